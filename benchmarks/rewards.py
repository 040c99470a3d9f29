"""How many responses one core scores in a second, by reward, and what responses cost that never finish."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import Benchmark, Figure, at_least, at_most
from rlcore.config.schema import RewardConfig
from rlcore.plugins import PluginManager
from rlcore.rewards.compose import resolve
from rlcore.rewards.scoring import Rewards

ROUNDS, ROWS, ENDLESS = 3, 1000, 8
TIMEOUT = 1.0
WORDS = "Each of the boxes holds as many apples as the basket, so we multiply and then take away what was eaten. "
TRL = """\
def equal(completions, answer, **columns):
    return [float(text.split()[-1] == each) for text, each in zip(completions, answer)]
"""
HANGS = "def hangs(prompt, response, answer):\n    while response == 'never':\n        pass\n    return 1.0"


class Row(NamedTuple):
    """A response and its reference."""

    response: str
    answer: str


def word_problem(draw: random.Random) -> Row:
    """A solution of 200 words in GSM8K's form."""
    number = str(draw.randrange(10_000))
    return Row(f"{WORDS * 10}\n#### {number if draw.random() < 0.5 else draw.randrange(10_000)}", number)


def expression(draw: random.Random) -> Row:
    """A boxed answer in MATH's forms: a fraction, a root, an interval, a set or a polynomial, every other one right."""
    a, b, c = (draw.randrange(1, 40) for _ in range(3))
    forms = [
        (rf"\frac{{{a}}}{{{b}}}", rf"\dfrac{{{2 * a}}}{{{2 * b}}}"),
        (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}"),
        (rf"({a}, {a + b}]", rf"\left({a},{a + b}\right]"),
        (rf"\{{{a}, {b + 40}, {c + 80}\}}", rf"\{{{c + 80}, {a}, {b + 40}\}}"),
        (rf"x^2 + {a + b}x + {a * b}", rf"(x+{a})(x+{b})"),
    ]
    answer, written = draw.choice(forms)
    return Row(rf"{WORDS * 10} So the answer is $\boxed{{{written if draw.random() < 0.5 else c}}}$.", answer)


SIDES: dict[str, tuple[str, Callable[[random.Random], Row], float]] = {
    "gsm8k": ("gsm8k", word_problem, 5000),
    "math": ("math", expression, 30),
    "a function of TRL's form": ("trl.py:equal", word_problem, 5000),
}
"""By side: the reward, its rows, and the responses a second that one core has to score."""
BARS = {name: at_least(f"{name}: responses a second on one core", least) for name, (_, _, least) in SIDES.items()}
OVER = at_most(f"{ENDLESS} endless responses: seconds over their time-outs", 8.0)
BENCHMARK = Benchmark(
    "rewards", measures=("rlcore/rewards", "rlcore/processes", "benchmarks/rewards.py"), bars=(*BARS.values(), OVER)
)
NOTES = f"""\
One reward process (`reward.workers=1`), as a run has it, scores {ROWS} responses of 200 words in one call; its start is
not counted. math: fractions, roots, intervals, sets and polynomials in MATH's forms, half of them right. Endless: a
function that does not return for {ENDLESS} of 64 responses under `reward.timeout={TIMEOUT:g}`: each costs its time-out,
and a new process is started after it. There is no other side."""


def seconds(reward: str, rows: Sequence[Row], folder: Path, timeout: float = 10.0) -> tuple[float, list[float]]:
    """Return the seconds that one process takes to score rows, and their rewards; files of rewards are in `folder`."""
    name = f"{folder}/{reward}" if ":" in reward else reward
    config = RewardConfig(functions={name: 1.0}, timeout=timeout, error_value=-1.0)
    rewards = Rewards(resolve(config, "", PluginManager.load().rewards()), config)
    rewards.start()
    responses, answers = [row.response for row in rows], [row.answer for row in rows]
    try:
        rewards.score(["?"], responses[:1], answers[:1], {})  # imports are part of the start
        began = time.perf_counter()
        scored = rewards.score(["?"] * len(rows), responses, answers, {})
        return time.perf_counter() - began, scored.totals
    finally:
        rewards.close()


def main() -> bool:
    """Measure in turn and write the results."""
    found: dict[str, list[float]] = {name: [] for name in SIDES}
    over, draw = [], random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "trl.py").write_text(TRL)
        (folder / "hangs.py").write_text(HANGS)
        for _ in range(ROUNDS):
            for side, (reward, make, _) in SIDES.items():
                rows = [make(draw) for _ in range(ROWS)]
                took, totals = seconds(reward, rows, folder)
                assert 0.4 < sum(totals) / ROWS < 0.6, f"{side}: half of the responses are right, got {sum(totals)}"
                found[side].append(ROWS / took)
            endless = [Row("never" if number % (64 // ENDLESS) == 1 else "soon", "1") for number in range(64)]
            took, totals = seconds("hangs.py:hangs", endless, folder, TIMEOUT)
            assert totals.count(-1.0) == ENDLESS
            over.append(took - ENDLESS * TIMEOUT)
    figures = [Figure(side, "responses scored on one core", "1/s", runs) for side, runs in found.items()]
    figures.append(Figure("endless responses", "seconds over their time-outs", "s", over))
    medians = {figure.side: sorted(figure.runs)[ROUNDS // 2] for figure in figures}
    bars = [bar.at(medians[side]) for side, bar in BARS.items()] + [OVER.at(medians["endless responses"])]
    return BENCHMARK.write(figures, bars, NOTES)
