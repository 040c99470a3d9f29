"""The console: a live display in a terminal, plain lines elsewhere, and a short summary at the end."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from io import StringIO
from itertools import count
from pathlib import Path
from typing import IO, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlcore.config.files import run_dir_word
from rlcore.config.schema import Config
from rlcore.trackers.base import Tracker
from rlcore.training.checkpoint import checkpoints
from rlcore.training.folder import LOG
from rlcore.training.fork import run_of, source_step

_MISSING = "–"
_NOT_FINITE = "bold red"


class ConsoleTracker(Tracker):
    """Shows step, reward, held-out accuracy, KL, tokens/s and time left, and a line on the health of the step.

    In a terminal and in a notebook it is a display that stays in place; elsewhere (CI, pipes) each step is a line.
    `console` is rich's, standard output by default.
    """

    def __init__(self, config: Config, run_dir: Path, console: Console | None = None) -> None:
        self._config = config
        self._run_dir = run_dir
        self._console = console or Console()
        self._in_notebook = self._console.is_jupyter
        if self._in_notebook:
            self._console = _plain_console()  # lines of one output, where rich would make one of each
        self._live: Live | _NotebookDisplay | None = None
        self._accuracy: float | None = None
        self._accuracy_of_sets: dict[str, float] = {}

    def start(self, resume_step: int) -> None:
        """Open the display."""
        forked_at, source = source_step(self._config), self._config.run.source
        after = "" if source is None else f" · from {run_of(Path(source))} at step {forked_at}"
        after += f" · resumed after step {resume_step}" if resume_step > forked_at else ""
        self._print(Text(f"rlcore {self._config.algorithm} · {self._run_dir}{after}"))
        first = self._display(resume_step, {})
        if self._in_notebook:
            self._live = _NotebookDisplay(first)
        elif self._console.is_terminal:
            self._live = Live(first, console=self._console, auto_refresh=False, transient=True)
        if self._live is not None:
            self._live.start(refresh=True)

    def described(self, lines: Sequence[str]) -> None:
        """Print the lines, above the display."""
        for line in lines:
            self._print(Text(line))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the step."""
        self._accuracy = metrics.get("eval/accuracy", self._accuracy)
        for name in (*self._config.data.mix, *self._config.eval.sets):
            if (accuracy := metrics.get(f"eval/{name}/accuracy")) is not None:
                self._accuracy_of_sets[name] = accuracy
        if self._live is not None:
            self._live.update(self._display(step, metrics), refresh=True)
            return
        line = Text(f"step {step}/{self._config.trainer.total_steps}")
        for name, value in self._figures(metrics) if step else self._accuracies():
            line.append(f"  {name} ").append(value)
        if step:
            line.append("  | ").append(_health(metrics))
        self._print(line)

    def saved(self, step: int, path: Path) -> None:
        """Print the checkpoint's path."""
        self._print(Text(f"checkpoint of step {step}: {path}"))

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        """Close the display and print the summary."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        for line in _closing(status, summary, self._run_dir):
            self._print(Text(line))

    def _print(self, text: Text) -> None:
        # soft_wrap keeps a line whole, so that grep finds it and a command can be copied
        self._console.print(text, soft_wrap=True)

    def _figures(self, metrics: Mapping[str, float]) -> list[tuple[str, Text]]:
        return [
            ("reward", _number(metrics.get("reward/mean"))),
            *self._accuracies(),
            ("KL", _number(metrics.get("kl/mean"), ".4f")),
            ("tokens/s", _number(metrics.get("throughput/tokens_per_second"), ",.0f")),
            ("left", _duration(metrics.get("time/left"))),
        ]

    def _accuracies(self) -> list[tuple[str, Text]]:
        """Return the newest accuracies: on the held-out prompts, and of each source and evaluation with a name."""
        has_own = self._config.eval.held_out and (self._accuracy is not None or not self._config.data.mix)
        held_out = [("accuracy", _number(self._accuracy))] if has_own else []
        return [*held_out, *((name, _number(value)) for name, value in self._accuracy_of_sets.items())]

    def _display(self, step: int, metrics: Mapping[str, float]) -> RenderableType:
        total = self._config.trainer.total_steps
        progress = Table.grid(padding=(0, 2))
        progress.add_row(f"step {step}/{total}", ProgressBar(total=total, completed=step, width=40))
        figures = Table.grid(padding=(0, 3))
        names, values = zip(*self._figures(metrics), strict=True)
        figures.add_row(*[Text({"accuracy": "held-out accuracy"}.get(name, name), style="dim") for name in names])
        figures.add_row(*values)
        return Group(progress, figures, _health(metrics))


class _NotebookDisplay:
    """One output of a notebook's cell, whose text each step replaces; used as rich's Live, which needs ipywidgets."""

    def __init__(self, first: RenderableType) -> None:
        self._shown, self._handle = first, None

    def start(self, *, refresh: bool) -> None:
        from IPython.display import display

        self._handle = display(self._text(), raw=True, display_id=True)

    def update(self, shown: RenderableType, *, refresh: bool) -> None:
        self._shown = shown
        assert self._handle is not None
        self._handle.update(self._text(), raw=True)

    def stop(self) -> None:
        """Leave the last step to be seen."""

    def _text(self) -> dict[str, str]:
        text = StringIO()
        _plain_console(text).print(self._shown)
        return {"text/plain": text.getvalue()}


def _plain_console(file: IO[str] | None = None) -> Console:
    return Console(file=file, width=120, force_jupyter=False, color_system=None)


def _health(metrics: Mapping[str, float]) -> Text:
    """Return the line on the step's health: whether the policy could learn from it."""
    line = Text()
    for name, value in (
        ("equal groups", _number(metrics.get("health/equal_groups"), ".0%")),
        ("effective tokens", _number(metrics.get("health/effective_tokens"), ",.0f")),
        ("truncated", _number(metrics.get("health/truncated"), ".0%")),
        ("gradient norm", _number(metrics.get("train/grad_norm"), ".3g")),
        ("response length", _number(metrics.get("response/mean_length"), ".1f")),
    ):
        line.append(", " if line else "").append(f"{name} ").append(value)
    if errors := metrics.get("reward/errors"):
        line.append(", ").append(f"{errors:.0f} rewards failed", style=_NOT_FINITE)
    return line


def _number(value: float | None, form: str = ".3f") -> Text:
    if value is None:
        return Text(_MISSING)
    return Text(format(value, form)) if math.isfinite(value) else Text(str(value).upper(), style=_NOT_FINITE)


def _duration(seconds: float | None) -> Text:
    """Return h:mm:ss or m:ss."""
    if seconds is None or not math.isfinite(seconds):
        return _number(seconds)
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return Text(f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}")


def _command() -> str:
    """Return the command that calls rlcore: its name if it is on the PATH, else its path (`make train`)."""
    if shutil.which("rlcore"):
        return "rlcore"
    script = Path(sys.executable).with_name("rlcore")
    return os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)


def _closing(status: str, summary: Mapping[str, Any], run_dir: Path) -> list[str]:
    """Return the lines of the closing summary: the outcome, the run folder, and commands to continue with.

    The commands work as they are: an evaluation only of a run with a checkpoint, another run in a folder that is free.
    """
    folder, config = shlex.quote(str(run_dir)), shlex.quote(str(run_dir / "config.yaml"))
    lines = [f"{status}: {summary['steps']} steps" if "steps" in summary else status]
    if "train_seconds" in summary:
        lines[0] += f" in {_duration(summary['train_seconds'])}"
    if summary.get("tokens_per_second"):
        lines[0] += f", {summary['tokens_per_second']:,.0f} tokens/s"
    before, after = (summary.get(f"accuracy_{when}") for when in ("before", "after"))
    if before is not None or after is not None:
        lines.append(f"held-out accuracy: {_number(before)} before, {_number(after)} after")
    if stopped := summary.get("stopped_at"):
        reached = ", ".join(f"{name} = {value:.4g}" for name, value in stopped.items())
        lines.append(f"ended early by trainer.stop_at: {reached}")
    if best := summary.get("best"):
        lines.append(f"best checkpoint: step {best['step']} ({best['value']:.4g}), {run_dir / 'checkpoints' / 'best'}")
    lines.append(f"run folder: {run_dir}")
    if summary.get("given_in_python") and status != "failed":  # the command line has not got it
        again = f"  rlcore.train(..., run_dir={str(run_dir)!r}) with the same arguments"
        return [
            *lines,
            "next, in Python:",
            again if status == "interrupted" else f"  rlcore.load_run({str(run_dir)!r})",
        ]
    command = shlex.quote(_command())
    given = [*summary.get("plugin_files", []), *(f"no:{name}" for name in summary.get("plugins_blocked", []))]
    plugins = "".join(f" -p {shlex.quote(word)}" for word in given)
    train = f"{command} train{plugins} --config {config}"
    if status == "finished":
        go_on = f"{train} {run_dir_word(_free(run_dir))} trainer.seed=1"
    elif status == "interrupted":
        go_on = f"{train} {run_dir_word(run_dir)}"
    else:
        go_on = f"tail -n 50 {shlex.quote(str(run_dir / LOG))}"
    lines.append("next:")
    if checkpoints(run_dir / "checkpoints"):
        lines.append(f"  {command} eval{plugins} {folder}")
    lines.append(f"  {go_on}")
    lines.append(f"  {command} plugins{plugins}")
    return lines


def _free(run_dir: Path) -> Path:
    """Return a path beside the run's folder that is not there yet."""
    if not run_dir.name or run_dir.name == "..":
        run_dir = run_dir.resolve()
    names = (run_dir.with_name(f"{run_dir.name}-again{'' if number == 1 else number}") for number in count(1))
    return next(path for path in names if not path.exists())
