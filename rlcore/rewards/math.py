"""The reward for mathematics whose answer is an expression: the final answer is found here, math-verify compares it."""

from __future__ import annotations

import logging
import re
from typing import Any

from rlcore.rewards.reference import reference_text

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs whole responses

RELATIVE = 2e-6
"""Numbers further apart than this, relative to the larger, are different. math-verify rounds them to six decimals."""
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_STATED = re.compile(r"(?:答案|Answer)\s*(?:是|为|:|：)\s*([^\n]+)", re.IGNORECASE)
_MARKS = ("\\boxed", "$", "\\(", "\\[")
_BASED = re.compile(r"\s*([0-9A-Za-z]+)_\{?(?:\\text\{)?([0-9]+)\}{0,2}\s*")
_EQUATION = re.compile(r"(?<![<>!:\\])=(?!=)")
_RELATION = re.compile(r"<|>|\\l[et]q?\b|\\g[et]q?\b|≤|≥")


def math(prompt: str, response: str, answer: Any) -> float:
    r"""Return 1.0 when the response's final answer is mathematically equal to the reference, else 0.0.

    The final answer is the last `\boxed{}` or `\fbox{}`, else the last `<answer>` tag, else what follows `Answer:`,
    else LaTeX in its delimiters, else a plain number or expression. Text up to `</think>` does not count, and without
    that end nothing does. `answer` is the bare LaTeX or text of the reference (`\frac{1}{2}`), or a text with the
    reference boxed or between dollar signs. Raises ValueError if no expression can be read from it.

    Of an equation the right side counts if the left is a name; `2+3=5` must hold. A percentage equals the number and
    its hundredth. An inequality equals the interval. Numbers in different bases, and a point and a set, differ.

    math-verify limits each of its steps to 5 s by SIGALRM, so this must run in a main thread, as it does in reward
    processes. A response that takes longer to parse or to compare counts as wrong.
    """
    reference = _reference(reference_text(answer))
    text = _after_thinking(response)
    if text is None:
        return 0.0
    boxes = _boxes(text)
    final = boxes[-1] if boxes else _stated(text)
    if final is None:
        return float(_equal(reference, text, bare=False))
    if _equal(reference, final, bare=True):
        return 1.0
    # Several boxes may hold the parts of one answer.
    parts = len(boxes) > 1 and "," in reference
    return float(parts and _equal(reference, ", ".join(boxes[-1 - reference.count(",") :]), bare=True))


def math_answer(response: str) -> str | None:
    r"""Return the final answer that `math` compares, as text without spaces and full stops around it; None without one.

    Of several boxes all count, joined by commas and a repeated one once, as they may be the parts of one answer:
    `\boxed{1} and \boxed{2}` is `1, 2`. Two texts of equal value, `1/2` and `0.5`, stay different.
    """
    text = _after_thinking(response)
    if text is None:
        return None
    if boxes := _boxes(text):
        return ", ".join(dict.fromkeys(filter(None, map(_plain, boxes)))) or None
    final = _stated(text)
    if final is None:
        parsed = _read(text.replace("**", " "))  # an expression and its text
        final = str(parsed[-1]) if parsed else ""
    return _plain(final) or None


def _reference(answer: str) -> str:
    """Return the reference as bare LaTeX or text, or as a text with delimiters."""
    answer = answer.replace("\\$", "")  # a currency sign delimits no formula
    boxes = _boxes(answer)
    return boxes[-1] if boxes else answer


def _after_thinking(response: str) -> str | None:
    """Return what follows the thinking; None for thinking that does not end."""
    _, mark, after = response.rpartition("</think>")
    if mark:
        return after
    return None if "<think>" in after else after


def _boxes(text: str) -> list[str]:
    """Return the contents of all boxes in order; one that does not end is left out."""
    found = []
    for match in _BOX.finditer(text):
        depth = 1
        for position in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0) if text[position - 1] != "\\" else 0
            if depth == 0:
                found.append(text[match.end() : position])
                break
    return found


def _stated(text: str) -> str | None:
    """Return the answer of the last tag, or after the last words that announce one; None if there are none."""
    if tags := _TAG.findall(text):
        return str(tags[-1])
    stated = _STATED.findall(text)
    if not stated:
        return None
    last = str(stated[-1]).replace("**", " ").strip()
    return None if any(mark in last for mark in _MARKS) else last


def _equal(reference: str, found: str, *, bare: bool) -> bool:
    """Whether two answers are equal. `bare`: `found` is the answer itself, not a text that holds it."""
    if not bare:
        return _verified(_parsed(reference), _read(found.replace("**", " ")))
    reference, found = _plain(reference), _plain(found)
    if {_kind(reference), _kind(found)} == {"point", "set"}:
        return False
    bases = [_BASED.fullmatch(each) for each in (reference, found)]
    if bases[0] and bases[1]:
        return bases[0].groups() == bases[1].groups()
    found_side = found if _EQUATION.search(reference) else _right_side(found)
    if found_side is None:
        return False
    wanted = _parsed(reference)
    return any(_verified(wanted, _read(f"${form}$")) for form in _forms(found_side, reference))


def _plain(answer: str) -> str:
    """Return an answer without thin spaces in numbers, a full stop at its end, and other ways to write the same."""
    answer = answer.replace("°", r"^\circ").replace(r"\varnothing", r"\emptyset").strip()
    answer = re.sub(r"(?<=\d)(?:\\[,!;: ]|\{,\})(?=\d{3})", "", answer)
    return answer.rstrip(".,;。、 ") if not answer.endswith("\\,") else answer[:-2].rstrip()


def _kind(answer: str) -> str:
    if answer.startswith(r"\{") and "," in answer:
        return "set"
    return "point" if re.match(r"(?:\\left\s*)?\(", answer) and "," in answer else "other"


def _right_side(answer: str) -> str | None:
    """Return the right side of an equation that names its left; of numbers, which must be equal; else the answer."""
    sides = [side.strip() for side in _EQUATION.split(answer)]
    if len(sides) < 2 or _RELATION.search(answer):
        return answer
    left = re.sub(r"\\(?:frac|sqrt|cdot|times|left|right|pi|dfrac|tfrac|text)\b", "", sides[0])
    if re.search(r"[A-Za-z]", left):
        return sides[-1]
    holds = _verified(_read(f"${sides[-1]}$"), _read(f"${sides[0]}$"))
    return sides[-1] if holds else None


def _forms(answer: str, reference: str) -> list[str]:
    """Return the ways to read an answer: a percentage is a number or its hundredth."""
    percent = re.fullmatch(r"(.+?)\s*\\?%", answer)
    if percent and "%" not in reference:
        return [percent[1], rf"\frac{{{percent[1]}}}{{100}}"]
    return [answer, rf"100 \cdot ({answer})"] if "%" in reference and not percent else [answer]


def _parsed(reference: str) -> list[Any]:
    parsed = _read(reference if any(mark in reference for mark in _MARKS) else f"${_plain(reference)}$")
    if not parsed:
        raise ValueError(f"no expression can be read from the reference answer {reference[-80:]!r}")
    return parsed


def _read(text: str) -> list[Any]:
    import math_verify

    found: list[Any] = math_verify.parse(text)
    return found


def _verified(wanted: list[Any], found: list[Any]) -> bool:
    """Whether math-verify finds two parsed answers equal, in either order, and their numbers are not only near."""
    import math_verify

    if not found:
        return False
    equal = math_verify.verify(wanted, found, allow_set_relation_comp=True) or (
        any(_is_relation(each) for each in wanted) and math_verify.verify(found, wanted, allow_set_relation_comp=True)
    )
    return equal and not _far_apart(wanted[0], found[0])


def _is_relation(value: Any) -> bool:
    import sympy

    return isinstance(value, sympy.core.relational.Relational | sympy.And)


def _far_apart(wanted: Any, found: Any) -> bool:
    """Whether both are numbers and differ by more than RELATIVE."""
    import sympy

    if not all(isinstance(each, sympy.Expr) and each.is_number and not each.free_symbols for each in (wanted, found)):
        return False
    difference, size = sympy.N(wanted - found, 30), sympy.Max(abs(sympy.N(wanted, 30)), abs(sympy.N(found, 30)))
    return bool(abs(difference) > RELATIVE * size)
