"""Runs so small that a test can afford several: in this process, on a handful of prompts."""

import json
from pathlib import Path

import pytest

from rlcore.config import compose
from rlcore.data.chat import load_tokenizer
from rlcore.data.loader import held_out_prompts
from rlcore.plugins import PluginManager, Role
from rlcore.rewards.compose import resolve

TRAIN = ["3+4=", "12+5=", "9-2=", "8+8=", "15-6=", "7+1=", "30+4=", "6-6="]
HELD_OUT = ["2+2=", "5+3=", "9-4=", "11+1=", "20-3=", "4+6="]


def write_rows(path: Path, problems: list[str]) -> None:
    rows = [{"prompt": problem, "answer": str(eval(problem.rstrip("=")))} for problem in problems]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> list[str]:
    """Overrides of a run of 8 training and 6 held-out prompts."""
    data = tmp_path_factory.mktemp("data")
    write_rows(data / "train.jsonl", TRAIN)
    write_rows(data / "test.jsonl", HELD_OUT)
    return [
        *("cluster=in_process", "tracker=none", "reward=arithmetic", "data=file", f"data.path={data}"),
        *("data.batch_size=2", "rollout.response_len=5", "engine.lr=1e-3", "trainer.eval_every=0"),
        "trainer.samples_per_step=100",
    ]


@pytest.fixture(scope="session")
def train_small(small):
    """Train in `folder` and return the summary."""
    from rlcore.training.trainer import train

    def run(folder: Path, *overrides: str, plugins: PluginManager | None = None) -> dict:
        plugins = plugins or PluginManager.load()
        algo = [] if any(override.startswith("algo=") for override in overrides) else ["algo=grpo", "algo.group_size=2"]
        return train(compose([*small, *algo, f"run.dir={folder}", *overrides], plugins), plugins)

    return run


@pytest.fixture
def open_small(small, tmp_path):
    """Return an open Run of the shipped model as `actor`, and the held-out prompts; closed after the test."""
    from contextlib import ExitStack

    from rlcore.training.run import open_run

    with ExitStack() as stack:

        def open_it(*overrides: str):
            plugins = PluginManager.load()
            config = compose([*small, "algo=grpo", *overrides], plugins)
            rewards = resolve(config.reward, "arithmetic", plugins.rewards())
            roles = {"actor": Role(trains=True, generates=True)}
            run = stack.enter_context(open_run(config, tmp_path, plugins, roles, rewards))
            tokenizer = load_tokenizer(config.model)
            return run, held_out_prompts(config.data, plugins.datasets()[config.data.name], tokenizer)

        yield open_it


def read_metrics(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "timeline/", "throughput/"))} for row in rows]


@pytest.fixture(scope="session")
def metrics_of():
    """Return a run's lines of metrics.jsonl, without those of the clock."""
    return read_metrics


@pytest.fixture(scope="session")
def samples_of():
    """Return a run's rows of samples/ by step."""

    def read(folder: Path) -> dict[int, list[dict]]:
        files = sorted((folder / "samples").glob("step_*.jsonl"))
        return {
            int(file.stem.removeprefix("step_")): [json.loads(line) for line in file.read_text().splitlines()]
            for file in files
        }

    return read


@pytest.fixture(scope="session")
def forget():
    """Delete a file's entry from the manifest of its checkpoint, as one that was changed on purpose."""

    def entry(checkpoint: Path, name: str) -> None:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        del manifest["files"][name]
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))

    return entry
