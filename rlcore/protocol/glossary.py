"""The glossary: every field that the core reads or writes, declared once.

`python -m rlcore.protocol.glossary` prints it as the Markdown of docs/glossary.md.
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
    """A standard field of a batch. `shapes` gives the shape in words for each kind of column that may hold it.

    `dtype` is None for object columns. In a shape, `*` is a row's own length and `width` a padded one.
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
    Field("prompts", _RAGGED, torch.int64, "token id", "the prompt as the model reads it, chat template included"),
    Field("prompt_text", _OBJECT, None, "str", "the prompt as reward functions see it"),
    Field(
        "prompt_messages",
        _OBJECT,
        None,
        "list of dict, or None",
        "the prompt's chat messages where the data set gave messages, not a string; only where it has such prompts",
    ),
    Field("answer", _OBJECT, None, "any", "the reference answer that rewards compare with"),
    Field("uid", _OBJECT, None, "str", "one per prompt: epoch and data row (`0:17`, held out `eval:17`), never random"),
    Field("sample_index", _DENSE, torch.int64, "index", "which of its prompt's samples a row is, from 0"),
    Field("responses", _RAGGED, torch.int64, "token id", "what follows the prompt, the end-of-sequence token included"),
    Field(
        "response_mask",
        _RAGGED,
        torch.int64,
        "0 or 1",
        "1 on the tokens of `responses` that the policy sampled, 0 on all others (they may stand in the middle)",
    ),
    Field(
        "rollout_log_probs",
        _RAGGED,
        torch.float32,
        "nat",
        "log-probability of each response token under the distribution that it was sampled from",
    ),
    Field("response_text", _OBJECT, None, "str", "the response decoded, as reward functions see it"),
    Field("prompt_length", _DENSE, torch.int64, "token", "length of `prompts`"),
    Field("response_length", _DENSE, torch.int64, "token", "length of `responses`"),
    Field("finished", _DENSE, torch.bool, "", "whether the response came to its end; False: cut at the length limit"),
    Field("weights_version", _DENSE, torch.int64, "optimizer step", "version of the weights that sampled the row"),
    Field(
        "exact_log_probs",
        _DENSE,
        torch.bool,
        "",
        "whether `rollout_log_probs` are what the train engine of `weights_version` would compute",
    ),
    Field(
        "log_probs",
        _RAGGED,
        torch.float32,
        "nat",
        "log-probability of each response token under the role that was asked, at the rollout temperature",
    ),
    Field("entropy", _RAGGED, torch.float32, "nat", "entropy of that distribution at each response token"),
    Field(
        "old_log_probs",
        _RAGGED,
        torch.float32,
        "nat",
        "log-probability of each response token under the policy before the update",
    ),
    Field("ref_log_probs", _RAGGED, torch.float32, "nat", "log-probability of each response token under the reference"),
    Field("scores", _DENSE, torch.float32, "reward", "what the reward functions gave the whole response"),
    Field("reward_error", _DENSE, torch.bool, "", "whether the reward raised, hung, or gave no finite number"),
    Field(
        "reward_detail",
        _OBJECT,
        None,
        "dict or None",
        "of a sample without a reward: uid, sample_index, function, cause and traceback",
    ),
    Field(
        "score/NAME", _DENSE, torch.float32, "reward", "what the reward NAME gave, unweighted; where there are several"
    ),
    Field(
        "preference",
        _DENSE,
        torch.float32,
        "0, 0.5 or 1",
        "of two responses that the judge compared: 1 the first is better, 0 the second, 0.5 a tie",
    ),
    Field("judge_error", _DENSE, torch.bool, "", "whether the judge gave no preference, so that it is the default"),
    Field("rewards", _RAGGED, torch.float32, "reward", "reward of each response token"),
    Field("values", _RAGGED, torch.float32, "reward", "the critic's estimate of the return at each response token"),
    Field(
        "advantages",
        {**_DENSE, **_RAGGED},
        torch.float32,
        "reward, or its standard deviations",
        "how much better than expected a response (dense) or each of its tokens (ragged) was",
    ),
    Field("returns", _RAGGED, torch.float32, "reward", "the return at each response token, which the critic learns"),
    Field(
        "input_ids", _PADDED, torch.int64, "token id", "prompt and response, padded; inside engines and for verl code"
    ),
    Field("attention_mask", _PADDED, torch.int64, "0 or 1", "1 on the tokens of `input_ids`, 0 on its padding"),
    Field("position_ids", _PADDED, torch.int64, "position", "position of each token of `input_ids`, from 0"),
)


def fields() -> dict[str, Field]:
    """Return the standard fields by name, in the order in which a step makes them."""
    return {field.name: field for field in _FIELDS}


def column_specs(*names: str) -> dict[str, ColumnSpec]:
    """Return the form of standard fields; DataError for a field that is no standard one, or has no one spec."""
    found: dict[str, ColumnSpec] = {}
    for name in names:
        field = fields().get(name)
        if field is None or len(field.shapes) != 1 or field.shapes in (_PADDED,):
            raise DataError(f"{name!r} is no standard field of one spec.{did_you_mean(name, fields())}")
        (kind,) = field.shapes
        found[name] = ColumnSpec(kind, field.dtype, (), "cpu")
    return found


def check_fields(batch: DataProto) -> None:
    """Raise DataError when a column named like a standard field has not its kind, dtype and number of dimensions."""
    for name, field in fields().items():
        if name not in batch:
            continue
        column = batch.table.column(name)
        spec = column.spec()
        fits = spec.kind in field.shapes
        if fits and spec.dtype is not None:
            dims = 1 + len(spec.shape) + (spec.kind == "ragged")
            fits = spec.dtype == field.dtype and dims == field.shapes[spec.kind].count(",") + 1
        if not fits:
            raise DataError(
                f"column {name!r} is {column.type_name()}; the glossary says {_describe(field)}: {field.meaning}. "
                "A field of your own takes another name (a plugin's carry its prefix)"
            )


def render_markdown() -> str:
    """Return the glossary as a Markdown page."""
    rows = [f"| `{field.name}` | {_describe(field)} | {field.unit} | {field.meaning} |" for field in _FIELDS]
    return "\n".join(
        [
            "# Fields of a batch",
            "",
            "Made from `rlcore/protocol/glossary.py` by `python -m rlcore.protocol.glossary`.",
            "",
            "Every column is `[rows, ...]`. Ragged columns hold rows of different length without padding (`*`). "
            "A plugin's own fields carry its prefix.",
            "",
            "| field | form | unit | meaning |",
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
