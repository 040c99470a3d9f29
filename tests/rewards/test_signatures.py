"""Functions written for TRL and verl run unchanged. About 8 s."""

from pathlib import Path

import pytest

from rlcore.config.schema import RewardConfig
from rlcore.errors import ConfigError
from rlcore.rewards.compose import resolve

FILE = Path(__file__).parent / "trl_and_verl.py"
PROMPTS, RESPONSES, ANSWERS = ["1+1=", "2+2=", "3+3="], ["2", "5", "6"], ["2", "4", None]


@pytest.fixture
def scored():
    """Return what `Rewards` says of the three rows by a function of the file, in a reward process."""
    from rlcore.rewards.scoring import Rewards

    def score(name, answer_key="answer", **columns):
        settings = RewardConfig(path=f"{FILE}:{name}")
        rewards = Rewards(resolve(settings, "", {}, answer_key=answer_key), settings)
        try:
            return rewards.score(PROMPTS, RESPONSES, ANSWERS, columns)
        finally:
            rewards.close()

    return score


def totals(scored):
    return [None if failure else float(total) for total, failure in zip(scored.totals, scored.failures, strict=True)]


def test_a_function_of_trls_form_gets_lists_by_name(scored):
    assert totals(scored("reward_len")) == [-19.0, -19.0, -19.0]
    assert totals(scored("with_optional_state")) == [0.0, 0.0, 0.0]
    assert totals(scored("right")) == [1.0, 0.0, None]  # None: does not apply to the third
    assert totals(scored("by_ground_truth")) == [1.0, 0.0, 0.0]  # verl's name of the answer
    assert totals(scored("by_ground_truth", ground_truth=["5", "5", "5"])) == [0.0, 1.0, 0.0]  # a column of the data
    found = scored("by_column", answer_key="data.solution", level=[1, 2, 3])
    assert totals(found) == [1.0, 0.0, 0.0]


def test_trls_conversations_are_lists_of_messages(scored):
    messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    assert totals(scored("conversational", prompt_messages=messages)) == [1.0, 0.0, 0.0]


def test_a_function_of_verls_form_gets_a_sample_and_may_return_a_dict(scored):
    extra = [{"index": 10}, {"index": 20}, None]
    found = scored("compute_score", data_source=["gsm8k"] * 3, extra_info=extra)
    assert totals(found) == [11.0, 20.0, 0.0]
    assert totals(scored("short_score", data_source=["four"] * 3)) == [4.0, 0.0, 0.0]
    missing = scored("no_score", data_source=["x"] * 3)
    assert "raised ValueError: returned a dict without `score`: acc" in missing.failures[0]["cause"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("with_state", r"has TRL's form and needs trainer_state, which rlcore does not give\. Give these"),
        ("more_score", r"has verl's form and needs tokenizer, which rlcore does not give; it gives data_source, solut"),
    ],
)
def test_a_parameter_that_cannot_be_given_is_refused_at_the_start(name, message):
    with pytest.raises(ConfigError, match=message):
        resolve(RewardConfig(path=f"{FILE}:{name}"), "", {})
