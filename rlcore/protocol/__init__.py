"""Batches as they travel: DataProto and its columns, padding to a divisor; `glossary` declares the standard fields."""

from rlcore.protocol.columns import ColumnSpec
from rlcore.protocol.dataproto import DataProto
from rlcore.protocol.moments import Moments
from rlcore.protocol.padding import pad_dataproto_to_divisor, unpad_dataproto
from rlcore.protocol.ragged import Ragged
from rlcore.protocol.views import DataProtoItem

__all__ = [
    "ColumnSpec",
    "DataProto",
    "DataProtoItem",
    "Moments",
    "Ragged",
    "pad_dataproto_to_divisor",
    "unpad_dataproto",
]
