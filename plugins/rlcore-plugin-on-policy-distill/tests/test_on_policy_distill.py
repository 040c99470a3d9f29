"""On-policy distillation: its loss by hand, which teacher answers, and a student that comes nearer to its teacher."""

import json
import re
from importlib.resources import files

import pytest
import torch
from rlcore_plugin_on_policy_distill import OnPolicyDistill, OnPolicyDistillConfig, on_policy_distill_loss

from rlcore import DataProto, Ragged
from rlcore.cli import main
from rlcore.ops import Outputs

TINY = str(files("rlcore.assets") / "tiny")
SMALL = ["algo=on_policy_distill", "cluster=in_process", "tracker=none", "data.batch_size=8", "rollout.response_len=6"]


def train(folder, *overrides):
    """Run a small training in this process; return its exit status and the metrics of its steps."""
    small = [*SMALL, "trainer.total_steps=1", "trainer.eval_every=0", f"run.dir={folder / 'run'}"]
    status = main(["train", *small, *overrides])
    file = folder / "run" / "metrics.jsonl"
    return status, [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture(scope="module")
def perturbed(tmp_path_factory) -> str:
    """The shipped model, moved away from what it has learned."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(tmp_path_factory.mktemp("perturbed"))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(TINY)
    for parameter in model.parameters():
        parameter.data += 0.03 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


def test_loss_by_hand():
    """Ratios are 2 and 1 where they count, of a clipped gain (1.2 * 3) and a loss of 2; the masked token counts not."""
    log_probs = torch.tensor([[-1.0, -5.0, -2.0]], requires_grad=True)
    batch = {
        "response_mask": torch.tensor([[1, 0, 1]]),
        "old_log_probs": torch.tensor([[-1.0 - torch.tensor(2.0).log(), -1.0, -2.0]]),
        "advantages": torch.tensor([[3.0, 7.0, -2.0]]),
    }
    out = Outputs({"log_probs": log_probs, "entropy": torch.ones(1, 3)})
    terms = on_policy_distill_loss(out, batch, OnPolicyDistillConfig(teacher="x"))
    policy = terms["policy"]
    assert policy.total.item() == pytest.approx(-(1.2 * 3 - 2))
    assert (policy.count, policy.weight) == (2, 1.0)
    # Descent lowers the token that the teacher finds less likely; the clipped and the masked one are left alone.
    (gradient,) = torch.autograd.grad(policy.total, log_probs)
    assert gradient.tolist() == [[0.0, 0.0, 2.0]]
    assert terms["clipped"].total == 1


class Teacher:
    """Gives each token the log-prob of its own number."""

    def __init__(self, number):
        self.number = number

    def log_probs(self, batch, *, name):
        return DataProto.from_dict({name: batch["responses"].map(lambda tokens: -self.number * tokens.float())})


class Teachers:
    """A run with two teachers."""

    def role(self, name, kind):
        return Teacher({"teacher_easy": 1.0, "teacher_hard": 10.0}[name])


def test_each_row_is_read_by_the_teacher_of_its_data_source():
    responses = Ragged.from_list([[1, 2], [3], [4, 5], [6]])
    batch = DataProto.from_dict({"responses": responses}, {"data_source": ["hard", "easy", "hard", "easy"]})
    algorithm = OnPolicyDistill(OnPolicyDistillConfig(teachers={"easy": "a", "hard": "b"}))
    assert set(algorithm.roles()) == {"actor", "teacher_easy", "teacher_hard"}
    made = algorithm._teacher_log_probs(Teachers(), batch)["distill_log_probs"]
    assert [row.tolist() for row in made] == [[-10.0, -20.0], [-3.0], [-40.0, -50.0], [-6.0]]


@pytest.mark.e2e
def test_a_student_comes_nearer_to_its_teacher(tmp_path, perturbed):
    """No reward is configured or computed."""
    learn = [f"model.path={perturbed}", f"algo.teacher={TINY}", "trainer.total_steps=12", "engine.lr=1e-3"]
    status, steps = train(tmp_path, *learn, "data.batch_size=16")
    assert status == 0
    first, last = (sum(step["distill/reverse_kl"] for step in part) / 3 for part in (steps[:3], steps[-3:]))
    assert first > 0.2
    assert last < 0.6 * first
    assert not any("reward/mean" in step for step in steps)


@pytest.mark.e2e
def test_a_teacher_with_the_students_weights_has_nothing_to_teach_but_the_task_has(tmp_path):
    status, (step,) = train(tmp_path, f"algo.teacher={TINY}")
    assert status == 0
    assert step["distill/reverse_kl"] == pytest.approx(0, abs=1e-4)
    assert step["train/grad_norm"] < 0.01
    task = ["algo.task_coef=1", f"run.dir={tmp_path / 'task'}"]
    assert main(["train", *SMALL, "trainer.total_steps=1", "trainer.eval_every=0", f"algo.teacher={TINY}", *task]) == 0
    (step,) = [json.loads(line) for line in (tmp_path / "task" / "metrics.jsonl").read_text().splitlines()]
    assert step["train/grad_norm"] > 0.1
    assert 0 < step["reward/mean"] < 1


@pytest.mark.e2e
def test_teachers_by_data_source(tmp_path, capsys, perturbed):
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "data_source": "mine"} for n in range(40)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    same = ["data=file", f"data.path={data}", "reward=arithmetic"]
    teachers = f"algo.teachers={{mine: {TINY}, other: {perturbed}}}"
    status, (step,) = train(tmp_path, *same, teachers)
    assert status == 0
    assert step["distill/reverse_kl"] == pytest.approx(0, abs=1e-4)
    assert main(["train", *SMALL, *same, f"algo.teachers={{other: {perturbed}}}", f"run.dir={tmp_path / 'no'}"]) == 1
    message = "row 1: column 'data_source' holds 'mine', which has no teacher; algo.teachers has other"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"needs a teacher: give either algo\.teacher=FOLDER, or several"),
        (["algo.teacher=x", "algo.teachers={a: y}"], "not both"),
        ([f"algo.teacher={TINY}", "algo.task_coef=1", "algo.group_size=1"], r"algo\.group_size=1 gives only one"),
        ([f"algo.teacher={TINY}", "algo.mini_batches=9"], r"algo\.mini_batches is 9"),
        (["algo.teacher=nowhere"], "nowhere"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, capsys, overrides, message):
    status, _ = train(tmp_path, *overrides)
    assert status != 0
    assert re.search(message, capsys.readouterr().err)
