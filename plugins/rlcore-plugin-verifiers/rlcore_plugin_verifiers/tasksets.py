"""Opens tasksets of verifiers 0.4, and refuses what an episode of rlcore cannot play."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from rlcore import ConfigError
from rlcore_plugin_verifiers.config import TasksetConfig

INSTALL = 'pip install "verifiers>=0.4,<0.5"'


def open_taskset(own: TasksetConfig) -> Any:
    """Return the taskset of `data.verifiers`. Raises ConfigError for one that is missing, or cannot be played."""
    if own.taskset is None:
        raise ConfigError("data=verifiers needs data.verifiers.taskset, the id of a taskset, such as my_taskset")
    where = f"data.verifiers.taskset={own.taskset}"
    try:
        from pydantic import ValidationError
        from verifiers.v1.envs.single_agent import SingleAgentEnv
        from verifiers.v1.utils.loaders import environment_class, taskset_class, taskset_config_type
    except ImportError as error:
        raise ConfigError(f"{where} needs verifiers 0.4 ({error}): {INSTALL}") from error
    try:
        found = taskset_class(own.taskset)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error
    environment = environment_class(own.taskset)
    if environment is not SingleAgentEnv:
        raise ConfigError(
            f"{where} brings the environment {environment.__name__}, which runs several agents; rlcore plays tasksets "
            "with one agent. env=agent trains any agent that uses OpenAI's API"
        )
    try:
        config = taskset_config_type(own.taskset).model_validate({**own.options, "id": own.taskset})
    except ValidationError as error:
        raise ConfigError(f"{where}: data.verifiers.options={own.options} is refused: {error}") from error
    taskset = found(config)
    _refuse(where, taskset)
    return taskset


def tasks_of(taskset: Any, own: TasksetConfig) -> list[Any]:
    """Return the tasks, in the order of the taskset. Raises ConfigError for an infinite one without a limit."""
    if not own.limit and not taskset.bounded:
        raise ConfigError(
            f"data.verifiers.taskset={own.taskset} yields tasks without end; set data.verifiers.limit to the number "
            "of tasks to read"
        )
    return list(taskset.take(own.limit) if own.limit else taskset)


def task_of(taskset: Any, data: Mapping[str, Any]) -> Any:
    """Return the task whose data a row holds."""
    kind = taskset.task_type()
    return kind(kind.data_type().model_validate(data), taskset.config.task)


def toolsets_of(taskset: Any) -> list[Any]:
    """Return the tool servers of the taskset and of each task, as objects."""
    return [*type(taskset).toolsets(taskset.config), *taskset.task_type().toolsets(taskset.config.task)]


def _refuse(where: str, taskset: Any) -> None:
    """Raise ConfigError for a taskset that needs what rlcore's episodes do not have."""
    from verifiers.v1.types import Request, Response
    from verifiers.v1.utils.decorators import discover_decorated

    kind = taskset.task_type()
    task = kind.__new__(kind)
    if kind.NEEDS_CONTAINER:
        raise ConfigError(f"{where}: its tasks need a container, and rlcore's episodes have none")
    if taskset.config.task.judges:
        raise ConfigError(f"{where} plugs judges into its tasks; use rlcore's own judge (docs/judge.md), or none")
    if taskset.config.task.stops:
        raise ConfigError(f"{where} plugs stops into its tasks, which rlcore does not call; leave them out")
    if discover_decorated(task, "intercept"):
        raise ConfigError(f"{where}: @intercept would change turns after they were sampled, so it cannot be trained on")
    for kind_of in ("reward", "metric", "stop"):
        for function in discover_decorated(task, kind_of):
            needed = inspect.signature(function).parameters
            if "runtime" in needed and needed["runtime"].default is inspect.Parameter.empty:
                raise ConfigError(
                    f"{where}: {kind.__name__}.{function.__name__} uses the runtime, and rlcore's episodes have none"
                )
            if kind_of == "stop" and {Request, Response} & set(
                inspect.get_annotations(function, eval_str=True).values()
            ):
                raise ConfigError(
                    f"{where}: {kind.__name__}.{function.__name__} is a @stop on requests or responses; only those on "
                    "the trace are called"
                )
