"""`rlcore plugins test NAME`, and what the pytest plugin costs those who do not use it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rlcore_plugin_testing.algorithm.checks import CHECKS

from rlcore.cli import main

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.mark.slow  # docs/write_a_plugin.md runs the command on an algorithm that passes
@pytest.mark.e2e
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_the_command_prints_a_report_card_and_fails_with_a_check(ray_cluster, broken_map, capsys):
    """A map function that looks at all rows that are in one place."""
    assert main(["plugins", "test", "sound", "-p", broken_map, "--set", "algo.pair_coef=0.02"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("FAIL")] == ["one_worker_equals_two"]
    assert "map of centred: sound_weight of a row depends" in next(line for line in lines if line.startswith("FAIL"))
    assert lines[-1].startswith("sound: 16 pass, 1 FAIL, 0 n/a, in ")
    assert len(lines) == 18
    assert all(len(line.split(maxsplit=2)) == 3 for line in lines[:-1])


@pytest.fixture
def broken_map(tmp_path) -> str:
    text = (FIXTURES / "sound.py").read_text()
    line = '        batch["sound_weight"] = torch.full((len(batch),), self.steps + chance)\n'
    assert line in text
    text = text.replace(line, '        batch = batch.union(batch.map(centred, reads=["old_log_probs"]))\n')
    text += """

def centred(batch):
    likely = torch.stack([row.mean() for row in batch["old_log_probs"]])
    return {"sound_weight": 1 + 0.1 * (likely - likely.mean())}
"""
    file = tmp_path / "over_a_part.py"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize(("words", "given"), [([], "no name"), (["grpo", "ppo"], "the words 'grpo ppo'")])
def test_one_name_is_needed(words, given, capsys):
    assert main(["plugins", "test", *words]) == 2
    assert f"was given {given}; usage: rlcore plugins test NAME" in capsys.readouterr().err


def test_the_pytest_plugin_imports_nothing_heavy():
    code = "import sys, rlcore_plugin_testing.pytest_plugin, json; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "ray", "numpy", "transformers", "hydra"}.isdisjoint(json.loads(done.stdout))


@pytest.mark.e2e
def test_two_lines_of_an_author_are_one_test_a_check(tmp_path):
    lines = ["from rlcore_plugin_testing import conformance", 'test_mine = conformance("grpo", "algo.group_size=2")']
    (tmp_path / "test_mine.py").write_text("\n".join(lines))
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "test_mine.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if "::" in line] == [
        f"test_mine.py::test_mine[{check}]" for check in CHECKS
    ]
