"""A generate that does not fit into memory goes on with fewer rows at a time, and samples the same tokens."""

from pathlib import Path

import pytest

from rlcore.errors import DeviceMemoryError
from rlcore.plugins import PluginManager

PLUGIN = Path(__file__).parents[1] / "fixtures" / "plugins" / "little_memory.py"


@pytest.fixture
def samples(train_small, samples_of, tmp_path, capsys):
    def run(name, *overrides):
        plugins = PluginManager.load([str(PLUGIN)])
        train_small(
            tmp_path / name, "trainer.total_steps=2", "algo=grpo", "algo.group_size=4", *overrides, plugins=plugins
        )
        return samples_of(tmp_path / name), (tmp_path / name / "rlcore.log").read_text()

    return run


@pytest.mark.parametrize("slots", [256, 6])
def test_the_same_tokens_in_halves(samples, slots):
    whole, _ = samples("whole", "rollout=hf")
    halved, log = samples("halved", "rollout=little_memory", f"rollout.little_memory.batch_size={slots}")
    assert halved == whole
    told = [line.partition(": ")[2] for line in log.splitlines() if "at a time" in line]
    first = f"generate of 8 rows does not fit into the memory of cpu: from now on {min(slots, 8) // 2} rows at a time"
    second = "generate of 4 rows does not fit into the memory of cpu: from now on 2 rows at a time"
    assert told == ([first, second] if slots == 256 else [first])  # and not again in the second step
    assert next(line.split()[2] for line in log.splitlines() if "at a time" in line) == "WARNING"


def test_a_single_row_that_does_not_fit_ends_the_run(samples):
    with pytest.raises(DeviceMemoryError, match=r"generate of 8 rows .* half of rollout.little_memory.batch_size"):
        samples("never", "rollout=little_memory", "rollout.little_memory.rows=0")
