"""The worker groups of a run's plugins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlcore.config import Config
from rlcore.errors import PluginError, did_you_mean
from rlcore.plugins import WorkerSpec
from rlcore.roles.pools import OpenPool
from rlcore.workers import ClassWithInitArgs, WorkerGroup
from rlcore.workers.executor import ProcessRequest


def group_requests(specs: Mapping[str, WorkerSpec], pools: Sequence[OpenPool]) -> list[ProcessRequest]:
    """Return the requests for the plugins' processes, one on each place of their pool.

    On a pool with roles or reward functions they use no GPU and take no turns with the other processes.
    """
    requests = []
    for planned, pool in pools:
        for name in planned.groups:
            spec = specs[name]
            place = pool.on_cpu() if planned.roles else pool
            requests.append(ProcessRequest(place, {name: ClassWithInitArgs(spec.worker, *spec.args)}, name))
    return requests


class PluginGroups:
    """The worker groups of a run's plugins, and the result of `run.group(NAME)` for each."""

    def __init__(self, specs: Mapping[str, WorkerSpec], groups: Mapping[str, WorkerGroup], config: Config) -> None:
        self.groups = dict(groups)
        self._config = config
        self._handles: dict[str, Any] = {}
        for name, group in groups.items():
            handle = specs[name].handle
            self._handles[name] = group if handle is None else handle(group, config)

    def get(self, name: str) -> Any:
        """Return the WorkerGroup, or its plugin's handle of it. Raises PluginError for an unknown name."""
        if name in self._handles:
            return self._handles[name]
        if name in self._config.sections:
            remedy = f"Its plugin starts no workers with this config: see its keys, `{name}.*`"
        else:
            remedy = f"Install the plugin that brings it (pip install rlcore-plugin-{name}?)"
        raise PluginError(
            f"this run has no worker group {name!r}.{did_you_mean(name, self._handles)} Its groups: "
            f"{', '.join(self._handles) or 'none'}. {remedy}"
        )

    def end_step(self) -> list[Callable[[], Mapping[str, float]]]:
        """Return functions that wait for the step's calls and give the metrics of the handles that have `end_step`."""
        handles = (handle for name, handle in self._handles.items() if handle is not self.groups[name])
        return [handle.end_step() for handle in handles if hasattr(handle, "end_step")]
