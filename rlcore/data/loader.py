"""The prompts of a run: shuffled, resumable training batches, and held-out prompts for evaluation."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from itertools import count as count_from
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlcore.config.schema import DataConfig
from rlcore.data.chat import NO_TOOLS, OfferedTools, PromptEncoder
from rlcore.data.curriculum import Curriculum, PromptResult
from rlcore.data.encode_processes import map_in_processes
from rlcore.data.encoding import PART, EncodedPrompts, PromptCache, cache_key
from rlcore.data.keys import answer_fault, nearest, value_at
from rlcore.data.messages import plain_prompt, plain_tools
from rlcore.data.schemas import TEMPLATE_KEYS, Schema, plain_rows, recognise, with_keys
from rlcore.data.template_kwargs import COLUMN, check_template_kwargs, row_template_kwargs
from rlcore.errors import CheckpointError, ConfigError, DataError, did_you_mean
from rlcore.plugins import DatasetSpec
from rlcore.protocol import DataProto, Ragged
from rlcore.protocol.glossary import fields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlcore.data.mix import MixLoader

log = logging.getLogger(__name__)

ROWS_EACH, MOST_PROCESSES = 20_000, 16
"""Rows for which one more process renders and tokenises, as it has to import transformers first, and the most of them:
each holds 0.4 GB."""
EPISODES = (
    *("episode", "branch", "turns", "turn_ends", "turn_rewards", "tool_calls", "tool_errors", "stop_reason"),
    *("episode_messages", "episode_score", "episode_row", "episode_error", "seat", "row_weight"),
)
"""Column names that are reserved in a run with an environment."""
TAKEN = ("prompt", "response", *(name for name in fields() if name not in EPISODES))
"""Reserved column names: reward functions or the core already give them a meaning."""


class PromptSplit:
    """The encoded prompts of a data set's split, "train" or "eval".

    `usable` holds the numbers of the rows whose prompts are used. `data.overlong` decides whether prompts over
    `data.prompt_len` tokens are left out, cut (their last tokens stay) or refused; `overlong` counts them. Rows that
    were encoded before are read from the cache. Raises DataError for a split without usable prompts, a row without a
    prompt, or a reserved column name.
    """

    def __init__(
        self,
        config: DataConfig,
        dataset: DatasetSpec,
        tokenizer: PreTrainedTokenizerBase,
        split: str,
        tools: OfferedTools | None = None,
        like: PromptSplit | None = None,
    ) -> None:
        """`like`: the training split, whose schema and keys a held-out split has too."""
        self._has_environment, self._knows_tools = tools is not None, False
        self._taken = (*TAKEN, *EPISODES) if self._has_environment else TAKEN
        self.where = f"data={dataset.name}, split {split!r}"
        rows: Sequence[Mapping[str, Any]] = dataset.load(config, split)
        if len(rows) == 0:
            raise DataError(f"{self.where}: the data set has no rows")
        if split == "train" and 0 < config.max_rows < len(rows):
            rows = [rows[number] for number in range(config.max_rows)]
        self._given_keys = config.prompt_key, config.answer_key
        self.schema: Schema | None = recognise(config, rows) if like is None else like.schema
        keyed: DataConfig = with_keys(config, self.schema, rows) if like is None else like._config
        self._config: DataConfig = replace(config, prompt_key=keyed.prompt_key, answer_key=keyed.answer_key)
        config = self._config
        self.rows = plain_rows(rows, config, self.where)
        rendered = config.prompt_key in config.rendered
        self._encoder = PromptEncoder(tokenizer, config.system_prompt, tools or NO_TOOLS, rendered)
        self._encoded = self._encode()
        self._has_messages = not bool(self._encoded.is_text.all())
        self.spelled_out: list[int] = np.flatnonzero(self._encoded.spells_out).tolist()
        self.usable, self.overlong = self._by_length()
        self.columns = self._other_columns()
        if not self.usable:
            raise DataError(
                f"{self.where}: all {len(self.rows)} prompts are longer than "
                f"data.prompt_len={config.prompt_len} tokens; raise it, or set data.overlong=cut"
            )

    @property
    def has_other_keys(self) -> bool:
        """Whether the prompt or the answer is read by a schema's key in place of the config's."""
        return self.keys != self._given_keys

    @property
    def keys(self) -> tuple[str, str]:
        """The keys of the prompt and of the answer."""
        return self._config.prompt_key, self._config.answer_key

    @property
    def longest(self) -> int:
        """The number of tokens of the longest usable prompt."""
        return min(int(self._encoded.lengths[self.usable].max()), self._config.prompt_len)

    @property
    def largest_token(self) -> int:
        """The largest token id of a usable prompt."""
        return int(self._encoded.largest[self.usable].max())

    def token_ids(self, row: int) -> np.ndarray:
        """Return the token ids of a row's prompt, int32 [tokens]: the last `data.prompt_len` of them."""
        # The end holds the question and the start of the answer's turn.
        return self._encoded.token_ids(row)[-self._config.prompt_len :]

    def digest(self, row: int) -> bytes:
        """Return a hash of a row's rendered prompt: two rows may differ and still be the same prompt for the model."""
        return self._encoded.digest(row)

    def chat(self, row: int) -> str:
        """Return a row's prompt as the model reads it."""
        return self._encoder.plain.text(self._render(self._prompt(self.rows[row]), self.rows[row]))

    def text(self, row: int) -> str:
        """Return a row's prompt for rewards: its string, or its messages as the model reads them."""
        return str(self._prompt(self.rows[row])) if self._encoded.is_text[row] else self.chat(row)

    def batch(self, chosen: Sequence[int], name: str | int) -> DataProto:
        """Return the batch of the prompts of these rows, each with the uid `NAME:ROW`.

        Columns: `prompts` Ragged int64; as objects `prompt_text`, `prompt_messages` where the split has any, `answer`
        (None where the row has none), `uid`, and all other columns of the data set.
        """
        rows = [self.rows[row] for row in chosen]
        objects: dict[str, list[Any]] = {
            "prompt_text": [self.text(row) for row in chosen],
            "answer": [self._answer(row) for row in rows],
            "uid": [f"{name}:{row}" for row in chosen],
        }
        if self._has_messages:
            messages = [self._prompt(row) for row in rows]
            objects["prompt_messages"] = [None if isinstance(prompt, str) else prompt for prompt in messages]
        for column in self.columns:
            objects[column] = [row.get(column) for row in rows]
        token_ids = Ragged.from_list([torch.from_numpy(self.token_ids(row)) for row in chosen], dtype=torch.int64)
        return DataProto.from_dict({"prompts": token_ids}, objects)

    def check_rows(self, check: Callable[[Mapping[str, Any]], None]) -> None:
        """See PromptLoader."""
        for number, row in enumerate(self.rows, start=1):
            answer = self._answer(row)
            try:
                check(row if answer is None else {**row, "answer": answer})
            except DataError as error:
                raise DataError(f"{self.where}, row {number}: {error}") from error

    def require_answers(self, reward: str) -> None:
        """Raise DataError for a row that `reward` cannot score, as it has no reference answer."""
        for number in self.usable:
            row = self.rows[number]
            if self._replied(row) is None and (fault := answer_fault(row, self._config.answer_key)):
                raise DataError(
                    f"{self.where}, row {number + 1}: reward {reward!r} needs a reference answer, but {fault}; "
                    "or choose another reward, or drop the row"
                )

    def require_columns(self, reward: str, names: Sequence[str]) -> None:
        """Raise DataError for a column that `reward` cannot do without and that no row has."""
        given = dict.fromkeys([*self.columns, *self.keys, "answer"])
        for name in names:
            if name not in (*given, *TAKEN, *EPISODES):
                raise DataError(
                    f"{self.where}: reward {reward!r} needs the column {name!r}, which no row has; there are "
                    f"{', '.join(given)}.{nearest(given, name)} Rename the column or the function's parameter, or give "
                    "the parameter a default"
                )

    def _prompt(self, row: Mapping[str, Any]) -> Any:
        """Return a row's prompt; of a column `messages` without the assistant's last message."""
        prompt = value_at(row, self._config.prompt_key)
        if isinstance(prompt, str) and self._config.prompt_key in self._config.rendered:
            return prompt  # the model's input as it is
        prompt = plain_prompt(prompt)
        return prompt if self._replied(row) is None else prompt[:-1]

    def _answer(self, row: Mapping[str, Any]) -> Any:
        """Return a row's answer; where it has none, the last message of a column `messages`."""
        replied, key = self._replied(row), self._config.answer_key
        return replied if replied is not None and answer_fault(row, key) else value_at(row, key)

    def _replied(self, row: Mapping[str, Any]) -> str | None:
        """Return the assistant's last message in a column `messages`, which holds whole conversations; None if none."""
        if self._config.prompt_key.rpartition(".")[2] != "messages":
            return None
        messages = plain_prompt(value_at(row, self._config.prompt_key))
        if not isinstance(messages, list) or len(messages) < 2 or not isinstance(messages[-1], Mapping):
            return None
        if messages[-1].get("role") != "assistant":
            return None
        if messages[-1].get("tool_calls"):
            raise DataError("the last message calls tools, so it is no answer; end the conversation before or after it")
        if beyond := [key for key in TEMPLATE_KEYS if messages[-1].get(key)]:
            raise DataError(
                f"the last message has {beyond[0]!r} besides its content, which the answer would lack; write it into "
                "the content as the model does, or drop it"
            )
        return messages[-1].get("content")

    def _other_columns(self) -> list[str]:
        names = dict.fromkeys(chain.from_iterable(self.rows))
        # A recognised schema's answer stays a column too: algorithms and rewards know its name.
        others = [name for name in names if name not in (self._config.prompt_key, self._given_keys[1])]
        taken = [name for name in others if name in self._taken]
        if taken == ["prompt"] and self.schema is not None:
            others.remove("prompt")  # another column of the schema is the prompt, as TRL's `messages`
        elif taken:
            raise DataError(
                f"{self.where}: rlcore reserves the column name {taken[0]!r}; rename or drop the column, or name it "
                "in data.prompt_key or data.answer_key"
            )
        return others

    def _encode(self) -> EncodedPrompts:
        """Return all rows' prompts, from the cache if they were encoded before."""
        cache, count = PromptCache(), len(self.rows)
        # The key of the prompt decides whether its last message is the answer.
        settings = self._has_environment, self._config.prompt_key
        key = cache_key(self._encoder, map(self._inputs, count_from(0), self.rows), *settings)
        if key is not None and (kept := cache.read(key)) is not None:
            return kept
        starts, processes = range(0, count, PART), min(MOST_PROCESSES, count // ROWS_EACH)
        if key is not None and processes > 1 and (processes := min(processes, _cores())) > 1:
            log.info("%s: %d prompts are rendered and tokenised in %d processes", self.where, count, processes)
            encode = copy.copy(self)
            encode.rows = []  # each part brings its own, without columns that are not rendered
            read = (self._config.prompt_key.partition(".")[0], "tools", COLUMN)
            sent = ({name: row[name] for name in read if name in row} for row in self.rows)
            parts = [(start, list(islice(sent, PART))) for start in starts]
            encoded = EncodedPrompts.concat(map_in_processes(processes, encode._encode_part, parts))
        else:
            rows = iter(self.rows)  # a slice of a datasets.Dataset is no list of rows
            encoded = EncodedPrompts.concat([self._encode_part((start, list(islice(rows, PART)))) for start in starts])
        if key is not None:
            cache.keep(key, encoded)
        return encoded

    def _inputs(self, number: int, row: Mapping[str, Any]) -> list[Any]:
        """Return what is rendered of a row; DataError where there is no prompt."""
        return [self._present(number, row), row.get("tools"), row.get(COLUMN)]

    def _present(self, number: int, row: Mapping[str, Any]) -> Any:
        """Return the value of a row's prompt; DataError where there is none."""
        key = self._config.prompt_key
        if (prompt := value_at(row, key)) is None:
            raise DataError(
                f"{self.where}, row {number + 1}: nothing in column {key!r}; its columns are "
                f"{', '.join(row) or 'none'}. Set data.prompt_key to the right one.{nearest(row, key)}"
            )
        return prompt

    def _encode_part(self, part: tuple[int, Sequence[Mapping[str, Any]]]) -> EncodedPrompts:
        """Return the prompts of consecutive rows; part: the number of the first, and the rows."""
        start, rows = part
        plain = self._encoder.plain
        marked, is_text = [], []
        for number, row in enumerate(rows, start):
            self._present(number, row)
            try:
                prompt = self._prompt(row)
                marked.append(self._render(prompt, row))
            except (ConfigError, DataError) as error:
                raise DataError(f"{self.where}, row {number + 1}: {error}") from error
            is_text.append(isinstance(prompt, str))
        token_ids = self._encoder.token_ids(marked)
        if [] in token_ids:
            empty = start + token_ids.index([])
            raise DataError(f"{self.where}, row {empty + 1}: the prompt is empty; the model needs a token to begin")
        chats = [plain.text(each) for each in marked]
        spells_out = [chat != each for chat, each in zip(chats, marked, strict=True)]
        return EncodedPrompts.of(token_ids, chats, is_text, spells_out)

    def _by_length(self) -> tuple[list[int], int]:
        """Return the rows whose prompts are used, and the number of prompts over `data.prompt_len` tokens."""
        config, lengths = self._config, self._encoded.lengths
        overlong = lengths > config.prompt_len
        if config.overlong == "error" and overlong.any():
            first = int(overlong.argmax())
            raise DataError(
                f"{self.where}, row {first + 1}: the prompt has {int(lengths[first])} tokens, more than "
                f"data.prompt_len={config.prompt_len}; raise it, or set data.overlong to filter or cut"
            )
        used = ~overlong if config.overlong == "filter" else np.ones_like(overlong)
        return np.flatnonzero(used).tolist(), int(overlong.sum())

    def _render(self, prompt: Any, row: Mapping[str, Any]) -> str:
        """Return the rendered prompt, with the tools and the template arguments of its row; special tokens marked."""
        encoder = self._encoder
        if encoder.rendered and isinstance(prompt, str):
            return prompt  # no template reads the row's tools
        tools, given = plain_tools(row.get("tools")), row_template_kwargs(row)
        check_template_kwargs(encoder.tokenizer, given, f"column {COLUMN!r}")
        chat = encoder.render(prompt, tools, given)
        if tools and self._has_environment:
            raise DataError("it has tools of its own (column 'tools'), and so has the environment; drop one of the two")
        if tools and not self._knows_tools:
            self._knows_tools = chat != encoder.render(prompt, (), given)
            if not self._knows_tools:
                raise DataError(
                    "it has tools (column 'tools'), which the chat template leaves out; set model.chat_template to one "
                    "that writes them, or drop the column"
                )
        return chat


class PromptLoader:
    """Endless batches of training prompts, epoch after epoch, and the held-out prompts.

    An epoch's order depends only on the seed and the epoch's number. So `state_dict` holds a position, and a loader
    restored to it returns exactly the batches that would have come next. Training prompts that render to the same text
    as a held-out one are left out. `counts` holds the numbers of prompts, and of those left out, by reason.

    Raises ConfigError when `data.batch_size` exceeds the number of training prompts and `data.drop_last` is set.
    """

    def __init__(
        self,
        config: DataConfig,
        dataset: DatasetSpec,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        tools: OfferedTools | None = None,
    ) -> None:
        self._config = config
        self._seed = seed
        self._train = PromptSplit(config, dataset, tokenizer, "train", tools)
        self._eval = PromptSplit(config, dataset, tokenizer, "eval", tools, like=self._train)
        self._name = dataset.name
        self._curriculum = Curriculum(config.curriculum, self._train.rows, self._train.where)
        self.leave_out(self.held_out_digests)

    @property
    def held_out_digests(self) -> set[bytes]:
        """The hashes of the held-out prompts as the model reads them."""
        return {self._eval.digest(row) for row in self._eval.usable}

    def leave_out(self, digests: Collection[bytes]) -> None:
        """Leave out the training prompts with one of these hashes, and begin the first epoch.

        Raises DataError when no prompt is left, ConfigError as the loader does.
        """
        self._rows = [row for row in self._train.usable if self._train.digest(row) not in digests]
        self.counts = {
            "train_prompts": len(self._rows),
            "held_out_prompts": len(self._eval.usable),
            "overlong": self._train.overlong,
            "overlong_held_out": self._eval.overlong,
            "held_out_in_train": len(self._train.usable) - len(self._rows),
        }
        self._check_size(self._name)
        self.epoch = 0
        self._position = 0
        self._order = self._epoch_order()

    def check_rows(self, check: Callable[[Mapping[str, Any]], None]) -> None:
        """Call `check` with each row of both splits; its DataError is raised again with the row's number.

        The rows have the column `answer` too, as batches have.
        """
        for split in (self._train, self._eval):
            split.check_rows(check)

    @property
    def columns(self) -> list[str]:
        """The names of the training rows' columns, with the keys of prompt and answer."""
        return list(dict.fromkeys([*self._train.columns, *self._train.keys, "answer"]))

    @property
    def schema_line(self) -> str | None:
        """A line that says which schema chose the keys of the training rows; None if the config's keys were kept."""
        if self._train.schema is None or not self._train.has_other_keys:
            return None
        prompt, answer = self._train.keys
        has_answer = any(value_at(row, answer) is not None for row in self._train.rows)
        return f"columns of {self._train.schema.name}, prompt in {prompt!r}{f', answer in {answer!r}' * has_answer}"

    @property
    def special_tokens_line(self) -> str | None:
        """A line that says how many prompts spell out special tokens, training and held-out; None if none does."""
        found = [(split, rows) for split in (self._train, self._eval) if (rows := split.spelled_out)]
        if not found:
            return None
        split, rows = found[0]
        number = sum(len(rows) for _, rows in found)
        return (
            f"{number} prompts spell out special tokens of the model, which are text there "
            f"(the first: {split.where}, row {rows[0] + 1}); data.rendered names the columns in which they are tokens: "
            "in texts that a template has rendered, and in the assistant's messages"
        )

    @property
    def epoch_batches(self) -> int:
        """The number of batches of an epoch."""
        whole, rest = divmod(len(self._rows), self._config.batch_size)
        return whole + (rest > 0 and not self._config.drop_last)

    @property
    def lines(self) -> list[str]:
        """The lines that a run's first lines say of the data."""
        return [line for line in (self.schema_line, self.special_tokens_line) if line]

    @property
    def longest(self) -> int:
        """The number of tokens of the longest prompt, held-out ones included."""
        return max(self._train.longest, self._eval.longest)

    @property
    def largest_token(self) -> int:
        """The largest token id of a prompt, held-out ones included."""
        return max(self._train.largest_token, self._eval.largest_token)

    def require(
        self, answers: str | None, columns: Mapping[str, Sequence[str]], *, train: bool, held_out: bool
    ) -> None:
        """Raise DataError for training or held-out rows without what reward functions need.

        answers: a reward that needs reference answers, None for none. columns: by reward, the columns that it needs.
        """
        for split, is_scored in ((self._train, train), (self._eval, held_out)):
            if is_scored and answers is not None:
                split.require_answers(answers)
            for reward, names in columns.items() if is_scored else ():
                split.require_columns(reward, names)

    def next_batch(self) -> DataProto:
        """Return the next `data.batch_size` prompts (fewer at an epoch's end without `drop_last`), uid `EPOCH:ROW`."""
        size, left = self._config.batch_size, len(self._order) - self._position
        if left == 0 or (left < size and self._config.drop_last):
            self._begin_epoch()
        chosen = self._order[self._position : self._position + size]
        self._position += len(chosen)
        return self._train.batch(chosen, self.epoch)

    def take(self, count: int, source: str) -> DataProto:
        """Return the next `count` prompts, uid `SOURCE/EPOCH:ROW`; epoch after epoch, with no prompt left out."""
        parts = []
        while count:
            if self._position == len(self._order):
                self._begin_epoch()
            chosen = self._order[self._position : self._position + count]
            self._position += len(chosen)
            count -= len(chosen)
            parts.append(self._train.batch(chosen, f"{source}/{self.epoch}"))
        return DataProto.concat(parts)

    def held_out(self, limit: int = 0) -> DataProto:
        """Return the first `limit` held-out prompts (0: all), or all if there are fewer; uid `eval:ROW`."""
        return self._eval.batch(self._eval.usable[: limit or None], "eval")

    def evaluated(self) -> DataProto:
        """Return the held-out prompts that evaluations use, `data.eval_size` of them; uid `eval:ROW`."""
        return self.held_out(self._config.eval_size)

    def learn(self, results: Mapping[str, PromptResult]) -> None:
        """Take what a step's samples have shown, by the `uid` of their prompts; DataError for one of another form."""
        if not self._config.curriculum.measures:
            return
        found = {uid: re.fullmatch(r"\d+:(\d+)", uid) for uid in results}
        if other := [uid for uid, match in found.items() if match is None]:
            raise DataError(
                f"a sample that was scored has uid={other[0]!r}, which is no prompt of the run; data.curriculum "
                "measures prompts by their uid, EPOCH:ROW, so the algorithm has to keep it"
            )
        self._curriculum.learn({int(match[1]): results[uid] for uid, match in found.items() if match is not None})

    @property
    def left_out_this_epoch(self) -> int:
        """The number of prompts that the curriculum leaves out of this epoch."""
        return len(self._rows) - len(self._order)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values, with a digest of the training prompts."""
        state = {
            "epoch": self.epoch,
            "position": self._position,
            "digest": self._digest,
            "batch_size": self._config.batch_size,
        }
        if self._config.curriculum.is_on:
            state["curriculum"] = self._curriculum.state_dict()
        if self._config.curriculum.measures:
            state["order"] = self._order  # made of results that later ones have replaced
        return state

    def difference(self, state: Mapping[str, Any]) -> str | None:
        """Return how the prompts or their order differ from those of a `state_dict`; None where they are the same."""
        if state.get("digest") != self._digest:
            return (
                "the training prompts differ from the checkpoint's: the data, the tokenizer, the chat template or the "
                "seed has changed"
            )
        if (before := state.get("batch_size", self._config.batch_size)) != self._config.batch_size:
            return f"data.batch_size = {self._config.batch_size} differs from the checkpoint's {before}"
        if ("curriculum" in state) != self._config.curriculum.is_on:
            return "data.curriculum differs from the checkpoint's"
        return self._curriculum.difference(state["curriculum"]) if "curriculum" in state else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a `state_dict`; CheckpointError when the prompts or their order have changed."""
        check_same(self, state)
        self.epoch, self._position = state["epoch"], state["position"]
        if "curriculum" in state:
            self._curriculum.load_state_dict(state["curriculum"])
        self._order = list(state["order"]) if self._config.curriculum.measures else self._epoch_order()

    def _begin_epoch(self) -> None:
        self.epoch += 1
        self._position = 0
        self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        """Return the rows of this epoch in their order."""
        order = list(self._rows)
        # A separate generator, so that neither the global one nor the model's sampling can change the order.
        draw = random.Random(f"prompts {self._seed} {self.epoch}")
        if self._config.shuffle:
            draw.shuffle(order)
        if self._config.curriculum.is_on:
            order = self._curriculum.order(order, self._config.batch_size, draw)
        return order

    def _check_size(self, name: str) -> None:
        total, size = len(self._rows), self._config.batch_size
        if total == 0:
            raise DataError(f"data={name}: every training prompt is also held out; nothing is left to train on")
        if size > total and self._config.drop_last:
            raise ConfigError(
                f"data.batch_size={size} is more than the {total} training prompts of data={name}; "
                f"set it to {total} or less, or set data.drop_last=false"
            )

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256(f"{self._seed} {self._config.shuffle}".encode())
        for start in range(0, len(self._rows), PART):
            pieces: list[np.ndarray] = []
            for row in self._rows[start : start + PART]:
                token_ids = self._train.token_ids(row)
                pieces += [np.array([row, len(token_ids)]), token_ids]
            digest.update(np.concatenate(pieces, dtype=np.int64).data)
        return digest.hexdigest()[:16]


def check_same(loader: PromptLoader | MixLoader, state: Mapping[str, Any]) -> None:
    """Raise CheckpointError when the prompts or their order differ from those of a `state_dict`."""
    if difference := loader.difference(state):
        raise CheckpointError(
            f"{difference}. Restore what has changed, or start a new run, from the model or from a checkpoint "
            "(rlcore train --from RUN)"
        )


def _cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_rendered(config: DataConfig, columns: Sequence[str]) -> None:
    """Raise ConfigError for a name in `data.rendered` that is none of the columns of the data."""
    for name in config.rendered:
        if name not in columns:
            raise ConfigError(
                f"data.rendered names {name!r}, which no row has as a column; there are {', '.join(columns)}."
                f"{did_you_mean(name, columns)}"
            )


def held_out_prompts(
    config: DataConfig,
    dataset: DatasetSpec,
    tokenizer: PreTrainedTokenizerBase,
    limit: int = 0,
    tools: OfferedTools | None = None,
) -> DataProto:
    """Return `PromptLoader.held_out(limit)` without reading the training split."""
    split = PromptSplit(config, dataset, tokenizer, "eval", tools)
    return split.batch(split.usable[: limit or None], "eval")
