"""The suite of environments finds what it is for: each broken environment by the check of that property."""

import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import Literal

import jsonschema
import pytest
from rlcore_plugin_testing import conformance
from rlcore_plugin_testing.environment.checks import CHECKS
from rlcore_plugin_testing.environment.script import arguments_for
from rlcore_plugin_testing.suites import open_suite

from rlcore import PluginError
from rlcore.cli import main
from rlcore.episodes.tool_schema import schemas_of

pytestmark = pytest.mark.timeout(200)  # a check kills runs and resumes them

FILE = Path(__file__).parent / "fixtures" / "broken_environments.py"
spec = importlib.util.spec_from_file_location("broken_for_names", FILE)
fixtures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fixtures)

test_sound = pytest.mark.e2e(conformance("env=sound", plugins=[str(FILE)]))
test_single_turn = pytest.mark.e2e(conformance("env=single_turn"))
test_calculator = pytest.mark.e2e(conformance("env=calculator"))
AGENT = f"{sys.executable} {FILE.with_name('small_agent.py')}"
test_agent = pytest.mark.slow(conformance("env=agent", f'env.command="{AGENT}"', "env.timeout=60"))
test_python = pytest.mark.slow(conformance("env=python"))


@pytest.mark.parametrize("name", fixtures.BROKEN)
def test_each_broken_environment_is_found_by_its_check(name, tmp_path):
    broken = fixtures.BROKEN[name]
    with open_suite(f"env={name}", tmp_path, plugins=[str(FILE)], only=broken.check) as suite:
        result = suite.result(broken.check)
    assert result.outcome == "FAIL", result
    assert broken.says in result.text


def test_each_check_has_an_environment_that_breaks_it():
    assert {broken.check for broken in fixtures.BROKEN.values()} == set(CHECKS)


ROWS = [{"prompt": f"guess {number}", "secret": number} for number in range(3, 9)]


def guess(row, turn):
    """Find the row's secret with the third guess."""
    call = {"name": "guess", "arguments": {"number": row["secret"] - 2 + turn}}
    return call if turn < 3 else "I have it."


test_guess = pytest.mark.e2e(conformance("env=file", f"env.path={FILE}:Guess", script=guess, rows=ROWS))


def test_an_author_gives_rows_and_a_script(tmp_path):
    with open_suite("env=file", tmp_path, settings=[f"env.path={FILE}:Guess"], script=guess, rows=ROWS) as suite:
        plain = suite.plain()
    assert {row["episode_score"] for row in plain.rows.values()} == {1.0}
    assert {row["turns"] for row in plain.rows.values()} == {3}
    assert set(plain.out["stop_reason"]) == {"done"}


def test_rows_and_a_script_are_for_environments(tmp_path):
    with pytest.raises(PluginError, match=r"script and rows are for environments; 'grpo' is .* algorithm"):
        open_suite("algo=grpo", tmp_path, rows=ROWS)


def test_arguments_fit_the_schemas_of_type_hints():
    """They are valid by jsonschema, and optional ones are given and left out."""

    def tool(
        text: str, count: int, share: float, flag: bool, names: list[str], word: Literal["a", "b"], most: int | None = 3
    ) -> str:
        """Do something.

        Args:
            text: a text
            count: a number
            share: a number
            flag: a flag
            names: texts
            word: a or b
            most: a number
        """

    (schema,) = schemas_of([tool])
    given = [arguments_for(schema["function"]["parameters"], random.Random(seed)) for seed in range(20)]
    for arguments in given:
        jsonschema.validate(arguments, schema["function"]["parameters"])
    assert {"most" in arguments for arguments in given} == {True, False}


@pytest.mark.e2e
def test_the_command_takes_a_script(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    keys = [f"env.path={FILE}:Guess", "data=file", f"data.path={tmp_path / 'data'}"]
    words = [word for key in keys for word in ("--set", key)]
    assert main(["plugins", "test", "env=file", "--script", f"{__file__}:guess", *words]) == 0
    out = capsys.readouterr().out
    assert "pass  episodes                16 rows, " in out
    assert main(["plugins", "test", "env=file", "--script", f"{__file__}:gues", *words]) == 2
    assert "has no function 'gues'" in capsys.readouterr().err


@pytest.mark.parametrize("tool_format", ["hermes", "llama", "json"])
def test_calls_are_written_in_each_tool_format(tool_format, tmp_path):
    settings = [f"env.path={FILE}:Guess", f"env.tool_format={tool_format}"]
    with open_suite("env=file", tmp_path, settings=settings, script=guess, rows=ROWS) as suite:
        text = suite.writer.text({"secret": 5}, 0)
        (call,) = suite.setup.tool_format.parse(text).calls
    assert (call.name, call.arguments) == ("guess", {"number": 3})
