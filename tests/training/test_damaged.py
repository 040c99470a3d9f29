"""Files of a run folder that are damaged: named, and the run goes on where it can. About 6 s."""

import shutil

import pytest

from rlcore.cli import main
from rlcore.errors import CheckpointError
from rlcore.plugins import PluginManager

OPTIONS = ["trainer.total_steps=4", "trainer.checkpoint_every=1", "trainer.keep_checkpoints=0", "trainer.eval_every=2"]


class Stopping(PluginManager):
    def step_end(self, run, step, metrics):
        super().step_end(run, step, metrics)
        if step == 4:
            raise RuntimeError("stop here")


@pytest.fixture(scope="module")
def straight(train_small, tmp_path_factory):
    """The folder of a run that was never interrupted."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    train_small(folder, *OPTIONS)
    return folder


@pytest.fixture(scope="module")
def stopped(train_small, tmp_path_factory):
    """The folder of a run that broke in step 4, with checkpoints of three steps."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(RuntimeError, match="stop here"):
        train_small(folder, *OPTIONS, plugins=Stopping.load())
    return folder


@pytest.fixture
def broken(stopped):
    """The same folder, restored after the test."""
    copy = stopped.with_name("copy")
    shutil.copytree(stopped, copy)
    yield stopped
    shutil.rmtree(stopped)
    copy.rename(stopped)


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_bit_of_the_optimizer_sends_the_run_back_to_the_whole_checkpoint(train_small, broken, straight, metrics_of):
    step = broken / "checkpoints" / "step_00000003"
    file = next(path for path in sorted((step / "actor").rglob("*.safetensors")) if "model" not in path.parts)
    flip(file)
    train_small(broken, *OPTIONS)
    log = (broken / "rlcore.log").read_text()
    name = file.relative_to(step)
    assert f"step_00000003 is damaged: {name} is not what was written (sha256); going on with" in log
    assert f"resumed from {broken}/checkpoints/step_00000002" in log
    assert metrics_of(broken) == metrics_of(straight)
    names = sorted(path.name for path in (broken / "checkpoints").iterdir())
    assert names == ["damaged-step_00000003", *(f"step_0000000{number}" for number in (1, 2, 3, 4))]


def test_without_a_whole_checkpoint_nothing_is_trained(train_small, broken):
    for step in (1, 2, 3):
        flip(broken / "checkpoints" / f"step_0000000{step}" / "trainer.json")
    before = (broken / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"trainer\.json is not what was written.*No whole checkpoint is left"):
        train_small(broken, *OPTIONS)
    assert (broken / "metrics.jsonl").read_bytes() == before
    assert len(list((broken / "checkpoints").iterdir())) == 3


def test_an_evaluation_takes_the_newest_whole_weights(broken, capsys, caplog):
    flip(broken / "checkpoints" / "step_00000003" / "actor" / "model" / "model.safetensors")
    assert main(["eval", str(broken)]) == 0
    assert "accuracy" in capsys.readouterr().out
    assert "actor/model/model.safetensors is not what was written" in caplog.text


def test_files_that_nothing_needs_do_not_stop_a_run(train_small, broken, straight, metrics_of):
    for name in ("heartbeat.json", "summary.json", "versions.json"):
        (broken / name).write_bytes(b'{"status": \xff')
    rows = (broken / "samples" / "step_000002.jsonl").read_text().splitlines(keepends=True)
    (broken / "samples" / "step_000002.jsonl").write_text("".join(rows[1:]))
    train_small(broken, *OPTIONS)
    assert metrics_of(broken) == metrics_of(straight)
    log = (broken / "rlcore.log").read_text()
    count = sum(len((broken / "samples" / f"step_00000{step}.jsonl").read_text().splitlines()) for step in (1, 2, 3))
    assert f"samples has {count} of the {count + 1} rows that the checkpoint counts" in log
