"""The same program gives the same numbers: in process and on Ray, on one worker and two, straight on and resumed."""

import os
import signal
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.timeout(600)]
# A tenth of the rewards fails, so that rows leave the batches on every path.
FAILS = Path(__file__).parents[1] / "fixtures" / "fails_on_some.py"
SMALL = [
    *(
        "trainer.total_steps=4",
        "trainer.eval_every=2",
        "trainer.samples_per_step=128",
        "data.max_rows=128",
        "data.eval_size=32",
    ),
    *(f"reward.path={FAILS}:score", "reward.max_failures=0.5"),
]
TWO = [*SMALL, "cluster.workers=2", "engine.torch.shard=0", "trainer.checkpoint_every=1", "trainer.keep_checkpoints=0"]


@pytest.fixture(scope="module")
def two_workers(ray_cluster, train_here, tmp_path_factory):
    return train_here(tmp_path_factory.mktemp("two") / "run", *TWO)


@pytest.fixture(scope="module")
def in_process(train_here, tmp_path_factory):
    return train_here(tmp_path_factory.mktemp("here") / "run", *SMALL, "cluster=in_process")


def test_in_process_equals_two_workers_on_ray(two_workers, in_process):
    compare(in_process, two_workers)


@pytest.mark.slow  # GRPO's suite compares one worker with two
def test_one_worker_on_ray_equals_two(ray_cluster, two_workers, train_here, tmp_path):
    compare(train_here(tmp_path / "run", *SMALL, "cluster.workers=1"), two_workers)


def test_whole_copies_equal_shards(ray_cluster, two_workers, train_here, tmp_path):
    compare(train_here(tmp_path / "run", *SMALL, "cluster.workers=2", "engine.torch.shard=1"), two_workers)


def compare(one, other):
    """The samples of every step are identical, and the metrics within 1e-5."""
    assert len(one.samples) == 4 * 128
    assert one.samples == other.samples
    assert len(one.numbers) == len(other.numbers) == 5
    for a, b in zip(one.numbers, other.numbers, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-5)
    assert one.numbers[4]["train/grad_norm"] > 0
    assert all(row["reward/errors"] > 0 for row in one.numbers if "reward/errors" in row)


def test_a_run_killed_at_any_step_goes_on_to_the_same_last_bit(
    ray_cluster, two_workers, start_command, train_here, tmp_path
):
    """SIGKILL on the driver of a run with a Ray of its own; resumed here, in the session's."""
    folder = tmp_path / "run"
    process = start_command(folder, *TWO)
    deadline = time.monotonic() + 120
    while not (folder / "checkpoints" / "step_00000002" / "trainer.json").exists():
        assert process.poll() is None, (tmp_path / "printed").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (folder / "summary.json").exists()
    train_here(folder, *TWO)
    resumed = type(two_workers)(folder)
    assert resumed.summary["status"] == "finished"
    assert resumed.numbers == two_workers.numbers  # to the last bit
    assert resumed.samples == two_workers.samples


def test_a_half_written_checkpoint_is_never_picked_up(two_workers, train_here, stopping_after, tmp_path):
    """Stopped after two steps, with the remains of a third checkpoint lying about."""
    folder = tmp_path / "run"
    small = [*SMALL, "cluster=in_process", "trainer.checkpoint_every=1"]
    with pytest.raises(RuntimeError, match="stop here"):
        train_here(folder, *small, plugins=stopping_after(2))
    checkpoints = folder / "checkpoints"
    (checkpoints / "step_00000002").rename(checkpoints / ".writing-step_00000002")
    (checkpoints / "step_00000003").mkdir()
    train_here(folder, *small)
    resumed = type(two_workers)(folder)
    assert resumed.summary["status"] == "finished"
    assert "resumed from" in (folder / "rlcore.log").read_text()
    assert "step_00000001" in (folder / "rlcore.log").read_text()
    for a, b in zip(resumed.numbers, two_workers.numbers, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-5)
