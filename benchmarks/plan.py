"""How wrong `rlcore plan` is: predicted against measured seconds of a step, a device being a core with one thread."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.models import write_characters
from benchmarks.report import GRPO, Benchmark, Figure, at_least, at_most
from rlcore.config import ModelConfig, compose
from rlcore.plugins import PluginManager

if TYPE_CHECKING:
    from rlcore_plugin_plan.profile import Profile

ALGORITHMS = {
    "ppo": ("actor, critic, ref", ["algo.samples=4", "algo.kl_coef=0.1"], ("critic", "ref")),
    "grpo": ("actor, ref", ["algo.group_size=4", "algo.kl_coef=0.1"], ("ref",)),
    "online_dpo": ("actor, ref", ["algo.group_size=4"], ("ref",)),
}
"""Of each algorithm its roles, what is set, and the roles that are tried on a device of their own."""
LAYOUTS = [(1, 1), (1, 2), (2, 1)]
"""[pp, tp] on two devices: 1-1-2, 1-2-1 and 2-1-1."""
STEPS = 7
"""Steps of a run, of which the first two are not timed."""
PROMPT, RESPONSE, PROMPTS = 40, 64, 4
LLAMA_13B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
}
CLUSTERS = {128: 2.0, 1024: 30.0}
"""A100s for which PPO of four 13B models is planned, and the seconds that the search may take on one core."""
ERROR = at_most("median error of a step's time", 0.2)
TAU = at_least("Kendall's tau within an algorithm", 0.7)
COMBINATIONS = at_least("combinations", 12)
SEARCH = {gpus: at_most(f"search for 4 models on {gpus} devices (s)", most) for gpus, most in CLUSTERS.items()}
BENCHMARK = Benchmark(
    "plan",
    measures=(
        *GRPO,
        "algorithms/rlcore_ppo.py",
        "algorithms/rlcore_online_dpo.py",
        "plugins/rlcore-plugin-plan/rlcore_plugin_plan",
        "benchmarks/plan.py",
        "benchmarks/models.py",
    ),
    bars=(ERROR, TAU, COMBINATIONS, *SEARCH.values()),
)
NOTES = """\
A random Qwen2 of 4 layers and hidden 256 in fp32; a step of {prompts} prompts of {prompt} tokens and four responses of
{response} each. Devices are two cores of one machine, a worker with one thread on each. First `rlcore plan --calibrate`
measured the machine with this model and these lengths, under none of the placements below; then each is predicted, with
its placement and layouts fixed, and run by the overrides of its plan. Measured: median of {steps} steps.

| algorithm | placement | layout p-t-d | predicted (s) | measured (s) | error |
| --- | --- | --- | --- | --- | --- |
{table}

Kendall's tau is over all pairs of one algorithm's rows: the share of pairs that stand in the right order, less the
share of the others. What calibration found:

| figure | value |
| --- | --- |
{profile}"""
SCORE = '''"""Scores that differ."""


def score(prompt, response, answer, **columns):
    return sum(map(ord, response)) % 997 / 997
'''


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    algorithm: str
    placement: str
    layout: str
    predicted: float
    measured: list[float]

    @property
    def seconds(self) -> float:
        return statistics.median(self.measured)

    @property
    def error(self) -> float:
        return self.predicted / self.seconds - 1

    def __str__(self) -> str:
        cells = [self.algorithm, self.placement, self.layout, f"{self.predicted:.2f}", f"{self.seconds:.2f}"]
        return f"| {' | '.join(cells)} | {self.error:+.0%} |"


def combinations() -> Iterator[tuple[str, str, str, list[str]]]:
    """Give algorithm, placement and layout in words, and their overrides."""
    for name, (roles, settings, apart) in ALGORITHMS.items():
        given = [f"algo={name}", *settings]
        for pp, tp in LAYOUTS:
            layouts = ", ".join(f"{role}: [{pp}, {tp}]" for role in roles.split(", "))
            words = [f"cluster.pools={{main: {{roles: [{roles}], workers: 2}}}}", f"engine.layouts={{{layouts}}}"]
            yield name, "all on two", f"{pp}-{tp}-{2 // (pp * tp)}", [*given, *words]
        for alone in apart:
            others = ", ".join(role for role in roles.split(", ") if role != alone)
            pools = f"{{main: {{roles: [{others}], workers: 1}}, side: {{roles: [{alone}], workers: 1}}}}"
            yield name, f"{alone} apart", "1-1-1", [*given, f"cluster.pools={pools}"]


def write_prompts(folder: Path, model: Path) -> int:
    """Write prompts of equal length and return their tokens."""
    from rlcore.data.chat import PromptEncoder, load_tokenizer

    rows = [{"prompt": f"{number:0{PROMPT}d}", "answer": "0"} for number in range(100, 164)]
    for name, some in (("train", rows[:48]), ("test", rows[48:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    (folder / "score.py").write_text(SCORE)
    encoder = PromptEncoder(load_tokenizer(ModelConfig(path=str(model))), None)
    (tokens,) = encoder.token_ids([encoder.render(rows[0]["prompt"])])
    return len(tokens)


def tau(rows: list[Row]) -> float:
    """Return Kendall's tau of predicted against measured over the pairs of each algorithm."""
    pairs = [pair for pair in itertools.combinations(rows, 2) if pair[0].algorithm == pair[1].algorithm]
    signs = [(a.predicted - b.predicted) * (a.seconds - b.seconds) for a, b in pairs]
    return (sum(sign > 0 for sign in signs) - sum(sign < 0 for sign in signs)) / len(signs)


def run(overrides: list[str], profile: Profile, plugins: PluginManager, folder: Path) -> tuple[float, list[float]]:
    """Return the predicted seconds of a step, and those of the steps of a run."""
    from rlcore_plugin_plan.overrides import values
    from rlcore_plugin_plan.plans import problem_of
    from rlcore_plugin_plan.problem import Devices
    from rlcore_plugin_plan.search import search

    from rlcore.training.trainer import train

    config = compose([*overrides, f"run.dir={folder}"], plugins)
    plan = search(problem_of(config, plugins, (Devices(profile, 2),)))[0]
    train(config.with_values(values(plan, config)), plugins)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = [line["time/step"] for line in lines if "time/step" in line]
    return plan.seconds, times[2:]


def search_seconds(folder: Path, gpus: int, plugins: PluginManager) -> list[float]:
    """Return the processor seconds of searches for PPO with a reward model on so many A100s."""
    from rlcore_plugin_plan.plans import problem_of
    from rlcore_plugin_plan.problem import Devices
    from rlcore_plugin_plan.profile import load
    from rlcore_plugin_plan.search import search

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_13B))
    words = [
        *("algo=ppo", "algo.mini_batches=8", "algo.kl_coef=0.1", f"model.path={folder}", f"reward.model={folder}"),
        *("model.dtype=bf16", "data.batch_size=1024", "data.prompt_len=1024", "rollout.response_len=1024"),
        *("engine.torch.activation_checkpointing=true", "engine.micro_batch_tokens=8192"),
    ]
    problem = problem_of(compose(words, plugins), plugins, (Devices(load("a100-80g"), gpus),))
    times = []
    for _ in range(5):
        start = time.process_time()
        search(problem)
        times.append(time.process_time() - start)
    return times


def main() -> bool:
    """Calibrate, run all combinations, and write the results."""
    from rlcore_plugin_plan.calibrate import measure
    from rlcore_plugin_plan.devices import devices
    from rlcore_plugin_plan.problem import Devices

    os.environ.update({"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"})
    plugins = PluginManager.load()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_characters(folder / "model", layers=4)
        (folder / "data").mkdir()
        prompt = write_prompts(folder / "data", folder / "model")
        common = [
            *(f"model.path={folder / 'model'}", "data=file", f"data.path={folder / 'data'}", "tracker=none"),
            *(f"data.prompt_len={prompt}", f"data.batch_size={PROMPTS}", f"rollout.response_len={RESPONSE}"),
            *(f"rollout.min_tokens={RESPONSE}", f"trainer.total_steps={STEPS}", "trainer.eval_every=0"),
            *(f"reward.path={folder / 'data' / 'score.py'}:score", "trainer.samples_per_step=0"),
        ]
        config = compose(["algo=grpo", *common], plugins)
        profile = measure(config, plugins, Devices(devices(config)[0].profile, 2))
        searches = {gpus: search_seconds(folder / "llama", gpus, plugins) for gpus in CLUSTERS}
        rows = []
        for number, (algorithm, placement, layout, words) in enumerate(combinations()):
            predicted, measured = run([*common, *words], profile, plugins, folder / str(number))
            rows.append(Row(algorithm, placement, layout, predicted, measured))
            print(rows[-1], flush=True)
    figures = [Figure("measured", f"{r.algorithm}, {r.placement}, {r.layout}", "s", r.measured) for r in rows]
    figures += [Figure("predicted", f"{r.algorithm}, {r.placement}, {r.layout}", "s", [r.predicted]) for r in rows]
    bars = [
        ERROR.at(statistics.median(abs(row.error) for row in rows)),
        TAU.at(tau(rows)),
        COMBINATIONS.at(len(rows)),
        *(bar.at(statistics.median(searches[gpus])) for gpus, bar in SEARCH.items()),
    ]
    figures += [Figure("rlcore plan", f"search for 4 models on {n} devices", "s", t) for n, t in searches.items()]
    found = {name: getattr(profile, name) for name, source in profile.sources.items() if source.startswith("measured")}
    notes = NOTES.format(
        prompts=PROMPTS,
        prompt=prompt,
        response=RESPONSE,
        steps=STEPS - 2,
        table="\n".join(map(str, rows)),
        profile="\n".join(f"| {name} | {value:.4g} |" for name, value in found.items()),
    )
    return BENCHMARK.write(figures, bars, notes)
