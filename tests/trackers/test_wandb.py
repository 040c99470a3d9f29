import json
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlcore.config.schema import Config, TrackerConfig
from rlcore.errors import ConfigError
from rlcore.trackers.wandb import WandbConfig, WandbTracker


@dataclass(frozen=True)
class Algo:
    group_size: int = 8


CONFIG = Config(
    algorithm="grpo",
    algo=Algo(),
    tracker=TrackerConfig(use=["wandb"]),
    sections={"wandb": WandbConfig(project="p", mode="offline")},
)


def messages(data):
    """The messages in a .wandb file: 7 bytes of header, then LevelDB's log format (blocks of 32 KiB)."""
    assert data[:4] == b":W&B"
    at, message = 7, b""
    while len(data) - at >= 7:
        if 32768 - at % 32768 < 7:  # too little of the block is left for a record's header
            at += 32768 - at % 32768
            continue
        length, part = struct.unpack_from("<HB", data, at + 4)
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):  # whole, or the last part
            yield message
            message = b""


def read_back(folder):
    """What an ended offline run holds: id, project, config, history rows, summary, exit code."""
    # wandb's own process may still be writing when `finish` has returned; at its exit Python waits for that process.
    until = time.monotonic() + 30.0
    while "exit" not in (found := read_file(folder)):
        assert time.monotonic() < until, f"no exit record in {folder} after 30 s"
        time.sleep(0.05)
    return found


def read_file(folder):
    """What the file in this folder holds by now."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("*.wandb")
    found = {"history": [], "config": {}, "summary": {}}
    for data in messages(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found["id"], found["project"] = record.run.run_id, record.run.project
            found["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            items = record.history.item
            found["history"].append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            )
        elif kind == "summary":
            for item in record.summary.update:
                found["summary"][item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
        elif kind == "exit":
            found["exit"] = record.exit.exit_code
    return found


@pytest.mark.e2e
@pytest.mark.filterwarnings("default")  # wandb's own
def test_an_offline_run_can_be_read_back_and_a_resumed_one_goes_on_in_it(tmp_path):
    detail = {"function": "mine", "cause": "raised ValueError", "traceback": ""}
    tracker = WandbTracker(CONFIG, tmp_path)
    tracker.start(0)
    tracker.log(1, {"reward/mean": 0.5, "train/grad_norm": float("nan")})
    tracker.samples(1, [{"uid": "0:1", "response_text": "4", "score": 1.0}, {"uid": "0:2", "reward_detail": detail}])
    tracker.log(2, {"reward/mean": 0.75})
    tracker.finish("interrupted", {"accuracy_after": 0.75})
    time.sleep(1.0)  # wandb names the folder by the second
    resumed = WandbTracker(CONFIG, tmp_path)
    resumed.start(1)
    resumed.log(2, {"reward/mean": 0.75})
    resumed.finish("failed", {})

    first, second = (read_back(folder) for folder in sorted((tmp_path / "wandb").glob("offline-run-*")))
    assert first["id"] == second["id"] == (tmp_path / "wandb_run_id").read_text().strip()
    assert first["project"] == "p"
    assert first["config"]["algorithm"] == "grpo"
    assert first["config"]["algo"] == {"group_size": 8}
    assert first["config"]["reward"]["timeout"] == 10.0
    scalars = [row for row in first["history"] if "reward/mean" in row]
    assert [(row["step"], row["reward/mean"]) for row in scalars] == [(1, 0.5), (2, 0.75)]
    assert str(scalars[0]["train/grad_norm"]).lower() == "nan"
    assert (first["summary"]["status"], first["summary"]["accuracy_after"]) == ("interrupted", 0.75)
    assert (first["exit"], second["exit"]) == (0, 1)
    assert [(row["step"], row["reward/mean"]) for row in second["history"]] == [(2, 0.75)]
    (path,) = (tmp_path / "wandb").rglob("*.table.json")
    table = json.loads(Path(path).read_text())
    assert table["columns"] == ["uid", "response_text", "score", "reward_detail"]
    assert table["data"] == [["0:1", "4", 1.0, None], ["0:2", None, None, json.dumps(detail)]]


def test_without_wandb_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        WandbTracker(CONFIG, tmp_path)
