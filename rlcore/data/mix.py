"""The sources of `data.mix`: batches that hold a share of each by weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from itertools import chain
from typing import Any

import numpy as np

from rlcore.config.eval_sets import naming
from rlcore.config.schema import DataConfig
from rlcore.data.curriculum import PromptResult
from rlcore.data.loader import PromptLoader, check_same
from rlcore.protocol import DataProto

SOURCE = "mix_source"
"""The column with the name of a prompt's source."""


class MixLoader:
    """Endless batches of `data.batch_size` training prompts from several loaders, and the held-out prompts of all.

    Each prompt comes from the source that is furthest behind its share of the prompts so far, the first of several, so
    the sources alternate within a batch and their counts follow their weights. Sources shuffle and count epochs by
    themselves; the state of a checkpoint has their positions and the number of prompts of each.

    config: the run's data config, with the weights. sources: the loaders by name; a training prompt that any of them
    holds out is left out of all. Raises DataError, naming the source, where none is left.
    """

    def __init__(self, config: DataConfig, sources: Mapping[str, PromptLoader]) -> None:
        self.sources = dict(sources)
        held_out = set(chain.from_iterable(loader.held_out_digests for loader in sources.values()))
        for name, loader in sources.items():
            with naming(f"data.mix.{name}"):
                loader.leave_out(held_out)
        self._batch_size = config.batch_size
        # Exact, as decimal weights are written: rounding would break ties between sources by chance.
        weights = {name: Fraction(str(config.mix[name].weight)) for name in sources}
        self._shares = {name: weight / sum(weights.values()) for name, weight in weights.items()}
        self._taken = dict.fromkeys(sources, 0)
        self.counts = {
            f"{name}/{reason}": count for name, loader in sources.items() for reason, count in loader.counts.items()
        }

    def check_rows(self, check: Callable[[Mapping[str, Any]], None]) -> None:
        """See PromptLoader."""
        for name, loader in self.sources.items():
            with naming(f"data.mix.{name}"):
                loader.check_rows(check)

    @property
    def columns(self) -> list[str]:
        """See PromptLoader; the columns of all sources."""
        return list(dict.fromkeys(chain.from_iterable(loader.columns for loader in self.sources.values())))

    @property
    def lines(self) -> list[str]:
        """See PromptLoader; each line begins with its source."""
        return [f"{name}: {line}" for name, loader in self.sources.items() for line in loader.lines]

    @property
    def longest(self) -> int:
        """See PromptLoader."""
        return max(loader.longest for loader in self.sources.values())

    @property
    def largest_token(self) -> int:
        """See PromptLoader."""
        return max(loader.largest_token for loader in self.sources.values())

    def next_batch(self) -> DataProto:
        """Return the next `data.batch_size` prompts, uid `SOURCE/EPOCH:ROW`, with the column `mix_source`.

        A column that a source lacks is None in its rows.
        """
        names = [self._next_source() for _ in range(self._batch_size)]
        counts = {name: names.count(name) for name in self.sources if name in names}
        joined = self._join({name: self.sources[name].take(count, name) for name, count in counts.items()})
        first_rows = dict(zip(counts, np.cumsum([0, *counts.values()]).tolist(), strict=False))
        rows = []
        for name in names:
            rows.append(first_rows[name])
            first_rows[name] += 1
        return joined[rows]

    def evaluated(self) -> DataProto:
        """Return the held-out prompts of all sources in turn, `data.eval_size` of each; uid `SOURCE/eval:ROW`."""
        batches = {}
        for name, loader in self.sources.items():
            batches[name] = loader.evaluated()
            batches[name]["uid"] = [f"{name}/{uid}" for uid in batches[name]["uid"]]
        return self._join(batches)

    def own_columns(self, batch: DataProto, source: str) -> DataProto:
        """Return a batch of one source without the columns that only other sources have."""
        others = set(self.columns) - set(self.sources[source].columns)
        return batch.select(None, [name for name in batch.non_tensor_batch if name not in others])

    def learn(self, results: Mapping[str, PromptResult]) -> None:
        """See PromptLoader."""
        for name, loader in self.sources.items():
            own = {
                uid.removeprefix(f"{name}/"): result for uid, result in results.items() if uid.startswith(f"{name}/")
            }
            loader.learn(own)

    @property
    def left_out_this_epoch(self) -> int:
        """See PromptLoader; of all sources."""
        return sum(loader.left_out_this_epoch for loader in self.sources.values())

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values: the positions of all sources, and how many prompts each has given."""
        positions = {name: loader.state_dict() for name, loader in self.sources.items()}
        return {
            "taken": dict(self._taken),
            "sources": positions,
            "batch_size": self._batch_size,
            "shares": self._written_shares,
        }

    def difference(self, state: Mapping[str, Any]) -> str | None:
        """See PromptLoader; names the source."""
        if set(before := state.get("sources", {})) != set(self.sources):
            return f"data.mix has {', '.join(self.sources)}, and the checkpoint's {', '.join(before) or 'nothing'}"
        if state.get("shares", self._written_shares) != self._written_shares:
            return "the weights of data.mix differ from the checkpoint's"
        if (before := state.get("batch_size", self._batch_size)) != self._batch_size:
            return f"data.batch_size = {self._batch_size} differs from the checkpoint's {before}"
        for name, loader in self.sources.items():
            if difference := loader.difference(state["sources"][name]):
                return f"data.mix.{name}: {difference}"
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a `state_dict`; CheckpointError, naming the source, when its prompts or their order have changed."""
        check_same(self, state)
        for name, loader in self.sources.items():
            loader.load_state_dict(state["sources"][name])
        self._taken = {name: state["taken"][name] for name in self.sources}

    @property
    def _written_shares(self) -> dict[str, str]:
        return {name: str(share) for name, share in self._shares.items()}

    def _next_source(self) -> str:
        after = sum(self._taken.values()) + 1
        name = max(self.sources, key=lambda name: self._shares[name] * after - self._taken[name])
        self._taken[name] += 1
        return name

    def _join(self, batches: Mapping[str, DataProto]) -> DataProto:
        columns = dict.fromkeys(chain.from_iterable(batch.keys() for batch in batches.values()))
        parts = []
        for name, batch in batches.items():
            batch[SOURCE] = [name] * len(batch)
            for column in columns:
                if column not in batch:
                    batch[column] = [None] * len(batch)
            parts.append(batch)
        return DataProto.concat(parts)
