"""`rlcore export RUN FOLDER`: writes the model that a run has trained, or its adapter, to a folder."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rlcore import CheckpointError, CommandSpec, ConfigError, hookimpl
from rlcore.commands import SUMMARIES

RLCORE_API = 1


def main(argv: list[str]) -> int:
    """Copy a role's folder of a checkpoint; with --merge, or another dtype, write a model with the adapter in it."""
    parser = argparse.ArgumentParser(prog="rlcore export", description=__doc__)
    parser.add_argument("run", type=Path, help="run folder, or a checkpoint of one")
    parser.add_argument("folder", type=Path, help="folder to write; it must not exist")
    parser.add_argument("--role", default="actor", help="role to export (default: actor)")
    parser.add_argument("--merge", action="store_true", help="merge the adapter into its model")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="precision of the model (default: as it is saved)")
    options = parser.parse_args(argv)
    kind = export(options.run, options.folder, role=options.role, merge=options.merge, dtype=options.dtype)
    print(f"{kind}: {options.folder}")
    return 0


def export(
    run: Path, folder: Path, *, role: str = "actor", merge: bool = False, dtype: Literal["fp32", "bf16"] | None = None
) -> Literal["adapter", "model"]:
    """Write a role's model, or its adapter, to a folder that is not there yet, and return which of the two it is.

    run: a run folder, or a checkpoint of one. merge: merge the adapter into its model. dtype: the model's precision;
    None as it is saved, and fp32 for a merged one. Raises ConfigError and CheckpointError.
    """
    from rlcore.adapter_folder import is_adapter

    if folder.exists():
        raise ConfigError(f"{folder} exists already; give a folder that does not")
    if dtype not in ("fp32", "bf16", None):
        raise ConfigError(f"dtype={dtype} is not a precision to export in; give fp32, bf16 or none")
    saved = _saved(run, role)
    adapter = is_adapter(saved) and not merge
    if adapter and dtype is not None:
        raise ConfigError(f"{saved} is an adapter, which is exported as it is; --dtype={dtype} needs --merge as well")
    if dtype is not None or (is_adapter(saved) and merge):
        _write(run, saved, folder, dtype or "fp32")
    else:
        shutil.copytree(saved, folder)
    return "adapter" if adapter else "model"


def _saved(run: Path, role: str) -> Path:
    """Return a role's folder in the newest whole checkpoint of a run, or in the checkpoint that was given."""
    from rlcore.training.checkpoint import chosen_whole, split_target
    from rlcore.training.folder import CONFIG

    if not (split_target(run)[0] / CONFIG).is_file():
        raise ConfigError(f"{run} is no run folder and no checkpoint of one: it has no {CONFIG}")
    found = chosen_whole(run, "")
    if found is None:
        raise CheckpointError(f"the run {run} has no checkpoint to export; train longer")
    if not (found / role / "model").is_dir():
        roles = sorted(path.parent.name for path in found.glob("*/model"))
        raise ConfigError(f"--role={role}: {found} holds no model of it; it holds those of {', '.join(roles)}")
    return found / role / "model"


def _write(run: Path, saved: Path, folder: Path, dtype: Literal["fp32", "bf16"]) -> None:
    """Write a model in a precision, with its adapter merged into it."""
    from rlcore.adapter_folder import AdapterFolder, is_adapter
    from rlcore.config import LoraConfig, ModelConfig, build
    from rlcore.config.files import read_values
    from rlcore.engine import Ranks, model_dtype, model_path, write_model_folder
    from rlcore.engine.adapter import merge_adapter
    from rlcore.model_folder import load_model
    from rlcore.training.checkpoint import split_target
    from rlcore.training.folder import CONFIG

    adapter = AdapterFolder.of(str(saved)) if is_adapter(saved) else None
    path = str(saved) if adapter is None else adapter.base
    model = build(ModelConfig, read_values(split_target(run)[0] / CONFIG)["model"], "model")
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
