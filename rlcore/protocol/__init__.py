"""Batches: DataProto and its columns. `glossary` declares the standard fields."""

from rlcore.protocol.columns import ColumnSpec
from rlcore.protocol.dataproto import DataProto
from rlcore.protocol.moments import Moments
from rlcore.protocol.ragged import Ragged
from rlcore.protocol.views import DataProtoItem

__all__ = [
    "ColumnSpec",
    "DataProto",
    "DataProtoItem",
    "Moments",
    "Ragged",
]
