"""The worker groups that plugins bring into a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlcore.config import Config
from rlcore.errors import PluginError, did_you_mean
from rlcore.plugins import WorkerSpec
from rlcore.workers import ClassWithInitArgs, Executor, WorkerGroup


class PluginGroups:
    """The groups by name. Each starts at its first use, so a run that does not use one pays nothing for it."""

    def __init__(self, specs: Mapping[str, WorkerSpec], executor: Executor, config: Config) -> None:
        self._specs, self._executor, self._config = specs, executor, config
        self._handles: dict[str, Any] = {}
        self.started: list[WorkerGroup] = []

    def get(self, name: str) -> Any:
        """Return a group, or the handle that its plugin makes of it. Raises PluginError for an unknown name."""
        if name not in self._handles:
            if name not in self._specs:
                raise PluginError(
                    f"this run has no worker group {name!r}.{did_you_mean(name, self._specs)} Its groups: "
                    f"{', '.join(self._specs) or 'none'}. Plugins bring them: pip install rlcore-plugin-{name}, or set "
                    "the config keys that turn it on"
                )
            self._handles[name] = self._start(self._specs[name])
        return self._handles[name]

    def _start(self, spec: WorkerSpec) -> Any:
        pool = self._executor.resource_pool(
            spec.workers,
            cpus_per_worker=spec.cpus_per_worker,
            gpus_per_worker=spec.gpus_per_worker,
            name=f"the workers {spec.name}",
        )
        group = self._executor.worker_group(pool, ClassWithInitArgs(spec.worker, *spec.args), name=spec.name)
        self.started.append(group)
        return group if spec.handle is None else spec.handle(group, self._config)

    def end_step(self) -> list[Callable[[], Mapping[str, float]]]:
        """Return the functions that give the handles' metrics of the step, when its calls are done."""
        return [handle.end_step() for handle in self._handles.values() if hasattr(handle, "end_step")]
