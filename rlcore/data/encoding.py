"""Encoded prompts, and their cache: rows that were rendered and tokenised once are read from disk at the next start."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import marshal
import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlcore import end_tokens, plain_text
from rlcore.data.chat import PromptEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

PART = 4096
"""Rows that are rendered and tokenised at a time."""
DIGEST_BYTES = 16
ENDING = ".safetensors"
KEPT_DAYS = 30
"""After how many days without a use an entry is removed."""
_LIBRARIES = ("transformers", "tokenizers", "jinja2")
_CHECKSUM = "sha256"


@dataclass(frozen=True)
class EncodedPrompts:
    """The prompts of rows as the model reads them, in one piece of memory.

    values: int32 [tokens], the token ids of all rows. starts: int64 [rows + 1], where each row's begin. digests: uint8
    [rows, 16], a hash of each rendered prompt. is_text: bool [rows], whether a row's prompt is a string, not messages.
    spells_out: bool [rows], whether it spells out special tokens, which are text there.
    """

    values: np.ndarray
    starts: np.ndarray
    digests: np.ndarray
    is_text: np.ndarray
    spells_out: np.ndarray

    @classmethod
    def of(
        cls, token_ids: Sequence[Sequence[int]], chats: Sequence[str], is_text: list[bool], spells_out: list[bool]
    ) -> EncodedPrompts:
        """Return the rows with these token ids and rendered prompts."""
        values = array("i")
        for row in token_ids:
            values.extend(row)
        hashes = b"".join(hashlib.blake2b(chat.encode(), digest_size=DIGEST_BYTES).digest() for chat in chats)
        return cls(
            values=np.asarray(values, dtype=np.int32),
            starts=np.cumsum([0, *map(len, token_ids)], dtype=np.int64),
            digests=np.frombuffer(hashes, dtype=np.uint8).reshape(-1, DIGEST_BYTES),
            is_text=np.array(is_text),
            spells_out=np.array(spells_out),
        )

    @classmethod
    def concat(cls, parts: Sequence[EncodedPrompts]) -> EncodedPrompts:
        """Return the rows of all parts in turn."""
        starts = np.cumsum(np.concatenate([[0], *(part.lengths for part in parts)]), dtype=np.int64)
        joined = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in _names() if name != "starts"
        }
        return cls(starts=starts, **joined)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each row, int64 [rows]; at least 1."""
        return np.diff(self.starts)

    @property
    def largest(self) -> np.ndarray:
        """The largest token id of each row, int32 [rows]."""
        return np.asarray(np.maximum.reduceat(self.values, self.starts[:-1]))

    def token_ids(self, row: int) -> np.ndarray:
        """Return a row's token ids, int32 [tokens]."""
        return self.values[self.starts[row] : self.starts[row + 1]]

    def digest(self, row: int) -> bytes:
        """Return the hash of a row's rendered prompt: equal for prompts that are the same to the model."""
        return self.digests[row].tobytes()


def _names() -> list[str]:
    return [field.name for field in fields(EncodedPrompts)]


class PromptCache:
    """Encoded prompts on disk, by a hash of all that they are made of: the rows, the tokenizer, the chat template.

    folder: prompts/ in the folder that the variable RLCORE_CACHE names, or in ~/.cache/rlcore. An entry is written
    whole or not at all, and has a checksum. A damaged one is made anew; one that nobody used for a month is removed.
    """

    def __init__(self) -> None:
        base = os.environ.get("RLCORE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "rlcore")
        self.folder = Path(base).expanduser() / "prompts"

    def read(self, key: str) -> EncodedPrompts | None:
        """Return the entry of a key; None where there is none or where it is damaged, which a warning says."""
        from safetensors import SafetensorError, safe_open

        path = self._path(key)
        if not path.is_file():
            return None
        try:
            with safe_open(path, "np") as file:
                found = EncodedPrompts(**{name: file.get_tensor(name) for name in _names()})
                checksum = (file.metadata() or {}).get(_CHECKSUM)
        except (OSError, SafetensorError) as error:
            log.warning("the encoded prompts in %s cannot be read and are made anew: %s", path, error)
            return None
        if checksum != _checksum(found):
            log.warning("the encoded prompts in %s are damaged and are made anew", path)
            return None
        with contextlib.suppress(OSError):  # of somebody else, or on a disk that cannot be written
            os.utime(path)
        return found

    def keep(self, key: str, prompts: EncodedPrompts) -> None:
        """Write an entry, and remove those that nobody used for a month; a warning says where the disk refuses."""
        from safetensors.numpy import save_file

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder) as aside:
                whole = Path(aside) / "whole"
                save_file({name: getattr(prompts, name) for name in _names()}, whole, {_CHECKSUM: _checksum(prompts)})
                os.replace(whole, self._path(key))
            self._remove_old()
        except OSError as error:
            log.warning(
                "the encoded prompts cannot be kept in %s (%s), so the next start encodes them again; free disk space, "
                "or let RLCORE_CACHE name another folder",
                *(self.folder, error.strerror or error),
            )

    def _remove_old(self) -> None:
        """Remove entries that nobody used for a month, and what a process has left that was killed while it wrote."""
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process removes them too
                days = (time.time() - path.stat().st_mtime) / 86_400
                if path.is_dir() and days > 1:
                    shutil.rmtree(path)
                elif path.suffix == ENDING and days > KEPT_DAYS:
                    path.unlink()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{ENDING}"


def cache_key(encoder: PromptEncoder, inputs: Iterable[Any], *settings: Any) -> str | None:
    """Return the key of what an encoder makes of rows; None where that cannot be told, so that nothing is kept.

    inputs: of each row all that is rendered. settings: what else decides whether a row is taken.
    """
    state = _encoder_state(encoder)
    if state is None:
        return None
    digest = hashlib.sha256()
    try:
        # A plain value's bytes in marshal's second format depend on nothing but the value and its types.
        for each in ([state, list(settings)], *inputs):
            digest.update(marshal.dumps(each, 2))
    except ValueError:  # a value that is neither text, number, list nor object
        return None
    return digest.hexdigest()


def _encoder_state(encoder: PromptEncoder) -> list[Any] | None:
    """Return all that decides, beside a row, how it is encoded; None for a tokenizer that has code of its own."""
    tokenizer = encoder.tokenizer
    given = _bound_arguments(tokenizer)
    is_known = tokenizer.is_fast and type(tokenizer).__module__.startswith("transformers.")
    if not is_known or given is None:
        return None
    return [
        *(_own_code(), *map(importlib.metadata.version, _LIBRARIES)),
        *(type(tokenizer).__name__, tokenizer.backend_tokenizer.to_str()),  # type: ignore[attr-defined]
        json.dumps(tokenizer.chat_template, sort_keys=True),
        {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())},
        given,
        *(encoder.system_prompt, encoder.rendered),
        *(json.dumps(list(encoder.tools.schemas), sort_keys=True, default=str), encoder.tools.instructions),
    ]


@cache
def _own_code() -> str:
    """Return a hash of rlcore's own part in it."""
    own = [*sorted(Path(__file__).parent.glob("*.py")), Path(plain_text.__file__), Path(end_tokens.__file__)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in own)).hexdigest()


def _bound_arguments(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the run's own arguments of the chat template as JSON; None where the template reads the clock."""
    given = dict(getattr(tokenizer.apply_chat_template, "keywords", {}))
    if "strftime_now" in given:
        given["strftime_now"] = given["strftime_now"]("%Y-%m-%d %H:%M:%S")
    elif "strftime_now" in json.dumps(tokenizer.chat_template):
        return None
    return json.dumps(given, sort_keys=True)


def _checksum(prompts: EncodedPrompts) -> str:
    digest = hashlib.sha256()
    for name in _names():
        digest.update(np.ascontiguousarray(getattr(prompts, name)).data)
    return digest.hexdigest()
