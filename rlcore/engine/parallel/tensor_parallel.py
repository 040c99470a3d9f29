"""Tensor parallelism by the model's own plan: linear layers become DTensors sharded over the `tp` axis of the mesh.

A plan (transformers' `base_model_tp_plan`) names modules by patterns. `colwise` shards a linear layer's outputs, so
that attention computes a share of the heads. `rowwise` shards its inputs and adds up the results. Of an adapter A is
sharded as the weight, and B along the outputs. The weights of
`replicated_with_grad_allreduce` are replicated, but each rank applies them to its own heads (Qwen3's norms of queries
and keys), so their gradients are added up. Everything else is replicated, and every rank computes it in full.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from rlcore.engine.adapter import LoraLinear
from rlcore.engine.parallel.layout import Layout
from rlcore.engine.parallel.model_shape import STYLES, ModelShape
from rlcore.errors import ConfigError


def plan_of(hf: Any) -> dict[str, str]:
    """Return the style of each module in the plan of a Hugging Face model, by the module's full name.

    Raises ConfigError for a model without a plan, and for a plan with unknown styles.
    """
    plan: Mapping[str, str] = getattr(hf.config.get_text_config(), "base_model_tp_plan", None) or {}
    unknown = sorted(set(plan.values()) - set(STYLES))
    if not plan or unknown:
        fault = f"has the unknown styles {', '.join(unknown)}" if unknown else "is missing"
        raise ConfigError(
            f"{type(hf).__name__} cannot be trained with engine.tp above 1: its base_model_tp_plan {fault}; supported "
            f"are {', '.join(STYLES)}"
        )
    # transformers writes a layer's number as `*`.
    patterns = {re.compile(re.escape(pattern).replace(r"\*", r"\d+")): style for pattern, style in plan.items()}
    found = {}
    for name, _ in getattr(hf, hf.base_model_prefix).named_modules():
        for pattern, style in patterns.items():
            if pattern.fullmatch(name):
                found[f"{hf.base_model_prefix}.{name}"] = style
    return found


def cut_dims(plan: Mapping[str, str], names: list[str]) -> dict[str, int]:
    """Return the dimension along which each parameter is sharded; parameters without one are replicated."""
    dims = {}
    for name in names:
        module, _, kind = name.rpartition(".")
        style = plan.get(module)
        if style == "colwise" or (style == "rowwise" and kind == "lora_b"):
            dims[name] = 0
        elif style == "rowwise" and kind in ("weight", "lora_a"):
            dims[name] = 1
    return dims


def summed(plan: Mapping[str, str], names: list[str]) -> list[str]:
    """Return the replicated parameters whose gradients have to be added up over the tensor ranks."""
    return [name for name in names if plan.get(name.rpartition(".")[0]) == "replicated_with_grad_allreduce"]


def parallelize(hf: nn.Module, plan: Mapping[str, str], mesh: Any) -> None:
    """Shard the modules of this rank, in place, over the one-dimensional DeviceMesh `mesh`."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    modules = dict(hf.named_modules())
    fed: Counter[str] = Counter()
    for name, style in plan.items():
        if style in styles and isinstance(modules.get(name), nn.Linear):
            # Every rank has read the same weights, so each takes its own shard and nothing is sent.
            if style == "rowwise" and isinstance(modules[name], LoraLinear):  # RowwiseParallel would replicate them
                for part, dim in (("lora_a", 1), ("lora_b", 0)):
                    whole = modules[name].get_parameter(part)
                    shard = distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)
                    setattr(modules[name], part, nn.Parameter(shard, requires_grad=whole.requires_grad))
            parallelize_module(modules[name], mesh, styles[style](), src_data_rank=None)
            fed[name.rpartition(".")[0]] += style == "colwise"
    # A module whose input feeds several sharded layers, as attention's queries, keys and values.
    for name, count in fed.items():
        if count > 1:
            modules[name].register_forward_pre_hook(partial(_share_input, mesh), with_kwargs=True)


def _share_input(mesh: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Turn a module's input into one DTensor, so that its linear layers' gradients are added up locally first.

    Queries, keys and values then cost one all-reduce in backward instead of three.
    """
    from torch.distributed.tensor import DTensor, Replicate

    def shared(hidden: Tensor) -> Tensor:
        return DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)

    if args:
        return (shared(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": shared(kwargs["hidden_states"])}


def shard_dims(hf: Any, ranks: int) -> dict[str, int]:
    """Return the dimension along which `ranks` tensor-parallel ranks divide each parameter; others are replicated.

    Raises ConfigError for a model that they cannot divide.
    """
    if problem := ModelShape.of(hf.config).problem(Layout(tp=ranks)):
        raise ConfigError(f"{type(hf).__name__} cannot generate with rollout.tp={ranks}: {problem}")
    return cut_dims(plan_of(hf), [name for name, _ in hf.named_parameters()])
