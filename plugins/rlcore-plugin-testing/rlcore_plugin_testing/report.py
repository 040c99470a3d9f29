"""A report card: the checks of one suite, each run once, with its result as a line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from rlcore import PluginManager, did_you_mean

T = TypeVar("T")

PLAIN = ("cluster.gpus_per_worker=0", "model.dtype=fp32")
"""Overrides of every suite, which its settings may replace: what its checks expect must not depend on the machine."""
LONGEST = 600
"""Characters of a result's text; an error of a worker may bring a traceback."""


class CheckFailed(Exception):
    """A check failed; the text names the fault."""


class NotApplicable(Exception):
    """A check does not apply to the plugin; the text says why."""


@dataclass(frozen=True)
class Result:
    """A line of the report card."""

    check: str
    outcome: Literal["pass", "FAIL", "n/a"]
    text: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.outcome:<4}  {self.check:<22}  {self.text}"


class CheckSuite:
    """The checks of one plugin, with their shared runs. A context manager, which ends processes that checks started.

    A subclass is the suite of one kind of plugin. A check is a function of the suite: it returns a few words on the
    things it checked, or raises CheckFailed or NotApplicable. Every other exception is a failure too.

    `name` is the plugin's; `folder` is where the suite may write; `checks` are the checks by name, in the order of the
    report card; `settings` are overrides such as "algo.group_size=4"; `plugins` are options as for `-p`.
    """

    noun: ClassVar[str]
    """The kind's name in a sentence."""
    group: ClassVar[str]
    """The config group of the kind: `rlcore plugins test GROUP=NAME`."""

    def __init__(
        self,
        name: str,
        folder: Path,
        checks: Mapping[str, Callable[[Any], str]],
        *,
        settings: Sequence[str] = (),
        plugins: Sequence[str] = (),
    ) -> None:
        self.name, self.folder, self.checks = name, folder, checks
        self.settings, self.plugins = list(settings), list(plugins)
        self._stack = ExitStack()
        self._kept: dict[str, Any] = {}

    @classmethod
    def names(cls, plugins: PluginManager) -> Sequence[str]:
        """Return the names of all plugins of the kind."""
        raise NotImplementedError

    @property
    def manager(self) -> PluginManager:
        """The plugins; loaded once, because each load of a local file gives other classes."""
        return self.once("manager", lambda: PluginManager.load(self.plugins))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def result(self, check: str) -> Result:
        """Run one check by its name."""
        if check not in self.checks:
            nearest = did_you_mean(check, self.checks)
            raise ValueError(f"unknown check {check!r}.{nearest} Checks: {', '.join(self.checks)}")
        start = time.perf_counter()
        outcome: Literal["pass", "FAIL", "n/a"] = "pass"
        try:
            text = self.checks[check](self)
        except NotApplicable as reason:
            outcome, text = "n/a", str(reason)
        except CheckFailed as found:
            outcome, text = "FAIL", str(found)
        except Exception as error:  # an error of the plugin is a finding
            outcome, text = "FAIL", f"{type(error).__name__}: {error}"
        text = " ".join(text.split())
        text = text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
        return Result(check, outcome, text, time.perf_counter() - start)

    def results(self) -> Iterator[Result]:
        """Run all checks, one after the other."""
        yield from map(self.result, self.checks)

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return the result of `make`, called at the first use of `name` only; an error is raised again at each use."""
        if name not in self._kept:
            try:
                self._kept[name] = make()
            except Exception as error:  # kept, and raised below
                self._kept[name] = error
        kept: Any = self._kept[name]
        if isinstance(kept, Exception):
            raise kept
        return kept  # type: ignore[no-any-return]


@contextmanager
def expect_error(error: type[Exception], title: str, *says: str) -> Iterator[None]:
    """Raise CheckFailed unless the block raises `error` with all of `says` in its text."""
    try:
        yield
    except error as raised:
        missing = [words for words in says if words not in str(raised)]
        if missing:
            raise CheckFailed(f"{title}: its error does not say {missing[0]!r}: {raised}") from raised
    else:
        raise CheckFailed(f"{title} raised no {error.__name__}")
