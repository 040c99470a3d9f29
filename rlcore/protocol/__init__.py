"""Batches as they travel: DataProto and its columns, padding to a divisor, and the glossary of fields."""

from rlcore.protocol.dataproto import DataProto
from rlcore.protocol.ragged import Ragged
from rlcore.protocol.views import DataProtoItem

__all__ = ["DataProto", "DataProtoItem", "Ragged"]
