"""Checkpoints are complete or not there, and a file that has changed is named."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from rlcore.errors import CheckpointError
from rlcore.training.checkpoint import checkpoints, faults, load, newest_whole, save, set_aside_after, step_of


def write(aside: Path) -> dict:
    """Write a file in a folder, as a role does, and return a state."""
    (aside / "actor").mkdir()
    (aside / "actor" / "weights").write_bytes(b"\x01\x02")
    return {"step": 1, "loader": {"epoch": 0, "position": 16}, "seconds": 0.1}


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoints(folder)]


def test_what_is_saved_is_loaded(tmp_path):
    path = save(tmp_path / "new" / "checkpoints", 7, write, keep=2)
    assert path == tmp_path / "new" / "checkpoints" / "step_00000007"
    assert checkpoints(path.parent) == [path]
    assert step_of(path) == 7
    assert load(path) == {"step": 1, "loader": {"epoch": 0, "position": 16}, "seconds": 0.1}
    assert (path / "actor" / "weights").read_bytes() == b"\x01\x02"
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(("keep", "left"), [(1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4]), (0, [1, 2, 3, 4])])
def test_the_newest_are_kept(tmp_path, keep, left):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, write, keep)
    assert [step_of(path) for path in checkpoints(tmp_path)] == left
    assert len(os.listdir(tmp_path)) == len(left)


def test_the_step_orders_not_the_name(tmp_path):
    """As text, step_123456789 comes before step_99999999."""
    for step in (123_456_789, 99_999_999, 5):
        save(tmp_path, step, write, keep=0)
    (tmp_path / "step_6").mkdir()
    (tmp_path / "step_6" / "manifest.json").write_text("{}")
    assert names(tmp_path) == ["step_00000005", "step_6", "step_99999999", "step_123456789"]
    save(tmp_path, 123_456_790, write, keep=2)
    assert names(tmp_path) == ["step_123456789", "step_123456790"]


def test_only_complete_ones_are_listed(tmp_path):
    assert checkpoints(tmp_path / "missing") == []
    save(tmp_path, 1, write, keep=0)
    for name in (".writing-step_00000002", "step_00000003", "step_4.old", "step_", "best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer.json").write_text("{}")
        if name != "step_00000003":
            (tmp_path / name / "manifest.json").write_text("{}")
    (tmp_path / "step_00000005").write_text("a file")
    assert names(tmp_path) == ["step_00000001"]


@pytest.mark.parametrize("error", [RuntimeError("a worker died"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_earlier_ones_and_no_new_one(tmp_path, error):
    save(tmp_path, 1, write, keep=1)

    def fail(aside: Path) -> dict:
        write(aside)
        raise error

    with pytest.raises(type(error)):
        save(tmp_path, 2, fail, keep=1)
    assert names(tmp_path) == ["step_00000001"]
    assert load(tmp_path / "step_00000001")["step"] == 1
    # The next one clears the remains away, whichever step it is.
    save(tmp_path, 3, write, keep=0)
    assert sorted(os.listdir(tmp_path)) == ["step_00000001", "step_00000003"]


def test_a_state_that_json_cannot_hold_leaves_no_checkpoint(tmp_path):
    save(tmp_path, 1, write, keep=0)
    with pytest.raises(CheckpointError, match="cannot be written as JSON"):
        save(tmp_path, 2, lambda aside: {"algorithm": {"state": object()}}, keep=1)
    assert names(tmp_path) == ["step_00000001"]


def test_a_disk_that_refuses_is_a_checkpoint_error(tmp_path):
    save(tmp_path, 1, write, keep=1)

    def full(aside: Path) -> dict:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step_00000002 cannot be written: .*No space left"):
        save(tmp_path, 2, full, keep=1)
    assert names(tmp_path) == ["step_00000001"]
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        save(tmp_path / "file", 1, write, keep=1)


def test_everything_is_on_disk_before_the_name_is(tmp_path, monkeypatch):
    synced: dict[Path, bool] = {}  # path -> whether the checkpoint had its name already
    fsync = os.fsync

    def record(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        synced[path.relative_to(tmp_path)] = (tmp_path / "step_00000001").exists()
        fsync(handle)

    monkeypatch.setattr(os, "fsync", record)
    save(tmp_path, 1, write, keep=0)
    aside = Path(".writing-step_00000001")
    before = {aside, aside / "actor", aside / "actor" / "weights", aside / "trainer.json", aside / "manifest.json"}
    assert synced == {**dict.fromkeys(before, False), Path(): True}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"step": 3', "cannot be read"),
        (b"", "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"[1, 2]", "holds a list"),
        (None, "cannot be read"),
    ],
)
def test_a_damaged_state_is_a_checkpoint_error(tmp_path, content, message):
    path = save(tmp_path, 3, write, keep=0)
    (path / "trainer.json").unlink()
    if content is not None:
        (path / "trainer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"step_00000003/trainer\.json.*{message}"):
        load(path)


def test_a_folder_of_another_name_has_no_step(tmp_path):
    with pytest.raises(CheckpointError, match="latest is not a checkpoint"):
        step_of(tmp_path / "latest")


def test_the_manifest_has_the_size_and_sha256_of_every_file(tmp_path):
    path = save(tmp_path, 1, write, keep=0)
    files = json.loads((path / "manifest.json").read_text())["files"]
    weights, state = b"\x01\x02", (path / "trainer.json").read_bytes()
    assert files == {
        "actor/weights": {"bytes": 2, "sha256": hashlib.sha256(weights).hexdigest()},
        "trainer.json": {"bytes": len(state), "sha256": hashlib.sha256(state).hexdigest()},
    }
    assert faults(path) == []


def flip(file: Path) -> None:
    """Change one bit."""
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "bit": (lambda path: flip(path / "actor" / "weights"), "actor/weights is not what was written (sha256)"),
    "digit": (lambda path: flip(path / "trainer.json"), "trainer.json is not what was written (sha256)"),
    "short": (
        lambda path: (path / "actor" / "weights").write_bytes(b"\x01"),
        "actor/weights has 1 bytes in place of 2",
    ),
    "gone": (lambda path: (path / "actor" / "weights").unlink(), "actor/weights is missing"),
    "manifest": (lambda path: flip(path / "manifest.json"), "manifest.json cannot be read: "),
    "keys": (lambda path: (path / "manifest.json").write_text('{"files": {"a": 1}}'), "manifest.json cannot be read: "),
    "older": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing (an older rlcore wrote none)"),
}


@pytest.mark.parametrize(("damage", "text"), DAMAGES.values(), ids=DAMAGES)
def test_the_newest_whole_checkpoint_is_taken_and_the_file_that_is_wrong_named(tmp_path, caplog, damage, text):
    for step in (1, 2, 3):
        save(tmp_path, step, write, keep=0)
    assert newest_whole(tmp_path) == tmp_path / "step_00000003"
    assert caplog.text == ""
    damage(tmp_path / "step_00000003")
    assert newest_whole(tmp_path) == tmp_path / "step_00000002"
    assert f"checkpoint {tmp_path}/step_00000003 is damaged: {text}" in caplog.text
    assert f"going on with {tmp_path}/step_00000002" in caplog.text
    assert newest_whole(tmp_path, "reference") == tmp_path / (
        "step_00000002" if "manifest" in text else "step_00000003"
    )
    for step in (1, 2):
        damage(tmp_path / f"step_0000000{step}")
    with pytest.raises(CheckpointError, match="No whole checkpoint is left") as error:
        newest_whole(tmp_path)
    assert str(error.value).count(text) == 3


def test_no_checkpoint_is_no_damage(tmp_path):
    assert newest_whole(tmp_path / "missing") is None
    assert newest_whole(tmp_path) is None


def test_damaged_ones_keep_their_files_and_make_room(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, write, keep=0)
    for _ in range(2):  # the second time over what the first has set aside
        flip(tmp_path / "step_00000003" / "trainer.json")
        set_aside_after(tmp_path / "step_00000002")
        assert names(tmp_path) == ["step_00000001", "step_00000002"]
        assert (tmp_path / "damaged-step_00000003" / "actor" / "weights").read_bytes() == b"\x01\x02"
        save(tmp_path, 3, write, keep=0)
        assert faults(tmp_path / "step_00000003") == []
