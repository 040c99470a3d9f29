"""The public contract of rollout engines: requests go in, finished rows come out, in the process of one worker.

Rows join while others decode: `add` queues requests, `step` decodes all rows of the engine further and returns those
that ended, `abort` takes rows out. `generate` answers a whole batch and is written once, on top of these three.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from rlcore.config import ModelConfig, RolloutConfig
from rlcore.engine.responses import response_columns
from rlcore.engine.weights.meter import Group
from rlcore.engine.weights.transfer import Shapes
from rlcore.errors import DataError
from rlcore.ops import noise_key
from rlcore.protocol import DataProto

C = TypeVar("C")
Reason = Literal["end", "stop", "length", "abort"]
"""The reason why a row left the engine; see Finished."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: the limits, the distribution, and the names that determine the noise keys of `generate`.

    Row (uid, sample_index) of call number `call` of step `step` draws the same noise on any rank and in any order. It
    draws different noise in any other call, step or purpose.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    seed: int = 0
    step: int = 0
    purpose: str = "train"
    call: int = 0

    def key(self, uid: str, sample_index: int) -> int:
        """Return the noise key of one row."""
        return noise_key(self.seed, self.step, self.purpose, self.call, uid, sample_index)

    @property
    def is_plain(self) -> bool:
        """Whether tokens come from the model's own distribution at a temperature above 0, without cuts."""
        return self.top_p >= 1.0 and self.top_k == 0 and self.min_tokens == 0 and self.temperature > 0


@dataclass(frozen=True)
class Request:
    """One row to sample: its prompt, its noise and its sampling.

    `id` is unique among the requests in flight. `prompt` holds at least one token id. Token t of the response (from 0)
    is drawn with noise number t of `key`, a signed 64-bit integer (`rlcore.ops.uniform_noise`).

    `sampled` are existing tokens of the response, with their log-probs in nats in `sampled_log_probs`; sampling
    continues after them. So a row that was interrupted after k tokens, and is added again with these k tokens, gives
    the tokens of the uninterrupted row. `sampling.min_tokens` and `max_tokens` count all tokens of the response, these
    included. `key` replaces the names in `sampling` (seed, step, purpose, call).

    `keep`: a later request will continue this row, so the engine may keep its keys and values until `forget`. `after`:
    the id of such a row, with whose tokens `prompt` begins. `row_limit`: the most tokens that the row and those that
    continue it will hold, prompt included, so that an engine makes room once; None: unknown. All three only save time:
    an engine may ignore them, and may drop what it has kept.
    """

    id: str
    prompt: tuple[int, ...]
    key: int
    sampling: Sampling
    sampled: tuple[int, ...] = ()
    sampled_log_probs: tuple[float, ...] = ()
    keep: bool = False
    after: str | None = None
    row_limit: int | None = None


@dataclass(frozen=True)
class Finished:
    """A row that left the engine, by request id.

    `tokens` are all token ids of the response, those of `Request.sampled` first. `log_probs` has one number a token, in
    nats, under the sampling distribution (0 at temperature 0). `reason`: "end" for an end token of the model, the last
    of `tokens`; "stop" for one of `Sampling.stop`, which stays in the response; "length" at `max_tokens`; "abort" for
    an aborted row. `weights_version` is the version of the weights that sampled the new tokens.
    """

    id: str
    tokens: Sequence[int]
    log_probs: Sequence[float]
    reason: Reason
    weights_version: int

    @property
    def finished(self) -> bool:
        """Whether the response ended by itself, with an end token or a stop string."""
        return self.reason in ("end", "stop")


@dataclass(frozen=True)
class Untested:
    """A rollout engine in a version that no test has seen; its first weights are tried (docs/rollout.md).

    name: the engine, its version and what else matters, such as "vLLM 0.33.0". tested: the versions that are known to
    pass, in words.
    """

    name: str
    tested: str


@dataclass(frozen=True)
class RolloutSetup(Generic[C]):
    """The arguments of a rollout engine, in the worker process that it samples in.

    model: the model's folder, precision and attention.
    rollout: the core's keys `rollout.*`.
    config: the engine's own keys `rollout.NAME.*`, an object of its spec's `config_class`; None without one.
    device: where it computes.
    shared: the train engine's module, only for an engine with the capability `shares_module`, which then generates with
        it; None: the engine keeps its own weights.
    tensor_group: the ranks that sample the same rows together, each with its shard of every layer; None: whole layers.
    engine_order: the ranks of all such groups, group after group; they start together. Empty without a tensor group.
    beside_training: a role trains in the same process, and uses the device too.
    training_bytes: bytes that gradients and optimizer states of this process will still take on the device.
    kept_bytes: the part of `training_bytes` that stays on the device while it samples.
    gpu_share: this process's share of its GPU, above 0 and at most 1.
    row_tokens: tokens of the longest prompt and response of a run; 0: unknown.
    """

    model: ModelConfig
    rollout: RolloutConfig
    config: C
    device: torch.device
    shared: nn.Module | None = None
    tensor_group: Group | None = None
    engine_order: Sequence[int] = ()
    beside_training: bool = False
    training_bytes: int = 0
    kept_bytes: int = 0
    gpu_share: float = 1.0
    row_tokens: int = 0


class RolloutEngine(ABC):
    """Samples responses with the weights that it was given. It lives in a worker's process, and is not thread-safe.

    `version`: of its weights, -1 before the first. `exact`: its log-probs may replace the train engine's, as both use
    the same arithmetic and differ only by rounding. `untested`: its version, if no test has seen it; its first weights
    are then tried before a row of the run is sampled. `tokenizer`: the model's, for texts and stop strings.
    `description`: its form of decoding, in a few words for the run's first lines.

    In fp32 the tokens of a row do not depend on when it was added or on the rows beside it. Ranks of one tensor group
    get the same calls in the same order.
    """

    version: int = -1
    description: str = ""
    exact: bool = False
    untested: Untested | None = None
    tokenizer: Any

    @abstractmethod
    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, in order. Later steps sample them, together with the rows that decode already.

        Raises DataError, and adds none of them, when `check_requests` refuses a request, when one does not fit into the
        engine's memory, or when the engine has no weights.
        """

    @abstractmethod
    def step(self) -> list[Finished]:
        """Decode every row that has a slot by at least one token and return the rows that ended; possibly none.

        Queued requests take free slots first, in the order in which they were added. Without requests in flight it
        returns [] at once.
        """

    @abstractmethod
    def abort(self, ids: Collection[str]) -> list[Finished]:
        """Remove rows, free their slots and memory, and return their tokens so far, with reason "abort".

        An aborted row can be added again, with its tokens as `sampled`. Raises DataError for an id that is not in
        flight; then it aborts nothing.
        """

    @property
    @abstractmethod
    def in_flight(self) -> Collection[str]:
        """The ids of all added requests that have neither ended nor been aborted."""

    def so_far(self, ids: Collection[str]) -> Mapping[str, Sequence[int]]:
        """Return the tokens so far of rows in flight that have any, those of `Request.sampled` first, by request id.

        For clients that read an answer while it is sampled. {}: the engine cannot tell before a row ends.
        """
        return {}

    @abstractmethod
    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int, shapes: Shapes) -> None:
        """Copy full weights by their Hugging Face names; each tensor is valid until the next.

        `shapes` are those of all tensors that `weights` will yield. Raises DataError while requests are in flight, and
        for missing or unknown names and unexpected shapes. Both checks come before the first tensor is read, so the old
        weights stay usable.
        """

    def adopt(self, shards: Iterator[tuple[str, Tensor]], version: int, shapes: Shapes) -> None:
        """Take over this rank's generating shards by name, as `sync` does with full weights.

        Called in place of `sync` where the training model is divided, of engines with one of two capabilities.
        `adopts_weights`: the engine decodes from these very tensors, which stay valid and unchanged until the next
        call. `tensor_shards` only: it copies them, each before it asks for the next.
        """
        self.sync(shards, version, shapes)

    def fingerprint(self) -> dict[str, int] | None:
        """Return the checksum of every whole parameter that it samples with, as `rlcore.engine.checksum` gives it.

        All ranks of a tensor group call it together, and each returns the same. None: the engine holds its weights in
        another form; then the log-probs of a few sampled tokens are compared with the train engine's instead.
        """
        return None

    def sleep(self) -> None:  # noqa: B027  (most stay awake)
        """Free memory for training, after a worker's call of `generate`.

        An engine that gives up its weights sets `version` to -1, and gets them again before the next rows.
        """

    def forget(self, ids: Collection[str]) -> None:  # noqa: B027  (most keep nothing)
        """Drop what is kept of these rows (`Request.keep`); ids of which nothing is kept are allowed."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Further metrics, which the next update's show."""
        return {}

    def close(self) -> None:  # noqa: B027  (most hold nothing)
        """Release everything the process holds for the engine, which is not used again."""

    def generate(self, batch: DataProto, sampling: Sampling) -> DataProto:
        """Return, for each row's `prompts`, `uid` and `sample_index`, one response.

        Columns: `responses` (ragged int64, with the end token if one was sampled), `response_mask` (ragged int64, 1),
        `rollout_log_probs` (ragged fp32, nats, under the sampling distribution), `response_text` (object),
        `prompt_length` and `response_length` (int64, tokens), `finished` (bool: ended by itself), `weights_version`
        (int64). Raises DataError while other requests are in flight, and the errors of `add`.
        """
        if self.in_flight:
            raise DataError(f"generate needs an idle engine, but {len(self.in_flight)} requests are in flight")
        prompts = [tuple(prompt.tolist()) for prompt in batch.view("prompts").to_list()]
        names = zip(batch.view("uid"), batch.view("sample_index"), strict=True)
        requests = [
            Request(str(row), prompt, sampling.key(str(uid), int(index)), sampling)
            for row, (prompt, (uid, index)) in enumerate(zip(prompts, names, strict=True))
        ]
        # Rows with the same prompt are neighbours, so that it is prefilled once. Prompts of similar length are too,
        # which saves padding.
        requests.sort(key=lambda request: (len(request.prompt), request.prompt))
        done: dict[str, Finished] = {}
        try:
            self.add(requests)
            while self.in_flight:
                done.update((row.id, row) for row in self.step())
        except BaseException:
            # Leave the engine idle: the next call must not meet rows of this one.
            self.abort(list(self.in_flight))
            raise
        rows = [done[str(row)] for row in range(len(prompts))]
        return response_columns(rows, batch.view("prompts").lengths, self.tokenizer)


class EpisodeSource(Protocol):
    """Plays the episodes of batches in one sampling process, with the engine that it was made for.

    `is_exact`: the requests of the last batch came in an order that does not depend on the environment's speed, so
    its log-probs do not either. Otherwise only the tokens do not: the log-probs of a row differ by rounding with the
    rows beside it.
    """

    is_exact: bool

    def play(self, batch: DataProto, sampling: Sampling) -> DataProto:
        """Return the rows of the batch's episodes, with the columns of `rlcore.episodes.rows`."""

    def waited(self) -> float:
        """Return the seconds since the last call in which the engine had no row to decode."""

    def close(self) -> None:
        """End all processes."""


class Episodes(Protocol):
    """A setup of episodes that a worker can open; `rlcore.episodes.setup` has the core's."""

    @property
    def key(self) -> str:
        """Equal for equal setups."""

    @property
    def max_failures(self) -> float:
        """Largest share of a batch's episodes that may fail."""

    def open(self, engine: RolloutEngine) -> EpisodeSource:
        """Return the source that plays episodes with this engine."""


def check_requests(requests: Sequence[Request], in_flight: Collection[str]) -> None:
    """Raise DataError for the first request that no engine could sample.

    Faults: an empty prompt, an id that is in flight already or occurs twice, unequal numbers of `sampled` and
    `sampled_log_probs`, `max_tokens` or more sampled tokens, and a `row_limit` below the row's own tokens.
    """
    seen = set(in_flight)
    for request in requests:
        problem, most = "", len(request.prompt) + request.sampling.max_tokens
        if request.id in seen:
            problem = "its id is in flight already; ids are unique among requests in flight"
        elif not request.prompt:
            problem = "its prompt is empty; it needs at least one token"
        elif len(request.sampled) != len(request.sampled_log_probs):
            problem = f"it has {len(request.sampled)} sampled tokens and {len(request.sampled_log_probs)} log-probs"
        elif len(request.sampled) >= request.sampling.max_tokens:
            problem = f"it has {len(request.sampled)} sampled tokens, and max_tokens={request.sampling.max_tokens}"
        elif request.row_limit is not None and request.row_limit < most:
            problem = f"its row_limit is {request.row_limit}; its prompt and max_tokens are {most} tokens"
        if problem:
            raise DataError(f"request {request.id!r} cannot be sampled: {problem}")
        seen.add(request.id)


def refuse_in_flight(in_flight: Collection[str]) -> None:
    """Raise DataError if requests are in flight: their keys and values were computed with the old weights."""
    if in_flight:
        raise DataError(
            f"weights cannot change while {len(in_flight)} requests are in flight; let them end, or abort them and add "
            "them again afterwards with their tokens as `sampled`"
        )
