"""The model card of an exported model: a README.md with the facts of its run, as the hub shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.hub import is_pinned

_ACCURACY = re.compile(r"eval/((?P<set>[\w-]+)/)?accuracy")
_OWN = "the run's held-out prompts"
POLICY = "actor"


def model_card(
    values: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]],
    versions: Mapping[str, Any],
    step: int,
    *,
    role: str,
    kind: str,
) -> str:
    """Return the text of the card of a role's model.

    values: the run's config as plain values. lines: those of its metrics.jsonl. versions: those of its versions.json.
    step: that of the checkpoint. kind: "model" or "adapter". Paths of this machine are not in the text, only their last
    parts: names on the hub are whole, with the commit that was used.
    """
    from huggingface_hub import ModelCardData

    model, data, rollout = values["model"]["path"], values["data"], values["rollout"]
    head = ModelCardData(
        base_model=_repository(model),
        library_name="peft" if kind == "adapter" else "transformers",
        pipeline_tag="text-generation" if role == POLICY else None,
        datasets=[name for name in map(_repository, _data_paths(data)) if name] or None,
        tags=["rlcore", "reinforcement-learning", str(values["algorithm"])],
    )
    facts = {
        "base model": _shown(model),
        "algorithm": f"`algo={values['algorithm']}`",
        "data": ", ".join(_data_names(data)),
        "steps": f"{step}, of {data['batch_size']} prompts each",
        "precision": values["model"]["dtype"],
        "learning rate": f"{values['engine']['lr']:g}, {values['engine']['schedule']}",
        "sampling": f"temperature {rollout['temperature']:g}, up to {rollout['response_len']} tokens",
        "seed": values["trainer"]["seed"],
        "versions": ", ".join(f"{name} {versions[name]}" for name in ("rlcore", "torch", "transformers")),
    }
    table = "\n".join(f"| {name} | {fact} |" for name, fact in facts.items())
    algorithm = json.dumps(_without_paths(values["algo"]), indent=2)
    parts = [
        f"---\n{head.to_yaml()}\n---\n\n# {Path(model.partition('@')[0]).name}, trained with {values['algorithm']}",
        f"This {kind} is the {role} of a run of rlcore, which trains language models by reinforcement learning.",
        f"| | |\n|---|---|\n{table}",
        *(_evaluations(lines, step) if role == POLICY else ()),
        f"## Settings of the algorithm\n\n```json\n{algorithm}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _evaluations(lines: Sequence[Mapping[str, Any]], step: int) -> list[str]:
    """Return a section with the accuracies before the run and at its last evaluation up to a step; [] without any."""
    evaluated = [line for line in lines if line["step"] <= step and any(map(_ACCURACY.fullmatch, line))]
    if not evaluated:
        return []
    first, last = evaluated[0], evaluated[-1]
    names = [name for name in last if _ACCURACY.fullmatch(name)]
    rows = [f"| {_set_of(name)} | {_interval(first, name)} | {_interval(last, name)} |" for name in names]
    head = f"| accuracy on | at step {first['step']} | at step {last['step']} |\n|---|---|---|\n"
    return [f"## Evaluation\n\n{head}" + "\n".join(rows) + "\n\nIn brackets: 95 % intervals over the prompts."]


def _set_of(name: str) -> str:
    found = _ACCURACY.fullmatch(name)
    return found["set"] or _OWN if found else name


def _interval(line: Mapping[str, Any], name: str) -> str:
    if name not in line:
        return "not evaluated"
    low, high = line.get(f"{name}_low"), line.get(f"{name}_high")
    between = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
    return f"{line[name]:.3f}{between}"


def _data_paths(data: Mapping[str, Any]) -> list[str]:
    sources = [each["data"] for each in data["mix"].values()] or [data]
    return [source["path"] for source in sources if source.get("path")]


def _data_names(data: Mapping[str, Any]) -> list[str]:
    sources = [each["data"] for each in data["mix"].values()] or [data]
    return [f"`data={each['name']}`" + (f" ({_shown(each['path'])})" if each.get("path") else "") for each in sources]


def _repository(path: str) -> str | None:
    return path.partition("@")[0] if is_pinned(path) else None


def _shown(path: str) -> str:
    """Return a name on the hub with its commit, or a path's last part."""
    if not is_pinned(path):
        return f"`{Path(path).name}`"
    repo, _, commit = path.partition("@")
    return f"{repo} at `{commit[:12]}`"


def _without_paths(value: Any) -> Any:
    """Return plain values with paths cut to their last parts."""
    if isinstance(value, Mapping):
        return {name: _without_paths(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_paths(each) for each in value]
    if isinstance(value, str) and (
        value.startswith(("/", "~", "./", "../")) or ("/" in value and Path(value).exists())
    ):
        return Path(value).name
    return value
