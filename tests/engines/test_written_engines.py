"""The engines in tests/fixtures/engines, written from docs/write_an_engine.md, pass their suites and train."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rlcore_plugin_testing import conformance

ENGINES = Path(__file__).parents[1] / "fixtures" / "engines"
PLAIN, GENERATE = ENGINES / "rlcore-plugin-plain", ENGINES / "rlcore-plugin-generate"


@pytest.fixture(autouse=True, scope="module")
def importable():
    with pytest.MonkeyPatch.context() as patch:
        for folder in (PLAIN, GENERATE):
            patch.syspath_prepend(folder)
        yield


test_plain = conformance("engine=plain", plugins=[str(PLAIN / "rlcore_plugin_plain.py")])
test_generate = pytest.mark.e2e(
    pytest.mark.timeout(200)(conformance("rollout=generate", plugins=[str(GENERATE / "rlcore_plugin_generate.py")]))
)


def test_they_are_as_short_as_the_page_promises():
    assert len((PLAIN / "plain_engine.py").read_text().splitlines()) <= 200
    assert len((GENERATE / "generate_engine.py").read_text().splitlines()) <= 200


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder in which both distributions are installed."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(folder)]
    for project in (PLAIN, GENERATE):
        copy = tmp_path_factory.mktemp("project") / project.name
        subprocess.run(["cp", "-r", str(project), str(copy)], check=True)  # building must leave no traces
        subprocess.run([*pip, str(copy)], check=True, env={**os.environ, "PIP_NO_INDEX": "1"})
    return folder


def train(site: Path, run: Path, *overrides: str) -> dict:
    """Train in a process of its own and return the run's summary."""
    command = [sys.executable, "-m", "rlcore.cli", "train", *overrides, "cluster=in_process", "tracker=none"]
    done = subprocess.run(
        [*command, f"run.dir={run}"], env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((run / "summary.json").read_text())


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_both_together_train_and_are_named_in_the_run(site, tmp_path):
    small = [
        "trainer.total_steps=2",
        "data.batch_size=2",
        "data.max_rows=128",
        "data.eval_size=4",
        "rollout.response_len=4",
    ]
    summary = train(site, tmp_path / "run", "algo=grpo", "engine=plain", "rollout=generate", *small)
    assert summary["status"] == "finished"
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "tokens_per_step: 4" in config
    assert "fused: true" in config


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mixture", [["rollout=generate"], ["engine=plain"]], ids=["generate-torch", "hf-plain"])
def test_each_learns_the_quickstart_beside_an_engine_of_rlcore(site, tmp_path, mixture):
    assert train(site, tmp_path / "run", "experiment=quickstart", *mixture)["accuracy_after"] >= 0.9
