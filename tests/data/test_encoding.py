"""Prompts that were encoded once are read from disk, and are what encoding them would give. Together 12 CPU seconds."""

from __future__ import annotations

import math
import os
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rlcore import DatasetSpec
from rlcore.config.schema import DataConfig, ModelConfig
from rlcore.data import loader
from rlcore.data.chat import NO_TOOLS, OfferedTools, load_tokenizer
from rlcore.data.encode_processes import map_in_processes
from rlcore.data.encoding import EncodedPrompts, PromptCache
from rlcore.data.loader import PromptLoader, PromptSplit
from rlcore.errors import DataError, WorkerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Rows = Sequence[dict[str, Any]]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
READS_ALL = (
    "{{ level }}{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{{ message.role }}{{ message.content }}{% endfor %}"
)
ROWS = [{"prompt": f"{number}+1="} for number in range(5)] + [{"prompt": [{"role": "user", "content": "1<|end|>"}]}]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the entries, empty at first."""
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "prompts"


@pytest.fixture
def split(tokenizer: PreTrainedTokenizerBase) -> Callable[..., PromptSplit]:
    def make(
        rows: Rows = ROWS,
        tools: OfferedTools | None = None,
        tokenizer: PreTrainedTokenizerBase = tokenizer,
        **config: Any,
    ) -> PromptSplit:
        dataset = DatasetSpec("own", lambda *_: rows, reward="arithmetic")
        return PromptSplit(DataConfig(name="own", **config), dataset, tokenizer, "train", tools)

    return make


def content(split: PromptSplit) -> list[Any]:
    """All that a split gives of its prompts."""
    batch = split.batch(split.usable, "x")
    texts = [list(batch[name]) for name in ("prompt_text", "uid")]
    digests = [split.digest(row) for row in split.usable]
    return [
        [row.tolist() for row in batch["prompts"].to_list()],
        *texts,
        digests,
        split.spelled_out,
        split.longest,
        split.largest_token,
    ]


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*"))


def test_the_second_start_reads_what_the_first_has_written(split: Any, folder: Path, tmp_path: Path) -> None:
    first = content(split())
    (entry,) = entries(folder)
    assert content(split()) == first
    assert entries(folder) == [entry]
    other = EncodedPrompts.of([[7, 8]] * len(ROWS), ["x"] * len(ROWS), [True] * len(ROWS), [False] * len(ROWS))
    PromptCache().keep(entry.stem, other)
    assert content(split())[0] == [[7, 8]] * len(ROWS)  # so it is read, not encoded again


def test_rows_are_encoded_in_parts(split: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = content(split())
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(loader, "PART", 4)
    assert content(split()) == whole
    with pytest.raises(DataError, match="row 6: the prompt is empty"):
        split([*ROWS[:5], {"prompt": ""}], rendered=["prompt"])


def test_whatever_changes_a_prompt_makes_another_entry(split: Any, folder: Path, monkeypatch: Any) -> None:
    """Each is compared with what a start without a cache gives."""
    own = load_tokenizer(ModelConfig())
    own.chat_template = READS_ALL
    leveled = [{"prompt": "1+1=", "chat_template_kwargs": {"level": "2"}}]
    tooled = [{"prompt": "1+1=", "tools": [TOOL]}]
    conversation = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    makings: list[dict[str, Any]] = [
        {},
        {"rows": [{"prompt": "2+2="}]},
        {"rows": [{"prompt": [{"role": "user", "content": "1+1="}]}]},
        {"rows": leveled},
        {"rows": tooled},
        {"tools": NO_TOOLS},  # an environment's, which takes no tools of rows
        {"tools": OfferedTools(schemas=[TOOL])},
        {"tools": OfferedTools(instructions="Add.")},
        {"rendered": ["prompt"]},
        {"system_prompt": "Add."},
        {"rows": [{"prompt": conversation}]},
        {"rows": [{"messages": conversation}], "prompt_key": "messages"},  # whose last message is the answer
    ]
    plain = [{"tokenizer": own, "rows": [{"prompt": "1+1="}], **making} for making in makings]
    other = load_tokenizer(ModelConfig(chat_template_kwargs={}))
    other.chat_template = READS_ALL.replace("message.role", "message.role|upper")
    plain.append({"tokenizer": other, "rows": [{"prompt": "1+1="}]})
    kept = [content(split(**making)) for making in plain]
    assert len(entries(folder)) == len(plain)
    again = [content(split(**making)) for making in plain]
    assert len(entries(folder)) == len(plain)
    monkeypatch.setenv("RLCORE_CACHE", str(folder / "none"))
    assert kept == again == [content(split(**making)) for making in plain]
    assert len({str(each[0]) for each in kept}) == 8  # five read as another one does


def test_rows_that_an_environment_refuses_are_refused_from_the_cache_too(split: Any) -> None:
    own = load_tokenizer(ModelConfig())
    own.chat_template = READS_ALL
    rows = [{"prompt": "1+1=", "tools": [TOOL]}]
    split(rows, tokenizer=own)
    with pytest.raises(DataError, match="tools of its own"):
        split(rows, tools=NO_TOOLS, tokenizer=own)


def test_lengths_and_columns_are_not_part_of_an_entry(split: Any, folder: Path) -> None:
    split()
    short = split(prompt_len=7, overlong="cut")
    assert short.longest == 7
    assert split(prompt_len=7).overlong == short.overlong == 1
    with pytest.raises(DataError, match=r"row 6: the prompt has \d+ tokens, more than data\.prompt_len=7"):
        split(prompt_len=7, overlong="error")
    split([{**row, "note": number} for number, row in enumerate(ROWS)])
    assert len(entries(folder)) == 1


def test_a_damaged_entry_is_made_anew(split: Any, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = content(split())
    (entry,) = entries(folder)
    written = entry.read_bytes()
    for damaged in (written[:-1] + bytes([written[-1] ^ 1]), written[: len(written) // 2], b""):
        entry.write_bytes(damaged)
        caplog.clear()
        assert content(split()) == whole
        assert "made anew" in caplog.text
        assert entry.read_bytes() == written


def test_a_cache_that_cannot_be_written_is_a_warning(
    split: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = content(split())
    (tmp_path / "file").touch()
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path / "file"))
    assert content(split()) == whole
    assert "cannot be kept" in caplog.text
    assert "RLCORE_CACHE" in caplog.text


def test_rows_may_be_a_dataset(split: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A slice of one is no list of rows. Each is encoded: neither reads the other's entry."""
    from datasets import Dataset

    rows = [{"prompt": f"{number}+1="} for number in range(5)]
    found = content(split(Dataset.from_list(rows)))
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path / "other"))
    assert found == content(split(rows))


def test_what_a_killed_writer_has_left_goes(split: Any, folder: Path) -> None:
    old, new = folder / "tmpold", folder / "tmpnew"
    for each in (old, new):
        each.mkdir(parents=True)
        (each / "whole").touch()
    days = time.time() - 2 * 86_400
    os.utime(old, (days, days))
    split()
    assert not old.exists()
    assert new.exists()


def test_entries_that_nobody_used_for_a_month_go(split: Any, folder: Path) -> None:
    split()
    (old,) = entries(folder)
    month = time.time() - 31 * 86_400
    os.utime(old, (month, month))
    split()  # a use
    split([{"prompt": "2+2="}])
    assert old in entries(folder)
    os.utime(old, (month, month))
    split([{"prompt": "3+3="}])
    assert old not in entries(folder)
    assert len(entries(folder)) == 2


def test_a_template_that_reads_the_clock_is_kept_by_the_runs_date_alone(split: Any, folder: Path) -> None:
    template = folder.parent.with_name("clock.jinja")
    template.write_text("{{ strftime_now('%d') }}{{ messages[0].content }}")

    def of(date: str | None) -> PromptSplit:
        tokenizer = load_tokenizer(replace(ModelConfig(), chat_template=str(template), date=date))
        return split([{"prompt": "1"}], tokenizer=tokenizer)

    of(None)
    assert entries(folder) == []
    assert (of("2026-11-28").chat(0), of("2026-11-29").chat(0)) == ("281", "291")
    assert content(of("2026-11-28")) != content(of("2026-11-29"))
    assert len(entries(folder)) == 2


def test_a_value_that_has_no_bytes_of_its_own_is_not_kept(split: Any, folder: Path) -> None:
    class Level(str):
        def __str__(self) -> str:
            return "3"

    own = load_tokenizer(ModelConfig())
    own.chat_template = READS_ALL
    made = split([{"prompt": "1+1=", "chat_template_kwargs": {"level": Level("2")}}], tokenizer=own)
    assert made.chat(0).endswith("user1+1=")
    assert entries(folder) == []


def test_the_digest_of_a_checkpoint_is_what_it_was(tokenizer: PreTrainedTokenizerBase) -> None:
    """As runs wrote it before there was a cache: they can be resumed."""
    splits = {"train": ROWS, "eval": [{"prompt": "9+9="}]}
    dataset = DatasetSpec("own", lambda _, split: splits[split], reward="arithmetic")
    made = PromptLoader(
        DataConfig(name="own", batch_size=2, shuffle=False, drop_last=False), dataset, tokenizer, seed=3
    )
    digest = sha256(b"3 False")
    rows = [row.tolist() for _ in range(3) for row in made.next_batch()["prompts"].to_list()]
    for number, row in enumerate(rows):
        digest.update(array("q", [number, len(row), *row]).tobytes())
    assert made.state_dict()["digest"] == digest.hexdigest()[:16]


def test_arrays_of_rows() -> None:
    first = EncodedPrompts.of([[1, 5], [2]], ["a", "b"], [True, False], [False, True])
    joined = EncodedPrompts.concat([first, EncodedPrompts.of([[3, 4, 9]], ["a"], [True], [False])])
    assert len(joined) == 3
    assert [joined.token_ids(row).tolist() for row in range(3)] == [[1, 5], [2], [3, 4, 9]]
    assert (joined.lengths.tolist(), joined.largest.tolist()) == ([2, 1, 3], [5, 2, 9])
    assert joined.digest(0) == joined.digest(2) != joined.digest(1)
    assert np.array_equal(joined.spells_out, [False, True, False])


def test_many_rows_are_encoded_in_processes(split: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """8 CPU seconds: each process imports transformers."""
    whole = content(split())
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(loader, "PART", 2)
    monkeypatch.setattr(loader, "ROWS_EACH", 3)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    used: list[int] = []
    mapped = loader.map_in_processes
    monkeypatch.setattr(loader, "map_in_processes", lambda count, *given: used.append(count) or mapped(count, *given))
    assert content(split()) == whole
    assert used == [2]
    with pytest.raises(DataError, match=r"split 'train', row 4: a prompt is a string, or a list of messages"):
        split([*ROWS[:3], {"prompt": 7}, *ROWS[:2], {"prompt": 8}])


def test_processes_answer_in_order_and_one_that_ends_is_an_error() -> None:
    assert map_in_processes(2, math.factorial, range(20)) == [math.factorial(number) for number in range(20)]
    with pytest.raises(WorkerError, match="prompts failed: ZeroDivisionError: division by zero"):
        map_in_processes(1, (1).__truediv__, [0])
    with pytest.raises(WorkerError, match=r"prompts ended: .*7.* Start again with more memory"):
        map_in_processes(2, os._exit, [7])
