"""DPO: its losses by hand, its pairs, bad data, and a training that learns held-out preferences."""

import json
import math
import random
import re

import pytest
import torch
from rlcore_plugin_dpo import DPOConfig, dpo_loss

from rlcore.cli import main
from rlcore.ops import Outputs

SMALL = ["algo=dpo", "cluster=in_process", "tracker=none", "data=file", "rollout.response_len=6"]
# Log-ratios of the responses are 1.5 and -0.5, so D = 2; masked tokens hold 9.
RATIO = torch.tensor([[1.0, 9.0, 0.5], [-0.5, 9.0, 9.0]])
MASK = torch.tensor([[1, 0, 1], [1, 0, 0]])
REFERENCE = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -1.5, -2.5]])


def loss(**settings):
    log_probs = (REFERENCE + RATIO).requires_grad_()
    batch = {
        "response_mask": MASK,
        "ref_log_probs": REFERENCE,
        "dpo_pair": torch.tensor([4, 4]),
        "dpo_side": torch.tensor([1.0, -1.0]),
    }
    out = Outputs({"log_probs": log_probs, "entropy": torch.ones(2, 3)})
    return dpo_loss(out, batch, DPOConfig(**{"beta": 0.5, **settings})), log_probs


def softplus(x):
    return math.log1p(math.exp(x))


@pytest.mark.parametrize(
    ("settings", "total"),
    [
        # beta D = 1, and 1 / (2 beta) = 1.
        ({}, softplus(-1)),
        ({"loss": "ipo"}, (2 - 1) ** 2),
        ({"loss": "hinge", "beta": 0.25}, 1 - 0.5),
        ({"label_smoothing": 0.2}, 0.8 * softplus(-1) + 0.2 * softplus(1)),
        ({"loss": "robust", "label_smoothing": 0.2}, (0.8 * softplus(-1) - 0.2 * softplus(1)) / 0.6),
    ],
)
def test_losses_by_hand(settings, total):
    terms, _ = loss(**settings)
    preference = terms["preference"]
    assert preference.total.item() == pytest.approx(total, abs=1e-6)
    assert (preference.count, preference.weight) == (1, 1.0)
    assert terms["accuracy"].total == 1
    assert terms["margin"].total.item() == pytest.approx(settings.get("beta", 0.5) * 2)
    assert "nll" not in terms


def test_a_gradient_step_makes_the_chosen_likelier_and_the_rejected_less_likely():
    terms, log_probs = loss()
    (gradient,) = torch.autograd.grad(terms["preference"].total, log_probs)
    slope = 0.5 * (1 - 1 / (1 + math.exp(-1)))
    torch.testing.assert_close(gradient, MASK * torch.tensor([-slope, slope])[:, None])


def test_the_likelihood_is_that_of_the_chosen_response():
    """Its tokens have the log-probs -1 + 1 and -3 + 0.5."""
    terms, log_probs = loss(nll_coef=0.3)
    assert (terms["nll"].total.item(), terms["nll"].count, terms["nll"].weight) == (2.5, 2, 0.3)
    (gradient,) = torch.autograd.grad(terms["nll"].total, log_probs)
    assert gradient.tolist() == [[-1, 0, -1], [0, 0, 0]]


def write_pairs(path, count, **changed):
    """Write sums of which the right one is preferred to one that ends with another digit."""
    draw = random.Random(count)
    rows = []
    for _ in range(count):
        a, b = draw.randint(10, 40), draw.randint(10, 40)
        rows.append({"prompt": f"{a}+{b}=", "chosen": f"{a + b}!", "rejected": str(a + b)} | changed)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"data.path={path}", "data.batch_size=8"]


def train(folder, *overrides):
    return main(["train", *SMALL, f"run.dir={folder}", "trainer.checkpoint_every=0", *overrides])


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.e2e
def test_it_learns_held_out_preferences_against_what_the_model_does(tmp_path):
    """The model answers without `!`; the data prefers the answer with it, so the first margin is 0 and then grows."""
    data = write_pairs(tmp_path / "pairs.jsonl", 80)
    learn = ["trainer.total_steps=8", "trainer.eval_every=8", "engine.lr=1e-3"]
    assert train(tmp_path / "run", *data, *learn) == 0
    first, last = (row for row in metrics(tmp_path / "run") if "eval/accuracy" in row)
    assert (first["eval/accuracy"], first["eval/margin"]) == (0.5, pytest.approx(0, abs=1e-4))
    assert first["eval/preference"] == pytest.approx(math.log(2), abs=1e-4)
    assert last["eval/accuracy"] == 1
    assert last["eval/margin"] > 0.3
    step = next(row for row in metrics(tmp_path / "run") if "loss/preference" in row)
    assert step["loss/margin"] == pytest.approx(0, abs=1e-4)  # the reference is the policy that the run starts from


@pytest.mark.e2e
def test_a_pair_is_never_parted(tmp_path):
    same = [*write_pairs(tmp_path / "pairs.jsonl", 12), "trainer.total_steps=2", "trainer.eval_every=0"]
    same += ["data.batch_size=5", "engine.lr=1e-3"]
    assert train(tmp_path / "whole", *same) == 0
    assert train(tmp_path / "cut", *same, "engine.micro_batch_rows=1", "algo.epochs=2", "algo.mini_batches=5") == 0
    whole, cut = metrics(tmp_path / "whole")[0], metrics(tmp_path / "cut")[0]
    assert (whole["train/optimizer_steps"], cut["train/optimizer_steps"]) == (1, 10)
    assert whole["loss/preference"] == pytest.approx(math.log(2), abs=1e-4)


@pytest.mark.e2e
def test_pairs_of_conversations_are_learned(tmp_path, capsys):
    """The prompt is the beginning that both sides share. The margin is 0 at first, as of texts, and then grows."""
    write_pairs(tmp_path / "pairs.jsonl", 12)
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    talks = [
        {
            side: [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
            for side in ("chosen", "rejected")
        }
        for row in rows
    ]
    options = [f"data.path={tmp_path}", "data.batch_size=4", "trainer.total_steps=1", "engine.lr=1e-3"]
    (tmp_path / "pairs.jsonl").unlink()
    for name, given in (("train", talks[:8]), ("test", talks[8:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    assert train(tmp_path / "run", *options, "trainer.eval_every=1") == 0
    first, last = metrics(tmp_path / "run")
    assert first["eval/pairs"] == 4
    assert first["eval/margin"] == pytest.approx(0, abs=1e-4)
    assert last["eval/margin"] > 0.01
    talks[1]["chosen"].append({"role": "user", "content": "sure?"})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talks))
    assert train(tmp_path / "absent", *options) == 1
    assert not (tmp_path / "absent").exists()
    assert re.search(r"row 2: column 'chosen' holds \[{'role'.* or one message of the ass", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rejected": None}, "row 1: column 'rejected' holds None, not a response; its columns are prompt, ch"),
        ({"chosen": ["7"]}, r"row 1: column 'chosen' holds \['7'\], not a response"),
        ({"chosen": "7", "rejected": "7"}, "row 1: both sides are '7', so there is no preference; remove the pair"),
    ],
)
def test_a_bad_pair_is_named_before_anything_starts(tmp_path, capsys, changed, message):
    assert train(tmp_path / "run", *write_pairs(tmp_path / "pairs.jsonl", 20, **changed)) == 1
    assert not (tmp_path / "run").exists()
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.temperature=0.7", r"rollout\.temperature=0\.7: log-probs are at that temperature"),
        ("algo.label_smoothing=0.5", r"algo\.label_smoothing=0\.5 treats every preference as a coin toss"),
        ("algo.mini_batches=9", r"algo\.mini_batches is 9, but a step has only data\.batch_size = 8 pairs"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, capsys, override, message):
    assert train(tmp_path / "run", *write_pairs(tmp_path / "pairs.jsonl", 20), override) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.e2e
def test_pairs_that_the_cut_makes_equal_are_left_out_and_counted(tmp_path, capsys):
    """Three of four pairs differ in their eighth token only; a response has six."""
    long = [{"prompt": f"{i}+4=", "chosen": "12345678", "rejected": "12345679"} for i in range(3)]
    rows = [*long, {"prompt": "9-2=", "chosen": "7", "rejected": "8"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "test.jsonl").write_text(
        "".join(json.dumps({**row, "prompt": "1" + row["prompt"]}) + "\n" for row in rows)
    )
    options = [f"data.path={tmp_path}", "data.batch_size=4", "trainer.total_steps=1", "trainer.eval_every=1"]
    assert train(tmp_path / "run", *options) == 0
    first, last = metrics(tmp_path / "run")
    assert first["eval/pairs"] == last["eval/pairs"] == 1
    assert last["dpo/equal_pairs"] == 3
    assert last["train/optimizer_steps"] == 1
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*long, {**long[0], "prompt": "2+2="}])
    )
    assert train(tmp_path / "none", *options, "trainer.eval_every=0") == 0
    (step,) = metrics(tmp_path / "none")
    assert (step["train/optimizer_steps"], step["train/skipped_updates"]) == (0, 1)
    (tmp_path / "test.jsonl").write_text((tmp_path / "train.jsonl").read_text().replace('"prompt": "', '"prompt": "5'))
    assert train(tmp_path / "no_eval", *options) == 1
    assert "all 4 held-out pairs are equal in their first rollout.response_len=6 tokens" in capsys.readouterr().err
