"""The glossary: every field of a batch that the core reads or writes, declared once.

`python -m rlcore.protocol.glossary` prints docs/glossary.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rlcore.errors import DataError, did_you_mean
from rlcore.protocol.columns import ColumnSpec, Kind

if TYPE_CHECKING:
    from rlcore.protocol.dataproto import DataProto


@dataclass(frozen=True)
class Field:
    """A standard field of a batch. `shapes` maps each allowed kind of column to its shape, in words.

    `dtype` is None for object columns. In a shape, `*` is a row's own length and `width` a padded length.
    """

    name: str
    shapes: dict[Kind, str]
    dtype: torch.dtype | None
    unit: str
    meaning: str


_DENSE: dict[Kind, str] = {"dense": "[rows]"}
_RAGGED: dict[Kind, str] = {"ragged": "[rows, *]"}
_PADDED: dict[Kind, str] = {"dense": "[rows, width]"}
_OBJECT: dict[Kind, str] = {"object": "[rows]"}

_FIELDS = (
    Field("prompts", _RAGGED, torch.int64, "token id", "the prompt that the model reads, including the chat template"),
    Field("prompt_text", _OBJECT, None, "str", "the prompt that reward functions get"),
    Field(
        "prompt_messages",
        _OBJECT,
        None,
        "list of dict, or None",
        "the prompt's chat messages, if the data set has messages; None for prompts given as a string",
    ),
    Field("answer", _OBJECT, None, "any", "the reference answer for the reward functions"),
    Field(
        "uid",
        _OBJECT,
        None,
        "str",
        "identifies the prompt by epoch and data row (`0:17`, held out `eval:17`); never random",
    ),
    Field("mix_source", _OBJECT, None, "str", "the prompt's source in `data.mix`, whose reward functions score it"),
    Field("sample_index", _DENSE, torch.int64, "index", "number of the sample among its prompt's samples, from 0"),
    Field("responses", _RAGGED, torch.int64, "token id", "the response, including the end-of-sequence token"),
    Field(
        "response_mask",
        _RAGGED,
        torch.int64,
        "0 or 1",
        "1 on tokens of `responses` that the policy sampled, 0 on all others, which may lie between sampled ones",
    ),
    Field(
        "rollout_log_probs",
        _RAGGED,
        torch.float32,
        "nat",
        "log-probability of each response token under the sampling distribution",
    ),
    Field("response_text", _OBJECT, None, "str", "the decoded response that reward functions get"),
    Field("prompt_length", _DENSE, torch.int64, "token", "length of `prompts`"),
    Field("response_length", _DENSE, torch.int64, "token", "length of `responses`"),
    Field(
        "finished", _DENSE, torch.bool, "", "True: the response ended by itself; False: it was cut at the length limit"
    ),
    Field(
        "weights_version",
        _DENSE,
        torch.int64,
        "optimizer step",
        "version of the weights that sampled the row: the optimizer steps before it",
    ),
    Field(
        "exact_log_probs",
        _DENSE,
        torch.bool,
        "",
        "whether `rollout_log_probs` equal those that the train engine would compute with `weights_version`",
    ),
    Field(
        "episode",
        _OBJECT,
        None,
        "str",
        "identifies the episode, `UID/SAMPLE_INDEX`, with the call's number from a step's second call on",
    ),
    Field("branch", _DENSE, torch.int64, "index", "number of the row among the branches of its episode, from 0"),
    Field(
        "seat",
        _DENSE,
        torch.int64,
        "index",
        "the player whose row it is, where an environment has several `seats`; a seat counts as an episode",
    ),
    Field(
        "row_weight",
        _DENSE,
        torch.float32,
        "",
        "weight of the row in the loss: 1 / branches of its episode; used inside an update",
    ),
    Field("turns", _DENSE, torch.int64, "turn", "turns that the policy sampled in the row"),
    Field(
        "turn_ends",
        _RAGGED,
        torch.int64,
        "token",
        "for each turn of the policy, the number of tokens of `responses` up to its end",
    ),
    Field("turn_rewards", _RAGGED, torch.float32, "reward", "the environment's reward of each turn of the policy"),
    Field("tool_calls", _DENSE, torch.int64, "call", "tool calls of the episode, with those that failed"),
    Field("tool_errors", _DENSE, torch.int64, "call", "tool calls that did not parse, or whose tool raised an error"),
    Field(
        "stop_reason",
        _OBJECT,
        None,
        "str",
        "why the episode ended: `end` the policy's answer, `done` the environment, `turns` or `length` a limit",
    ),
    Field(
        "episode_messages",
        _OBJECT,
        None,
        "list of dict",
        "the row's chat messages after the prompt: the policy's, the tools' and the environment's",
    ),
    Field("episode_score", _OBJECT, None, "float or None", "the environment's score of the episode"),
    Field(
        "episode_row", _DENSE, torch.int64, "index", "row of the batch that asked for the episode; used inside a call"
    ),
    Field(
        "episode_error",
        _OBJECT,
        None,
        "dict or None",
        "of a failed episode, which is left out: cause, traceback and attempts; used inside a call",
    ),
    Field(
        "log_probs",
        _RAGGED,
        torch.float32,
        "nat",
        "log-probability of each response token under the role that computed it, at the rollout temperature",
    ),
    Field(
        "entropy",
        _RAGGED,
        torch.float32,
        "nat",
        "entropy of the next-token distribution at each response token, at the rollout temperature",
    ),
    Field(
        "old_log_probs",
        _RAGGED,
        torch.float32,
        "nat",
        "log-probability of each response token under the policy before the update",
    ),
    Field("ref_log_probs", _RAGGED, torch.float32, "nat", "log-probability of each response token under the reference"),
    Field("scores", _DENSE, torch.float32, "reward", "the score of the whole response from the reward functions"),
    Field(
        "reward_error",
        _DENSE,
        torch.bool,
        "",
        "whether the reward function raised, hung, or returned a number that is not finite",
    ),
    Field(
        "reward_detail",
        _OBJECT,
        None,
        "dict or None",
        "for a sample without a reward: uid, sample_index, function, cause and traceback",
    ),
    Field(
        "extracted_answer",
        _OBJECT,
        None,
        "str or None",
        "in evaluations: the response's final answer, if a reward function extracts it; None where it finds none",
    ),
    Field(
        "score/NAME", _DENSE, torch.float32, "reward", "the unweighted score of the reward NAME, in runs with several"
    ),
    Field(
        "preference",
        _DENSE,
        torch.float32,
        "0, 0.5 or 1",
        "the judge's comparison of two responses: 1 the first is better, 0 the second, 0.5 a tie",
    ),
    Field(
        "judge_error", _DENSE, torch.bool, "", "whether the judge gave no preference, and `preference` is the default"
    ),
    Field("rewards", _RAGGED, torch.float32, "reward", "reward of each response token"),
    Field("values", _RAGGED, torch.float32, "reward", "the critic's estimate of the return before each response token"),
    Field(
        "advantages",
        {**_DENSE, **_RAGGED},
        torch.float32,
        "reward, or its standard deviations",
        "how much better than expected a response (dense) or each of its tokens (ragged) was",
    ),
    Field("returns", _RAGGED, torch.float32, "reward", "the return at each response token, the critic's target"),
    Field(
        "input_ids",
        _PADDED,
        torch.int64,
        "token id",
        "prompt and response, padded; used inside engines and by verl programs",
    ),
    Field("attention_mask", _PADDED, torch.int64, "0 or 1", "1 on the tokens of `input_ids`, 0 on its padding"),
    Field("position_ids", _PADDED, torch.int64, "position", "position of each token of `input_ids`, from 0"),
)


def fields() -> dict[str, Field]:
    """Return the standard fields by name, in the order in which a step computes them."""
    return {field.name: field for field in _FIELDS}


def column_specs(*names: str) -> dict[str, ColumnSpec]:
    """Return the ColumnSpec of each named standard field; DataError for an unknown field, or one with several specs."""
    found: dict[str, ColumnSpec] = {}
    for name in names:
        field = fields().get(name)
        if field is None or len(field.shapes) != 1 or field.shapes in (_PADDED,):
            raise DataError(f"{name!r} is not a standard field with a single spec.{did_you_mean(name, fields())}")
        (kind,) = field.shapes
        found[name] = ColumnSpec(kind, field.dtype, (), "cpu")
    return found


def check_fields(batch: DataProto) -> None:
    """Raise DataError when a column has the name of a standard field but another kind, dtype or dimension count."""
    for name, field in fields().items():
        if name not in batch:
            continue
        column = batch.table.column(name)
        spec = column.spec()
        fits = spec.kind in field.shapes
        if fits and spec.dtype is not None:
            # A ragged entry has no dimension for its row's own length, but the shape in the glossary does.
            dims = 1 + len(spec.shape) + (spec.kind == "ragged")
            fits = spec.dtype == field.dtype and dims == field.shapes[spec.kind].count(",") + 1
        if not fits:
            raise DataError(
                f"column {name!r} is {column.type_name()}; the glossary says {_describe(field)}: {field.meaning}. "
                "Give a field of your own another name, with the plugin's prefix"
            )


def render_markdown() -> str:
    """Return the glossary as a Markdown page."""
    rows = [f"| `{field.name}` | {_describe(field)} | {field.unit} | {field.meaning} |" for field in _FIELDS]
    return "\n".join(
        [
            "# Fields of a batch",
            "",
            "Generated from `rlcore/protocol/glossary.py` by `python -m rlcore.protocol.glossary`.",
            "",
            "Every column is `[rows, ...]`. Ragged columns hold rows of different lengths without padding (`*`). "
            "A plugin's own fields have its prefix.",
            "",
            "| field | type | unit | meaning |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _describe(field: Field) -> str:
    dtype = f" {field.dtype}".replace("torch.", "") if field.dtype else ""
    return " or ".join(f"{kind}{dtype} {shape}" for kind, shape in field.shapes.items())


if __name__ == "__main__":
    print(render_markdown(), end="")
