"""The table of docs/models.md is what the engines do. Four families take 5 s, all of them (slow) about two minutes."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("model_families", ROOT / "tests" / "model_families.py")
families = importlib.util.module_from_spec(SPEC)
sys.modules["model_families"] = families
SPEC.loader.exec_module(families)

PAGE = (ROOT / "docs" / "models.md").read_text()
SOME = [
    pytest.param(family, marks=[] if family in families.ALWAYS else pytest.mark.slow) for family in families.FAMILIES
]


def test_the_page_lists_the_families_and_says_what_the_columns_are():
    assert PAGE.startswith(families.HEAD)
    rows = PAGE.removeprefix(families.HEAD).splitlines()
    assert [row.split("|")[1].strip() for row in rows] == list(families.FAMILIES)


@pytest.mark.parametrize("family", SOME)
def test_a_family_does_what_the_page_says(family, tmp_path):
    row = families.measure(family, tmp_path)
    assert str(row) in PAGE.splitlines()
    assert row.gap < 1e-4
