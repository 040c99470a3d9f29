"""The reward model: its loss by hand, bad pairs, and the way from pairs to a run that they reward."""

import json
import math
import random
import re

import pytest
import torch
from rlcore_plugin_reward_model import RewardModelConfig, bradley_terry

from rlcore.cli import main
from rlcore.ops import Outputs

SMALL = ["cluster=in_process", "tracker=none", "data=file", "rollout.response_len=6", "trainer.checkpoint_every=0"]


def write_pairs(path, count):
    """Write arithmetic, where the right answer is preferred to one that is far off, which a short training can see."""
    draw = random.Random(count)
    rows = []
    for _ in range(count):
        a, b, off = draw.randint(0, 20), draw.randint(0, 20), draw.randint(100, 899)
        rows.append({"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + off)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def train(folder, *overrides):
    return main(["train", "algo=reward_model", *SMALL, f"run.dir={folder}", *overrides])


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def loss(scores, pair, chosen, **settings):
    scores = torch.tensor(scores, requires_grad=True)
    batch = {"reward_model_pair": torch.tensor(pair), "reward_model_chosen": torch.tensor(chosen)}
    return bradley_terry(Outputs({"scores": scores}), batch, RewardModelConfig(**settings)), scores


def test_loss_by_hand():
    """Pair 5 scores 1 against 1 - ln 3, so sigmoid(ln 3) = 3/4; pair 2 scores 0 against 0, sigmoid(0) = 1/2."""
    ln3 = math.log(3)
    terms, scores = loss([1 - ln3, 0.0, 1.0, 0.0], pair=[5, 2, 5, 2], chosen=[False, True, True, False])
    preference = terms["preference"]
    assert preference.total.item() == pytest.approx(-math.log(3 / 4) - math.log(1 / 2))
    assert (preference.count, preference.weight) == (2, 1.0)
    (gradient,) = torch.autograd.grad(preference.total, scores)
    # Minus sigmoid of the negated margin, 1/4 and 1/2, on the chosen side and its opposite on the other.
    assert gradient.tolist() == pytest.approx([0.25, -0.5, -0.25, 0.5])
    assert (terms["accuracy"].total, terms["accuracy"].count, terms["accuracy"].weight) == (1, 2, None)
    assert terms["margin"].total.item() == pytest.approx(ln3)
    assert set(terms) == {"preference", "accuracy", "margin"}


def test_centering_pulls_the_sum_of_a_pair_to_zero():
    """Scores 3 and 1: (3 + 1)^2 = 16, with a slope of 8 on both sides."""
    terms, scores = loss([3.0, 1.0], pair=[0, 0], chosen=[True, False], center=0.1)
    assert (terms["center"].total.item(), terms["center"].weight) == (16.0, 0.1)
    (gradient,) = torch.autograd.grad(terms["center"].total, scores)
    assert gradient.tolist() == [8.0, 8.0]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            {"rejected": None},
            "row 3: column 'rejected' holds None, not a response; its columns are prompt, ch",
        ),
        ({"chosen": ["7"]}, r"row 3: column 'chosen' holds \['7'\], not a response"),
        ({"rejected": "7", "chosen": "7"}, "row 3: both sides are '7', so there is no preference; remove the pair"),
    ],
)
def test_a_pair_that_is_none_is_named_before_anything_starts(tmp_path, capsys, broken, message):
    rows = write_pairs(tmp_path / "train.jsonl", 6)
    write_pairs(tmp_path / "test.jsonl", 2)
    rows[2] |= broken
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert train(tmp_path / "run", f"data.path={tmp_path}", "data.batch_size=2") == 1
    assert not (tmp_path / "run").exists()
    assert re.search("rlcore: data=file, split 'train', " + message, capsys.readouterr().err)


def test_prompts_without_any_pairs_and_too_few_pairs(tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(9)))
    assert train(tmp_path / "run", f"data.path={tmp_path / 'prompts.jsonl'}", "data.batch_size=2") == 1
    assert "row 1: column 'chosen' holds None, not a response; its columns are prompt" in capsys.readouterr().err
    few = ["data.batch_size=2", "algo.mini_batches=3"]
    assert train(tmp_path / "run", f"data.path={tmp_path / 'prompts.jsonl'}", *few) == 2
    assert "algo.mini_batches is 3, but a step has only data.batch_size = 2 pairs" in capsys.readouterr().err


def test_a_pair_of_whole_conversations_is_none(tmp_path, capsys):
    """One message of the assistant is a text; after more of them there is another prompt."""
    roles = {"chosen": "assistant", "rejected": "assistant"}
    rows = [
        row | {side: [{"role": role, "content": row[side]}] for side, role in roles.items()}
        for row in write_pairs(tmp_path / "pairs.jsonl", 12)
    ]
    rows[1]["chosen"].append({"role": "user", "content": "sure?"})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert train(tmp_path / "run", f"data.path={tmp_path}", "data.eval_split=train", "data.batch_size=2") == 1
    assert not (tmp_path / "run").exists()
    assert re.search(r"row \d+: column 'chosen' holds \[{'role'.* or one message of the ass", capsys.readouterr().err)


@pytest.mark.timeout(200)
@pytest.mark.e2e
def test_a_pair_is_never_parted(tmp_path):
    """With one row a micro-batch the loss would see half pairs; with odd mini-batches too."""
    write_pairs(tmp_path / "pairs.jsonl", 12)
    same = [f"data.path={tmp_path / 'pairs.jsonl'}", "data.batch_size=5", "trainer.total_steps=2", "engine.lr=1e-3"]
    same.append("trainer.eval_every=0")
    assert train(tmp_path / "whole", *same) == 0
    assert train(tmp_path / "cut", *same, "engine.micro_batch_rows=1") == 0
    for whole, cut in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "cut"), strict=True):
        assert cut["loss/preference"] == pytest.approx(whole["loss/preference"], rel=1e-5)
        assert cut["train/grad_norm"] == pytest.approx(whole["train/grad_norm"], rel=1e-4)
    assert train(tmp_path / "minis", *same, "algo.mini_batches=3") == 0
    assert metrics(tmp_path / "minis")[0]["train/optimizer_steps"] == 3


@pytest.mark.timeout(200)
@pytest.mark.e2e
def test_from_pairs_to_a_run_that_the_model_rewards(tmp_path, capsys):
    """It learns held-out pairs, `rlcore eval` says the same, transformers opens it, and GRPO is rewarded by it."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    write_pairs(tmp_path / "pairs.jsonl", 120)
    learn = ["trainer.total_steps=16", "trainer.eval_every=16", "data.batch_size=16", "engine.lr=1e-3"]
    run = tmp_path / "rm"
    assert train(run, f"data.path={tmp_path / 'pairs.jsonl'}", *learn) == 0
    summary = json.loads((run / "summary.json").read_text())
    steps = metrics(run)
    assert summary["accuracy_before"] == 0.0  # a head of zeros prefers nothing
    assert summary["accuracy_after"] == steps[-1]["eval/accuracy"] >= 0.8
    assert steps[1]["loss/preference"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[-1]["loss/preference"] < 0.5
    assert steps[-1]["eval/margin"] > 0
    assert steps[1]["at_limit"] == 0

    capsys.readouterr()
    assert main(["eval", str(run)]) == 0
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert float(printed["accuracy"]) == pytest.approx(summary["accuracy_after"], abs=1e-3)

    model = run / "checkpoints" / "step_00000016" / "reward_model" / "model"
    hf = AutoModelForSequenceClassification.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)

    def score(prompt, response):
        chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        ids = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), return_tensors="pt")
        return hf(**ids).logits.item()

    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+5="}) + "\n" for i in range(9)))
    grpo = ["algo=grpo", "algo.group_size=2", "algo.kl_coef=0", *SMALL, f"data.path={tmp_path / 'prompts.jsonl'}"]
    grpo += ["data.batch_size=4", "trainer.total_steps=1", "trainer.eval_every=0", f"reward.model={model}"]
    assert main(["train", *grpo, f"run.dir={tmp_path / 'grpo'}"]) == 0
    (samples,) = (tmp_path / "grpo" / "samples").glob("step_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    finished = [row for row in rows if row["finished"]]
    assert finished
    for row in finished:
        assert row["scores"] == pytest.approx(score(row["prompt_text"], row["response_text"]), abs=1e-3)
    assert score("8+5=", "13") > score("8+5=", "513")


def test_it_is_no_reward_model_of_a_run_that_trains_one(tmp_path, capsys):
    write_pairs(tmp_path / "pairs.jsonl", 12)
    paths = [f"data.path={tmp_path / 'pairs.jsonl'}", "data.batch_size=2", f"reward.model={tmp_path}"]
    assert train(tmp_path / "run", *paths) == 2
    assert "algo=reward_model has its own role 'reward_model'; leave out reward.model" in capsys.readouterr().err


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
    assert last["equal_pairs"] == 3
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
