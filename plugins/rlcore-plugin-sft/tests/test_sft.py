"""SFT: its loss by hand, a training that learns, and its errors for rows that it cannot learn from."""

import json
import re

import pytest
import torch
from rlcore_plugin_sft import SFT, SFTConfig, sft_loss

from rlcore import DataError
from rlcore.cli import main
from rlcore.ops import Outputs

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "text": f"{a + b}!"} for a in range(6) for b in range(4)]


@pytest.fixture
def run(tmp_path):
    """Train on rows, written to a JSONL file, in this process; return the exit status and the metrics of the steps."""

    def train(rows, *overrides):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        base = ["algo=sft", "cluster=in_process", "tracker=none", "reward=arithmetic", "data=file", f"data.path={path}"]
        base += ["data.batch_size=8", "rollout.response_len=6", "engine.lr=1e-3", "trainer.total_steps=4"]
        status = main(["train", *base, "trainer.eval_every=0", f"run.dir={tmp_path / 'run'}", *overrides])
        file = tmp_path / "run" / "metrics.jsonl"
        return status, [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    return train


def test_loss_is_the_mean_negative_log_likelihood_of_the_response_tokens():
    log_probs = torch.tensor([[-1.0, -2.0, -9.0], [-0.5, -0.25, -4.0]], requires_grad=True)
    entropy = torch.tensor([[1.0, 2.0, 50.0], [3.0, 4.0, 5.0]])
    batch = {"response_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}
    terms = sft_loss(Outputs({"log_probs": log_probs, "entropy": entropy}), batch, SFTConfig())
    assert terms["nll"].total.item() == 1 + 2 + 0.5 + 0.25 + 4
    assert (terms["nll"].count, terms["nll"].weight) == (5, 1.0)
    # Descent raises every token of the responses alike, and none behind a response's end.
    (gradient,) = torch.autograd.grad(terms["nll"].total, log_probs)
    assert gradient.tolist() == [[-1, -1, 0], [-1, -1, -1]]
    assert (terms["entropy"].total.item(), terms["entropy"].count, terms["entropy"].weight) == (15, 5, None)


@pytest.mark.e2e
def test_the_loss_falls_and_the_evaluation_counts_the_answers(run):
    """The model knows sums but ends them without `!`: the first loss is above 1, and then it learns the new ending."""
    status, metrics = run(ROWS, "algo.response_key=text", "trainer.total_steps=8", "trainer.eval_every=8")
    assert status == 0
    losses = [row["loss/nll"] for row in metrics if "loss/nll" in row]
    assert len(losses) == 8
    assert losses[0] > 1
    assert losses[-1] < losses[0] / 3
    assert metrics[0]["eval/samples"] == metrics[-1]["eval/samples"] > 0
    # The reward still compares with `answer`, to which an answer ending with `!` is wrong.
    assert metrics[-1]["eval/accuracy"] <= metrics[0]["eval/accuracy"]
    assert metrics[-1]["eval/truncated"] == 0


@pytest.mark.e2e
def test_what_rejection_sampling_kept_is_a_data_set(run, tmp_path):
    first = ["algo=rejection_sampling", "algo.keep=top_k", "algo.samples=2", "trainer.total_steps=1"]
    status, _ = run(ROWS, *first, f"run.dir={tmp_path / 'first'}")
    assert status == 0
    kept = (tmp_path / "first" / "kept.jsonl").read_text().splitlines()
    assert len(kept) == 8
    second = ["algo.response_key=completion", "data.batch_size=4", "trainer.total_steps=1"]
    status, metrics = run([json.loads(row) for row in kept], *second)
    assert status == 0
    assert metrics[0]["loss/nll"] > 0


def test_epochs_and_mini_batches_are_optimizer_steps(run):
    status, metrics = run(ROWS, "algo.epochs=2", "algo.mini_batches=4", "trainer.total_steps=1")
    assert status == 0
    assert metrics[0]["train/optimizer_steps"] == 8


def conversation(row, form):
    asked, answered = (
        [{"role": role, "content": row[key]}] for role, key in (("user", "prompt"), ("assistant", "answer"))
    )
    if form == "messages":
        return {"messages": [*asked, *answered]}
    return {"prompt": asked, "completion": answered} if form == "apart" else row


@pytest.mark.e2e
def test_conversations_are_learned(run):
    """The model half knows the sums and how an answer ends: with other tokens around them its loss is above 1."""
    status, metrics = run([conversation(row, "messages") for row in ROWS], "trainer.total_steps=1")
    assert status == 0
    assert 0 < metrics[0]["loss/nll"] < 0.8


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "user", "content": "7+7="}]}, "row 3: algo.response_key=answer: the row has no such"),
        (
            {"prompt": "7+7=", "completion": [{"role": "assistant", "content": "1"}, {"role": "user", "content": "2"}]},
            "row 3: column 'answer' holds [{'role': 'assistant', 'content': '1'}, {'role': 'user', 'content': '2'}], ",
        ),
    ],
)
def test_a_conversation_that_is_no_response_is_named_before_the_run(run, tmp_path, capsys, row, message):
    form = "messages" if "messages" in row else "apart"
    (tmp_path / "two").mkdir()
    rows = [conversation(row, form) for row in ROWS[:8]]
    for name, given in (("train", [*rows[:2], row, *rows[2:]]), ("test", rows[:1])):
        (tmp_path / "two" / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in given))
    status, _ = run(ROWS, f"data.path={tmp_path / 'two'}", f"run.dir={tmp_path / 'absent'}")
    assert status == 1
    assert not (tmp_path / "absent").exists()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("text", "share"), [("1234", 0.0), ("1234567", 1.0)])
def test_responses_that_fill_the_length_there_is_are_counted(run, text, share):
    """4 digits and the end-of-text token are 5 tokens of 6; 7 digits are cut."""
    _, metrics = run([{**row, "text": text} for row in ROWS], "algo.response_key=text", "trainer.total_steps=1")
    assert metrics[0]["sft/full_length"] == share


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "there is no response in column 'text': it holds None. SFT needs a text in every row"),
        ("  ", "there is no response in column 'text': it holds '  '"),
        (42, "column 'text' holds 42, which is of type int; a response is a text, so write it as a string"),
        (["a"], "column 'text' holds ['a'], which is of type list"),
    ],
)
def test_one_row_without_a_response_is_named_before_the_run(run, tmp_path, capsys, value, message):
    rows = [{**row, "text": "7" if number != 5 else value} for number, row in enumerate(ROWS)]
    status, _ = run(rows, "algo.response_key=text", f"run.dir={tmp_path / 'absent'}")
    assert status == 1
    assert not (tmp_path / "absent").exists()
    assert f"row 6: {message}" in capsys.readouterr().err


def test_a_missing_column_is_named_with_those_there_are():
    with pytest.raises(DataError, match=r"algo\.response_key=txt: the row has no such column, only answer, text;"):
        SFT(SFTConfig(response_key="txt")).check_row({"answer": "a", "text": "b"})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.temperature=0.7", r"rollout\.temperature=0\.7: log-probs are at that temperature"),
        ("algo.mini_batches=9", r"algo\.mini_batches is 9, but a step has only data\.batch_size = 8 rows"),
    ],
)
def test_settings_that_cannot_be_are_refused(run, capsys, override, message):
    status, _ = run(ROWS, override)
    assert status != 0
    assert re.search(message, capsys.readouterr().err)
