"""The reward `reasoning_gym`: an answer's score by the verifier of the generator that made the question.

Verifiers of reasoning-gym 0.1.25 give the answer to Python's `eval`, or to sympy's `parse_expr`, which evaluates too.
A policy can write any program there. So `eval` reads literals only, and sympy gets an answer only if it is arithmetic.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rlcore_plugin_reasoning_gym.entries import from_json
from rlcore_plugin_reasoning_gym.generate import generator

EVALUATED = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
"""Tasks whose verifier evaluates the answer with `eval`."""
PARSED = ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
"""Tasks whose verifier evaluates the answer with sympy."""
FUNCTIONS = "a?(sin|cos|tan)h?|sec|csc|cot|exp|log|ln|sqrt|pi|Abs"
LONGEST = 10_000
"""Most characters of an answer that sympy gets; exponents have at most three digits, and are not powers."""

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARITHMETIC = re.compile(rf"(\d+(\.\d+)?|\b({FUNCTIONS}|[A-Za-z])\b|[-+*/^=(),\s])*")
_LARGE_POWER = re.compile(r"\*\*(?!\s*\(?\s*-?\d{1,3}(/\d{1,3}|\b)(?!\s*\)?\s*\*\*))")


def score(prompt: str, response: str, answer: Any, reasoning_gym: Mapping[str, Any]) -> float:
    """Return the verifier's score of a response, from 0 to 1; `reasoning_gym` is the row's column of that name."""
    del prompt
    return verify(reasoning_gym, answer, answer_in(response, reasoning_gym["answer_form"]))


def answer_in(response: str, form: str) -> str | None:
    """Return the answer in a response, None if it has none; see `data.reasoning_gym.answer`."""
    tagged: list[str] = [] if form == "whole" else _TAG.findall(response)
    if tagged:
        return tagged[-1].strip()
    return None if form == "tagged" else response.strip()


def verify(entry: Mapping[str, Any], reference: str | None, answer: str | None) -> float:
    """Return the score of an answer to an entry whose reference answer is `reference`.

    An answer that the verifier cannot read scores 0; a verifier that cannot read its own reference answer raises.
    """
    task = entry["task"]
    if answer is None or not _is_harmless(task, answer):
        return 0.0
    whole = {"answer": reference, "metadata": from_json(entry["metadata"])}
    dataset = _dataset(task, json.dumps(entry["options"], sort_keys=True), entry["level"])
    try:
        return float(dataset.score_answer(answer, whole))
    except Exception:
        dataset.score_answer(reference, whole)
        return 0.0


def _is_harmless(task: str, answer: str) -> bool:
    if task not in PARSED:
        return True
    return len(answer) <= LONGEST and bool(_ARITHMETIC.fullmatch(answer)) and not _LARGE_POWER.search(answer)


@lru_cache(maxsize=256)
def _dataset(task: str, options: str, level: int) -> Any:
    dataset = generator(task, json.loads(options), level)
    if task in EVALUATED:
        module: Any = importlib.import_module(type(dataset).__module__)
        module.eval = ast.literal_eval
    return dataset
