"""The splits of a folder: files named after them, shards of such files, or what datasets' `save_to_disk` wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from rlcore.config.schema import DataConfig
from rlcore.data.formats import FORMATS, read_json, remedy
from rlcore.errors import ConfigError, DataError, did_you_mean

HELD_OUT = ("test", "eval", "validation", "valid", "val", "dev")
"""The names by which a held-out split is recognised. A data set may have one of them."""
SAVED = ("dataset_info.json", "state.json")
_SHARD = re.compile(r"(?P<split>.+?)-(?P<number>\d{5})-of-(?P<count>\d{5})(?:-[0-9a-f]+)?")

Splits = Mapping[str, list[Path]]


def split_files(folder: Path, config: DataConfig, split: str) -> list[Path] | None:
    """Return the files of a folder's split ("train" or "eval") in order; None where it has no held-out split.

    `data.train_split`, `data.eval_split` and `data.subset` choose. Raises ConfigError for a split or subset that is not
    there and as `_held_out_split` does, DataError for a missing shard and an empty split.
    """
    place = _subset_folder(folder, config.subset)
    splits = find_splits(place)
    shown = f"data.path={config.path}" + (f", data.subset={config.subset}," if config.subset else "")
    for key in ("train_split", "eval_split"):
        if (name := getattr(config, key)) is not None and name not in splits:
            raise ConfigError(
                f"data.{key}={name}: {shown} has no such split, only {', '.join(splits) or 'none'}."
                f"{did_you_mean(name, splits)}"
            )
    train = config.train_split or "train"
    if split == "train":
        if train not in splits:
            raise ConfigError(_no_train_split(place, splits, shown))
        return _whole(train, splits[train])
    held_out = config.eval_split or _held_out_split(splits, train, shown)
    return None if held_out in (None, train) else _whole(held_out, splits[held_out])


def _held_out_split(splits: Splits, train: str, shown: str) -> str | None:
    """Return the split that is held out by its name, None for a data set with a training split alone.

    Raises ConfigError where several splits have such a name, and where other splits are there and none has.
    """
    others = [name for name in splits if name != train]
    held_out = [name for name in HELD_OUT if name in others]
    if len(held_out) > 1:
        raise ConfigError(
            f"{shown} has several held-out splits: {', '.join(held_out)}; choose one, as data.eval_split={held_out[0]}"
        )
    if not held_out and others and train in splits:
        raise ConfigError(
            f"{shown} has the splits {', '.join([train, *others])}; say which is held out, as "
            f"data.eval_split={others[0]}, or hold a share of the training split out with data.eval_split={train}"
        )
    return held_out[0] if held_out else None


def find_splits(folder: Path) -> Splits:
    """Return the files of each split of a folder, in order; a saved `Dataset` is the split "train".

    Files lie in the folder itself or in its subfolder `data`: SPLIT.jsonl, or shards SPLIT-00000-of-00012.parquet.
    """
    if (saved := folder / "dataset_dict.json").is_file():
        return {name: _saved_files(folder / name) for name in read_json(saved)["splits"]}
    if is_saved_dataset(folder):
        return {"train": _saved_files(folder)}
    splits: dict[str, list[Path]] = {}
    for place in (folder, folder / "data"):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            if path.suffix in FORMATS and path.is_file():
                shard = _SHARD.fullmatch(path.stem)
                splits.setdefault(shard["split"] if shard else path.stem, []).append(path)
    return splits


def is_saved_dataset(folder: Path) -> bool:
    """Return whether a folder is one that `Dataset.save_to_disk` wrote."""
    return all((folder / name).is_file() for name in SAVED)


def _whole(name: str, files: list[Path]) -> list[Path]:
    """Return the files of a split; raise where they are neither one file nor all shards of one."""
    if not files:
        raise DataError(f"the split {name!r} has no rows; choose another, or drop it")
    if is_saved_dataset(files[0].parent):
        return files
    shards = [_SHARD.fullmatch(path.stem) for path in files]
    forms = {
        (path.parent, path.suffix, shard and shard["count"])  # datasets once wrote a hash of its own into each name
        for path, shard in zip(files, shards, strict=True)
    }
    numbers = [shard["number"] for shard in shards if shard]
    if len(forms) > 1 or len(numbers) > len({*numbers}):
        names = ", ".join(path.name for path in files)
        raise ConfigError(
            f"data.path={files[0].parent} has several files for the split {name!r}: {names}; "
            "keep only one of them, or the shards of one"
        )
    first = shards[0]
    if first is None:
        return files
    for number in range(int(first["count"])):
        if f"{number:05d}" not in numbers:
            lacking = f"{name}-{number:05d}-of-{first['count']}{files[0].suffix}"
            raise DataError(
                f"{files[0].parent} has {len(files)} of the {int(first['count'])} shards of the split {name!r}: "
                f"{lacking} is missing; fetch it, or rename the files if they are whole"
            )
    return files


def _saved_files(folder: Path) -> list[Path]:
    """Return the files of a folder that `Dataset.save_to_disk` wrote."""
    state = folder / "state.json"
    if not state.is_file():
        raise DataError(f"{folder} has no state.json, so it is not whole; save the data set again")
    files = [folder / each["filename"] for each in read_json(state)["_data_files"]]
    for file in files:
        if not file.is_file():
            raise DataError(f"{file} is missing, one of the {len(files)} files that state.json names; save it again")
    return files


def _subset_folder(folder: Path, subset: str | None) -> Path:
    if subset is None:
        return folder
    if (folder / subset).is_dir() and find_splits(folder / subset):
        return folder / subset
    there = _subsets(folder)
    raise ConfigError(
        f"data.subset={subset}: data.path={folder} has no such subset, only {', '.join(there) or 'none'}."
        f"{did_you_mean(subset, there)}"
    )


def _subsets(folder: Path) -> list[str]:
    folders = sorted(path for path in folder.iterdir() if path.is_dir() and path.name != "data")
    return [path.name for path in folders if find_splits(path)]


def _no_train_split(folder: Path, splits: Splits, shown: str) -> str:
    names = sorted(path.name for path in folder.iterdir())
    there = ", ".join(names[:10]) or "nothing"
    if splits:
        advice = f"set data.train_split to one of its splits: {', '.join(splits)}"
    elif subsets := _subsets(folder):
        advice = f"set data.subset to one of its subsets: {', '.join(subsets)}"
    else:
        tables = [name for name in names if name.endswith((".csv", ".tsv"))]
        advice = remedy(folder / tables[0]) if tables else "put train.jsonl there, or shards of it"
    return (
        f"{shown} has no file for the train split: looked for train with the ending {', '.join(FORMATS)}; "
        f"the folder holds {there}; {advice}"
    )
