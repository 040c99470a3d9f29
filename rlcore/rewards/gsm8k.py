"""Rewards of GSM8K (arXiv 2110.14168): does the final number of a response equal the reference's?

Two forms. `gsm8k` is strict: the response must state its result in the data set's format, `#### 42`; this teaches the
format along with the arithmetic. `gsm8k_flexible` takes the last number in the response, in any context.

Numbers are compared by value: `1,234` is 1234 and `5.00` is 5. A currency sign before and a percent sign after a
number are units, not part of it: `$18` is 18 and `20%` is 20.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from rlcore.rewards.reference import reference_text

# A hyphen is a minus sign unless a word, a number or a bracket ends right before it (3-5, top-10).
_SIGN = r"(?P<sign>(?<![\w)])[-−])?"
_CURRENCY = r"(?:\\?[$€£¥₹])?"
# Commas separate thousands only between groups of three digits: "1,200" is one number, "1,2" is two.
_DIGITS = r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = rf"{_SIGN}{_CURRENCY}(?P<inner_sign>(?<=[$€£¥₹])[-−])?{_DIGITS}"
_ANY_NUMBER = re.compile(_NUMBER)
# Neither a fraction (1/2) nor a range (18-20) is a number. The number may stand in bold marks or in a box.
_MARKED_NUMBER = re.compile(rf"####\s*(?:\*\*|\\boxed\{{)?\s*{_NUMBER}(?![0-9]|[.,][0-9]|\s*[-–/]\s*[0-9])")


def gsm8k(prompt: str, response: str, answer: Any) -> float:
    """Return 1.0 when the number after the response's last `####` equals the answer, else 0.0.

    `answer` is a number or its text, or the data set's whole reference solution, which ends in `#### NUMBER`.
    Raises ValueError when it holds no number.
    """
    return float(_last(_MARKED_NUMBER, response) == _reference(answer))


def gsm8k_flexible(prompt: str, response: str, answer: Any) -> float:
    """Return 1.0 when the last number in the response equals the answer, else 0.0; `answer` is as for `gsm8k`."""
    return float(_last(_ANY_NUMBER, response) == _reference(answer))


def gsm8k_answer(response: str) -> str | None:
    """Return the number after the response's last `####` as text, `5` for `5.00`; None without one."""
    return _as_text(_last(_MARKED_NUMBER, response))


def gsm8k_flexible_answer(response: str) -> str | None:
    """Return the last number in the response as text, `5` for `5.00`; None without one."""
    return _as_text(_last(_ANY_NUMBER, response))


def _as_text(number: Decimal | None) -> str | None:
    """Return the text of a number, equal for numbers of equal value."""
    if number is None:
        return None
    text = f"{number:f}"  # normalize() would round to 28 digits
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if number == 0 else text


def _reference(answer: Any) -> Decimal:
    number = _last(_ANY_NUMBER, reference_text(answer).rpartition("####")[2])
    if number is None:
        raise ValueError(f"the reference answer {str(answer)[-80:]!r} holds no number; expected '42' or '... #### 42'")
    return number


def _last(pattern: re.Pattern[str], text: str) -> Decimal | None:
    """Return the value of the last match of `pattern` in `text`, or None without one."""
    matches = list(pattern.finditer(text))
    if not matches:
        return None
    last = matches[-1]
    value = Decimal(last["digits"].replace(",", ""))
    return -value if last["sign"] or last["inner_sign"] else value
