"""The hooks. A plugin module implements any of them as functions marked with `@rlcore.hookimpl`.

Rules of all hooks:

- Process: hooks run in the driver, the process of the `rlcore` command; never in a worker.
- Order: plugins of the distribution `rlcore` first, then the other installed ones, each by entry-point name; then local
  files in the order of their `-p` options; then the objects of a Python program. No option of a hook changes it.
- Arguments: an implementation names the arguments that it uses, without defaults; it may leave out the others.
- Errors: rlcore's own errors (ConfigError, DataError, ...) pass through unchanged; any other becomes a PluginError with
  the plugin's name, distribution and file, and the option that blocks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from rlcore.plugins.specs import (
    AlgorithmSpec,
    CommandSpec,
    ConfigSpec,
    DatasetSpec,
    EnvironmentSpec,
    RewardSpec,
    RolloutEngineSpec,
    ToolFormatSpec,
    TrackerSpec,
    TrainEngineSpec,
    WorkerSpec,
)

if TYPE_CHECKING:
    from rlcore.config import Config
    from rlcore.plugins.manager import PluginManager

F = TypeVar("F", bound=Callable[..., Any])

_spec = pluggy.HookspecMarker("rlcore")
_impl = pluggy.HookimplMarker("rlcore")


def hookimpl(function: F) -> F:
    """Mark a module-level function, or a method of an object, as the hook with its name. It takes no options."""
    return _impl(function)


@_spec
def rlcore_algorithm() -> AlgorithmSpec:
    """Register an algorithm, `rlcore train algo=NAME`.

    When: once, when plugins are loaded, before the config is composed.
    Returns: one AlgorithmSpec. The name is the entry point's; a local file may choose it. Its algorithm class has a
    frozen dataclass as `config_class`. The keys under `algo` are made from that.
    Errors: another name, a second algorithm in one entry point, or a taken name stop the command.
    """
    raise NotImplementedError


@_spec
def rlcore_rewards() -> RewardSpec | Sequence[RewardSpec]:
    """Register reward functions, for `reward.functions` and as the default of data sets.

    When: once, when plugins are loaded.
    Returns: one RewardSpec or a list of them.
    Errors: a name that another plugin has given stops the command.
    """
    raise NotImplementedError


@_spec
def rlcore_datasets() -> DatasetSpec | Sequence[DatasetSpec]:
    """Register data sets, `data=NAME`.

    When: once, when plugins are loaded. Nothing is read until a run loads the data set.
    Returns: one DatasetSpec or a list of them.
    Errors: a name that another plugin has given stops the command.
    """
    raise NotImplementedError


@_spec
def rlcore_rollout_engines() -> RolloutEngineSpec | Sequence[RolloutEngineSpec]:
    """Register rollout engines, `rollout=NAME`.

    When: once, when plugins are loaded. Import the engine's libraries in `create`, not in the plugin module.
    Returns: one RolloutEngineSpec or a list of them.
    Errors: a name that another plugin has given stops the command.
    """
    raise NotImplementedError


@_spec
def rlcore_train_engines() -> TrainEngineSpec | Sequence[TrainEngineSpec]:
    """Register train engines, `engine=NAME`.

    When: once, when plugins are loaded. Import the engine's libraries in `create`, not in the plugin module.
    Returns: one TrainEngineSpec or a list of them.
    Errors: a name that another plugin has given stops the command.
    """
    raise NotImplementedError


@_spec
def rlcore_environments() -> EnvironmentSpec | Sequence[EnvironmentSpec]:
    """Register environments of episodes, `env=NAME`.

    When: once, when plugins are loaded. Import the environment's libraries in its class, not in the plugin module.
    Returns: one EnvironmentSpec or a list of them.
    Errors: a name that another plugin has given stops the command.
    """
    raise NotImplementedError


@_spec
def rlcore_tool_formats() -> ToolFormatSpec | Sequence[ToolFormatSpec]:
    """Register forms in which models write tool calls, `env.tool_format=NAME`.

    When: once, when plugins are loaded.
    Returns: one ToolFormatSpec or a list of them.
    Errors: a name that another plugin has given stops the command.
    """
    raise NotImplementedError


@_spec
def rlcore_configs() -> ConfigSpec | Sequence[ConfigSpec]:
    """Register sections of the config, for keys that belong neither to an engine nor to an algorithm.

    When: once, when plugins are loaded, before the config is composed.
    Returns: one ConfigSpec or a list of them. Its keys are `NAME.*`, and every config has them while the plugin is
    installed. An engine's own keys come with its spec, an algorithm's with its class.
    Errors: a name that another plugin has given, or that rlcore's own config has, stops the command.
    """
    raise NotImplementedError


@_spec
def rlcore_trackers() -> TrackerSpec | Sequence[TrackerSpec]:
    """Register trackers, for `tracker.use`.

    When: once, when plugins are loaded. `create` is called when a run that uses the tracker starts.
    Returns: one TrackerSpec or a list of them.
    Errors: a name that another plugin has given stops the command.
    """
    raise NotImplementedError


@_spec
def rlcore_commands() -> CommandSpec | Sequence[CommandSpec]:
    """Register commands, `rlcore NAME ...`.

    When: once, when plugins are loaded.
    Returns: one CommandSpec or a list of them. An installed plugin declares each as the entry point
    `command.NAME`, from which `rlcore --help` lists it without importing it; `command.A.B` is the command `rlcore A B`.
    Errors: a name that is taken or not declared stops the command.
    """
    raise NotImplementedError


@_spec
def rlcore_place_roles(config: Config, plugins: PluginManager) -> Config | None:
    """Answer `cluster.pools=auto`: choose the pools of a run's roles, and the layout of each role.

    When: once a run with `cluster.pools=auto`, after the config is composed and before it is checked.
    Returns: the config with `cluster.pools` set, or None to leave the answer to the next plugin. The first answer
    counts.
    Errors: the first error stops the command, as does the lack of an answer.
    """
    raise NotImplementedError


@_spec
def rlcore_workers(config: Config) -> WorkerSpec | Sequence[WorkerSpec]:
    """Register the plugin's own workers, for algorithms to call through `run.group(NAME)`.

    When: once a run, before its workers start. Import the worker's libraries in the worker, not in the plugin module.
    Returns: one WorkerSpec or a list of them, empty if the config needs none.
    Errors: a name that another plugin has given stops the run.
    """
    raise NotImplementedError


@_spec
def rlcore_check_config(config: Config) -> None:
    """Check the whole config and raise ConfigError if it cannot work.

    When: once a run, after rlcore's own checks and the algorithm's `check`, before Ray starts and any folder is made;
    in a sweep also for each job before the first one starts.
    Returns: nothing; the config cannot be changed.
    Errors: the first error stops the command.
    """
    raise NotImplementedError


@_spec
def rlcore_run_start(run: Any) -> None:
    """Prepare for a run.

    When: once a run, also a resumed one, after all workers have started and before the first evaluation and step.
    Returns: nothing.
    Errors: the first error ends the run as failed.
    """
    raise NotImplementedError


@_spec
def rlcore_step_end(run: Any, step: int, metrics: Mapping[str, float]) -> None:
    """Observe a finished step.

    When: once a step, after its metrics are complete and logged, before its checkpoint. `step` counts from 1.
    Returns: nothing; the metrics cannot be changed.
    Errors: the first error ends the run as failed.
    """
    raise NotImplementedError


@_spec
def rlcore_checkpoint(run: Any, path: Path) -> None:
    """Add files to a checkpoint, or record that it exists.

    When: once a checkpoint, after rlcore has written the models into `path` and before the folder gets its final name.
    Files written under `path` are part of the checkpoint.
    Returns: nothing.
    Errors: the first error ends the run as failed; the unfinished checkpoint is never picked up.
    """
    raise NotImplementedError


@_spec
def rlcore_run_end(run: Any, status: str) -> None:
    """Close the resources that `rlcore_run_start` opened.

    When: once a run that started, also after a failure or an interruption, before the workers stop. `status` is that of
    summary.json.
    Returns: nothing.
    Errors: the other plugins' implementations are still called; then the first error is raised.
    """
    raise NotImplementedError
