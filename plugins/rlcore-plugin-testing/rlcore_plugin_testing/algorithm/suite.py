"""The runs of one algorithm, each made once and shared by the checks."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rlcore import Config, PluginManager, RLCoreError, Role, RoleKind, Run
from rlcore.config import ClusterConfig, compose, to_yaml
from rlcore.data.chat import load_tokenizer
from rlcore.plugins import KINDS
from rlcore.training.checkpoint import STATE
from rlcore.training.trainer import train
from rlcore.workers import make_executor
from rlcore_plugin_testing.algorithm import killed, problem
from rlcore_plugin_testing.algorithm.losses import LossProbe
from rlcore_plugin_testing.algorithm.watch import (
    Changes,
    Item,
    RecordingPlugins,
    RunRecord,
    StopEarly,
    function_name,
    recorded_maps,
)
from rlcore_plugin_testing.report import CheckFailed, CheckSuite, NotApplicable, Result

START_SECONDS = 600.0
"""Seconds for the start of Ray's workers: their imports take long on a machine that runs other tests."""
STOPPED_AT = 2
"""The step at whose end a run is stopped or killed; the checkpoint of the step before is then the newest."""


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: its folder and its record."""

    folder: Path
    record: RunRecord

    @property
    def numbers(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl without the metrics that measure time."""
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        clock = ("time/", "timeline/", "throughput/")
        return [{k: v for k, v in line.items() if not k.startswith(clock)} for line in lines]

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Every sample in the run's files, in order."""
        files = sorted((self.folder / "samples").glob("*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def saved(self, step: int) -> dict[str, Any]:
        """Return the weights and optimizer states of a checkpoint, as `contents` by file."""
        folder = self._checkpoint(step)
        return {str(path.relative_to(folder)): contents(path) for path in sorted(folder.rglob("*.safetensors"))}

    def state(self, step: int) -> Any:
        """Return the algorithm's `state_dict` in a checkpoint."""
        return json.loads((self._checkpoint(step) / STATE).read_text())["algorithm"]["state"]

    def _checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step_{step:08d}"


def contents(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the names, types, shapes and offsets of a safetensors file's tensors, and their bytes.

    The metadata is left out: safetensors writes it in a different order each time.
    """
    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    header.pop("__metadata__", None)
    return header, raw[begin:]


class AlgorithmSuite(CheckSuite):
    """The runs of one algorithm, each made once and shared by the checks.

    At the end it stops Ray if it started one, and removes weights; the rest of each run stays in `folder`. Raises
    PluginError for an unknown algorithm.
    """

    noun = "algorithm"
    group = "algo"

    def __init__(self, name: str, folder: Path, checks: Mapping[str, Callable[[Any], str]], **options: Any) -> None:
        super().__init__(name, folder, checks, **options)
        self.spec = PluginManager.load(self.plugins).algorithm(name)
        problem.write_data(folder)

    @classmethod
    def names(cls, plugins: PluginManager) -> Sequence[str]:
        """See CheckSuite."""
        return list(plugins.algorithms())

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for weights in [*self.folder.glob("*/checkpoints"), *self.folder.glob("before")]:
            shutil.rmtree(weights)

    def results(self) -> Iterator[Result]:
        """See CheckSuite. The run to be killed starts at once, parallel to the others."""
        # `once` keeps an error of its start for the check that needs the run.
        with suppress(RLCoreError):
            self.once("killed", self._start_killed)
        yield from super().results()

    # Shared by the checks

    @property
    def config(self) -> Config:
        """The config of the in-process runs, without a folder."""

        def make() -> Config:
            overrides = [f"algo={self.name}", "cluster=in_process", *problem.overrides(self.folder, self.settings)]
            return compose(overrides, PluginManager.load(self.plugins))

        return self.once("config", make)

    @property
    def vocab(self) -> int:
        """The number of tokens in the model's vocabulary."""
        return self.once("vocab", lambda: len(load_tokenizer(self.config.model)))

    @property
    def plain(self) -> FinishedRun:
        """A run in this process."""
        return self.once("plain", lambda: self._in_process("plain", Changes()))

    def changed(self, name: str, changes: Changes, start: Callable[[Run], None] | None = None) -> FinishedRun:
        """Return a run in this process that differs by `changes`; one run for each name."""
        return self.once(name, lambda: self._in_process(name, changes, start))

    def _in_process(self, name: str, changes: Changes, start: Callable[[Run], None] | None = None) -> FinishedRun:
        plugins = RecordingPlugins.load(self.plugins)
        record = plugins.record_run(changes, start)
        try:
            with recorded_maps(record.mapped):
                self._train(self.config, name, plugins)
        except StopEarly:
            pass  # the record holds the step that the check needs
        return FinishedRun(self.folder / name, record)

    def _train(self, config: Config, name: str, plugins: PluginManager) -> None:
        train(replace(config, run=replace(config.run, dir=str(self.folder / name))), plugins)

    def on_ray(self, workers: int) -> FinishedRun:
        """Return a run on Ray. All share one cluster, started here unless this process is connected to one."""

        def make() -> FinishedRun:
            self.once("cluster", self._start_ray)
            cluster = ClusterConfig(executor="ray", workers=workers, inline_kb=0.0, start_timeout=START_SECONDS)
            self._train(replace(self.config, cluster=cluster), f"ray-{workers}", PluginManager.load(self.plugins))
            return FinishedRun(self.folder / f"ray-{workers}", RunRecord())

        return self.once(f"ray-{workers}", make)

    def _start_ray(self) -> bool:
        self._stack.enter_context(make_executor(ClusterConfig(executor="ray")))
        return True

    @property
    def stopped_and_resumed(self) -> FinishedRun:
        """A run that stopped in this process before a checkpoint, and was resumed."""

        def make() -> FinishedRun:
            stopped = self._in_process("stopped", Changes(stop_after=STOPPED_AT))
            if len(stopped.record.metrics) != STOPPED_AT:
                raise CheckFailed(f"the run to be stopped took {len(stopped.record.metrics)} steps, not {STOPPED_AT}")
            self._train(self.config, "stopped", PluginManager.load(self.plugins))
            return FinishedRun(self.folder / "stopped", RunRecord())

        return self.once("stopped", make)

    @property
    def killed_and_resumed(self) -> FinishedRun:
        """A run that was killed in its own process and resumed in this one."""

        def make() -> FinishedRun:
            process = self.once("killed", self._start_killed)
            process.join()
            if (status := process.exitcode) != -signal.SIGKILL:
                printed = (self.folder / "killed.log").read_text()[-500:]
                raise CheckFailed(f"the run to be killed ended by itself, with {status}: {printed}")
            self._train(self.config, "resumed", PluginManager.load(self.plugins))
            return FinishedRun(self.folder / "resumed", RunRecord())

        return self.once("resumed", make)

    def _start_killed(self) -> BaseProcess:
        process = killed.start(
            STOPPED_AT, to_yaml(self.config), self.folder / "resumed", self.plugins, self.folder / "killed.log"
        )
        self._stack.callback(process.join)
        self._stack.callback(process.kill)  # before waiting, if nobody has waited for it
        return process

    # The algorithm

    @property
    def roles(self) -> dict[str, Role]:
        """The algorithm's roles by name."""
        return dict(self.spec.algorithm(self.config.algo).roles())

    def probes(self, finished: FinishedRun, *, kinds: Sequence[RoleKind] = KINDS) -> list[LossProbe]:
        """Return a probe of each loss of each role of these kinds, on the loss's largest batch.

        Raises NotApplicable when no such role trains, CheckFailed when none was updated.
        """
        if not any(role.trains and role.kind in kinds for role in self.roles.values()):
            raise NotApplicable(f"no {_either(kinds)} trains")
        largest: dict[tuple[str, str], Item] = {}
        for item in finished.record.items:
            key = (item.role, function_name(item.loss))
            if item.kind in kinds and len(item.batch) > (len(largest[key].batch) if key in largest else 0):
                largest[key] = item
        if not largest:
            steps = len(finished.record.metrics)
            raise CheckFailed(f"in {steps} steps no row reached update() of a {_either(kinds)}")
        return [LossProbe(item, self.config.algo, self.vocab) for item in largest.values()]

    def expect_error(self, name: str, changes: Changes) -> RLCoreError | None:
        """Return the error of rlcore that ends a run with these changes, None if it ends well."""
        try:
            self.changed(name, changes)
        except RLCoreError as error:
            return error
        return None


def _either(kinds: Sequence[RoleKind]) -> str:
    return " or ".join(map(str, kinds))
