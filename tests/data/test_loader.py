from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rlcore import DatasetSpec
from rlcore.config.schema import DataConfig
from rlcore.data.loader import PromptLoader, held_out_prompts
from rlcore.errors import CheckpointError, ConfigError, DataError
from rlcore.protocol import DataProto
from rlcore.protocol.glossary import check_fields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Rows = Sequence[dict[str, Any]]
TRAIN = [{"prompt": f"{i}+1=", "answer": str(i + 1), "level": i % 3} for i in range(10)]
EVAL = [{"prompt": f"{i}+2=", "answer": str(i + 2), "level": 0} for i in range(4)]


@pytest.fixture
def loader(tokenizer: PreTrainedTokenizerBase) -> Any:
    def make(train: Rows = TRAIN, held_out: Rows = EVAL, seed: int = 0, **config: Any) -> PromptLoader:
        splits = {"train": train, "eval": held_out}
        dataset = DatasetSpec("own", lambda _, split: splits[split], reward="arithmetic")
        return PromptLoader(DataConfig(name="own", **{"batch_size": 4, **config}), dataset, tokenizer, seed=seed)

    return make


def uids(batch: DataProto) -> list[str]:
    return list(batch["uid"])


def test_what_a_batch_holds(loader: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    batch = loader(shuffle=False).next_batch()
    assert set(batch.keys()) == {"prompts", "prompt_text", "answer", "uid", "level"}
    assert uids(batch) == ["0:0", "0:1", "0:2", "0:3"]
    assert list(batch["prompt_text"]) == ["0+1=", "1+1=", "2+1=", "3+1="]
    assert list(batch["answer"]) == ["1", "2", "3", "4"]
    assert list(batch["level"]) == [0, 1, 2, 0]
    assert batch["prompts"].dtype == torch.int64
    assert tokenizer.decode(batch["prompts"][1]) == "<|user|>1+1=<|end|><|assistant|>"
    check_fields(batch)


def test_special_tokens_that_a_prompt_spells_out_are_text_unless_rendered(
    loader: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    text = "1<|end|><|system|>2"
    rows = [{"prompt": "1+1="}, {"prompt": text}, {"prompt": [{"role": "user", "content": text}]}]
    plain = loader(train=rows, held_out=[*EVAL, {"prompt": "<|user|>"}], shuffle=False, batch_size=3)
    batch = plain.next_batch()
    told = ["<|user|>", *text, "<|end|>", "<|assistant|>"]
    assert [tokenizer.convert_ids_to_tokens(row) for row in batch["prompts"].to_list()[1:]] == [told, told]
    assert list(batch["prompt_text"]) == ["1+1=", text, f"<|user|>{text}<|end|><|assistant|>"]
    assert plain.special_tokens_line == (
        "3 prompts spell out special tokens of the model, which are text there (the first: data=own, split "
        "'train', row 2); data.rendered names the columns in which they are tokens: in texts that a template has "
        "rendered, and in the assistant's messages"
    )
    rendered = loader(train=rows[:2], rendered=["prompt"], shuffle=False, batch_size=2)
    assert tokenizer.convert_ids_to_tokens(rendered.next_batch()["prompts"][1]) == ["1", "<|end|>", "<|system|>", "2"]
    assert rendered.special_tokens_line is None
    # The same prompt as a text and as messages: compared as the model reads it.
    assert loader(train=rows, held_out=rows[1:2], batch_size=1).counts["held_out_in_train"] == 2


def test_in_a_rendered_column_special_tokens_of_the_assistants_messages_are_tokens(
    loader: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    """An example answer and the beginning of the next one; a user's stay text."""
    text, ended = "1<|system|>", "<|end|>"
    roles = ["user", "assistant", "user", "assistant"]
    rows = [{"prompt": [{"role": role, "content": text} for role in roles]}]

    def tokens(**given: Any) -> list[str]:
        made = loader(train=rows, batch_size=1, **given)
        assert made.special_tokens_line is not None
        return tokenizer.convert_ids_to_tokens(made.next_batch()["prompts"][0])

    user, begun = ["<|user|>", *text, ended, "<|assistant|>"], ["1", "<|system|>"]
    assert tokens() == [*user, *text, ended, *user, *text]
    assert tokens(rendered=["prompt"]) == [*user, *begun, ended, *user, *begun]


def test_a_template_that_changes_the_assistants_text_names_the_remedy(
    loader: Any, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Qwen3's, which takes reasoning out of earlier answers."""
    template = "{% for message in messages %}{{ message.content.split('<|end|>')[-1] }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    rows = [{"prompt": [{"role": "assistant", "content": "1<|end|>2"}, {"role": "user", "content": "3"}]}]
    with pytest.raises(DataError, match=r"row 1: the chat template changes .* name the prompts' column in data\.rend"):
        loader(train=rows, batch_size=1)
    made = loader(train=rows, batch_size=1, rendered=["prompt"])
    assert tokenizer.convert_ids_to_tokens(made.next_batch()["prompts"][0]) == ["2", "3"]


def test_an_epoch_is_each_prompt_once_and_drop_last_leaves_the_rest_out(loader: Any) -> None:
    keep = loader(drop_last=False)
    sizes, seen = [], []
    for _ in range(6):
        batch = keep.next_batch()
        sizes.append(len(batch))
        seen += uids(batch)
    assert sizes == [4, 4, 2, 4, 4, 2]
    assert sorted(seen) == [f"{epoch}:{row}" for epoch in (0, 1) for row in range(10)]
    drop = loader(drop_last=True)
    assert [len(drop.next_batch()) for _ in range(4)] == [4, 4, 4, 4]
    assert drop.epoch == 1


def test_the_order_depends_on_seed_and_epoch_alone(loader: Any) -> None:
    random.seed(1)
    torch.manual_seed(1)
    first, again, other = loader(seed=3), loader(seed=3), loader(seed=4)
    epochs = [[uid.split(":")[1] for uid in uids(first.next_batch()) + uids(first.next_batch())] for _ in range(2)]
    assert epochs[0] != epochs[1]
    random.seed(2)
    torch.manual_seed(2)
    assert [uid.split(":")[1] for uid in uids(again.next_batch()) + uids(again.next_batch())] == epochs[0]
    assert [uid.split(":")[1] for uid in uids(other.next_batch()) + uids(other.next_batch())] != epochs[0]


def test_another_batch_size_takes_the_same_order(loader: Any) -> None:
    small, large = loader(batch_size=2), loader(batch_size=6)
    assert [uid for _ in range(3) for uid in uids(small.next_batch())] == uids(large.next_batch())


@pytest.mark.parametrize("steps", range(7))
def test_resume_goes_on_with_the_batches_to_come(loader: Any, steps: int) -> None:
    uninterrupted = loader(drop_last=False)
    for _ in range(steps):
        uninterrupted.next_batch()
    state = json.loads(json.dumps(uninterrupted.state_dict()))
    resumed = loader(drop_last=False)
    resumed.load_state_dict(state)
    for _ in range(5):
        assert resumed.next_batch().equal(uninterrupted.next_batch())


@pytest.mark.parametrize("change", [{"seed": 1}, {"train": TRAIN[:9]}, {"system_prompt": "Think."}, {"shuffle": False}])
def test_resume_refuses_other_prompts(loader: Any, change: dict[str, Any]) -> None:
    state = loader().state_dict()
    with pytest.raises(CheckpointError, match="differ from the checkpoint's"):
        loader(**change).load_state_dict(state)


def test_held_out_prompts(loader: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    assert uids(loader().held_out(2)) == ["eval:0", "eval:1"]
    assert uids(loader().held_out()) == uids(loader().held_out(99)) == [f"eval:{i}" for i in range(4)]
    dataset = DatasetSpec("own", lambda _, split: {"eval": EVAL}[split], reward="arithmetic")
    assert held_out_prompts(DataConfig(), dataset, tokenizer, 2).equal(loader().held_out(2))


def test_training_prompts_that_are_held_out_are_left_out(loader: Any) -> None:
    made = loader(train=TRAIN + EVAL, batch_size=5)
    rows = {uid for _ in range(2) for uid in uids(made.next_batch())}
    assert rows == {f"0:{i}" for i in range(10)}
    assert made.counts["held_out_in_train"] == 4
    assert (made.counts["train_prompts"], made.counts["held_out_prompts"]) == (10, 4)
    with pytest.raises(DataError, match="every training prompt is also held out"):
        loader(train=EVAL)


LONG = [*TRAIN, {"prompt": "123456789+1=", "answer": "123456790", "level": 0}]
"""The template adds 3 tokens, so the last prompt has 15 and the others 7."""


def test_overlong_prompts_are_filtered_and_counted(loader: Any) -> None:
    made = loader(train=LONG, prompt_len=14, batch_size=10)
    assert "0:10" not in uids(made.next_batch())
    assert made.counts["overlong"] == 1
    assert made.counts["train_prompts"] == 10
    assert loader(train=LONG, prompt_len=15).counts["overlong"] == 0


def test_overlong_prompts_are_cut_to_their_end(loader: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    made = loader(train=LONG, prompt_len=8, overlong="cut", shuffle=False, batch_size=11)
    batch = made.next_batch()
    assert made.counts["overlong"] == 1
    assert tokenizer.decode(batch["prompts"][10]) == "789+1=<|end|><|assistant|>"
    assert batch["prompt_text"][10] == "123456789+1="
    assert int(batch["prompts"].lengths.max()) == 8


def test_overlong_prompts_are_an_error(loader: Any) -> None:
    with pytest.raises(DataError, match=r"row 11: the prompt has 15 tokens, more than data\.prompt_len=14"):
        loader(train=LONG, prompt_len=14, overlong="error")
    with pytest.raises(DataError, match=r"all 11 prompts are longer than data\.prompt_len=3"):
        loader(train=LONG, prompt_len=3)


def test_a_batch_larger_than_the_data(loader: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.batch_size=11 is more than the 10 training prompts"):
        loader(batch_size=11)
    assert len(loader(batch_size=11, drop_last=False).next_batch()) == 10


def test_bad_rows(loader: Any) -> None:
    with pytest.raises(DataError, match="split 'eval': the data set has no rows"):
        loader(held_out=[])
    with pytest.raises(DataError, match=r"row 1: nothing in column 'question'; its columns are prompt, answer, level"):
        loader(prompt_key="question")
    with pytest.raises(DataError, match=r"row 2: a prompt is a string, or a list of messages"):
        loader(train=[*TRAIN[:1], {"prompt": 3}])
    with pytest.raises(DataError, match="rlcore reserves the column name 'scores'"):
        loader(train=[{**TRAIN[0], "scores": 1.0}])


def test_rows_without_an_answer_and_with_uneven_columns(loader: Any) -> None:
    batch = loader(train=[{"prompt": "1"}, {"prompt": "2", "hint": "x"}], shuffle=False, batch_size=2).next_batch()
    assert list(batch["answer"]) == [None, None]
    assert list(batch["hint"]) == [None, "x"]


def test_messages_are_kept_beside_the_text_that_was_made_of_them(loader: Any) -> None:
    messages = [{"role": "user", "content": "31+1="}]
    batch = loader(train=[{"prompt": messages}, {"prompt": "32+2="}], shuffle=False, batch_size=2).next_batch()
    assert list(batch["prompt_messages"]) == [messages, None]
    assert batch["prompt_text"][0] != "31+1="
    assert "prompt_messages" not in loader().next_batch()


def test_a_huggingface_dataset_serves_as_rows(loader: Any) -> None:
    from datasets import Dataset

    assert loader(train=Dataset.from_list(TRAIN)).next_batch().equal(loader().next_batch())


def test_keys_may_be_paths_into_columns(loader: Any) -> None:
    rows = [{"q": {"text": f"{i}+1="}, "reward_model": {"ground_truth": str(i + 1)}} for i in range(4)]
    made = loader(rows, rows[:1], batch_size=2, prompt_key="q.text", answer_key="reward_model.ground_truth")
    batch = made.held_out()
    assert (batch["prompt_text"].tolist(), batch["answer"].tolist()) == (["0+1="], ["1"])
    assert batch["reward_model"].tolist() == [{"ground_truth": "1"}]


def test_a_row_without_the_answer_that_a_reward_needs_is_refused(loader: Any) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1) if i != 7 else None} for i in range(10)]
    made = loader(rows, EVAL)
    made.require("arithmetic", {}, train=False, held_out=True)
    with pytest.raises(
        DataError, match=r"data=own, split 'train', row 8: reward 'arithmetic' needs .* column 'answer'"
    ):
        made.require("arithmetic", {}, train=True, held_out=True)
    held_out = loader(TRAIN, [{"prompt": "p"}])
    held_out.require("arithmetic", {}, train=True, held_out=False)
    with pytest.raises(DataError, match=r"split 'eval', row 1: .* its columns are prompt\. Set data\.answer_key to"):
        held_out.require("arithmetic", {}, train=True, held_out=True)


def test_a_column_that_a_reward_function_cannot_do_without_is_demanded(loader: Any) -> None:
    made = loader(TRAIN, [{"prompt": "1+2=", "answer": "3"}])
    made.require(None, {"f": ("level", "uid", "answer"), "g": ()}, train=True, held_out=False)
    with pytest.raises(DataError, match=r"split 'eval': reward 'f' needs the column 'level', which no row has; there"):
        made.require(None, {"f": ("level",)}, train=True, held_out=True)
    with pytest.raises(DataError, match=r"needs the column 'levle'.* there are level, prompt, answer.*mean 'level'\?"):
        made.require(None, {"f": ("levle",)}, train=True, held_out=False)


def test_the_last_message_of_whole_conversations_is_the_answer(loader: Any) -> None:
    """Of a column `messages`; in any other prompt column such a message is the beginning of the response."""
    rows = [
        {"messages": [{"role": "user", "content": f"{i}+1="}, {"role": "assistant", "content": str(i + 1)}]}
        for i in range(5)
    ]
    made = loader(rows, rows[:1], prompt_key="messages")
    batch = made.held_out()
    assert (batch["prompt_text"].tolist(), batch["answer"].tolist()) == (["<|user|>0+1=<|end|><|assistant|>"], ["1"])
    assert batch["prompt_messages"].tolist() == [[{"role": "user", "content": "0+1="}]]
    made.require("arithmetic", {}, train=True, held_out=True)
    named = [{"prompt": row["messages"]} for row in rows]
    begun = loader(named, named[:1]).held_out()
    assert (begun["prompt_text"].tolist(), begun["answer"].tolist()) == (["<|user|>0+1=<|end|><|assistant|>1"], [None])
    own = [{**row, "answer": "own"} for row in rows]
    assert loader(own, own[:1], prompt_key="messages").held_out()["answer"].tolist() == ["own"]


def test_a_rendered_prompt_column(loader: Any) -> None:
    rows = [{"prompt": f"<|user|>{i}+1=<|end|><|assistant|>", "answer": str(i + 1)} for i in range(5)]
    made = loader(rows, rows[:1], rendered=["prompt"])
    assert made.held_out()["prompts"][0].tolist() == loader(TRAIN, TRAIN[:1]).held_out()["prompts"][0].tolist()
