"""The timeline: figures by hand, and the trace file."""

import json

import pytest

from rlcore.training.timeline import Trace, timeline_metrics
from rlcore.workers import Span


def span(role, method, began, ended, *, rank=0, pid=1, waited=0.0):
    return Span(role, method, rank, "host", pid, began - waited, began, ended)


SPANS = [
    span("actor", "generate", 101.0, 103.0),
    span("actor", "generate", 101.5, 104.0, rank=1, pid=2),
    span("ref", "log_probs", 103.5, 105.0, pid=3, waited=2.5),
    span("critic", "values", 107.0, 108.0, pid=4),
    span("actor", "seconds", 108.0, 109.0),
    span("actor", "start", 90.0, 95.0),
]


def test_who_ran_when():
    # At work: 101 to 105 and 107 to 108; actor and ref both from 103.5 to 104.
    assert timeline_metrics(SPANS, 100.0) == pytest.approx(
        {
            "timeline/actor.generate/began": 1.0,
            "timeline/actor.generate/ended": 4.0,
            "timeline/ref.log_probs/began": 3.5,
            "timeline/ref.log_probs/ended": 5.0,
            "timeline/critic.values/began": 7.0,
            "timeline/critic.values/ended": 8.0,
            "timeline/busy": 5.0,
            "timeline/overlap": 0.1,
        }
    )
    assert timeline_metrics([], 100.0) == {}


def test_the_trace_can_be_read_and_goes_on_after_a_resume(tmp_path):
    path = tmp_path / "timeline.json"
    Trace(path).add(1, 100.0, 110.0, SPANS[:3])
    Trace(path).add(2, 110.0, 120.0, SPANS[3:])
    text = path.read_text()
    assert text.startswith("[\n")
    events = json.loads(text.rstrip().rstrip(",") + "]")
    named = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    shown = [(named[e["pid"]], e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X"]
    assert shown[:5] == [
        ("controller", "step 1", 100.0, 10.0),
        ("actor rank 0 (1 on host)", "actor.generate", 101.0, 2.0),
        ("actor rank 1 (2 on host)", "actor.generate", 101.5, 2.5),
        ("ref rank 0 (3 on host)", "waits for input", 101.0, 2.5),
        ("ref rank 0 (3 on host)", "ref.log_probs", 103.5, 1.5),
    ]
    assert [name for _, name, _, _ in shown[5:]] == ["step 2", "critic.values", "actor.start"]
