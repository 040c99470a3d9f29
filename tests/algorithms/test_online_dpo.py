"""Online DPO: its losses by hand, its pairs, and its settings end to end."""

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from rlcore_online_dpo import Comparisons, OnlineDPO, OnlineDPOConfig, online_dpo_loss, random_twos

from rlcore.config import compose
from rlcore.errors import ConfigError
from rlcore.ops import Outputs, noise_key
from rlcore.plugins import PluginManager
from rlcore.training.preflight import preflight

LN2 = math.log(2)

# Two pairs: log-ratios of the responses 1.5 against -0.5, so D = 2, and -1 against 0, so D = -1. Masked tokens hold 9.
RATIO = torch.tensor([[1.0, 0.5, 9.0], [-0.5, 9.0, 9.0], [-2.0, 0.5, 0.5], [0.25, 9.0, -0.25]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 1]])
PAIR = torch.tensor([7, 7, 3, 3])
SIDE = torch.tensor([1.0, -1.0, 1.0, -1.0])
REFERENCE = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -1.5, -2.5], [-0.1, -0.2, -0.3], [-4.0, -5.0, -6.0]])
ENTROPY = torch.arange(12.0).view(4, 3)


def loss(rows=(0, 1, 2, 3), **settings):
    """Return the terms of these rows at beta = 0.5, and their log_probs [rows, 3]."""
    rows = list(rows)
    log_probs = (REFERENCE + RATIO)[rows].requires_grad_()
    batch = {
        "response_mask": MASK[rows],
        "ref_log_probs": REFERENCE[rows],
        "dpo_pair": PAIR[rows],
        "dpo_side": SIDE[rows],
    }
    out = Outputs({"log_probs": log_probs, "entropy": ENTROPY[rows]})
    return online_dpo_loss(out, batch, OnlineDPOConfig(**{"beta": 0.5, **settings})), log_probs


def gradient(**settings):
    terms, log_probs = loss(**settings)
    (grad,) = torch.autograd.grad(terms["preference"].total, log_probs)
    return grad


@pytest.mark.parametrize(
    ("settings", "total"),
    [
        # beta D is 1 and -0.5; -log sigmoid of them is log(1 + 1/e) and log(1 + e^0.5).
        ({"loss": "sigmoid"}, 0.3132617 + 0.9740770),
        # 1 / (2 beta) = 1: (2 - 1)^2 + (-1 - 1)^2.
        ({"loss": "ipo"}, 1.0 + 4.0),
        ({"loss": "hinge"}, 0.0 + 1.5),
        # A tenth of each loss at -D: log(1 + e) = 1.3132617 and log(1 + e^-0.5) = 0.4740770; 9 and 0; 2 and 0.5.
        ({"loss": "sigmoid", "label_smoothing": 0.1}, 0.9 * 1.2873387 + 0.1 * 1.7873387),
        ({"loss": "ipo", "label_smoothing": 0.1}, 0.9 * 5.0 + 0.1 * 9.0),
        ({"loss": "hinge", "label_smoothing": 0.1}, 0.9 * 1.5 + 0.1 * 2.5),
        # The same losses at D and -D, subtracted, over 1 - 2 * 0.1.
        ({"loss": "robust", "label_smoothing": 0.1}, (0.9 * 1.2873387 - 0.1 * 1.7873387) / 0.8),
        ({"loss": "robust"}, 0.3132617 + 0.9740770),
    ],
)
def test_losses(settings, total):
    terms, _ = loss(**settings)
    assert terms["preference"].total.item() == pytest.approx(total, abs=1e-6)
    assert terms["preference"].count == 2
    assert terms["preference"].weight == 1.0


def test_a_gradient_step_makes_the_chosen_likelier_and_the_rejected_less_likely():
    """Sigmoid: -beta sigmoid(-beta D) on each token of the chosen, and its negative on the rejected."""
    first, second = 0.5 * 0.2689414, 0.5 * 0.6224593  # sigmoid(-1), sigmoid(0.5)
    expected = MASK * torch.tensor([-first, first, -second, second])[:, None]
    torch.testing.assert_close(gradient(loss="sigmoid"), expected)
    # IPO: 2 (D - 1) is 2 and -4; where D is above 1 / (2 beta), it is pulled down to it.
    expected = MASK * torch.tensor([2.0, -2.0, -4.0, 4.0])[:, None]
    torch.testing.assert_close(gradient(loss="ipo"), expected)
    # Hinge: nothing from the pair whose margin is 1, beta from the other.
    grad = gradient(loss="hinge", beta=0.6)
    assert not grad[:2].any()
    torch.testing.assert_close(grad[2:], MASK[2:] * torch.tensor([-0.6, 0.6])[:, None])
    # Smoothed: 0.9 f'(D) - 0.1 f'(-D), with sigmoid(1) = 0.7310586 and sigmoid(-0.5) = 0.3775407.
    first, second = 0.9 * first - 0.05 * 0.7310586, 0.9 * second - 0.05 * 0.3775407
    expected = MASK * torch.tensor([-first, first, -second, second])[:, None]
    torch.testing.assert_close(gradient(label_smoothing=0.1), expected)


@pytest.mark.parametrize("order", [(1, 0, 3, 2), (0, 2, 1, 3), (3, 1, 2, 0)])
@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "hinge"])
def test_pairs_are_told_by_their_number_and_not_by_their_place(order, kind):
    plain, moved = loss(loss=kind)[0], loss(order, loss=kind)[0]
    for name, term in plain.items():
        assert moved[name].total.item() == pytest.approx(term.total.item(), abs=1e-6), name
        assert moved[name].count == term.count
    torch.testing.assert_close(gradient(rows=order, loss=kind), gradient(loss=kind)[list(order)])


@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "hinge"])
def test_a_batch_is_the_sum_of_its_pairs(kind):
    whole, parts = loss(loss=kind)[0], [loss(rows, loss=kind)[0] for rows in [(0, 1), (3, 2)]]
    for name, term in whole.items():
        assert sum(part[name].total.item() for part in parts) == pytest.approx(term.total.item(), abs=1e-6), name
        assert sum(part[name].count for part in parts) == term.count


def test_metrics_are_reported_and_not_optimised():
    terms, _ = loss()
    assert {name for name, term in terms.items() if term.weight is not None} == {"preference"}
    assert terms["margin"].total.item() == pytest.approx(0.5 * (2 - 1))
    assert terms["accuracy"].total == 1  # only the first pair's chosen response has the higher implicit reward
    assert loss((0, 1))[0]["accuracy"].total == 1
    assert loss((2, 3))[0]["accuracy"].total == 0
    assert terms["chosen_reward"].total.item() == pytest.approx(0.5 * (1.5 - 1))
    assert terms["rejected_reward"].total.item() == pytest.approx(0.5 * (-0.5 + 0))
    assert {name: float(term.count) for name, term in terms.items()} == {
        **dict.fromkeys(("preference", "margin", "accuracy", "chosen_reward", "rejected_reward"), 2.0),
        "entropy": 8.0,
    }
    assert terms["entropy"].total == 0 + 1 + 3 + 6 + 7 + 8 + 9 + 11


# Pairs


def test_ties_are_left_out_and_the_preferred_is_chosen():
    compared = Comparisons(torch.tensor([0, 0, 3]), torch.tensor([1, 2, 4]), torch.tensor([1.0, 0.5, 0.0]))
    chosen, rejected = compared.pairs()
    assert chosen.tolist() == [0, 4]
    assert rejected.tolist() == [1, 3]


def test_best_against_worst_goes_by_wins():
    """Rows 0, 1, 2 win 1.5, 0.5 and 1 comparisons; rows 3, 4, 5 one each, in a ring, so none is best."""
    first, second = torch.tensor([0, 0, 1, 3, 4, 5]), torch.tensor([1, 2, 2, 4, 5, 3])
    preference = torch.tensor([1.0, 0.5, 0.5, 1.0, 1.0, 1.0])
    best = Comparisons(first, second, preference).best_against_worst([[0, 1, 2], [3, 4, 5]])
    assert (best.first.tolist(), best.second.tolist(), best.preference.tolist()) == ([0, 3], [1, 3], [1.0, 0.5])


def test_a_failed_comparison_is_neither_a_win_nor_a_loss():
    """Rows 0 to 3: 0 won against 3 and failed with 1 and 2; 1 won against 2, lost to 3; 2 lost to 1 and 3.

    So 0 has a result in one of three and is left out; 3 won 2 of 3, 1 one of 2, 2 none of 2. As half wins, the failures
    would put 0 first, with 2 of 3. Rows 4 and 5 have no result, so their prompt is dropped.
    """
    first, second = torch.tensor([0, 0, 0, 1, 1, 2, 4]), torch.tensor([1, 2, 3, 2, 3, 3, 5])
    preference = torch.tensor([math.nan, math.nan, 1.0, 1.0, 0.0, 0.0, math.nan])
    compared = Comparisons(first, second, preference)
    best = compared.best_against_worst([[0, 1, 2, 3], [4, 5]])
    assert (best.first.tolist(), best.second.tolist(), best.preference.tolist()) == ([3], [2], [1.0])
    chosen, rejected = compared.pairs()
    assert (chosen.tolist(), rejected.tolist()) == ([0, 1, 3, 3], [3, 2, 1, 2])
    nothing = Comparisons(first[6:], second[6:], preference[6:]).best_against_worst([[4, 5]])
    assert [len(each) for each in nothing.pairs()] == [0, 0]


def test_random_twos_depend_on_their_name_alone_and_are_equally_likely():
    names = [noise_key("test", number) for number in range(600)]
    groups = [[3 * number, 3 * number + 1, 3 * number + 2] for number in range(600)]
    state = torch.get_rng_state()
    twos = random_twos(groups, names)
    assert random_twos(groups[5:6], names[5:6]) == twos[5:6]
    assert torch.equal(torch.get_rng_state(), state)
    counts = [sum((a % 3, b % 3) == two for a, b in twos) for two in [(0, 1), (0, 2), (1, 2)]]
    assert sum(counts) == 600
    assert all(abs(count - 200) < 60 for count in counts), counts  # 5 standard deviations


# Steps


@pytest.fixture
def step(take_steps, tmp_path):
    """Take steps of online DPO on rewards that repeat `scores`, row after row."""

    def take(scores, *overrides, **options):
        rewards = [1.0 * scores[row % len(scores)] for row in range(64)]
        (tmp_path / "given.py").write_text(
            "from rlcore import RewardSpec\n\ndef given(prompt, response, answer):\n"
            f"    return {rewards}[:len(prompt)]\n\nscore = RewardSpec('given', given, batched=True)\n"
        )
        settings = ["algo=online_dpo", f"reward.path={tmp_path / 'given.py'}:score", "rollout.temperature=2"]
        return take_steps(*settings, *overrides, **options)

    return take


@pytest.mark.parametrize(
    ("pairs", "made", "ties"),
    [("best_worst", 4, 0), ("all", 8, 4)],  # of each of four prompts: 1 and 0 twice, 1 and 1
)
def test_pairs_and_ties_of_a_step(step, pairs, made, ties):
    (metrics,), (batch,), roles = step([1, 1, 0], "algo.group_size=3", f"algo.pairs={pairs}")
    assert roles == {"actor", "ref"}
    assert len(batch) == 12
    assert (metrics["dpo/pairs"], metrics["dpo/ties"], metrics["dpo/usable_prompts"]) == (made, ties, 1.0)
    # Policy and reference are the same before the first update: D = 0 and the loss is log 2.
    assert metrics["loss/preference"] == pytest.approx(LN2, abs=1e-6)
    assert metrics["loss/margin"] == pytest.approx(0, abs=1e-6)
    assert metrics["loss/accuracy"] == 0.5
    assert metrics["train/optimizer_steps"] == 1


def test_random_pairs_of_a_step_are_the_same_in_a_second_run(step):
    options = ("algo.group_size=3", "algo.pairs=random")
    found = [step([1, 1, 0], *options, steps=2)[0] for _ in range(2)]
    assert found[0] == found[1]
    for metrics in found[0]:
        assert metrics["dpo/pairs"] + metrics["dpo/ties"] == 4
        assert metrics["dpo/usable_prompts"] == metrics["dpo/pairs"] / 4


def test_the_share_of_usable_prompts(step):
    (metrics,), _, _ = step([0, 0, 0, 1], "algo.group_size=2")
    assert (metrics["dpo/pairs"], metrics["dpo/ties"], metrics["dpo/usable_prompts"]) == (2, 2, 0.5)


def test_a_failed_reward_is_no_preference(take_steps, tmp_path):
    """Of three scores 0, 1 and a failure, which counts as -5, only the first two are compared; best_worst too."""
    (tmp_path / "fails.py").write_text(
        "calls = []\n\ndef score(prompt, response, answer):\n    calls.append(prompt)\n"
        "    return [0, 1, 1 / (len(calls) % 3)][(len(calls) - 1) % 3]\n"
    )
    options = ["algo=online_dpo", "algo.group_size=3", f"reward.path={tmp_path / 'fails.py'}:score"]
    limits = ["reward.error_value=-5", "reward.max_failures=0.4"]
    for pairs, ties in (("all", 8), ("best_worst", 0)):
        (metrics,), (batch,), _ = take_steps(*options, *limits, f"algo.pairs={pairs}")
        assert batch["scores"].tolist() == [0, 1, -5] * 4
        assert (metrics["dpo/pairs"], metrics["dpo/ties"]) == (4, ties)


def test_equal_responses_are_no_pair_whatever_their_scores(take_steps):
    """With a temperature that makes all responses of a prompt equal, and rewards 0, 1, 0, 1."""
    options = ["algo=online_dpo", "algo.group_size=2", "rollout.top_k=1"]
    (metrics,), _, _ = take_steps(*options)
    assert (metrics["dpo/pairs"], metrics["dpo/ties"]) == (0, 4)


def test_a_step_without_a_pair_changes_nothing(step):
    (metrics, after), batches, _ = step([1], "algo.group_size=3", "algo.mini_batches=2", "algo.epochs=2", steps=2)
    assert (metrics["dpo/pairs"], metrics["dpo/ties"], metrics["dpo/usable_prompts"]) == (0, 4, 0.0)
    assert metrics["train/optimizer_steps"] == 0
    assert metrics["train/skipped_updates"] > 0
    assert set(batches[1]["weights_version"].tolist()) == {0}
    assert after["dpo/pairs"] == 0


def test_the_chosen_become_likelier_than_the_rejected(step):
    """Scores say that each prompt's second response is the better one; several passes over the first step's pairs."""
    (metrics,), _, _ = step([0, 1], "algo.group_size=2", "algo.epochs=6", "algo.beta=0.5")
    assert metrics["loss/preference"] < LN2  # the mean over the passes
    assert metrics["loss/chosen_reward"] > 0 > metrics["loss/rejected_reward"]
    assert metrics["loss/accuracy"] > 0.5
    assert metrics["loss/margin"] == pytest.approx(metrics["loss/chosen_reward"] - metrics["loss/rejected_reward"])


@pytest.mark.e2e
@pytest.mark.parametrize("limit", ["engine.micro_batch_rows=1", "engine.micro_batch_rows=3"])
def test_no_micro_batch_parts_a_pair(step, limit):
    """Were one parted, a lone response would count as a pair whose other log-ratio is 0."""
    options = ("algo.group_size=3", "algo.pairs=all", "algo.beta=2", "algo.epochs=2")
    ((whole,), _, _), ((cut,), _, _) = step([0, 1, 3], *options), step([0, 1, 3], *options, limit)
    for name in ("loss/preference", "loss/margin", "loss/accuracy", "train/grad_norm"):
        assert cut[name] == pytest.approx(whole[name], rel=1e-4), name
    assert whole["dpo/pairs"] == 12


# The reference


def weights(run, role):
    engine = run.roles[role].group._processes._workers[role][0].train
    return {name: value.clone() for name, value in engine.export(torch.float32)}


@pytest.mark.parametrize(
    ("options", "same"),
    [
        (["algo.reference=frozen"], False),
        (["algo.reference=copied", "algo.reference_every=2"], True),
        (["algo.reference=copied", "algo.reference_every=3"], False),
    ],
)
def test_the_reference_is_frozen_or_copied_every_few_steps(step, options, same):
    """Two steps, so that a copy every 2 has just been made, and one every 3 has not."""
    seen = {}

    def read(run):
        seen.update(ref=weights(run, "ref"), actor=weights(run, "actor"))

    (_, second), _, _ = step([0, 1], "algo.group_size=2", *options, steps=2, then=read)
    assert all(torch.equal(value, seen["actor"][name]) for name, value in seen["ref"].items()) == same
    assert abs(second["loss/chosen_reward"]) > 1e-4  # the policy of the second step is not its reference


@pytest.mark.e2e
def test_an_averaged_reference_goes_a_share_of_the_way_after_each_step(step):
    """One step at share 0.25: start + (actor - start) / 4."""
    seen = {}

    def read(run):
        seen.update(ref=weights(run, "ref"), actor=weights(run, "actor"))

    step([0, 1], "algo.reference=frozen", then=read)
    start, actor = seen["ref"], seen["actor"]
    step([0, 1], "algo.reference=averaged", "algo.reference_share=0.25", then=read)
    for name, value in seen["ref"].items():
        torch.testing.assert_close(value, start[name] + 0.25 * (actor[name] - start[name]))
    assert any(not torch.equal(value, start[name]) for name, value in seen["ref"].items())


# The judge


class LongerWins(BaseHTTPRequestHandler):
    """A judge that prefers the longer response."""

    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        first, second = (len(part.split(">\n", 1)[1].split("\n</")[0]) for part in question.split("<response_")[1:])
        verdict = "A" if first > second else "B" if second > first else "tie"
        body = json.dumps({"choices": [{"message": {"content": verdict}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.mark.parametrize("pairs", ["best_worst", "all"])
def test_a_judge_in_place_of_the_scores(step, pairs):
    """Scores would make each prompt's last response the best; the judge prefers longer ones."""
    with ThreadingHTTPServer(("127.0.0.1", 0), LongerWins) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        judge = [f"judge.url=http://127.0.0.1:{server.server_port}/v1", "judge.model=longer", "algo.judge=pairwise"]
        (metrics,), (batch,), _ = step([0, 0, 1], "algo.group_size=3", f"algo.pairs={pairs}", *judge)
        server.shutdown()
    prompts = [[len(text) for text in batch["response_text"][start : start + 3]] for start in (0, 3, 6, 9)]
    spread = [max(lengths) > min(lengths) for lengths in prompts]
    decided = [sum(a != b for a, b in zip(p, p[1:] + p[:1], strict=True)) for p in prompts]
    assert any(spread)
    assert metrics["dpo/usable_prompts"] == sum(spread) / 4
    assert metrics["dpo/pairs"] == sum(decided if pairs == "all" else spread)
    assert metrics["judge/pairs"] == 12
    assert metrics["judge/errors"] == 0


def test_with_a_judge_a_reward_may_fail(take_steps, tmp_path):
    """Nothing is learned from the scores, so all rows stay and are judged."""
    (tmp_path / "fails.py").write_text("def score(prompt, response, answer):\n    raise ValueError('no answer')\n")
    with ThreadingHTTPServer(("127.0.0.1", 0), LongerWins) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        judge = [f"judge.url=http://127.0.0.1:{server.server_port}/v1", "judge.model=longer", "algo.judge=pairwise"]
        options = ["algo=online_dpo", "algo.group_size=3", "algo.pairs=all", "rollout.temperature=4", *judge]
        (plain,), _, _ = take_steps(*options)
        (failed,), (batch,), _ = take_steps(*options, f"reward.path={tmp_path / 'fails.py'}:score")
        server.shutdown()
    assert batch["reward_error"].all()
    assert failed["dpo/pairs"] == plain["dpo/pairs"] > 0
    assert failed["judge/pairs"] == 12


# Config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algo.judge=pairwise"], r"algo\.judge=pairwise asks a judge: set judge\.url and judge\.model"),
        (["rollout.temperature=0"], r"rollout\.temperature=0 makes a prompt's responses equal"),
        (["algo.label_smoothing=0.5"], r"algo\.label_smoothing=0\.5 treats every preference as a coin toss"),
        (["data.batch_size=3", "algo.mini_batches=4"], r"mini_batches is 4, but a step has at most 3 pairs"),
        (["data.batch_size=1", "algo.mini_batches=7", "algo.group_size=4", "algo.pairs=all"], "at most 6 pairs"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides, message):
    plugins = PluginManager.load()
    config = compose(["algo=online_dpo", "cluster=in_process", *overrides], plugins)
    with pytest.raises(ConfigError, match=message):
        preflight(config, plugins)


@pytest.mark.parametrize(
    "override",
    ["group_size=1", "pairs=some", "judge=human", "loss=kto", "beta=0", "label_smoothing=0.6", "reference_every=0"],
)
def test_settings_out_of_range_are_refused(override):
    with pytest.raises(ConfigError, match=override.split("=")[0]):
        compose(["algo=online_dpo", f"algo.{override}"], PluginManager.load())


def test_only_a_reference_that_moves_follows_the_actor():
    for reference, follows in (("frozen", None), ("copied", "actor"), ("averaged", "actor")):
        roles = OnlineDPO(OnlineDPOConfig(reference=reference)).roles()
        assert roles["ref"].follows == follows
        assert (roles["actor"].trains, roles["actor"].generates, roles["ref"].trains) == (True, True, False)
