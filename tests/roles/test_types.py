"""What a type checker sees of roles: the calls of a kind, and no others."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
from rlcore import CRITIC, CriticHandle, DataProto, Role, Run

def step(run: Run, batch: DataProto) -> None:
    run.actor.generate(batch)
    run.critic.values(batch)
    run.reward_model.score(batch)
    run.role("cost_critic", CriticHandle).values(batch)
    run.teacher.update(batch)
    run.actor.values(batch)
    run.critic.log_probs(batch)
    run.role("cost_critic", CriticHandle).score(batch)
    run.teacher.generate(batch)
    Role(kind="critic")
"""
"""The calls after `run.teacher.update` are mistakes: of another kind, of a role whose kind is not stated, a string."""


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_mypy_sees_the_calls_of_a_kind(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", tmp_path / "program.py"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    lines = [int(line.split(":")[1]) for line in found.splitlines() if "program.py" in line]
    first = PROGRAM.splitlines().index("    run.actor.values(batch)") + 1
    assert lines == list(range(first, first + 5)), found
    assert '"PolicyHandle" has no attribute "values"' in found
    assert '"RoleHandle" has no attribute "generate"' in found
