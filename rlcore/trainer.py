"""The training loop around an algorithm's step: data, clock, metrics, evaluation, checkpoints, interruption."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rlcore import checkpoint
from rlcore.config import Config, check
from rlcore.data.chat import load_tokenizer
from rlcore.data.loader import PromptLoader
from rlcore.errors import CheckpointError
from rlcore.evaluate import evaluate_prompts, sample_rows
from rlcore.folder import LOG, RunFolder, default_path, open_folder
from rlcore.health import step_metrics
from rlcore.plugins import Algorithm, PluginManager
from rlcore.rewards.compose import resolve
from rlcore.rewards.scoring import check as check_rewards
from rlcore.run import Run, open_run
from rlcore.trackers import Trackers

log = logging.getLogger(__name__)


def train(config: Config, plugins: PluginManager) -> dict[str, Any]:
    """Train, or go on with an unfinished run in the same folder, and return what summary.json holds.

    Everything that can be wrong with config, data, model folder and run folder is found before Ray starts. Raises the
    errors of rlcore.errors; the folder then holds a summary with status "failed".
    """
    check(config, plugins)
    algorithm = plugins.algorithm(config.algorithm).algorithm(config.algo)
    roles = algorithm.roles()
    dataset = plugins.datasets()[config.data.name]
    loader = PromptLoader(config.data, dataset, load_tokenizer(config.model), seed=config.trainer.seed)
    rewards = resolve(config.reward, dataset.reward, plugins.rewards(), plugins.by_value_modules)
    check_rewards(rewards, config.reward)
    folder = open_folder(default_path(config), config, plugins)
    try:
        with _logging_to(folder.path / LOG):
            for name, (path, digest) in plugins.local_files.items():
                log.info("plugin %s from %s, sha256 %s", name, path, digest)
            place = folder.path.resolve()
            with open_run(config, place, plugins, roles, rewards, log_dir=place / "logs") as run:
                return Trainer(run, algorithm, plugins, loader, folder).run()
    finally:
        folder.close()


class Trainer:
    """The loop of one run. `run()` is all of it; the other methods are its parts, in the order in which they come."""

    def __init__(
        self, run: Run, algorithm: Algorithm, plugins: PluginManager, loader: PromptLoader, folder: RunFolder
    ) -> None:
        self.run_, self.algorithm, self.plugins, self.loader, self.folder = run, algorithm, plugins, loader, folder
        self.config = run.config
        self.step = 0
        self.tokens = 0.0
        self.seconds = 0.0
        self.accuracy: dict[str, float | None] = {"before": None, "after": None}
        self.saved_step: int | None = None
        self.trackers = Trackers(self.config, folder.path, plugins.trackers())
        self.held_out = loader.held_out(self.config.data.eval_size) if self.config.trainer.eval_every else None

    def run(self) -> dict[str, Any]:
        """Run all steps and return the summary; write it whatever happens."""
        status = "failed"
        try:
            self._restore()
            self.trackers.start(resume_step=self.step)
            self.plugins.run_start(self.run_)
            with _Interruption() as interruption:
                status = self._loop(interruption)
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            summary = self._summary(status)
            self.folder.write_summary(summary)
            try:
                self.plugins.run_end(self.run_, status)
            finally:
                self.trackers.finish(status, summary)
        return summary

    def _loop(self, interruption: _Interruption) -> str:
        total = self.config.trainer.total_steps
        if self.step == 0 and self.accuracy["before"] is None:
            self._evaluate()
            self.accuracy["before"] = self.accuracy["after"]
        while self.step < total and not interruption.asked:
            self._one_step()
            every = self.config.trainer.checkpoint_every
            if every and self.step % every == 0 and self.step < total:
                self._save()
        if self.saved_step != self.step:
            self._save()
        return "finished" if self.step >= total else "interrupted"

    def _one_step(self) -> None:
        start = time.perf_counter()
        self.run_.begin_step(self.step + 1)
        prompts = self.loader.next_batch()
        returned = self.algorithm.step(self.run_, prompts)
        logged, scored = self.run_.end_step()
        self.step += 1
        metrics = step_metrics(returned, logged, scored, self.config.reward.pass_score)
        for name, role in self.run_.roles.items():
            metrics.update({f"time/{name}_{kind}": seconds for kind, seconds in role.seconds().items()})
        elapsed = time.perf_counter() - start
        tokens = metrics.pop("tokens")
        self.tokens += tokens
        self.seconds += elapsed
        metrics["time/step"] = elapsed
        metrics["throughput/tokens_per_second"] = tokens / elapsed
        metrics["time/left"] = (self.config.trainer.total_steps - self.step) * self.seconds / self.step
        metrics.update({f"data/{name}": float(count) for name, count in self.loader.counts.items()})
        if self._is_time_to_evaluate():
            self._evaluate()
        self.trackers.log(self.step, metrics)
        if scored:
            self.trackers.samples(self.step, sample_rows(scored[-1], self.config.trainer.samples_per_step))
        self.plugins.step_end(self.run_, self.step, metrics)

    def _is_time_to_evaluate(self) -> bool:
        every = self.config.trainer.eval_every
        return bool(every) and (self.step % every == 0 or self.step == self.config.trainer.total_steps)

    def _evaluate(self) -> None:
        if self.held_out is None:
            return
        found = evaluate_prompts(self.run_, self.held_out)
        self.run_.end_step()
        self.accuracy["after"] = found.metrics["eval/accuracy"]
        self.trackers.evaluated(self.step, found.metrics)

    def _save(self) -> None:
        keep = self.config.trainer.keep_checkpoints
        path = checkpoint.save(self.folder.checkpoints, self.step, self._write, keep)
        self.saved_step = self.step
        self.trackers.saved(self.step, path)

    def _write(self, aside: Path) -> dict[str, Any]:
        for name, role in self.run_.roles.items():
            if role.role.trains:
                role.group.save_state(str(aside.resolve() / name))
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "accuracy": self.accuracy,
            "loader": self.loader.state_dict(),
            "algorithm": {"name": self.config.algorithm, "state": self.algorithm.state_dict()},
        }
        self.plugins.checkpoint(self.run_, aside)
        return state

    def _restore(self) -> None:
        path = self.folder.resume_from
        if path is None:
            return
        state = checkpoint.load(path)
        try:
            self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
            self.accuracy = state["accuracy"]
            self.loader.load_state_dict(state["loader"])
            self.algorithm.load_state_dict(state["algorithm"]["state"])
        except KeyError as error:
            raise CheckpointError(
                f"{path / checkpoint.STATE} lacks {error}; it is of another version of rlcore"
            ) from error
        for name, role in self.run_.roles.items():
            if role.role.trains:
                role.group.load_state(str((path / name).resolve()))
        self.saved_step = self.step
        log.info("resumed from %s", path)

    def _summary(self, status: str) -> dict[str, Any]:
        return {
            "status": status,
            "algorithm": self.config.algorithm,
            "steps": self.step,
            "accuracy_before": self.accuracy["before"],
            "accuracy_after": self.accuracy["after"],
            "train_seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens / self.seconds, 1) if self.seconds else 0.0,
            "run_dir": str(self.folder.path),
        }


class _Interruption:
    """The first Ctrl-C or SIGTERM asks the loop to checkpoint and leave after the step; the second leaves at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        log.warning("%s: a checkpoint follows after this step; once more to leave now", signal.Signals(number).name)

    def __enter__(self) -> _Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Send rlcore's log records of this process to a file for a while; warnings also go to stderr."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("rlcore")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
        handler.close()
