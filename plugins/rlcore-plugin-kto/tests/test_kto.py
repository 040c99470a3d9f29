"""KTO: its loss by hand, its reference point, bad data, and a training that learns from single responses."""

import json
import math
import random
import re

import pytest
import torch
from rlcore_plugin_kto import KTO, KTOConfig, kto_loss, with_other_prompts

from rlcore import DataProto, Ragged
from rlcore.cli import main
from rlcore.ops import Outputs

SMALL = ["algo=kto", "cluster=in_process", "tracker=none", "data=file", "rollout.response_len=6"]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_loss_by_hand():
    """h is 1.5 and -0.5; with z = 0.5 the good row is 1 ahead of it and the bad row 1 behind it; masked tokens hold 9.

    A second good row is 3 behind.
    """
    ratio = torch.tensor([[1.0, 9.0, 0.5], [-0.5, 9.0, 9.0], [-2.5, 9.0, 9.0]])
    reference = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -1.5, -2.5], [-1.0, -1.0, -1.0]])
    log_probs = (reference + ratio).requires_grad_()
    mask = torch.tensor([[1, 0, 1], [1, 0, 0], [1, 0, 0]])
    batch = {
        "response_mask": mask,
        "ref_log_probs": reference,
        "kto_good": torch.tensor([True, False, True]),
        "kto_kl": torch.full((3,), 0.5),
    }
    out = Outputs({"log_probs": log_probs, "entropy": torch.ones(3, 3)})
    terms = kto_loss(out, batch, KTOConfig(beta=0.5, good_weight=2.0, bad_weight=3.0))
    kto = terms["kto"]
    good, bad, behind = 2 * (1 - sigmoid(0.5)), 3 * (1 - sigmoid(0.5)), 2 * (1 - sigmoid(-1.5))
    assert kto.total.item() == pytest.approx(good + bad + behind, abs=1e-6)
    assert (kto.count, kto.weight) == (3, 1.0)
    # Descent raises the good responses and lowers the bad one; the slope is weight beta s (1 - s).
    (gradient,) = torch.autograd.grad(kto.total, log_probs)
    slope = 0.5 * sigmoid(0.5) * (1 - sigmoid(0.5))
    slopes = torch.tensor([-2 * slope, 3 * slope, -2 * 0.5 * sigmoid(1.5) * (1 - sigmoid(1.5))])
    torch.testing.assert_close(gradient, mask * slopes[:, None])
    assert (terms["accuracy"].total, terms["accuracy"].weight) == (2, None)
    assert (terms["good_reward"].total.item(), terms["good_reward"].count) == (pytest.approx(0.5 * (1 - 3)), 2)
    assert (terms["bad_reward"].total.item(), terms["bad_reward"].count) == (-0.5, 1)


class Policies:
    """Answers log_probs: of the actor by the mismatched responses, of the reference zeros."""

    def __init__(self, value):
        self.value, self.seen = value, []

    def log_probs(self, batch, *, name):
        self.seen.append([tokens.tolist() for tokens in batch["responses"]])
        values = batch["responses"].map(lambda tokens: self.value * tokens.float())
        return DataProto.from_dict({name: values})


class Steps:
    """The parts of a run that `KTO._rows` uses."""

    def __init__(self, value):
        self.actor, self.ref = Policies(value), Policies(0.0)

    def encode(self, prompts, column):
        assert column == "completion"
        texts = Ragged.from_list([[int(text)] * int(text) for text in prompts[column]])
        return DataProto.from_dict({"responses": texts, "response_mask": texts.map(torch.ones_like)})


@pytest.mark.parametrize(("value", "kl"), [(0.5, (2 + 4.5 + 0.5) / 3), (-0.5, 0.0)])
def test_the_reference_point_is_the_mean_over_mismatched_responses_and_not_below_zero(value, kl):
    """Each prompt gets the next row's response: h of response n is n * n * value."""
    prompts = DataProto.from_dict(
        {"prompts": Ragged.from_list([[5], [6], [7]])},
        {
            "completion": ["1", "2", "3"],
            "label": [True, False, True],
            "uid": ["a", "b", "c"],
            "prompt_text": ["x", "y", "z"],
        },
    )
    run = Steps(value)
    rows = KTO(KTOConfig())._rows(run, prompts)
    assert rows["kto_kl"].tolist() == pytest.approx([kl] * 3)
    assert rows["kto_good"].tolist() == [True, False, True]
    assert run.actor.seen == [[[2, 2], [3, 3, 3], [1]]]
    assert [tokens.tolist() for tokens in rows["responses"]] == [[1], [2, 2], [3, 3, 3]]


@pytest.mark.parametrize(
    ("prompts", "rows", "others"),
    [
        ("abc", [0, 1, 2], [1, 2, 0]),
        ("aab", [0, 1, 2], [2, 2, 0]),
        ("abba", [0, 1, 2, 3], [1, 3, 3, 1]),
        ("a", [], []),
        ("aa", [], []),
        ("", [], []),
    ],
)
def test_no_row_is_its_own_reference(prompts, rows, others):
    assert with_other_prompts(list(prompts)) == (rows, others)


def test_an_only_row_has_the_reference_point_zero():
    """Its own response would be 0.5 ahead."""
    row = DataProto.from_dict(
        {"prompts": Ragged.from_list([[5]])},
        {"completion": ["1"], "label": [True], "uid": ["a"], "prompt_text": ["x"]},
    )
    assert KTO(KTOConfig())._rows(Steps(0.5), row)["kto_kl"].tolist() == [0.0]


def write_rows(path, count, **changed):
    """Write right sums that are good only if they end with `!`."""
    draw = random.Random(count)
    rows = []
    for _ in range(count):
        a, b, good = draw.randint(10, 40), draw.randint(10, 40), draw.random() < 0.5
        rows.append({"prompt": f"{a}+{b}=", "completion": f"{a + b}{'!' * good}", "label": good} | changed)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"data.path={path}", "data.batch_size=8"]


def train(folder, *overrides):
    return main(["train", *SMALL, f"run.dir={folder}", "trainer.checkpoint_every=0", *overrides])


@pytest.mark.e2e
def test_it_learns_which_held_out_responses_are_good(tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", 120)
    learn = ["trainer.total_steps=10", "trainer.eval_every=10", "engine.lr=1e-3", "data.batch_size=16"]
    assert train(tmp_path / "run", *data, *learn) == 0
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in metrics if "eval/accuracy" in row]
    assert evaluated[-1]["eval/accuracy"] >= 0.9
    steps = [row for row in metrics if "loss/kto" in row]
    assert steps[0]["loss/kto"] == pytest.approx(0.5, abs=1e-3)  # sigmoid(0): the policy is the reference
    assert steps[0]["kto/kl"] == pytest.approx(0, abs=1e-4)
    assert steps[-1]["loss/kto"] < 0.45
    assert steps[-1]["loss/good_reward"] > steps[-1]["loss/bad_reward"]


def test_a_completion_of_several_messages_is_none(tmp_path, capsys):
    """One message of the assistant is a text, as in the other rows."""
    told = [[{"role": "assistant", "content": str(i)}] for i in range(20)]
    told[4].append({"role": "user", "content": "sure?"})
    rows = [{"prompt": f"{i}+0=", "completion": each, "label": True} for i, each in enumerate(told)]
    for name, given in (("train", rows[:10]), ("test", rows[10:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    assert train(tmp_path / "run", f"data.path={tmp_path}", "data.batch_size=8") == 1
    assert not (tmp_path / "run").exists()
    assert re.search(r"row 5: column 'completion' holds \[{'role'.* or one message of the ass", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"completion": None}, "row 1: column 'completion' holds None, not a response; its columns are prompt, co"),
        ({"label": "yes"}, "row 1: column 'label' holds 'yes'; it must be true for a good response, else false"),
    ],
)
def test_a_bad_row_is_named_before_anything_starts(tmp_path, capsys, changed, message):
    assert train(tmp_path / "run", *write_rows(tmp_path / "rows.jsonl", 20, **changed)) == 1
    assert not (tmp_path / "run").exists()
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.temperature=0.7"], r"rollout\.temperature=0\.7: log-probs are at that temperature"),
        (["data.batch_size=1"], r"data\.batch_size=1: the reference point needs another row's response"),
        (["algo.good_weight=0", "algo.bad_weight=0"], "are both 0, so nothing is learned; raise one"),
        (["algo.mini_batches=9"], r"algo\.mini_batches is 9, but a step has only data\.batch_size = 8 rows"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, capsys, overrides, message):
    assert train(tmp_path / "run", *write_rows(tmp_path / "rows.jsonl", 20), *overrides) == 2
    assert re.search(message, capsys.readouterr().err)
