"""Where ray, wandb, datasets and vllm are not installed, an algorithm still trains in process."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
ABSENT = ("ray", "wandb", "datasets", "vllm")


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """A venv with links to all that is installed here but those."""
    venv = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    here = Path(sysconfig.get_path("purelib"))
    there = venv / here.relative_to(sys.prefix)
    for entry in here.iterdir():
        if entry.name.split("-")[0] not in ABSENT:
            (there / entry.name).symlink_to(entry)
    return venv / "bin" / "python"


def run(python, *argv, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [python, *argv], capture_output=True, text=True, timeout=200, env=environment, check=False, **options
    )


@pytest.mark.parametrize("name", ABSENT)
def test_the_venv_is_bare(bare_python, name):
    assert "ModuleNotFoundError" in run(bare_python, "-c", f"import {name}").stderr


def test_an_algorithm_trains_in_process(bare_python, tmp_path):
    small = [
        "trainer.total_steps=2",
        "data.batch_size=4",
        "trainer.eval_every=2",
        "data.max_rows=128",
        "data.eval_size=8",
    ]
    command = ["train", "experiment=quickstart", "cluster=in_process", *small, "run.dir=run"]
    done = run(bare_python, "-m", "rlcore.cli", *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"


MISSING = {
    "ray": ["cluster=local"],
    "wandb": ["tracker=wandb"],
    "datasets": ["data=file", "data.path=rows.parquet"],
    "vllm": ["rollout=vllm"],
}
EACH = """
import contextlib, io, json, sys
from rlcore.cli import main

said = {}
for missing, command in json.loads(sys.argv[1]).items():
    with contextlib.redirect_stderr(io.StringIO()) as error:
        said[missing] = main(command), error.getvalue()
print(json.dumps(said))
"""


def test_what_is_missing_is_named_before_anything_starts(bare_python, tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")  # it is never read
    command = ["train", "algo=grpo", "cluster=in_process", "data.batch_size=1", "run.dir=run"]
    commands = {missing: [*command, *overrides] for missing, overrides in MISSING.items()}
    done = run(bare_python, "-c", EACH, json.dumps(commands), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert list(said) == list(MISSING)
    for missing, (status, error) in said.items():
        assert status == 2, error
        assert "Traceback" not in error
        assert missing in error
        assert "pip install" in error
