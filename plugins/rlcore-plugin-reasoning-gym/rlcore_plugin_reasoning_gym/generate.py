"""Make rows: `PYTHONHASHSEED=0 python -m rlcore_plugin_reasoning_gym.generate`, settings and rows as JSON."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rlcore import DataError
from rlcore_plugin_reasoning_gym.entries import to_json

OWN = ("seed", "size")
"""Parameters of generators that the plugin sets."""


def rows(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows that the settings (TasksConfig as a dict, and `split`) describe.

    Row i has the level i * levels // size. Each task has its own seed for each split and level, and counts its indices.
    """
    tasks, options = _tasks(settings["tasks"]), settings["options"]
    if unused := set(options) - set(tasks):
        raise DataError(f"data.reasoning_gym.options names {sorted(unused)}, which data.reasoning_gym.tasks does not")
    split, levels = settings["split"], settings["levels"]
    size = settings["size"] if split == "train" else settings["eval_size"]
    draw = random.Random(_number(settings["seed"], "draw", split))
    names, weights = list(tasks), list(tasks.values())
    generators: dict[tuple[str, int], tuple[Any, int]] = {}
    counts: Counter[tuple[str, int]] = Counter()
    made = []
    for place in range(size):
        level = place * levels // size if levels else -1
        task = draw.choices(names, weights)[0]
        key = (task, level)
        if key not in generators:
            # Most generators draw entry i from seed + i, so neighbouring seeds would give nearly the same entries.
            seed = _number(settings["seed"], task, split, level) % 2**31
            generators[key] = (generator(task, options.get(task, {}), level, seed=seed, size=size), seed)
        dataset, seed = generators[key]
        entry = _entry(task, dataset, counts[key], seed)
        made.append(
            {
                "question": entry["question"],
                "answer": entry["answer"],
                "entry": {
                    "task": task,
                    "seed": seed,
                    "index": counts[key],
                    "level": level,
                    "options": options.get(task, {}),
                    "metadata": to_json(entry["metadata"]),
                    "answer_form": settings["answer"],
                },
            }
        )
        counts[key] += 1
    return made


def generator(task: str, options: Mapping[str, Any], level: int, *, seed: int = 0, size: int = 1) -> Any:
    """Return a task's data set; level -1: without its curriculum. Raises DataError for options that it refuses."""
    from reasoning_gym.factory import DATASETS

    config_class = DATASETS[task][1]
    known = [each.name for each in fields(config_class) if each.name not in OWN]
    if unknown := set(options) - set(known):
        raise DataError(f"task {task!r} has no parameter {sorted(unknown)[0]!r}; it has {', '.join(known)}")
    given = {**_of_level(task, level, options), **options} if level >= 0 else dict(options)
    return DATASETS[task][0](_config(task, {**given, "seed": seed, "size": size}))


def _tasks(given: Mapping[str, float]) -> dict[str, float]:
    from reasoning_gym.factory import DATASETS

    installed = sorted(set(DATASETS) - {"composite"})
    for task, weight in given.items():
        if task not in installed:
            raise DataError(f"data.reasoning_gym.tasks: unknown task {task!r}; there are {', '.join(installed)}")
        if not 0 < weight < float("inf"):
            raise DataError(f"data.reasoning_gym.tasks: the weight of {task!r} is {weight}; it must be above 0")
    return dict(given) or dict.fromkeys(installed, 1.0)


def _config(task: str, given: Mapping[str, Any]) -> Any:
    """Return the generator's config object. Raises DataError for values that it refuses."""
    from reasoning_gym.factory import DATASETS

    try:
        config = DATASETS[task][1](**given)
        if hasattr(config, "validate"):
            config.validate()
    except (AssertionError, TypeError, ValueError) as error:
        shown = {name: value for name, value in given.items() if name not in OWN}
        raise DataError(f"task {task!r} refuses {shown}: {error}") from error
    return config


def _of_level(task: str, level: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the task's curriculum at the highest level up to `level` that its generator accepts.

    Empty for a task without a curriculum, or whose generator refuses all of them.
    """
    from reasoning_gym.factory import CURRICULA

    if task not in CURRICULA:
        return {}
    for each in range(level, -1, -1):
        curriculum = CURRICULA[task]()
        for name, attribute in curriculum.attributes.items():
            curriculum.set_attr_level(name, min(each, len(attribute.levels) - 1))
        config = curriculum.generate_configuration()
        given = {name: value for name, value in vars(config).items() if name not in OWN}
        with contextlib.suppress(DataError):
            _config(task, {**given, **options, "seed": 0, "size": 1})
            return given
    return {}


def _entry(task: str, dataset: Any, index: int, seed: int) -> dict[str, Any]:
    try:
        entry: dict[str, Any] = dataset[index]
    except Exception as error:
        raise DataError(
            f"task {task!r} gives no entry {index} with seed {seed}: {type(error).__name__}: {error}. Leave it out of "
            "data.reasoning_gym.tasks, or change its options or the seed"
        ) from error
    return entry


def _number(*names: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:8], "big")


def main() -> None:
    """Read settings from standard input and write the rows, or the error."""
    settings = json.load(sys.stdin)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # some generators print
            reply: dict[str, Any] = {"rows": rows(settings)}
    except DataError as error:
        reply = {"error": str(error)}
    json.dump(reply, sys.stdout)


if __name__ == "__main__":
    main()
