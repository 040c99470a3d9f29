"""The metrics of a step, each worked by hand."""

import math

import pytest
import torch

from rlcore.errors import DataError
from rlcore.protocol import DataProto
from rlcore.training.health import step_metrics


def scored(scores, uid, lengths, *, prompt_length=1, finished=None, errors=None, **more) -> DataProto:
    rows = len(scores)
    return DataProto.from_single_dict(
        {
            "scores": torch.tensor(scores, dtype=torch.float32),
            "uid": uid,
            "response_length": torch.tensor(lengths, dtype=torch.int64),
            "prompt_length": torch.full((rows,), prompt_length, dtype=torch.int64),
            "finished": torch.tensor(finished or [True] * rows),
            "reward_error": torch.tensor(errors or [False] * rows),
            **{name.replace("__", "/"): torch.tensor(values) for name, values in more.items()},
        }
    )


def six_rows() -> DataProto:
    """Three prompts, of which only `a` got different rewards."""
    return scored(
        [1.0, 0.0, 1.0, 1.0, 0.5, 0.5],
        ["a", "a", "b", "b", "c", "c"],
        [3, 5, 2, 2, 4, 6],
        prompt_length=4,
        finished=[True, True, True, False, True, True],
        errors=[False, True, False, False, False, False],
    )


def test_every_metric_of_one_batch():
    assert step_metrics({}, {}, [six_rows()], pass_score=1.0) == pytest.approx(
        {
            "reward/mean": 4 / 6,
            # Squares of the deviations 1/3 (three times), -2/3, -1/6 (twice) add up to 5/6; over 6 rows: 5/36.
            "reward/std": math.sqrt(5) / 6,
            "reward/accuracy": 3 / 6,
            "reward/errors": 1,
            "response/mean_length": 22 / 6,
            "health/equal_groups": 2 / 3,
            "health/effective_tokens": 3 + 5,
            "health/truncated": 1 / 6,
            "reward/dropped_groups": 0,
            "tokens": 6 * 4 + 22,
        }
    )


@pytest.mark.parametrize(("pass_score", "share"), [(0.5, 5 / 6), (0.6, 3 / 6), (1.1, 0.0)])
def test_accuracy_is_the_share_of_scores_from_the_pass_score_on(pass_score, share):
    assert step_metrics({}, {}, [six_rows()], pass_score)["reward/accuracy"] == pytest.approx(share)


def test_a_failed_reward_is_no_right_answer_whatever_value_it_got():
    batch = scored([1.0, 1.0], ["a", "b"], [1, 1], errors=[False, True])
    metrics = step_metrics({}, {}, [batch], pass_score=1.0)
    assert (metrics["reward/accuracy"], metrics["reward/mean"], metrics["reward/errors"]) == (0.5, 1.0, 1)


def test_samples_without_a_reward_count_in_no_mean_of_rewards():
    """Of prompt `a` a single sample is left, of `b` two equal ones; `c` never had another."""
    nan = math.nan
    batch = scored(
        [1.0, nan, 0.5, 0.5, nan, 0.0],
        ["a", "a", "b", "b", "b", "c"],
        [3, 5, 2, 2, 4, 6],
        errors=[False, True, False, False, True, False],
        score__brief=[nan, nan, 4.0, 2.0, nan, nan],
        score__never=[nan] * 6,
    )
    metrics = step_metrics({}, {}, [batch], pass_score=1.0)
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/std"] == pytest.approx(math.sqrt(0.5 / 4))
    assert metrics["reward/accuracy"] == 0.25
    assert (metrics["reward/errors"], metrics["reward/dropped_groups"]) == (2, 1)
    assert metrics["health/equal_groups"] == 1.0
    assert metrics["response/mean_length"] == 22 / 6
    assert metrics["reward/brief"] == 3.0
    assert "reward/never" not in metrics


def test_where_no_sample_has_a_reward_there_is_no_mean_of_rewards():
    nan = math.nan
    batch = scored([nan, nan], ["a", "a"], [3, 5], errors=[True, True])
    metrics = step_metrics({}, {}, [batch], pass_score=1.0)
    assert metrics == {
        "reward/errors": 2,
        "response/mean_length": 4,
        "health/truncated": 0,
        "tokens": metrics["tokens"],
    }


def test_batches_of_different_sizes_weigh_by_their_rows():
    one = scored([1.0], ["a"], [2], prompt_length=10, score__length=[4.0])
    three = scored([0.0, 0.0, 0.0], ["b", "b", "c"], [6, 6, 6], finished=[False, False, True], score__length=[0.0] * 3)
    metrics = step_metrics({}, {}, [one, three], pass_score=1.0)
    assert metrics["reward/mean"] == 0.25  # the mean of the batches' means would be 0.5
    assert metrics["reward/std"] == pytest.approx(math.sqrt(3) / 4)
    assert metrics["reward/accuracy"] == 0.25
    assert metrics["response/mean_length"] == 5
    assert metrics["health/truncated"] == 0.5
    assert metrics["health/equal_groups"] == 1.0
    assert metrics["health/effective_tokens"] == 0
    assert metrics["tokens"] == 10 + 2 + 3 + 18
    assert metrics["reward/length"] == 1.0


def test_rows_of_one_prompt_in_two_batches_are_one_group():
    metrics = step_metrics({}, {}, [scored([1.0], ["a"], [2]), scored([0.0, 3.0], ["a", "b"], [4, 8])], 1.0)
    assert metrics["health/equal_groups"] == 0.5  # b, alone
    assert metrics["health/effective_tokens"] == 2 + 4


def test_scores_by_reward_function_where_every_batch_has_them():
    first = scored([1.0, 0.0], ["a", "a"], [1, 1], score__exact=[1.0, 0.0], score__short=[0.5, 0.5])
    second = scored([1.0], ["b"], [1], score__exact=[1.0])
    metrics = step_metrics({}, {}, [first, second], 1.0)
    assert metrics["reward/exact"] == pytest.approx(2 / 3)
    assert "reward/short" not in metrics
    assert step_metrics({}, {}, [first], 1.0)["reward/short"] == 0.5


@pytest.mark.parametrize(
    ("returned", "kl"),
    [
        ({"loss/kl": 0.25, "loss/kl_old": 0.5}, 0.25),
        ({"loss/kl_old": 0.5}, 0.5),
        ({"loss/kl": 0.0, "loss/kl_old": 0.5}, 0.0),
        ({"loss/policy": 1.0}, None),
    ],
)
def test_the_kl_is_that_to_the_reference_or_to_the_policy_that_sampled(returned, kl):
    assert step_metrics(returned, {}, [], 1.0).get("kl/mean") == kl


def test_a_step_that_scored_nothing_has_what_it_returned_and_logged():
    metrics = step_metrics({"loss/policy": 1, "same": 1.0}, {"mine": 2.0, "same": 3.0}, [], pass_score=1.0)
    assert metrics == {"loss/policy": 1.0, "mine": 2.0, "same": 3.0, "tokens": 0.0}
    assert all(type(value) is float for value in metrics.values())


@pytest.mark.parametrize("returned", [None, 3, [("loss", 1.0)]])
def test_a_step_must_return_a_mapping(returned):
    with pytest.raises(DataError, match=rf"{type(returned).__name__}; it must return a mapping of metrics"):
        step_metrics(returned, {}, [], 1.0)


@pytest.mark.parametrize("value", ["high", None, torch.tensor([1.0, 2.0]), [1.0]])
def test_a_metric_must_be_a_number(value):
    with pytest.raises(DataError, match=r"returned loss=.*a metric must be a number"):
        step_metrics({"fine": 1.0, "loss": value}, {}, [], 1.0)


def test_a_reward_that_is_not_recorded_is_left_out_of_the_steps_metrics(open_small):
    run, prompts = open_small()
    run.begin_step(1)
    sampled, greedy = run.actor.generate(prompts), run.actor.generate(prompts, temperature=0.0)
    scores = run.reward(sampled)["scores"]
    assert len(run.reward(greedy, record=False)["scores"]) == len(prompts)
    _, (scored,) = run.end_step()
    assert scored["scores"].tolist() == scores.tolist()
    assert scored["response_text"].tolist() == sampled["response_text"].tolist()


@pytest.mark.parametrize(("value", "said"), [(math.nan, "nan"), (math.inf, "inf")])
def test_scores_that_are_not_finite_stop_the_step(value, said):
    """An algorithm may have passed over them: NaN is neither above a threshold nor the best of a group."""
    batch = scored([1.0, value, 0.0], ["a", "b", "c"], [1, 1, 1])
    with pytest.raises(DataError, match=rf"1 of 3 scores are not finite; the first, of uid=b, is {said}\. Fix"):
        step_metrics({}, {}, [six_rows(), batch], pass_score=1.0)


def test_groups_of_one_say_nothing():
    metrics = step_metrics({}, {}, [scored([1.0, 0.0], ["a", "b"], [2, 2])], 1.0)
    assert not {"health/equal_groups", "health/effective_tokens"} & metrics.keys()
    assert metrics["reward/mean"] == 0.5
