"""The order of an epoch by difficulty, and the rows that it leaves out. Together under a second."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from rlcore import DatasetSpec
from rlcore.config import CurriculumConfig
from rlcore.config.schema import DataConfig
from rlcore.data.curriculum import Curriculum, PromptResult
from rlcore.data.loader import PromptLoader
from rlcore.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEVELS = [3, 1, 2, 1, 3, 2, 1, 2, 3, 1]
ROWS = [{"prompt": f"{row}+1=", "answer": str(row + 1), "level": level} for row, level in enumerate(LEVELS)]


@pytest.fixture
def loader(tokenizer: PreTrainedTokenizerBase) -> Any:
    def make(rows: Any = ROWS, seed: int = 0, batch_size: int = 2, **curriculum: Any) -> PromptLoader:
        splits = {"train": rows, "eval": [{"prompt": "9+9=", "answer": "18", "level": 1}]}
        dataset = DatasetSpec("own", lambda _, split: splits[split], reward="arithmetic")
        config = DataConfig(name="own", batch_size=batch_size, curriculum=CurriculumConfig(**curriculum))
        return PromptLoader(config, dataset, tokenizer, seed=seed)

    return make


def epoch(loader: PromptLoader, batches: int = 5) -> list[int]:
    """The rows of the next batches."""
    return [int(uid.split(":")[1]) for _ in range(batches) for uid in loader.next_batch()["uid"]]


def test_a_column_orders_each_epoch_and_ties_stay_shuffled(loader: Any) -> None:
    plain, easy = loader(), loader(by="level")
    for _ in range(2):
        shuffled, ordered = epoch(plain), epoch(easy)
        assert ordered == sorted(shuffled, key=lambda row: LEVELS[row])
    assert [LEVELS[row] for row in epoch(loader(by="level", easy="high"))] == sorted(LEVELS, reverse=True)
    assert epoch(loader(by="level", seed=1)) != epoch(loader(by="level"))


def test_a_column_may_be_inside_an_object(loader: Any) -> None:
    rows = [{"prompt": f"{row}+1=", "extra": {"level": -row}} for row in range(10)]
    assert epoch(loader(rows, by="extra.level")) == list(range(9, -1, -1))


@pytest.mark.parametrize("value", ["3", None, float("nan"), float("inf"), True])
def test_a_difficulty_that_is_no_number_names_its_row(loader: Any, value: Any) -> None:
    rows = [*ROWS[:2], {**ROWS[2], "level": value}]
    with pytest.raises(DataError, match=r"split 'train', row 3: data\.curriculum\.by=level needs a finite number"):
        loader(rows, by="level")


def test_an_unknown_column_and_a_column_named_measured(loader: Any) -> None:
    with pytest.raises(DataError, match="Did you mean 'level'"):
        loader(by="levle")
    with pytest.raises(ConfigError, match="rename the column"):
        loader([{**row, "measured": 1.0} for row in ROWS], by="measured")


def test_measured_rewards_order_the_next_epoch(loader: Any) -> None:
    """Row 7 has no result and comes first; then the rows from the highest reward to the lowest."""
    made = loader(by="measured")
    first = epoch(made)
    assert first == epoch(loader())
    made.learn({f"0:{row}": PromptResult(row / 10, False) for row in range(10) if row != 7})
    assert epoch(made) == [7, 9, 8, 6, 5, 4, 3, 2, 1, 0]
    made.learn({"1:0": PromptResult(0.95, False), "1:7": PromptResult(0.0, True)})
    assert epoch(made) == [0, 9, 8, 6, 5, 4, 3, 2, 1, 7]


def test_a_row_that_taught_nothing_is_left_out_with_the_given_probability(loader: Any) -> None:
    made = loader(skip=0.25)
    made.learn({f"0:{row}": PromptResult(1.0, row < 4) for row in range(10)})
    came, epochs = Counter[int](), 400
    for _ in range(epochs):
        made._begin_epoch()
        came.update(made._order)
        assert len(made._order) + made.left_out_this_epoch == 10
    assert all(came[row] == epochs for row in range(4, 10))
    # Four rows with 400 draws each: the standard deviation of the share is 0.011.
    assert sum(came[row] for row in range(4)) / (4 * epochs) == pytest.approx(0.75, abs=0.05)


def test_an_epoch_keeps_at_least_a_batch(loader: Any) -> None:
    made = loader(skip=1.0, batch_size=4)
    made.learn({f"0:{row}": PromptResult(0.0, True) for row in range(10)})
    made._begin_epoch()
    assert len(made.next_batch()) == 4
    assert made.left_out_this_epoch == 6
    made.learn({"1:3": PromptResult(0.5, False)})
    assert all(3 in epoch(made, 1) for _ in range(3))


@pytest.mark.parametrize("steps", range(12))
def test_a_resumed_loader_goes_on_row_by_row(loader: Any, steps: int) -> None:
    """Results of every step change the next epoch, and not the one under way."""

    def step(made: PromptLoader) -> list[str]:
        uids = list(made.next_batch()["uid"])
        made.learn({uid: PromptResult(draw.random(), draw.random() < 0.5) for uid in uids})
        return uids

    settings = {"by": "measured", "skip": 0.5}
    draw = random.Random(3)
    straight = loader(**settings)
    expected = [step(straight) for _ in range(16)]
    draw = random.Random(3)
    stopped = loader(**settings)
    for _ in range(steps):
        step(stopped)
    resumed = loader(**settings)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert [step(resumed) for _ in range(16 - steps)] == expected[steps:]


def test_a_uid_of_another_form_is_an_error_where_prompts_are_measured(loader: Any) -> None:
    loader().learn({"0:1#2": PromptResult(1.0, False)})  # nothing is measured
    with pytest.raises(DataError, match=r"uid='0:1#2', which is no prompt of the run"):
        loader(skip=0.5).learn({"0:1#2": PromptResult(1.0, False)})


def test_another_curriculum_is_not_resumed(loader: Any) -> None:
    state = loader(by="level").state_dict()
    other = [{**row, "level": 0} for row in ROWS]
    for made in (loader(other, by="level"), loader(by="level", easy="high"), loader(by="level", skip=0.1)):
        with pytest.raises(CheckpointError, match=r"data\.curriculum, or the column 'level', differs"):
            made.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"data\.curriculum differs"):
        loader().load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"data\.curriculum differs"):
        loader(by="level").load_state_dict(loader().state_dict())
    assert "curriculum" not in loader().state_dict()


def test_without_a_curriculum_nothing_is_kept() -> None:
    made = Curriculum(CurriculumConfig(by="level"), ROWS, "x")
    made.learn({0: PromptResult(1.0, True)})
    assert "results" not in made.state_dict()
