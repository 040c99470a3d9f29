"""The reward for mathematics whose answer is an expression, by the math-verify library."""

from __future__ import annotations

from typing import Any

from rlcore.rewards.reference import reference_text


def math(prompt: str, response: str, answer: Any) -> float:
    r"""Return 1.0 when the response's final expression is mathematically equal to the answer, else 0.0.

    The final expression is one in `\boxed{}`, else LaTeX in its delimiters, else a plain number or expression; boxes
    close together are read as one set. `answer` is the bare LaTeX or text of the reference (`\frac{1}{2}`), or a text
    with the reference boxed or between dollar signs. Raises ValueError if no expression can be read from it.

    math-verify limits each of its steps to 5 s by SIGALRM, so this must run in a main thread, as it does in reward
    processes. A response that takes longer to parse or to compare counts as wrong.
    """
    import math_verify

    expected = _reference(reference_text(answer))
    found = math_verify.parse(response)
    return float(bool(found) and math_verify.verify(expected, found))


def _reference(answer: str) -> list[Any]:
    import math_verify

    answer = answer.replace("\\$", "")  # a currency sign delimits no formula
    delimited = any(mark in answer for mark in ("\\boxed", "$", "\\(", "\\["))
    parsed = math_verify.parse(answer if delimited else f"${answer}$")
    if not parsed:
        raise ValueError(f"no expression can be read from the reference answer {answer[-80:]!r}")
    return parsed
