"""`rlcore export RUN FOLDER`: writes the model that a run has trained, or its adapter, to a folder or to the hub."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rlcore import CheckpointError, CommandSpec, ConfigError, hookimpl
from rlcore.commands import SUMMARIES
from rlcore.hub import create_repository, push_folder
from rlcore.training.checkpoint import step_of

RLCORE_API = 1
CARD = "README.md"
Dtype = Literal["fp32", "bf16"]
Kind = Literal["adapter", "model"]


def main(argv: list[str]) -> int:
    """Copy a role's folder of a checkpoint; with --merge, or another dtype, write a model with the adapter in it."""
    parser = argparse.ArgumentParser(prog="rlcore export", description=__doc__)
    parser.add_argument("run", type=Path, help="run folder, or a checkpoint of one")
    parser.add_argument("folder", type=Path, nargs="?", help="folder to write; it must not exist")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest whole one)")
    parser.add_argument("--role", default="actor", help="role to export (default: actor)")
    parser.add_argument("--merge", action="store_true", help="merge the adapter into its model")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="precision of the model (default: as it is saved)")
    parser.add_argument(
        "--push", metavar="ORG/NAME", help="send it to the Hugging Face hub; without a folder by way of TMPDIR"
    )
    parser.add_argument("--private", action="store_true", help="a repository that --push makes is private")
    options = parser.parse_args(argv)
    if options.folder is None and options.push is None:
        raise ConfigError("nowhere to export to: give a folder to write, or --push ORG/NAME, or both")
    if options.private and options.push is None:
        raise ConfigError("--private is for the repository that --push makes; give --push, or leave it out")
    given = {"step": options.step, "role": options.role, "merge": options.merge, "dtype": options.dtype}
    if options.push is None:
        print(f"{export(options.run, options.folder, **given)}: {options.folder}")
        return 0
    check_exported(options.run, options.folder, **given)
    create_repository(options.push, private=options.private)  # refused before the model is written
    with tempfile.TemporaryDirectory() as aside:
        folder = options.folder or Path(aside) / "model"
        kind = export(options.run, folder, **given)
        if options.folder is not None:
            print(f"{kind}: {options.folder}")
        print(f"{kind}: {push_folder(folder, options.push, 'A checkpoint of a run of rlcore')}")
    return 0


def export(
    run: Path,
    folder: Path,
    *,
    step: int | None = None,
    role: str = "actor",
    merge: bool = False,
    dtype: Dtype | None = None,
) -> Kind:
    """Write a role's model, or its adapter, with a model card to a folder that is not there yet; return which it is.

    run: a run folder, or a checkpoint of one. step: of the checkpoint; None: the newest whole one. merge: merge the
    adapter into its model. dtype: the model's precision; None as it is saved, and fp32 for a merged one. Raises
    ConfigError and CheckpointError.
    """
    from rlcore.adapter_folder import is_adapter

    checkpoint, saved, kind = check_exported(run, folder, step=step, role=role, merge=merge, dtype=dtype)
    card = _card(checkpoint, role, kind)
    if dtype is not None or (is_adapter(saved) and merge):
        _write(checkpoint, saved, folder, dtype or "fp32")
    else:
        shutil.copytree(saved, folder)
    (folder / CARD).write_text(card, encoding="utf-8")
    return kind


def check_exported(
    run: Path, folder: Path | None, *, step: int | None, role: str, merge: bool, dtype: Dtype | None
) -> tuple[Path, Path, Kind]:
    """Return the checkpoint, the role's folder in it and what is exported; ConfigError where `export` cannot."""
    from rlcore.adapter_folder import is_adapter

    if folder is not None and folder.exists():
        raise ConfigError(f"{folder} exists already; give a folder that does not")
    if dtype not in ("fp32", "bf16", None):
        raise ConfigError(f"dtype={dtype} is not a precision to export in; give fp32, bf16 or none")
    checkpoint = _checkpoint(run, step)
    saved = _saved(checkpoint, role)
    adapter = is_adapter(saved) and not merge
    if adapter and dtype is not None:
        raise ConfigError(f"{saved} is an adapter, which is exported as it is; --dtype={dtype} needs --merge as well")
    return checkpoint, saved, "adapter" if adapter else "model"


def _checkpoint(run: Path, step: int | None) -> Path:
    """Return the whole checkpoint of a step of a run; None: the newest one, or the one that `run` itself names."""
    from rlcore.training.checkpoint import checkpoints, chosen_whole, path_of, split_target
    from rlcore.training.folder import CONFIG

    folder, named = split_target(run)
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{run} is no run folder and no checkpoint of one: it has no {CONFIG}")
    if step is not None and named is not None:
        raise ConfigError(f"{run} is a checkpoint already; leave out --step={step}, or give the run {folder}")
    target = run if step is None else path_of(folder / "checkpoints", step)
    if step is not None and not target.is_dir():
        steps = ", ".join(str(step_of(path)) for path in checkpoints(folder / "checkpoints")) or "none"
        raise ConfigError(f"--step={step}: the run {folder} has no checkpoint of it; it has those of the steps {steps}")
    found = chosen_whole(target)
    if found is None:
        raise CheckpointError(f"the run {run} has no checkpoint to export; train longer")
    return found


def _saved(checkpoint: Path, role: str) -> Path:
    """Return a role's model in a checkpoint."""
    if not (checkpoint / role / "model").is_dir():
        roles = sorted(path.parent.name for path in checkpoint.glob("*/model"))
        raise ConfigError(f"--role={role}: {checkpoint} holds no model of it; it holds those of {', '.join(roles)}")
    return checkpoint / role / "model"


def _card(checkpoint: Path, role: str, kind: str) -> str:
    """Return the model card by what the run folder says."""
    from rlcore.commands.model_card import model_card
    from rlcore.config.files import read_values
    from rlcore.trackers.jsonl import METRICS, read_lines
    from rlcore.training.folder import CONFIG, read_versions

    run = checkpoint.parent.parent
    facts = read_values(run / CONFIG), read_lines(run / METRICS), read_versions(run)
    return model_card(*facts, step_of(checkpoint), role=role, kind=kind)


def _write(checkpoint: Path, saved: Path, folder: Path, dtype: Dtype) -> None:
    """Write a model in a precision, with its adapter merged into it."""
    from rlcore.adapter_folder import AdapterFolder, is_adapter
    from rlcore.config import LoraConfig, ModelConfig, build
    from rlcore.config.files import read_values
    from rlcore.engine import Ranks, model_dtype, model_path, write_model_folder
    from rlcore.engine.adapter import merge_adapter
    from rlcore.model_folder import load_model
    from rlcore.training.folder import CONFIG

    adapter = AdapterFolder.of(str(saved)) if is_adapter(saved) else None
    path = str(saved) if adapter is None else adapter.base
    model = build(ModelConfig, read_values(checkpoint.parent.parent / CONFIG)["model"], "model")
    model = replace(model, path=path, dtype=dtype, lora=LoraConfig())
    base = model_path(path, code=model.trust_remote_code)
    if not base.is_dir():
        raise ConfigError(
            f"{saved} is an adapter of {path}, which is not there; put the model there, or correct "
            "base_model_name_or_path in adapter_config.json"
        )
    hf = load_model(model, scores=None if adapter is None else adapter.has_score)
    if adapter is not None:
        merge_adapter(hf, adapter)
    hf.to(model_dtype(model))
    hf.config.dtype = model_dtype(model)
    write_model_folder(hf, hf.named_parameters(), model, folder, Ranks())


@hookimpl
def rlcore_commands() -> CommandSpec:
    """Register `rlcore export`."""
    return CommandSpec("export", SUMMARIES["export"], main)
