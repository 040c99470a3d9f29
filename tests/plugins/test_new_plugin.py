"""`rlcore new-plugin NAME`: what it writes installs, passes its tests and trains; what it refuses, and how."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rlcore.cli import main
from rlcore.errors import ConfigError
from rlcore.plugins.new import KINDS, new_plugin

ROOT = Path(__file__).parents[2]


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_is_written_and_said(tmp_path, capsys):
    assert main(["new-plugin", "my-algo", "--dir", str(tmp_path / "made" / "here")]) == 0
    folder = tmp_path / "made" / "here" / "rlcore-plugin-my-algo"
    written = {"rlcore_plugin_my_algo.py", "pyproject.toml", "README.md", "tests/test_my_algo.py"}
    assert files(tmp_path / "made" / "here" / "rlcore-plugin-my-algo") == {*written, ".github/workflows/test.yml"}
    said = capsys.readouterr().out
    assert said.startswith(f"wrote {folder}:\n")
    assert said.endswith(
        f"next:\n  pip install -e '{folder}[test]'\n  rlcore plugins test my_algo\n  rlcore train algo=my_algo\n"
    )
    assert all(f"\n  {name}\n" in said for name in written)
    assert all("$" not in (folder / name).read_text() for name in files(folder)), "a name was not filled in"


def test_an_environment_is_written_and_said(tmp_path, capsys):
    assert main(["new-plugin", "my-game", "--kind", "environment", "--dir", str(tmp_path)]) == 0
    folder = tmp_path / "rlcore-plugin-my-game"
    written = {"rlcore_plugin_my_game.py", "pyproject.toml", "README.md", "tests/test_my_game.py"}
    assert files(folder) == {*written, ".github/workflows/test.yml"}
    said = capsys.readouterr().out
    use = "experiment=quickstart env=my_game data.prompt_len=1024 rollout.response_len=256"
    assert said.endswith(f"\n  rlcore plugins test my_game\n  rlcore train {use}\n")
    assert f"rlcore train {use}\n" in (folder / "README.md").read_text()
    assert all("$" not in (folder / name).read_text() for name in files(folder)), "a name was not filled in"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["rlcore"] == {"environment.my_game": "rlcore_plugin_my_game"}


def test_an_unknown_kind_is_told(tmp_path, capsys):
    assert main(["new-plugin", "my-game", "--kind", "enviroment", "--dir", str(tmp_path)]) == 2
    expected = "--kind enviroment: unknown kind. Did you mean 'environment'? Kinds: algorithm, environment"
    assert expected in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["calculator", "Single-Turn"])
def test_the_name_of_an_installed_environment_is_refused(tmp_path, capsys, name):
    assert main(["new-plugin", name, "--kind", "environment", "--dir", str(tmp_path)]) == 2
    taken = name.lower().replace("-", "_")
    assert f"an environment {taken!r} is installed already, by rlcore " in capsys.readouterr().err
    assert new_plugin("grpo", tmp_path, "environment")[0].is_dir(), "kinds have names of their own"


def test_the_distribution_is_named_in_one_way(tmp_path):
    """Underscores and the prefix in the given name make no difference."""
    for number, name in enumerate(("my-algo", "my_algo", "rlcore-plugin-my-algo")):
        folder, module, *_ = new_plugin(name, tmp_path / str(number))
        assert (folder.name, module.name) == ("rlcore-plugin-my-algo", "rlcore_plugin_my_algo.py")
        project = tomllib.loads((folder / "pyproject.toml").read_text())
        assert project["project"]["name"] == "rlcore-plugin-my-algo"
        assert project["project"]["entry-points"]["rlcore"] == {"my_algo": "rlcore_plugin_my_algo"}
        assert project["tool"]["setuptools"]["py-modules"] == ["rlcore_plugin_my_algo"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["my-algo", "algorithm", "config", "x2"])
def test_it_is_clean_and_defines_each_name_once(tmp_path, name, kind):
    folder, module, *_ = new_plugin(name, tmp_path, kind)
    for command in (["check", "--select", "E,F,W,I,B,UP,SIM,RUF,PT,D1", "--ignore", "D1"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--line-length", "120", "--isolated", "."]
        done = subprocess.run(ruff, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    assert len(module.read_text().splitlines()) < 80


@pytest.mark.parametrize("kind", KINDS)
def test_the_ci_file_runs_what_the_readme_says(tmp_path, kind):
    folder, *_ = new_plugin("my-algo", tmp_path, kind)
    steps = yaml.safe_load((folder / ".github" / "workflows" / "test.yml").read_text())["jobs"]["test"]["steps"]
    commands = [step["run"] for step in steps if "run" in step]
    shown = re.findall(r"^```sh\n(.*?)^```$", (folder / "README.md").read_text(), re.MULTILINE | re.DOTALL)[0]
    assert commands[0].startswith('pip install -e ".[test]"')
    assert commands[1:] == ["pytest"]
    assert set(commands[1:]) < set(shown.splitlines())
    assert "test" in tomllib.loads((folder / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("9lives", "starts with a letter"),
        ("my algo", "starts with a letter"),
        ("../algo", "starts with a letter"),
        ("größer", "starts with a letter"),
        ("algo-", "starts with a letter"),
        ("", "starts with a letter"),
        ("import", "import is a word of Python; add a word, as my-import"),
        ("True", "True is a word of Python"),
        ("null", "algo=null would be read as a value"),
        ("grpo", "an algorithm 'grpo' is installed already, by rlcore "),
        ("GRPO", "an algorithm 'grpo' is installed already, by rlcore "),
        ("rlcore-plugin-online-dpo", "an algorithm 'online_dpo' is installed already"),
    ],
)
def test_names_that_cannot_be_are_refused_before_anything_is_written(tmp_path, capsys, name, fault):
    assert main(["new-plugin", name, "--dir", str(tmp_path / "made")]) == 2
    assert fault in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    own = tmp_path / "rlcore-plugin-my-algo" / "README.md"
    own.parent.mkdir()
    own.write_text("mine")
    with pytest.raises(ConfigError, match=r"rlcore-plugin-my-algo exists, and nothing is overwritten"):
        new_plugin("my-algo", tmp_path)
    assert files(tmp_path) == {"rlcore-plugin-my-algo/README.md"}
    assert own.read_text() == "mine"


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written: .*; choose another --dir"):
        new_plugin("my-algo", tmp_path / "file")


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_it_installs_passes_its_tests_and_trains(tmp_path):
    """Its conformance suite is run for the checks that need neither Ray nor a second process.

    The whole suite runs in tests/docs, on the algorithm that docs/write_a_plugin.md makes of this one.
    """
    folder, *_ = new_plugin("my-algo", tmp_path)
    run = installed(folder, tmp_path)
    checks = "by_hand or config or steps or metrics or micro_batch_split or padding or row_order or masked or better"
    passed = run("pytest", "-q", "-p", "no:cacheprovider", str(folder), "-k", checks)
    assert re.search(r"^9 passed", passed, re.MULTILINE), passed
    small = [
        "cluster=in_process",
        "trainer.total_steps=2",
        "trainer.eval_every=0",
        "data.max_rows=128",
        "data.eval_size=2",
    ]
    run("rlcore.cli", "train", "algo=my_algo", *small, "data.batch_size=4", "rollout.response_len=6", "run.dir=run")
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["train/optimizer_steps"] for step in steps if "train/optimizer_steps" in step] == [1, 1]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_an_environment_installs_passes_its_tests_and_trains(tmp_path):
    """Its conformance suite is run for the checks without a second process of the suite's own."""
    folder, *_ = new_plugin("my-game", tmp_path, "environment")
    run = installed(folder, tmp_path)
    checks = "by_hand or config or episodes or same_seed or masks"
    passed = run("pytest", "-q", "-p", "no:cacheprovider", str(folder), "-k", checks)
    assert re.search(r"^5 passed", passed, re.MULTILINE), passed
    small = [
        "cluster=in_process",
        "trainer.total_steps=1",
        "trainer.eval_every=0",
        "data.max_rows=128",
        "data.eval_size=2",
        "run.dir=run",
    ]
    small += ["experiment=quickstart", "data.batch_size=2", "data.prompt_len=1024", "algo.group_size=2"]
    run("rlcore.cli", "train", "env=my_game", "env.my_game.largest=5", "rollout.response_len=64", *small)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["episodes/played"] for step in steps if "episodes/played" in step] == [4.0]


def installed(folder: Path, parent: Path) -> Callable[..., str]:
    """Install a distribution into a folder, and return a function that runs a module of Python beside it."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(parent / "site"), str(folder)], check=True)
    env = {**os.environ, "PYTHONPATH": str(parent / "site"), "OMP_NUM_THREADS": "1"}

    def run(*words: str) -> str:
        done = subprocess.run([sys.executable, "-m", *words], cwd=parent, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_the_docs_teach_from_the_rloo_that_is_shipped():
    page = (ROOT / "docs" / "write_a_plugin.md").read_text()
    (shown,) = re.findall(r"^```python file=\S*/rlcore_plugin_my_rloo.py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    shipped = (ROOT / "plugins" / "rlcore-plugin-rloo" / "rlcore_plugin_rloo.py").read_text()
    assert shown == shipped.replace('AlgorithmSpec("rloo"', 'AlgorithmSpec("my_rloo"')
