"""All config keys with type, default and meaning, as text for `--help` and as docs/configuration.md.

`python -m rlcore.plugins.reference configuration` prints the page.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, get_type_hints

from rlcore.config.build import REQUIRED, defaults, type_name
from rlcore.config.compose import GROUPS, core_values
from rlcore.config.files import NOT_COMPARED
from rlcore.config.schema import SECTIONS, CurriculumConfig, EvalSetConfig, LoraConfig, MixConfig, RoleConfig

_INTRODUCTION = """\
# Configuration

<!-- Made by `python -m rlcore.plugins.reference configuration`. Edit rlcore/config/ and rlcore/engines/*/config.py
instead. -->

A run's config is composed from the defaults below, the chosen options of the groups, and the overrides of the command
line, in this order. `rlcore config algo=NAME ...` composes and checks a config and prints it.

- `GROUP=OPTION` chooses an option of a group: `data=gsm8k`. In addition to the options below, each installed algorithm
  is an option of `algo`, and each installed data set, reward, rollout engine, train engine and tracker is an option of
  its group.
- `GROUP.KEY=VALUE` sets one value: `trainer.total_steps=10`, `rollout.stop=["</answer>"]`, `data.path=null`. A text
  with a comma, a brace or a leading digit is quoted twice: `'data.system_prompt="Hello, you"'`. `${trainer.seed}` takes
  another key's value; `\\${` is a plain `${`.
- `experiment=NAME` takes a whole experiment. Your own go into a folder `DIR/experiment/NAME.yaml` that
  `--config-dir DIR` makes known; its other groups work in the same way.
- `--multirun` runs one job for each combination of values: `engine.lr=1e-6,1e-5`. Job i has the run folder
  `run.dir/i`, or `multirun/TIME/i`.
- `--config RUN/config.yaml` repeats a run: it starts from the saved values, in a new run folder, and overrides may
  follow.

The algorithm's own keys are under `algo`, an engine's under `rollout.NAME` or `engine.NAME`; other plugins have
sections of their own. A run has the sections of its engines and of all installed plugins; `rlcore train algo=NAME
--help` shows them all.
"""


CORE_SECTIONS: dict[str, type] = {
    **SECTIONS,
    "model.lora": LoraConfig,
    "data.curriculum": CurriculumConfig,
    "data.mix.NAME": MixConfig,
    "roles.NAME": RoleConfig,
    "eval.sets.NAME": EvalSetConfig,
}
"""The dataclasses of the core's keys by dotted name; NAME stands for each source, each role, and each evaluation."""


@dataclass(frozen=True)
class Key:
    """One config key: its dotted name, its type and default in words, and its description with its bounds.

    resumable: a run may be resumed with another value.
    """

    name: str
    type: str
    default: str
    doc: str
    resumable: bool


def keys(section: str, cls: type) -> Iterator[Key]:
    """Yield the keys of one dataclass, named `section.FIELD`, in the order of the fields."""
    hints, values = get_type_hints(cls), core_values()[section] if section in SECTIONS else defaults(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):  # a section of its own
            continue
        limits = [(sign, field.metadata.get(end)) for end, sign in (("min", ">="), ("max", "<="))]
        bounds = [f"{sign} {limit:g}" for sign, limit in limits if limit is not None]
        doc = field.metadata.get("doc", "")
        yield Key(
            name=f"{section}.{field.name}",
            type=type_name(hints[field.name]) + (" | auto" if field.metadata.get("auto") else ""),
            default="required" if values[field.name] == REQUIRED else json.dumps(values[field.name]),
            doc=f"{doc} ({', '.join(bounds)})" if bounds else doc,
            resumable=section in NOT_COMPARED or bool(field.metadata.get("incidental")),
        )


def group_options() -> dict[str, list[str]]:
    """Return the options with a YAML file in configs/, by group; a group without options is left out."""
    found = {}
    for group in GROUPS:
        folder = files("rlcore.configs").joinpath(group)
        names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
        if options := sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")):
            found[group] = options
    return found


def text(sections: dict[str, type[Any]], *, only_resumable: bool = False) -> str:
    """Return the keys of the sections, or those that a resume may change, as aligned lines for a terminal."""
    lines = []
    for section, cls in sections.items():
        found = [key for key in keys(section, cls) if key.resumable or not only_resumable]
        if only_resumable and not found:
            continue
        lines.append(f"{section}:" if dataclasses.fields(cls) else f"{section}: no keys")
        for key in found:
            lines.append(f"  {key.name} = {key.default}  [{key.type}]")
            if key.doc:
                lines.append(f"      {key.doc}")
    return "\n".join(lines)


def markdown(own: Mapping[str, type]) -> str:
    """Return the page docs/configuration.md; `own` are the config classes of rlcore's own plugins, by dotted name."""
    parts = [_INTRODUCTION]
    options = group_options()
    sections: dict[str, type] = {}
    for section, cls in CORE_SECTIONS.items():
        sections[section] = cls
        sections |= {path: brought for path, brought in own.items() if path.startswith(f"{section}.")}
    sections |= own
    for section, cls in sections.items():
        parts.append(f"## {section}\n\n{cls.__doc__}\n")
        if section in options:
            parts.append(f"Options: {', '.join(f'`{section}={name}`' for name in options[section])}\n")
        parts.append("| key | type | default | meaning |\n|---|---|---|---|")
        parts += [f"| `{k.name}` | {_cell(k.type)} | `{k.default}` | {_cell(k.doc)} |" for k in keys(section, cls)]
        parts.append("")
    experiments = ", ".join(f"`experiment={name}`" for name in options["experiment"])
    return "\n".join([*parts, f"## experiment\n\nOptions: {experiments}\n"])


def _cell(value: str) -> str:
    return value.replace("|", "\\|")
