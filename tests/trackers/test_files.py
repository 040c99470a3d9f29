import json

import numpy as np
import pytest

from rlcore.config.schema import Config, TrackerConfig
from rlcore.errors import ConfigError, DataError
from rlcore.plugins.specs import TrackerSpec
from rlcore.trackers import Tracker, Trackers


def config(*use):
    return Config(algorithm="grpo", algo=None, tracker=TrackerConfig(use=list(use)))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_a_step_at_once_with_the_evaluation_of_its_step(tmp_path):
    trackers = Trackers(config(), tmp_path, {})
    trackers.start()
    trackers.evaluated(0, {"eval/accuracy": 0.25})
    trackers.log(1, {"reward/mean": np.float32(0.5), "train/grad_norm": float("nan"), "kl/mean": float("-inf")})
    trackers.evaluated(2, {"eval/accuracy": 0.5})
    trackers.log(2, {"reward/mean": 1})
    expected = [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 1, "reward/mean": 0.5, "train/grad_norm": "nan", "kl/mean": "-inf"},
        {"step": 2, "eval/accuracy": 0.5, "reward/mean": 1.0},
    ]
    assert lines(tmp_path / "metrics.jsonl") == expected  # before finish: each step reaches the file
    trackers.finish("finished", {})


def test_resume_drops_what_came_after_the_checkpoint_and_a_half_written_line(tmp_path):
    first = Trackers(config(), tmp_path, {})
    first.start()
    for step in range(5):
        first.log(step, {"reward/mean": 0.1 * step})
        first.samples(step, [{"uid": f"0:{step}"}])
    first.finish("failed", {})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "rew')
    kept = (tmp_path / "metrics.jsonl").read_text().splitlines()[:3]
    second = Trackers(config(), tmp_path, {})
    second.start(resume_step=2)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == kept
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [
        f"step_00000{step}.jsonl" for step in range(3)
    ]
    second.log(3, {"reward/mean": 7.0})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    second.finish("finished", {})
    third = Trackers(config(), tmp_path, {})
    third.start()  # it was killed before its first checkpoint: from the start again
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert list((tmp_path / "samples").iterdir()) == []
    third.finish("finished", {})


def test_resume_keeps_all_lines_when_only_the_last_is_broken(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 0.1}\n{"step": 2, "a": "nan"}\n{"st')
    trackers = Trackers(config(), tmp_path, {})
    trackers.start(resume_step=2)
    trackers.finish("finished", {})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 0.1}, {"step": 2, "a": "nan"}]


def test_lines_that_cannot_be_read_are_kept_aside_and_lost_ones_named(tmp_path, caplog):
    first = Trackers(config(), tmp_path, {})
    first.start()
    for step in range(6):
        first.log(step, {"reward/mean": 0.1 * step})
        first.samples(step, [{"uid": f"{step}:{row}"} for row in range(step)])
    assert first.sample_rows == 15
    first.finish("failed", {})
    texts = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    texts[1], texts[3] = b"\xff" + texts[1], b'{"step": null}\n'
    del texts[4]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(texts))
    samples = tmp_path / "samples"
    (samples / "step_000002.jsonl").unlink()
    (samples / "step_000001 copy.jsonl").write_text("{}")
    (samples / "step_000003.jsonl").write_text('{"uid": "3:0"}\n{"u"id": "3:1"}\n{"uid": "3:2"}\n')
    second = Trackers(config(), tmp_path, {})
    second.start(resume_step=5, sample_rows=15)
    second.finish("finished", {})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 2, 5]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == texts[1] + texts[3]
    assert [line["uid"] for line in lines(samples / "step_000003.jsonl")] == ["3:0", "3:2"]
    assert (samples / "step_000003.jsonl.damaged").read_text() == '{"u"id": "3:1"}\n'
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/metrics.jsonl: lines 2, 4 cannot be read; they are now in {tmp_path}/metrics.jsonl.damaged",
        f"{tmp_path}/metrics.jsonl lacks the lines of steps 1, 3, 4",
        f"{samples}/step_000003.jsonl: lines 2 cannot be read; they are now in {samples}/step_000003.jsonl.damaged",
        f"{samples} has 12 of the 15 rows that the checkpoint counts; there is no file for steps 2",
    ]


def test_samples_say_what_was_sampled_and_why_it_got_its_reward(tmp_path):
    trackers = Trackers(config(), tmp_path, {})
    trackers.start()
    detail = {"function": "mine", "cause": "raised ValueError", "traceback": "..."}
    rows = [
        {"uid": "0:1", "prompt_text": "2+2=", "response_text": "4\n“ok”", "score": np.float32(1.0), "finished": True},
        {"uid": "0:2", "response_text": "", "reward_detail": detail, "extra": {1}},
    ]
    trackers.samples(12, rows)
    trackers.finish("finished", {})
    first, second = lines(tmp_path / "samples" / "step_000012.jsonl")
    assert first == {**rows[0], "score": 1.0}
    assert second == {"uid": "0:2", "response_text": "", "reward_detail": detail, "extra": "{1}"}


class Recorder(Tracker):
    def __init__(self, calls, fail_in=None):
        self.calls, self.fail_in = calls, fail_in

    def _note(self, *call):
        self.calls.append(call)
        if call[0] == self.fail_in:
            raise RuntimeError(f"no {call[0]}")

    def start(self, resume_step):
        self._note("start", resume_step)

    def log(self, step, metrics):
        self._note("log", step, metrics)

    def finish(self, status, summary):
        self._note("finish", status, summary)


def specs(**trackers):
    return {name: TrackerSpec(name, lambda config, run_dir, t=tracker: t) for name, tracker in trackers.items()}


def test_a_tracker_of_a_plugin_gets_every_call_and_one_that_overrides_nothing_works(tmp_path):
    calls = []
    trackers = Trackers(config("mine", "idle", "jsonl"), tmp_path, specs(mine=Recorder(calls), idle=Tracker()))
    trackers.start(4)
    trackers.log(5, {"a": 1})
    trackers.samples(5, [])
    trackers.saved(5, tmp_path)
    trackers.finish("finished", {"steps": 5})
    assert calls == [("start", 4), ("log", 5, {"a": 1.0}), ("finish", "finished", {"steps": 5})]


def test_an_error_in_a_tracker_ends_the_run_and_names_it(tmp_path):
    good, bad = [], []
    trackers = Trackers(config("good", "bad"), tmp_path, specs(good=Recorder(good), bad=Recorder(bad, "log")))
    trackers.start()
    with pytest.raises(RuntimeError, match="no log") as caught:
        trackers.log(1, {})
    assert "'bad'" in caught.value.__notes__[0]
    with pytest.raises(TypeError, match="metric 'loss' is 'high', not a number"):
        trackers.log(2, {"loss": "high"})
    trackers.finish("failed", {})


def test_a_full_disk_is_a_clear_error(tmp_path):
    trackers = Trackers(config(), tmp_path, {})
    trackers.start()
    (tmp_path / "samples").mkdir(exist_ok=True)
    (tmp_path / "samples" / "step_000001.jsonl").symlink_to("/dev/full")  # every write fails with "no space left"
    with pytest.raises(DataError, match=r"'jsonl' cannot write: .*No space left.* The last checkpoint is safe"):
        trackers.samples(1, [{"uid": "0:1"}])
    trackers.finish("failed", {})


def test_when_one_does_not_start_the_others_are_finished_as_failed(tmp_path):
    good, bad = [], []
    trackers = Trackers(config("good", "bad"), tmp_path, specs(good=Recorder(good), bad=Recorder(bad, "start")))
    with pytest.raises(RuntimeError, match="no start"):
        trackers.start()
    assert good[-1] == ("finish", "failed", {})
    assert bad == [("start", 0)]


def test_all_are_finished_even_if_one_raises(tmp_path):
    good, bad = [], []
    trackers = Trackers(config("bad", "good"), tmp_path, specs(good=Recorder(good), bad=Recorder(bad, "finish")))
    trackers.start()
    with pytest.raises(RuntimeError, match="no finish"):
        trackers.finish("finished", {})
    assert good[-1] == ("finish", "finished", {})


def test_an_unknown_tracker(tmp_path):
    with pytest.raises(
        ConfigError, match=r"'consol' is not installed; installed are console. Did you mean 'console'\?"
    ):
        Trackers(config("consol"), tmp_path, specs(console=Tracker()))
