"""Batches of several data sets by weight: counts by hand, epochs, resuming, columns, and held-out prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from rlcore import DatasetSpec
from rlcore.config.schema import DataConfig, MixConfig
from rlcore.data.loader import PromptLoader
from rlcore.data.mix import MixLoader
from rlcore.errors import CheckpointError, DataError
from rlcore.protocol.glossary import check_fields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Rows = Sequence[dict[str, Any]]
SUMS = [{"prompt": f"{i}+1=", "answer": str(i + 1), "level": i} for i in range(6)]
CHAT = [{"prompt": f"{i}-1=", "answer": str(i - 1), "mood": "good"} for i in range(1, 4)]
HELD_OUT = [{"prompt": "7+7=", "answer": "14"}, {"prompt": "8+8=", "answer": "16"}]


@pytest.fixture
def mix(tokenizer: PreTrainedTokenizerBase) -> Any:
    def make(
        weights: dict[str, float], batch_size: int, held_out: Rows = HELD_OUT, rows: Rows = SUMS, **config: Any
    ) -> MixLoader:
        rows_of = {"sums": rows, "chat": CHAT, "more": CHAT}
        loaders = {}
        for name in weights:
            splits = {"train": rows_of[name], "eval": HELD_OUT if name == "sums" else held_out}
            dataset = DatasetSpec(name, lambda _, split, splits=splits: splits[split], reward="arithmetic")
            own = DataConfig(name=name, batch_size=batch_size, drop_last=False, **config)
            loaders[name] = PromptLoader(own, dataset, tokenizer, seed=3)
        sources = {name: MixConfig(weight=weight) for name, weight in weights.items()}
        return MixLoader(DataConfig(batch_size=batch_size, mix=sources), loaders)

    return make


def uids(loader: MixLoader, batches: int) -> list[str]:
    return [uid for _ in range(batches) for uid in loader.next_batch()["uid"]]


def sources(loader: MixLoader, batches: int) -> list[list[str]]:
    return [[name[0] for name in loader.next_batch()["mix_source"]] for _ in range(batches)]


def test_each_prompt_is_of_the_source_that_is_furthest_behind(mix: Any) -> None:
    """Shares 2/3 and 1/3. Behind by 2/3 and 1/3 before the first prompt, then 1/3 and 2/3, then 1 and 0, and so on."""
    assert sources(mix({"sums": 2, "chat": 1}, 4), 3) == [list("scss"), list("cssc"), list("sscs")]


def test_shares_hold_over_the_steps_where_a_batch_cannot_hold_them(mix: Any) -> None:
    counted = Counter(name for batch in sources(mix({"sums": 0.7, "chat": 0.2, "more": 0.1}, 3), 10) for name in batch)
    assert counted == {"s": 21, "c": 6, "m": 3}


def test_the_same_prompts_come_twice_in_a_batch_with_uids_of_two_epochs(mix: Any) -> None:
    """Five prompts of three: the epoch ends inside the batch, and the second begins there."""
    loader = mix({"chat": 1}, 5)
    batch = loader.next_batch()
    epochs = [uid.rpartition(":")[0] for uid in batch["uid"]]
    assert epochs == ["chat/0"] * 3 + ["chat/1"] * 2
    assert len(set(batch["uid"])) == 5
    assert len(set(batch["prompt_text"])) == 3
    # An epoch has each prompt once, also the one that began in another batch.
    seen = [*batch["uid"], *uids(loader, 2)]
    assert Counter(uid.rpartition(":")[0] for uid in seen) == {f"chat/{epoch}": 3 for epoch in range(5)}
    assert len(set(seen)) == 15


def test_sources_shuffle_by_themselves(mix: Any) -> None:
    """The prompts of a source do not depend on the other sources and their weights."""
    alone, mixed = uids(mix({"sums": 1}, 4), 4), uids(mix({"chat": 3, "sums": 1}, 4), 16)
    assert [uid for uid in mixed if uid.startswith("sums")] == alone
    assert alone[:6] != sorted(alone[:6])


def test_a_resumed_mix_goes_on_to_the_row(mix: Any) -> None:
    weights = {"sums": 0.6, "chat": 0.4}
    straight = uids(mix(weights, 3), 9)
    for steps in range(1, 8):
        first, second = mix(weights, 3), mix(weights, 3)
        before = uids(first, steps)
        second.load_state_dict(first.state_dict())
        assert before + uids(second, 9 - steps) == straight
    changed = mix(weights, 3, rows=SUMS[:5])
    with pytest.raises(CheckpointError, match=r"data\.mix\.sums: the training prompts differ"):
        changed.load_state_dict(first.state_dict())


def test_a_mix_says_how_it_differs(mix: Any) -> None:
    state = mix({"sums": 0.6, "chat": 0.4}, 3).state_dict()
    assert mix({"sums": 0.6, "chat": 0.4}, 3).difference(state) is None
    assert mix({"sums": 6, "chat": 4}, 3).difference(state) is None  # the same shares
    assert (
        mix({"sums": 0.5, "chat": 0.5}, 3).difference(state) == "the weights of data.mix differ from the checkpoint's"
    )
    other = mix({"sums": 0.6, "chat": 0.4}, 2).difference(state)
    assert other == "data.batch_size = 2 differs from the checkpoint's 3"
    assert mix({"sums": 1}, 3).difference(state) == "data.mix has sums, and the checkpoint's sums, chat"
    of_one = mix({"sums": 1}, 3).sources["sums"]
    assert "the training prompts differ" in str(of_one.difference(state))
    assert mix({"sums": 1}, 3).difference(of_one.state_dict()) == "data.mix has sums, and the checkpoint's nothing"


def test_columns_of_one_source_are_none_in_the_others(mix: Any) -> None:
    loader = mix({"sums": 1, "chat": 1}, 4)
    batch = loader.next_batch()
    check_fields(batch)
    assert list(batch["mix_source"]) == ["sums", "chat"] * 2
    assert [level is None for level in batch["level"]] == [False, True] * 2
    assert list(batch["mood"]) == [None, "good"] * 2
    own = loader.own_columns(batch[[0, 2]], "sums")
    assert "level" in own
    assert "mood" not in own


def test_the_held_out_prompts_of_one_source_are_trained_on_in_none(mix: Any) -> None:
    loader = mix({"sums": 1, "chat": 1}, 4, held_out=[{"prompt": "2+1=", "answer": "3"}])
    assert (loader.counts["sums/held_out_in_train"], loader.counts["chat/held_out_in_train"]) == (1, 0)
    texts = {text for _ in range(4) for text in loader.next_batch()["prompt_text"]}
    assert {row["prompt"] for row in [*SUMS, *CHAT]} - texts == {"2+1="}
    with pytest.raises(DataError, match=r"^data\.mix\.sums: data=sums: every training prompt is also held out"):
        mix({"sums": 1, "chat": 1}, 4, held_out=SUMS)


def test_held_out_prompts_of_all_sources(mix: Any) -> None:
    batch = mix({"sums": 1, "chat": 1}, 4, eval_size=1).evaluated()
    assert list(batch["uid"]) == ["sums/eval:0", "chat/eval:0"]
    assert list(batch["mix_source"]) == ["sums", "chat"]
    everything = mix({"sums": 1, "chat": 1}, 4, eval_size=0).evaluated()
    assert list(everything["uid"]) == ["sums/eval:0", "sums/eval:1", "chat/eval:0", "chat/eval:1"]
