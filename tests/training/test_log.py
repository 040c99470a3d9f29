"""`run.log` adds numbers to the step's metrics."""

import pytest

from rlcore.errors import DataError
from rlcore.training.run import Run


@pytest.fixture
def run():
    made = Run.__new__(Run)
    made._logged = {}
    return made


def test_names_with_a_slash_come_in_a_mapping_and_plain_ones_by_keyword(run):
    run.log({"dpo/pairs": 3, "metrics": 1}, pairs=True)
    run.log(named=0.5)
    assert run._logged == {"dpo/pairs": 3.0, "metrics": 1.0, "pairs": 1.0, "named": 0.5}


def test_only_numbers(run):
    with pytest.raises(DataError, match=r"run.log: dpo/pairs='3' is a str, not a number"):
        run.log({"dpo/pairs": "3"})
