"""`make bench B=gpu`: the figures and faults of one card, in at most eight minutes.

`python -m benchmarks.gpu.doctor [PART...] [--small] [--keep FOLDER]` runs the named parts, or all. Each part is a
process with a limit of its own; one that fails gives its traceback, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.gpu.parts import GIVEN_MODEL, PARTS, NotHere
from benchmarks.gpu.sizes import SIZES
from benchmarks.report import GRPO, Bar, Benchmark, DeclaredBar, Figure, at_least, at_most

ROOT = Path(__file__).parents[2]
PARTS_HELP = (
    f"{', '.join(PARTS)} (default: all but {', '.join(name for name, part in PARTS.items() if part.on_request)})"
)
MOST_SECONDS = 480.0
"""All parts together; what has not begun by then is left out."""


@dataclass
class Findings:
    """The figures of the parts, and the parts left out or failed, with the reason."""

    figures: list[Figure] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def median(self, side: str, name: str) -> float | None:
        """Return a figure's median, None if it was not measured; `side` may lack the version that follows a name."""
        for figure in self.figures:
            if (figure.side == side or figure.side.startswith(f"{side} 1.")) and figure.name == name and figure.runs:
                return float(figure.summary["median"])  # type: ignore[arg-type]
        return None


def main(argv: Sequence[str] | None = None) -> bool:
    """Run the parts, write the results, and return whether no part failed and all bars hold."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=PARTS_HELP)
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU: a test of the code, no figures")
    parser.add_argument("--keep", type=Path, help="a folder for models, runs and logs that is not removed")
    parser.add_argument("--model", type=Path, help="the folder of a model with trained weights, for the part `given`")
    parser.add_argument("--seconds", type=float, default=MOST_SECONDS, help="for all parts together (default: 480)")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    for name in asked.parts:
        if name not in PARTS:
            parser.error(f"no part {name!r}; there are {', '.join(PARTS)}")
    size = "small" if asked.small else "card"
    if asked.one:
        return _one(asked.parts[0], size, asked.one)
    if not asked.small and not _has_card():
        print("B=gpu needs a GPU, and torch finds none here; --small runs the same code on the CPU", file=sys.stderr)
        return False
    names = asked.parts or [name for name, part in PARTS.items() if not part.on_request]
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        env = environment(Path(scratch))
        if asked.model:
            env[GIVEN_MODEL] = str(asked.model.absolute())
        wanted = list(dict.fromkeys(["models", *names]))
        found = Findings()

        def report() -> bool:
            return BENCHMARK.write(found.figures, bars(found), notes(found, size))

        for _ in run_parts(found, wanted, size, folder.absolute(), env, where=Path(scratch), seconds=asked.seconds):
            with contextlib.redirect_stdout(None):
                report()  # now, as a lent card may be taken back at any time
        for name, text in found.failed.items():
            print(f"\n=== {name} FAILED ===\n{text}")
        for name in wanted:
            state = "FAILED" if name in found.failed else f"no {found.absent[name]}" if name in found.absent else "ok"
            print(f"{name:<12} {found.seconds.get(name, 0.0):6.1f} s  {state}")
        held = report()
    return held and not found.failed


def _has_card() -> bool:
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code]).returncode == 0


def environment(scratch: Path) -> dict[str, str]:
    """Return an environment in which rlcore is installed: as it is, or from this checkout, without a network.

    The parts run in `scratch`: in the checkout its sources would hide the installed package.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    try:
        importlib.metadata.version("rlcore")
    except importlib.metadata.PackageNotFoundError:
        site, copy = scratch / "site", scratch / "checkout"
        ignored = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "tests", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=ignored)  # as setuptools writes into what it builds
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
        plugins = map(str, sorted((copy / "plugins").glob("*/")))
        subprocess.run([*command, "--target", str(site), str(copy), *plugins], check=True)
        (site / "benchmarks").symlink_to(ROOT / "benchmarks")
        paths[0] = str(site)
        sys.path.insert(0, str(site))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}


def run_parts(
    found: Findings,
    names: Sequence[str],
    size: str,
    folder: Path,
    env: Mapping[str, str],
    where: Path,
    seconds: float,
) -> Iterator[str]:
    """Run each part in a process of its own, in the folder `where`, and yield its name when `found` has its figures."""
    began = time.perf_counter()
    for name in names:
        limit = min(PARTS[name].seconds, seconds - (time.perf_counter() - began))
        if limit <= 0:
            found.absent[name] = "time left"
            continue
        out, log = folder / f"{name}.json", folder / f"{name}.log"
        out.unlink(missing_ok=True)
        small = ["--small"] if size == "small" else []
        command = [sys.executable, "-m", "benchmarks.gpu.doctor", name, *small, "--one", str(out)]
        start, ended = time.perf_counter(), True
        with log.open("w") as file:
            process = subprocess.Popen(
                command, env=dict(env), cwd=where, stdout=file, stderr=file, start_new_session=True
            )
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                ended = False
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        found.seconds[name] = time.perf_counter() - start
        answer = json.loads(out.read_text()) if out.exists() else {}
        if not ended:
            found.failed[name] = f"not done after {limit:.0f} s; the end of its output:\n{log.read_text()[-3000:]}"
        elif "figures" in answer:
            found.figures += [Figure(**each) for each in answer["figures"]]
        elif "absent" in answer:
            found.absent[name] = answer["absent"]
        else:
            found.failed[name] = answer.get("failed") or log.read_text()[-3000:]
        print(f"{name}: {found.seconds[name]:.1f} s", flush=True)
        yield name


def _one(name: str, size: str, out: Path) -> bool:
    """Run a part in this process and write its figures to `out`, which lies beside the folder of models."""
    answer: dict[str, object]
    try:
        answer = {"figures": [asdict(each) for each in PARTS[name].run(SIZES[size], out.parent)]}
    except NotHere as error:
        answer = {"absent": str(error)}
    except Exception:  # the doctor prints it and goes on
        answer = {"failed": traceback.format_exc()[-6000:]}
    out.write_text(json.dumps(answer))
    return "failed" not in answer


HALF, LARGER, TAIL, TRL = "rlcore hf 0.5B", "rlcore hf 1.5B", "rlcore hf 0.5B, long tail", "TRL"
GENERATING = "sampled tokens while generating"


PEAK, ARITHMETIC, PRODUCT = "peak memory of tensors", "arithmetic of an update", ("card", "matrix product")
FP32 = "device against CPU, fp32"
Value = Callable[[Findings], float | None]
"""A bar's value; None where its figures were not measured."""


def median(side: str, name: str) -> Value:
    """Return the reader of a figure's median."""
    return lambda found: found.median(side, name)


def ratio(above: tuple[str, str], below: tuple[str, str]) -> Value:
    """Return the reader of the ratio of two figures' medians."""

    def value(found: Findings) -> float | None:
        numerator, denominator = found.median(*above), found.median(*below)
        return None if numerator is None or not denominator else numerator / denominator

    return value


BARS: Sequence[tuple[DeclaredBar, Value]] = (
    (at_least("0.5B: sampled tokens/s while generating", 60_000), median(HALF, GENERATING)),
    (at_least("1.5B: sampled tokens/s while generating", 30_000), median(LARGER, GENERATING)),
    (at_least("long tail, of the flat rate", 0.6), ratio((TAIL, GENERATING), (HALF, GENERATING))),
    (at_least("0.5B: an update, of the card's matrix product", 0.40), ratio((HALF, ARITHMETIC), PRODUCT)),
    (at_least("1.5B: an update, of the card's matrix product", 0.45), ratio((LARGER, ARITHMETIC), PRODUCT)),
    (at_most("head: ms", 50), median("head", "forward and backward")),
    (at_most("head: memory, % of the logits", 10), median("head", "memory, of all logits in fp32")),
    (at_least("times TRL's steps", 6), ratio((TRL, "a step"), (HALF, "a step"))),
    (at_most("peak memory, of TRL's", 0.6), ratio((HALF, PEAK), (TRL, PEAK))),
    (at_most("fp32 log-probs from the CPU's, nats", 1e-4), median(FP32, "log-probs, largest difference")),
    (at_most("fp32 gradient from the CPU's, relative", 1e-4), median(FP32, "gradient, |difference| / |gradient|")),
    (
        at_most("bf16: sampler's log-probs from the trainer's, mean", 2e-3),
        median(HALF, "sampler's log-probs from the trainer's, mean"),
    ),
    (at_least("resumed bit for bit", 1), median("resumed against uninterrupted", "weights are equal, bit by bit")),
)
BENCHMARK = Benchmark(
    "gpu",
    measures=(*GRPO, "rlcore/engines/vllm", "benchmarks/gpu"),
    bars=tuple(bar for bar, _ in BARS),
)


def bars(found: Findings) -> list[Bar]:
    """Return the bars of the measured figures; a missing figure has no bar."""
    values = [(bar, value(found)) for bar, value in BARS]
    return [bar.at(value) for bar, value in values if value is not None]


def notes(found: Findings, size: str) -> str:
    """Return the report's text before its table."""
    lines = [
        f"One card: {card()}. Random weights of the named shapes, {SIZES[size].dtype}, GRPO without a reference on"
    ]
    lines.append("32 word problems x 8 samples x 256 new tokens; the first step of several does not count.")
    for name, text in found.absent.items():
        lines.append(f"Part {name} was left out, as there is no {text}.")
    for name in found.failed:
        lines.append(f"Part {name} FAILED.")
    return "\n".join(lines)


def card() -> str:
    """Return the card's name and driver, or that there is none."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
