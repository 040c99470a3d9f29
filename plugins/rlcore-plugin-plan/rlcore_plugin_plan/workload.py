"""The workload of a step: the lengths of its rows, and the settings that cut them into micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlcore import Config
from rlcore.engine import micro_batch_limit
from rlcore_plugin_plan.dataflow import Call

if TYPE_CHECKING:
    from rlcore import PluginManager


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt, and possible lengths of a response in tokens, all equally likely."""

    prompt: int
    responses: tuple[int, ...]

    @cached_property
    def response(self) -> float:
        """The mean length of a response."""
        return sum(self.responses) / len(self.responses)

    @property
    def most(self) -> int:
        """The longest response."""
        return max(self.responses)

    @property
    def row(self) -> float:
        """The mean tokens of a row."""
        return self.prompt + self.response

    @cached_property
    def context(self) -> float:
        """Mean number of earlier tokens that a token attends to, over all tokens: sum n^2 / 2 / sum n."""
        rows = [self.prompt + length for length in self.responses]
        return sum(n * n for n in rows) / 2 / sum(rows)

    @cached_property
    def runs(self) -> tuple[tuple[int, int, float], ...]:
        """Runs of decoding steps with a constant number of live rows: (first, last + 1, share of the rows)."""
        ordered = sorted(self.responses)
        found, start = [], 0
        for index, length in enumerate(ordered):
            if length > start:
                found.append((start, length, (len(ordered) - index) / len(ordered)))
                start = length
        return tuple(found)


@dataclass(frozen=True)
class Workload:
    """A step's rows, and the config's settings that cut them into micro-batches.

    `prompts`: of a step. `dtype_bytes`: of an element in forward and backward. `attention`: as `model.attention`.
    `continuous`: continuous batching, a waiting row takes the slot of a finished one. `shares_module`: a device with
    all trained weights samples with them; otherwise with a copy. `pooled_cache`: decoding rows share one pool of keys
    and values; otherwise each has room for the longest row.
    """

    prompts: int
    lengths: Lengths
    dtype_bytes: int = 2
    micro_batch_tokens: int = 16384
    micro_batch_rows: int = 0
    recompute: bool = False
    shard: int = 0
    layerwise_above: int = 50_000_000
    logits_chunk: int = 4096
    attention: str = "auto"
    padding_free: bool = True
    continuous: bool = False
    shares_module: bool = True
    pooled_cache: bool = False
    offload: bool = False

    @classmethod
    def of(cls, config: Config, plugins: PluginManager, responses: tuple[int, ...] = (), *, cpu: bool) -> Workload:
        """Read a config; without `responses` every response has `rollout.response_len` tokens.

        A setting that the train engine lacks keeps its default. `cpu`: devices are cores of a CPU.
        """
        engine, rollout = config.engine, config.rollout
        train = plugins.train_engines()[engine.name].capabilities
        sampling = plugins.rollout_engines()[rollout.name].capabilities
        settings: dict[str, Any] = {name: config.value(key) for name, key in train.settings.items()}
        return cls(
            prompts=config.data.batch_size,
            lengths=Lengths(config.data.prompt_len, responses or (rollout.response_len,)),
            dtype_bytes=2 if config.model.dtype == "bf16" else 4,
            micro_batch_tokens=micro_batch_limit(engine.micro_batch_tokens, gpu=not cpu),
            micro_batch_rows=engine.micro_batch_rows,
            attention=config.model.attention,
            continuous=sampling.continuous_batching,
            shares_module=sampling.shares_module,
            pooled_cache=sampling.cache_key is not None,
            offload=engine.offload,
            **settings,
        )

    def rows(self, call: Call) -> float:
        """Rows of a call on all devices together."""
        return call.rows * self.prompts

    def micro_batches(self, rows: float, stages: int) -> tuple[int, float]:
        """Return the number of a rank's micro-batches and the rows of each; a pipeline needs at least `stages`."""
        count = 1
        if self.micro_batch_tokens:
            fit = max(1, math.floor(self.micro_batch_tokens / self.lengths.row))
            count = max(count, math.ceil(rows / fit))
        if self.micro_batch_rows:
            count = max(count, math.ceil(rows / self.micro_batch_rows))
        if stages > 1:
            count = max(count, stages)
        return count, rows / count

    def computed(self, rows: float, call: Call, *, cpu: bool) -> float:
        """Return the tokens that every layer computes for a micro-batch of `rows` of a call's rows.

        With torch's own attention the rows of a prompt share one copy of it (rlcore.engines.torch.packing). With P
        prompts of g rows each, n random rows of a mini-batch have P (1 - (1 - n / (P g))^g) distinct prompts, and n / g
        where rows of one prompt are together. Kernels for variable lengths compute the prompt for every row; a `cpu`
        has no such kernels.
        """
        kernel = self.attention.startswith("flash") or (self.attention == "auto" and self.dtype_bytes == 2 and not cpu)
        if kernel or not self.padding_free or call.prompts == 0:
            return rows * self.lengths.row
        share = min(1.0, rows * call.mini_batches / self.rows(call))
        prompts = call.prompts * self.prompts / call.mini_batches
        different = prompts * (share if call.together else 1 - (1 - share) ** (call.rows / call.prompts))
        return min(rows, different) * self.lengths.prompt + rows * self.lengths.response

    @property
    def tokens(self) -> float:
        """Prompt and response tokens of a step with one response a prompt (the paper's throughput counts these)."""
        return self.prompts * self.lengths.row
