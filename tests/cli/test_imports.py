"""What a command imports, and how long the light ones take, each in a process of its own."""

import json
import os
import subprocess
import sys
import time

import pytest

HEAVY = ("torch", "ray", "transformers", "tensordict", "wandb", "datasets", "hydra", "numpy", "rlcore_grpo")
REPORT = (
    "\nimport json, sys; print(json.dumps(sorted(name for name in sys.modules if '.' not in name)), file=sys.stderr)"
)


def imported(code: str, **environment: str) -> set[str]:
    """Return the top-level modules that are loaded after the code has run."""
    done = subprocess.run(
        [sys.executable, "-c", code + REPORT],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    return set(json.loads(done.stderr))


@pytest.mark.parametrize(
    "code",
    [
        "import rlcore",
        "import rlcore.cli",
        "import rlcore.plugins",
        "import rlcore.config",
        "from rlcore import Algorithm, ConfigError, hookimpl, option",
        "from rlcore.cli import main; main(['--help'])",
        "from rlcore.cli import main; main([])",
        "from rlcore.cli import main; main(['--version'])",
        "from rlcore.cli import main; main(['train', '--help'])",
    ],
)
def test_light_commands_import_nothing_heavy(code):
    assert imported(code).isdisjoint(HEAVY)


def test_completion_imports_no_plugin():
    modules = imported("from rlcore.cli import main; main(['-sc', 'query=bash'])", COMP_LINE="rlcore train algo=")
    assert modules.isdisjoint({"torch", "ray", "transformers", "rlcore_grpo"})
    assert "hydra" in modules


def test_help_of_an_algorithm_imports_it():
    modules = imported("from rlcore.cli import main; main(['train', 'algo=grpo', '--help'])")
    assert "rlcore_grpo" in modules
    assert "ray" not in modules


def fastest(code: str) -> float:
    """Return the seconds of the fastest of three runs, less those of an empty one: other processes may be busy."""

    def once(run: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", run], check=True, capture_output=True)
        return time.perf_counter() - start

    return min(once(code) for _ in range(3)) - min(once("pass") for _ in range(3))


def test_import_and_help_are_quick():
    assert fastest("import rlcore") < 0.3
    assert fastest("from rlcore.cli import main; main(['--help'])") < 1.0


def test_help_lists_commands_algorithms_and_groups():
    done = subprocess.run([sys.executable, "-m", "rlcore.cli", "--help"], capture_output=True, text=True, check=True)
    for part in ("train ", "eval ", "plugins ", "config ", "algorithms: grpo", "gsm8k", "quickstart", "in_process"):
        assert part in done.stdout


def test_error_in_a_process_of_its_own_has_no_traceback(tmp_path):
    command = [sys.executable, "-m", "rlcore.cli", "train", "-p", "no:grop"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("rlcore: -p no:grop blocks nothing: no plugin has that name. Did you mean 'grpo'?")
    assert list(tmp_path.iterdir()) == []  # no outputs/, no log
