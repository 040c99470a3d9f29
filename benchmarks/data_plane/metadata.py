"""Rows chosen by reference alone: repeat, reorder and chunk of a batch of 4,096 shards and 20 columns."""

from __future__ import annotations

import time

import torch

from rlcore.protocol import DataProto
from rlcore.protocol.columns import Column, ColumnSpec
from rlcore.protocol.remote import Block, RemoteColumn
from rlcore.protocol.table import Table

SHARDS, COLUMNS, ROWS_A_SHARD = 4096, 20, 4
REPEAT, CHUNKS = 2, 8


class Nowhere(Block):
    """A block that nobody fetches."""

    def column(self) -> Column:
        raise AssertionError("rows were chosen, and a block was fetched")


def make() -> DataProto:
    """Return the batch, joined of its shards."""
    form = ColumnSpec("ragged", torch.float32, (), "cpu")
    shards = []
    for _ in range(SHARDS):
        columns = {f"column_{i}": RemoteColumn.of_block(form, Nowhere(), ROWS_A_SHARD) for i in range(COLUMNS)}
        shards.append(DataProto._of(Table(dict(columns))))
    return DataProto.concat(shards)


def seconds(batch: DataProto, seed: int) -> float:
    """Return how long repeat, reorder and chunk take together."""
    order = torch.randperm(len(batch) * REPEAT, generator=torch.Generator().manual_seed(seed))
    start = time.perf_counter()
    chunks = batch.repeat(REPEAT).reorder(order).chunk(CHUNKS)
    taken = time.perf_counter() - start
    assert len(chunks) == CHUNKS
    return taken
