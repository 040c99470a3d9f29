"""The worker that scores responses; a run has `reward.workers` of them, in a separate group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlcore.config.schema import ModelConfig, RewardConfig
from rlcore.end_tokens import end_tokens
from rlcore.model_folder import read_tokenizer
from rlcore.protocol import DataProto
from rlcore.protocol.columns import ColumnSpec
from rlcore.protocol.glossary import column_specs
from rlcore.rewards.compose import WeightedReward
from rlcore.rewards.scoring import Rewards
from rlcore.workers import Dispatch, Worker, register

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_READS = ("prompt_text", "response_text", "answer")


def named_scores(functions: Sequence[WeightedReward], config: RewardConfig) -> tuple[str, ...]:
    """Return the functions that get a score column each: all, if there are several or also a reward model."""
    return tuple(function.name for function in functions) if len(functions) > 1 or config.model is not None else ()


def extracts_answers(functions: Sequence[WeightedReward]) -> bool:
    """Return whether one of the functions can extract a response's final answer."""
    return any(function.extract is not None for function in functions)


def _gives(batch: DataProto, named: Sequence[str] = (), extracts: bool = False) -> dict[str, ColumnSpec]:
    by_name = {f"score/{name}": ColumnSpec.dense(torch.float32) for name in named}
    extracted = column_specs("extracted_answer") if extracts else {}
    return {**column_specs("scores", "reward_error", "reward_detail"), **by_name, **extracted}


class RewardWorker(Worker):
    """Scores rows of a batch with the run's reward functions, in a killable child process."""

    def __init__(
        self, functions: Sequence[WeightedReward], config: RewardConfig, model: ModelConfig | None = None
    ) -> None:
        """`functions` come from `rlcore.rewards.compose.resolve`. `model`: the policy's, for its special tokens."""
        self._rewards = Rewards(functions, config)
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._ends: list[int] = []
        if config.special_tokens and model is not None:
            self._tokenizer = read_tokenizer(model)
            self._ends = end_tokens(model, self._tokenizer)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def start(self) -> None:
        """Start the process; ConfigError when a function cannot be loaded on this host."""
        self._rewards.start()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=_READS, gives=_gives)
    def score(self, batch: DataProto, named: Sequence[str] = (), extracts: bool = False) -> DataProto:
        """Return each row's reward.

        Reads the object columns prompt_text, response_text and answer; functions that accept them also get the other
        object columns. With `reward.special_tokens` the texts of responses are those of the column `responses`. Returns
        scores fp32 [rows]; reward_error bool [rows], True where a function failed and the score is
        `reward.error_value`, or NaN; reward_detail, object: None, or a dict with uid and sample_index (where the batch
        has them), function, cause and traceback; and score/NAME fp32 [rows] of each function in `named`, NaN where it
        returned None. With `extracts` also extracted_answer, object: the response's final answer as text, or None. A
        batched function is called once with all rows of this worker.
        """
        columns: dict[str, list[Any]] = {name: list(values) for name, values in batch.non_tensor_batch.items()}
        # The remaining columns go to the functions that accept them.
        prompts, responses, answers = (columns.pop(name) for name in _READS)
        if self._tokenizer is not None:
            responses = [self._with_special_tokens(row.tolist()) for row in batch.view("responses")]
        scored = self._rewards.score(prompts, responses, answers, columns, extracts=extracts)
        result = DataProto(
            {
                "scores": torch.tensor(scored.totals, dtype=torch.float32),
                "reward_error": torch.tensor([failure is not None for failure in scored.failures], dtype=torch.bool),
            },
            {"reward_detail": failure_details(scored.failures, batch)},
        )
        for name in named:
            result[f"score/{name}"] = torch.tensor(scored.by_function[name], dtype=torch.float32)
        if extracts:
            result["extracted_answer"] = scored.extracted
        return result

    def _with_special_tokens(self, tokens: list[int]) -> str:
        """Return the text of a response with its special tokens, but without its end token."""
        assert self._tokenizer is not None
        body = tokens[:-1] if tokens and tokens[-1] in self._ends else tokens
        return str(self._tokenizer.decode(body, skip_special_tokens=False))

    def shutdown(self) -> None:
        """Kill the child process. On Ray, where the worker itself is killed, the child dies with it."""
        self._rewards.close()


def failure_details(failures: Sequence[dict[str, str] | None], batch: DataProto) -> list[dict[str, Any] | None]:
    """Add the uid and sample_index to each failure."""
    names = {name: batch[name] for name in ("uid", "sample_index") if name in batch}
    details: list[dict[str, Any] | None] = []
    for row, failure in enumerate(failures):
        sample = {name: int(values[row]) if name == "sample_index" else values[row] for name, values in names.items()}
        details.append(None if failure is None else {**sample, **failure})
    return details
