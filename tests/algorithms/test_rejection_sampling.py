"""Rejection sampling: what is kept and the loss on it by hand; steps, and the data set that they write, end to end."""

import json
import math

import pytest
import torch
from rlcore_rejection_sampling import RejectionSampling, RejectionSamplingConfig, choose, imitation_loss

from rlcore.config import compose
from rlcore.data.files import read_rows
from rlcore.errors import ConfigError, DataError
from rlcore.ops import Outputs
from rlcore.plugins import PluginManager
from rlcore.protocol import DataProto, Ragged
from rlcore.training.preflight import preflight
from rlcore.training.trainer import train

#        uid  tokens  score  error
ROWS = [
    ("a", [5, 6], 1.0, False),
    ("a", [5, 6], 1.0, False),  # repeats the row above
    ("a", [5, 6, 0], 0.5, False),  # longer, so another response
    ("a", [7], 2.0, False),
    ("b", [5, 6], 1.0, False),  # the same tokens, but of another prompt
    ("b", [8], 0.0, False),
    ("b", [8], 0.0, False),
    ("b", [9], 9.0, True),  # its reward function failed
    ("c", [5], 0.0, False),
    ("c", [6], 0.0, False),
]


def rows(order=None):
    uid, tokens, scores, errors = zip(*(ROWS if order is None else [ROWS[i] for i in order]), strict=True)
    responses = Ragged.from_list([torch.tensor(row) for row in tokens], dtype=torch.int64)
    tensors = {"responses": responses, "scores": torch.tensor(scores), "reward_error": torch.tensor(errors)}
    return DataProto.from_dict(tensors, {"uid": list(uid)})


def chosen(threshold=None, top_k=None, **kwargs):
    """Return the indices that are kept, and those that are dropped as duplicates."""
    marks = choose(rows(**kwargs), threshold=threshold, top_k=top_k)
    return [marks[name].nonzero().flatten().tolist() for name in ("rejection_kept", "rejection_repeat")]


def test_threshold_keeps_each_distinct_response_that_reaches_it():
    assert chosen(threshold=1.0) == [[0, 3, 4], [1]]
    assert chosen(threshold=0.5) == [[0, 2, 3, 4], [1]]
    assert chosen(threshold=2.0) == [[3], []]
    assert chosen(threshold=2.5) == [[], []]


def test_top_k_keeps_the_best_distinct_responses_of_each_prompt():
    """Without a threshold row 6 is a duplicate too; of the equal rows 8 and 9 the earlier one is the best."""
    assert chosen(top_k=1) == [[3, 4, 8], [1, 6]]
    assert chosen(top_k=2) == [[0, 3, 4, 5, 8, 9], [1, 6]]
    assert chosen(top_k=3) == [[0, 2, 3, 4, 5, 8, 9], [1, 6]]


def test_top_k_above_a_threshold():
    assert chosen(threshold=0.5, top_k=1) == [[3, 4], [1]]
    assert chosen(threshold=0.5, top_k=2) == [[0, 3, 4], [1]]


def test_a_response_is_dropped_only_for_one_that_is_kept():
    """Rows 6 and 5 alone: below the threshold, so neither is a duplicate of anything that could be learned."""
    assert chosen(threshold=1.0, order=[6, 5]) == [[], []]


def loss(mask):
    log_probs = torch.tensor([[-1.0, -2.0, -9.0], [-0.5, -0.25, -4.0]], requires_grad=True)
    out = Outputs({"log_probs": log_probs, "entropy": torch.tensor([[1.0, 2.0, 50.0], [3.0, 4.0, 5.0]])})
    return imitation_loss(out, {"response_mask": torch.tensor(mask)}, RejectionSamplingConfig()), log_probs


def test_loss_is_the_mean_negative_log_likelihood_of_the_tokens():
    terms, log_probs = loss([[1, 1, 0], [1, 1, 1]])
    assert terms["nll"].total.item() == pytest.approx(1 + 2 + 0.5 + 0.25 + 4)
    assert (terms["nll"].count, terms["nll"].weight) == (5, 1.0)
    # Descent raises the log-prob of every kept token by the same amount, and of no masked one.
    (grad,) = torch.autograd.grad(terms["nll"].total, log_probs)
    assert grad.tolist() == [[-1, -1, 0], [-1, -1, -1]]
    assert terms["entropy"].total == 1 + 2 + 3 + 4 + 5
    assert (terms["entropy"].count, terms["entropy"].weight) == (5, None)


def test_loss_without_any_token_is_zero():
    terms, log_probs = loss([[0, 0, 0], [0, 0, 0]])
    assert (terms["nll"].total.item(), terms["nll"].count) == (0, 0)
    assert not torch.autograd.grad(terms["nll"].total, log_probs)[0].any()


# Steps. Rewards are 0, 1, 0, 1, ... in row order unless said otherwise.

ALGO = ["algo=rejection_sampling", "algo.samples=4", "rollout.temperature=2"]


def distinct(batch, keep):
    """Return the indices of the rows that `keep` and repeat none before them, found from the batch alone."""
    seen, found = set(), []
    for row in range(len(batch)):
        key = (batch["uid"][row], tuple(batch["responses"][row].tolist()))
        if keep[row] and key not in seen:
            seen.add(key)
            found.append(row)
    return found


def kept_rows(folder):
    return [json.loads(line) for line in (folder / "kept.jsonl").read_text().splitlines()]


def test_a_step_imitates_what_it_keeps_and_writes_it_down(take_steps, tmp_path):
    (metrics,), (batch,), roles = take_steps(*ALGO, "algo.epochs=2", "algo.mini_batches=2")
    assert roles == {"actor"}
    assert len(batch) == 16
    kept = distinct(batch, batch["scores"] == 1)
    assert metrics["rejection/kept"] == len(kept) / 16
    assert metrics["rejection/duplicates"] == 8 - len(kept)
    assert metrics["rejection/prompts_without"] == 0
    assert metrics["rejection/empty_steps"] == 0
    assert metrics["train/optimizer_steps"] == 4
    assert kept_rows(tmp_path) == [
        {
            "prompt": batch["prompt_text"][row],
            "answer": batch["answer"][row],
            "completion": batch["response_text"][row],
            "score": 1.0,
            "step": 1,
        }
        for row in kept
    ]


def test_the_first_loss_is_that_of_the_kept_under_the_policy_that_sampled_them(take_steps):
    """The best of four, one optimizer step: before it, nll is minus their log-probs as they were sampled."""
    (metrics,), (batch,), _ = take_steps(*ALGO, "algo.keep=top_k", "algo.top_k=1")
    best = [next(row for row in range(start, start + 4) if batch["scores"][row] == 1) for start in range(0, 16, 4)]
    log_probs = [batch["rollout_log_probs"][row] for row in best]
    expected = -sum(float(row.sum()) for row in log_probs) / sum(len(row) for row in log_probs)
    assert metrics["loss/nll"] == pytest.approx(expected, rel=1e-4)
    assert metrics["rejection/kept"] == 4 / 16


def test_what_is_kept_becomes_likelier(take_steps):
    options = [*ALGO, "engine.lr=1e-4", "algo.epochs=4"]
    _, (batch,), _ = take_steps(*options)
    after = []
    take_steps(*options, then=lambda run: after.extend(run.actor.log_probs(batch)["log_probs"]))
    kept = distinct(batch, batch["scores"] == 1)
    gains = [float((after[row] - batch["rollout_log_probs"][row]).sum()) for row in kept]
    assert sum(gain > 0 for gain in gains) > 0.8 * len(kept)


def test_a_step_that_keeps_nothing_is_counted_and_changes_nothing(take_steps, tmp_path):
    metrics, batches, _ = take_steps(*ALGO, "algo.threshold=1.5", steps=2)
    assert [row["rejection/empty_steps"] for row in metrics] == [1, 2]
    assert [row["rejection/kept"] for row in metrics] == [0, 0]
    assert [row["rejection/prompts_without"] for row in metrics] == [1, 1]
    assert [row["train/skipped_updates"] for row in metrics] == [1, 1]
    assert [row["train/optimizer_steps"] for row in metrics] == [0, 0]
    assert all(math.isfinite(value) for row in metrics for value in row.values())
    assert set(batches[1]["weights_version"].tolist()) == {0}
    assert (tmp_path / "kept.jsonl").read_text() == ""


def test_the_threshold_is_the_pass_score_unless_it_is_set(take_steps):
    """Scores are 0 and 1: by default 1 passes; with reward.pass_score=0 all do; a threshold of its own goes first."""
    for options, lowest in (([], 1), (["reward.pass_score=0"], 0), (["reward.pass_score=0", "algo.threshold=1"], 1)):
        (metrics,), (batch,), _ = take_steps(*ALGO, *options)
        assert metrics["rejection/kept"] == len(distinct(batch, batch["scores"] >= lowest)) / 16


def test_one_run_after_another_in_a_folder_starts_the_file_anew(take_steps, tmp_path):
    take_steps(*ALGO, steps=2)
    both = kept_rows(tmp_path)
    assert [row["step"] for row in both] == sorted(row["step"] for row in both)
    assert {row["step"] for row in both} == {1, 2}
    take_steps(*ALGO)
    assert kept_rows(tmp_path) == [row for row in both if row["step"] == 1]


class Killed(PluginManager):
    """Stops the run hard at the end of step `at`, after its rows were written and before its checkpoint."""

    at = 0

    def step_end(self, run, step, metrics):
        super().step_end(run, step, metrics)
        if step == self.at:
            raise RuntimeError("killed")


def run_on(folder, data, *overrides, at=0, steps=5):
    """Train on `data` in this process, with a checkpoint every second step, and stop at the end of step `at`."""
    plugins = Killed.load()
    plugins.at = at
    base = ["algo=rejection_sampling", "algo.samples=8", "cluster=in_process", "tracker=none", "reward=arithmetic"]
    base += ["data=file", f"data.path={data}", "data.batch_size=2", "rollout.response_len=5", "trainer.eval_every=0"]
    base += ["engine.lr=1e-4", f"trainer.total_steps={steps}", "trainer.checkpoint_every=2", f"run.dir={folder}"]
    train(compose([*base, *overrides], plugins), plugins)


@pytest.fixture
def sums(tmp_path):
    """A file of sums, every second prompt a list of messages."""
    rows = [{"prompt": f"{a}+{a % 4}=", "answer": str(a + a % 4)} for a in range(12)]
    for row in rows[::2]:
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.e2e
def test_a_resumed_run_neither_repeats_nor_loses_rows(tmp_path, sums):
    run_on(tmp_path / "whole", sums)
    whole = (tmp_path / "whole" / "kept.jsonl").read_bytes()
    assert len({json.loads(line)["step"] for line in whole.splitlines()}) > 2
    with pytest.raises(RuntimeError, match="killed"):
        run_on(tmp_path / "cut", sums, at=3)
    path = tmp_path / "cut" / "kept.jsonl"
    assert whole.startswith(path.read_bytes())
    with path.open("a") as file:
        file.write('{"prompt": "half a li')  # as when the machine went down in the middle of step 4
    run_on(tmp_path / "cut", sums)
    assert path.read_bytes() == whole


@pytest.mark.e2e
def test_a_resumed_run_misses_rows_that_somebody_took_away(tmp_path, sums):
    with pytest.raises(RuntimeError, match="killed"):
        run_on(tmp_path / "run", sums, at=3)
    path = tmp_path / "run" / "kept.jsonl"
    path.write_text("")
    with pytest.raises(DataError, match=r"kept\.jsonl has 0 bytes, but had [1-9]\d* at this run's checkpoint; put the"):
        run_on(tmp_path / "run", sums)


@pytest.mark.e2e
def test_the_kept_are_a_data_set_that_a_run_can_read(tmp_path, sums):
    """Prompts come out as they went in, strings and messages."""
    run_on(tmp_path / "first", sums, "algo.keep=top_k", steps=2)
    path = tmp_path / "first" / "kept.jsonl"
    given = {json.dumps(row["prompt"]): row["answer"] for row in read_rows(sums)}
    rows = read_rows(path)
    assert {type(row["prompt"]) for row in rows} == {str, list}
    for row in rows:
        assert given[json.dumps(row["prompt"])] == row["answer"]
        assert isinstance(row["completion"], str)
        assert row["score"] in (0.0, 1.0)
    run_on(tmp_path / "second", path, steps=1)
    metrics = [json.loads(line) for line in (tmp_path / "second" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["reward/errors"] == 0


# Settings


def checked(*overrides):
    plugins = PluginManager.load()
    preflight(compose(["algo=rejection_sampling", "cluster=in_process", *overrides], plugins), plugins)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algo.keep=top_k", "algo.top_k=8"], r"algo\.top_k=8 of algo\.samples=8 keeps every response; raise"),
        (["rollout.temperature=0"], r"rollout\.temperature=0 makes all algo\.samples=8 responses of a prompt equal"),
        (["algo.keep=best"], "best"),
        (["algo.samples=0"], "samples"),
        (["algo.top_k=0"], "top_k"),
        (["algo.epochs=0"], "epochs"),
    ],
)
def test_settings_that_cannot_be_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        checked(*overrides)


def test_settings_that_can_be():
    checked()
    checked("algo.samples=1")
    checked("algo.samples=1", "rollout.temperature=0")
    checked("algo.keep=top_k", "algo.top_k=8", "algo.threshold=0.5")


def test_state_is_plain_and_comes_back():
    algorithm = RejectionSampling(RejectionSamplingConfig())
    algorithm.load_state_dict(json.loads('{"kept_bytes": 12, "empty_steps": 3}'))
    assert algorithm.state_dict() == {"kept_bytes": 12, "empty_steps": 3}
