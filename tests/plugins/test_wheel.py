"""A stranger's distribution: built as a wheel, installed with pip, used through the command line."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import yaml

PROJECT = Path(__file__).parents[1] / "fixtures" / "plugins" / "rlcore-plugin-parrot"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of a new venv that sees this one's packages and has the plugin installed."""
    folder = tmp_path_factory.mktemp("stranger")
    shutil.copytree(PROJECT, folder / "project")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(folder / "project")], check=True
    )
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    interpreter = folder / "venv" / "bin" / "python"
    site = next((folder / "venv" / "lib").glob("python*/site-packages"))
    # addsitedir, not a plain path: an editable rlcore is found through the .pth files there.
    (site / "parent.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "--python", str(interpreter), "install", "--no-deps", "--no-index", str(wheel)], check=True)
    return str(interpreter)


SHELL = """
import contextlib, io, json, sys
from rlcore.cli import main

for line in sys.stdin:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(json.loads(line))
    print(json.dumps([status, out.getvalue(), err.getvalue()]), flush=True)
"""


@pytest.fixture(scope="module")
def rlcore(python, tmp_path_factory):
    """A command's standard output, or its error output where it is to fail. One process runs all: imports take long."""
    where = tmp_path_factory.mktemp("where")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": where}
    with subprocess.Popen([python, "-c", SHELL], **pipes) as shell:

        def run(*argv: str, status: int = 0) -> str:
            print(json.dumps(argv), file=shell.stdin, flush=True)
            done, out, err = json.loads(shell.stdout.readline())
            assert done == status, err
            return err if status else out

        yield run
        shell.stdin.close()


def test_it_is_listed_with_version_file_and_hooks(rlcore, python):
    rows = {row["name"]: row for row in json.loads(rlcore("plugins", "--json"))}
    row = rows["parrot"]
    assert (row["distribution"], row["version"], row["state"]) == ("rlcore-plugin-parrot", "0.3.1", "loaded")
    assert Path(row["file"]).is_relative_to(Path(python).parents[1])
    assert row["hooks"] == ["rlcore_algorithm", "rlcore_rewards"]
    assert {"grpo", "command.squawk", "reward.builtin"} <= set(rows)
    # rlcore's own come first, whatever the names.
    owners = [row["distribution"] for row in rows.values()]
    assert owners == sorted(owners, key=lambda owner: owner != "rlcore")


def test_its_algorithm_composes_like_a_built_in_one(rlcore):
    shown = rlcore("train", "algo=parrot", "algo.mood=cross", "reward=repeats", "data=gsm8k", "--cfg", "job")
    config = yaml.safe_load(shown)
    assert config["algorithm"] == "parrot"
    assert config["algo"] == {"volume": 0.5, "mood": "cross"}
    assert config["reward"]["functions"] == {"repeats": 1.0}
    assert "algo.mod'. Did you mean 'algo.mood'" in rlcore("train", "algo=parrot", "algo.mod=x", status=2)


def test_help_names_it(rlcore):
    printed = rlcore("--help")
    assert re.search(r"algorithms: .*\bgrpo, .*\bparrot\b", printed)
    assert "squawk       from rlcore-plugin-parrot" in printed
    assert "algo.volume = 0.5  [float]\n      how loud (>= 0, <= 1)" in rlcore("train", "algo=parrot", "-h")
    assert rlcore("squawk", "twice") == "squawk twice\n"


def test_blocked_it_is_gone(rlcore):
    message = rlcore("train", "-p", "no:parrot", "algo=parrot", status=2)
    assert "algo=parrot is unknown" in message
