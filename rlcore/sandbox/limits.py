"""What code may use, and what came of running it."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """The limits of one run of code, or of one session.

    seconds: wall-clock time of a run, start included, or of one `execute`. CPU time of one process: this plus a second
    in a run, 60 times this in a session.
    memory_mb: address space of each process, in MiB.
    processes: processes and threads at a time, the first one included.
    file_mb: size of a file, in MiB; with namespaces also of all files together.
    output_kb: how much of standard output, and how much of standard error, is kept, in KiB. A run that writes 64 times
    as much is stopped.
    """

    seconds: float = 10.0
    memory_mb: int = 512
    processes: int = 16
    file_mb: int = 16
    output_kb: int = 64

    def __post_init__(self) -> None:
        for name, least in (("seconds", 0.1), ("memory_mb", 64), ("processes", 1), ("file_mb", 1), ("output_kb", 1)):
            value = getattr(self, name)
            if not least <= value < float("inf"):
                raise ConfigError(f"Limits: {name} is {value}; it must be at least {least:g}")


@dataclass(frozen=True)
class Result:
    """What a run, or one `execute` of a session, gave.

    stdout, stderr: text; bytes that are not UTF-8 are replaced.
    status: the exit status, negative for the signal that killed the process; in a session 0, or 1 after an exception;
    None when the code was stopped, or ended the session's process.
    timed_out: it took longer than `Limits.seconds`.
    cut: `stdout` or `stderr` lacks what came after `Limits.output_kb`.
    cause: in words, what ended it.
    """

    stdout: str
    stderr: str
    status: int | None
    timed_out: bool
    cut: bool
    cause: str

    @property
    def ok(self) -> bool:
        """Whether it ended by itself, without an exception or a status other than 0."""
        return self.status == 0
