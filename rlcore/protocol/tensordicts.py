"""A table as a TensorDict and back. Only this module imports tensordict, and only when a function is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rlcore.errors import DataError
from rlcore.protocol.columns import column_of
from rlcore.protocol.ragged import Ragged
from rlcore.protocol.table import Table


def table_to_tensordict(table: Table) -> Any:
    """Return a TensorDict with private contents; see DataProto.to_tensordict."""
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    clash = sorted(table.columns.keys() & table.meta_info.keys())
    if clash:
        raise DataError(
            f"a TensorDict cannot hold {clash}, which are both columns and keys of meta_info; rename one of them"
        )
    result = TensorDict({}, batch_size=[table.rows])
    for name, column in table.columns.items():
        value = column.read()
        if isinstance(value, Ragged):
            value = torch.nested.nested_tensor_from_jagged(value.values, value.offsets)
        elif not isinstance(value, torch.Tensor):
            value = NonTensorStack(*(NonTensorData(item) for item in value))
        result.set(name, value)
    for key, item in table.meta_info.items():
        result.set(key, NonTensorData(item, batch_size=[table.rows]))
    return result


def table_from_tensordict(tensor_dict: Any, meta_info: Mapping[str, Any]) -> Table:
    """Return the table of a TensorDict; see DataProto.from_tensordict."""
    from tensordict import NonTensorData, NonTensorStack

    rows, *_ = tensor_dict.batch_size or (0,)
    table = Table(bare_rows=rows)
    for name, value in tensor_dict.items():
        if isinstance(value, NonTensorData):
            table.meta_info[name] = value.data
        else:
            objects = [item.data for item in value] if isinstance(value, NonTensorStack) else value
            table.bind(name, column_of(name, objects))
    table.meta_info.update(meta_info)
    return table
