"""Reward functions that were written for TRL or verl, recognised by their parameters and called as those call them.

TRL (GRPOTrainer): `f(completions, prompts=..., **columns) -> list[float | None]`, one call for many samples.
verl: `compute_score(data_source, solution_str, ground_truth, extra_info=None)`, a number or a dict with `score`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.errors import ConfigError

NOT_THERE = ("completion_ids", "trainer_state", "log_extra", "log_metric")
"""What TRL passes and rlcore does not: a function may take it, but not need it."""
GROUND_TRUTH = "ground_truth"
"""verl's name of the reference answer."""


@dataclass(frozen=True)
class TrlReward:
    """Calls a function of TRL's form with lists.

    `takes`: its parameters; None for any. `needs`: those that columns of the data set must give. `answers`: the names
    under which it gets the reference answers; under verl's name `ground_truth` too, if no column has that name. Where
    rows of the data set hold messages, prompts and completions are lists of messages, as in TRL.
    """

    function: Callable[..., Any]
    takes: frozenset[str] | None
    needs: tuple[str, ...]
    answers: tuple[str, ...]

    def __call__(self, _prompts: list[str], _responses: list[str], _answers: list[Any], **columns: Any) -> Any:
        """Return the function's list."""
        prompts: list[Any] = _prompts
        completions: list[Any] = _responses
        messages = columns.pop("prompt_messages", None)
        if messages is not None and any(each is not None for each in messages):
            prompts = [
                [{"role": "user", "content": text}] if given is None else given
                for text, given in zip(_prompts, messages, strict=True)
            ]
            completions = [[{"role": "assistant", "content": response}] for response in _responses]
        answers = dict.fromkeys(self.answers, _answers)
        texts = {"prompts": prompts, "completions": completions}
        return self.function(**_taken({GROUND_TRUTH: _answers, **columns, **answers, **texts}, self.takes))


@dataclass(frozen=True)
class VerlReward:
    """Calls a function of verl's form with one sample; `takes`: its parameters, None for any.

    `data_source` and `extra_info` are columns of the data set.
    """

    function: Callable[..., Any]
    takes: frozenset[str] | None

    def __call__(self, _prompt: str, _response: str, _answer: Any, **columns: Any) -> Any:
        """Return the function's number, or the `score` of its dict."""
        given = {
            "data_source": columns.get("data_source"),
            "solution_str": _response,
            "ground_truth": _answer,
            "extra_info": columns.get("extra_info") or {},
        }
        result = self.function(**_taken(given, self.takes))
        if not isinstance(result, Mapping):
            return result
        if "score" not in result:
            raise ValueError(f"returned a dict without `score`: {', '.join(map(str, result)) or 'it is empty'}")
        return result["score"]


def adapted(score: Callable[..., Any], reference: str, answer_key: str) -> TrlReward | VerlReward | None:
    """Return the adapter for a function of TRL's or verl's form, by its parameters; None for rlcore's own form.

    Raises ConfigError for such a function that needs a parameter which rlcore cannot give.
    """
    parameters = inspect.signature(score).parameters.values()
    names = frozenset(parameter.name for parameter in parameters)
    needed = [each.name for each in parameters if each.default is each.empty and each.kind in _BY_NAME]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if {"solution_str", "ground_truth"} <= names:
        _refuse(reference, "verl", [name for name in needed if name not in _VERL], _VERL)
        return VerlReward(score, None if takes_any else names)
    if "completions" in names:
        _refuse(reference, "TRL", [name for name in needed if name in NOT_THERE], ())
        answers = tuple(dict.fromkeys(("answer", answer_key, answer_key.rpartition(".")[2])))
        given = ("prompts", "completions", GROUND_TRUTH, *answers)
        needs = tuple(name for name in needed if name not in given)
        return TrlReward(score, None if takes_any else names, needs, answers)
    return None


def needed_columns(score: Callable[..., Any]) -> tuple[str, ...]:
    """Return the parameters that a resolved function cannot do without, besides prompt, response and answer."""
    if isinstance(score, TrlReward):
        return score.needs
    further = list(inspect.signature(score).parameters.values())[3:]
    return tuple(each.name for each in further if each.default is each.empty and each.kind in _BY_NAME)


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")


def _taken(given: Mapping[str, Any], takes: frozenset[str] | None) -> dict[str, Any]:
    return {name: value for name, value in given.items() if takes is None or name in takes}


def _refuse(reference: str, form: str, lacking: Sequence[str], known: Sequence[str]) -> None:
    if lacking:
        has = f"; it gives {', '.join(known)}" if known else ""
        raise ConfigError(
            f"reward {reference!r} has {form}'s form and needs {', '.join(lacking)}, which rlcore does not give{has}. "
            "Give these parameters defaults"
        )
