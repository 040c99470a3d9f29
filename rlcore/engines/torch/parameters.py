"""The parameters of a model over a layout's ranks: local shards, and gathers of full parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.engine.parallel import tensor_parallel
from rlcore.engine.parallel.layout import ShardSpec
from rlcore.engine.parallel.mesh import TrainMesh
from rlcore.engine.weights.fingerprint import checksum
from rlcore.engine.weights.transfer import Shapes
from rlcore.engines.torch import state
from rlcore.engines.torch.model import PackedModel
from rlcore.engines.torch.pipeline import keep_stage, stages_of

MESSAGE_ELEMENTS = 2**24
"""Largest number of gradient elements in one message."""


class Parameters:
    """A model's parameters by their Hugging Face names, tied ones once.

    The constructor divides the model in place: pipeline stages first, then tensor shards. FSDP shards it afterwards.
    `shapes`, `shard_specs` and `trained_names` are those of the whole model, on every rank and in the same order.
    """

    def __init__(self, model: PackedModel, mesh: TrainMesh) -> None:
        self._hf, self._mesh = model.hf, mesh
        layout = mesh.layout
        self.shapes: Shapes = {name: tuple(parameter.shape) for name, parameter in self._hf.named_parameters()}
        names = list(self.shapes)
        self.trained_names = [name for name, each in self._hf.named_parameters() if each.requires_grad]
        plan = tensor_parallel.plan_of(self._hf) if layout.tp > 1 else {}
        dims = tensor_parallel.cut_dims(plan, names)
        stages = stages_of(self._hf, names, layout.pp)
        self.shard_specs: Mapping[str, ShardSpec] = {
            name: ShardSpec(shape, stages[name], dims.get(name)) for name, shape in self.shapes.items()
        }
        if layout.pp > 1:
            keep_stage(model, mesh.coordinates.pp, layout.pp)
        if layout.tp > 1:
            tensor_parallel.parallelize(self._hf, plan, mesh.devices["tp"])
        own_names = [name for name in names if mesh.coordinates.pp in stages[name]]
        self._summed = tensor_parallel.summed(plan, own_names)
        self._orders: list[list[str]] | None = None

    def named_local(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters with a shard on this rank, in the order of `shapes`."""
        yield from self._hf.named_parameters()

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield those of `named_local` that train: all, or with an adapter fewer."""
        names = set(self.trained_names)
        return ((name, parameter) for name, parameter in self.named_local() if name in names)

    def by_mesh(self) -> list[dict[str, Any]]:
        """Return what trains in optimizer groups by DeviceMesh, as AdamW's fused step cannot mix meshes."""
        groups: dict[Any, list[nn.Parameter]] = {}
        for _, parameter in self.trained():
            groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        return [{"params": parameters} for parameters in groups.values()]

    def shard_of(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's shard, a view, of a full tensor that is divided like the parameter `name`."""
        mesh, dim = self._mesh, self.shard_specs[name].dim
        if dim is not None:
            whole = whole.chunk(mesh.layout.tp, dim)[mesh.coordinates.tp]
        if mesh.shards > 1:
            chunks = whole.chunk(mesh.shards, 0)  # as FSDP2 does: the last ranks may get less, or nothing
            whole = chunks[mesh.shard] if mesh.shard < len(chunks) else whole[:0]
        return whole

    def iter_full(
        self, tensors: Mapping[str, Tensor], names: Sequence[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Gather tensors that are divided like the parameters `names` and yield them in full; None: in `shapes`' order.

        `tensors` has every name with a shard on this rank. All ranks iterate to the end.
        """
        mesh = self._mesh
        for name in self.shard_specs if names is None else names:
            cut = self.shard_specs[name]
            if mesh.coordinates.pp == cut.stages[0]:
                rows = cut.shape[0] // (mesh.layout.tp if cut.dim == 0 else 1)
                shard = mesh.join_data_shards(state.local(tensors[name].detach()), rows)
                yield name, mesh.broadcast_from_stage(cut.stages[0], mesh.join_tensor_shards(shard, cut.dim))
            else:
                empty = torch.empty(cut.shape, dtype=torch.float32, device=mesh.ranks.device)
                yield name, mesh.broadcast_from_stage(cut.stages[0], empty)

    def iter_tp_shards(self, root: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's model-parallel shards in the dtype of the forward, whole along dp.

        `root` is the module that FSDP2 wraps. A tensor is valid until the next one.
        """
        from torch.distributed.fsdp import FSDPModule

        if self._mesh.is_whole:
            yield from ((name, parameter.detach().to(dtype)) for name, parameter in self.named_local())
            return
        reshard_fsdp(root)
        for prefix, module in root.named_modules():
            if not isinstance(module, FSDPModule):
                continue
            module.unshard()  # one gather for all its own parameters; nested FSDP modules stay sharded
            for name, parameter in nn.Module.named_parameters(module):  # type: ignore[arg-type]
                if not _over_data(parameter):
                    yield f"{prefix}.{name}".rpartition("hf.")[2], state.local(parameter).detach()
            module.reshard()

    def iter_gathered(self, root: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield every full parameter in the dtype of the forward. All ranks iterate. See `iter_tp_shards`."""
        mesh = self._mesh
        # FSDP's modules yield in an order of their own. The other stages need it to match the broadcasts.
        if self._orders is None:
            mine = [name for name, _ in self.iter_tp_shards(root, dtype)] if mesh.layout.pp > 1 else []
            everyone = mesh.ranks.gather((mesh.coordinates.pp, mine)) if mesh.layout.pp > 1 else []
            self._orders = list(dict(everyone).values())
        for stage in range(mesh.layout.pp):
            if stage == mesh.coordinates.pp:
                for name, shard in self.iter_tp_shards(root, dtype):
                    if self.shard_specs[name].stages[0] == stage:
                        whole = mesh.join_tensor_shards(shard, self.shard_specs[name].dim)
                        yield name, mesh.broadcast_from_stage(stage, whole)
                continue
            for name in self._orders[stage]:
                if self.shard_specs[name].stages[0] == stage:
                    empty = torch.empty(self.shard_specs[name].shape, dtype=dtype, device=mesh.ranks.device)
                    yield name, mesh.broadcast_from_stage(stage, empty)

    def checksums(self, dtype: torch.dtype) -> dict[str, int]:
        """Return the checksums of this rank's shards in `dtype`; those of all ranks add up to the fingerprint."""
        found: dict[str, int] = {}
        for name, parameter in self.named_local():
            if self._is_counted(name):
                place = self.shard_of(name, torch.empty(self.shapes[name], device="meta"))
                found[name] = checksum(state.local(parameter.detach()).to(dtype), place)
        return found

    # Gradients

    @torch.no_grad()
    def complete_gradients(self) -> None:
        """Add up, in place, gradients that are spread over several ranks: those of `summed`, and tied embeddings.

        Unsharded copies of the model average their gradients here; FSDP does it for shards.
        """
        mesh = self._mesh
        if mesh.is_whole:
            if mesh.copies > 1:
                self._average_gradients()
            return
        held = dict(self.named_local())
        for name in self._summed:
            gradient = held[name].grad
            if gradient is not None:
                torch.distributed.all_reduce(state.local(gradient), group=mesh.group("tp"))
        for name, cut in self.shard_specs.items():
            gradient = held[name].grad if len(cut.stages) > 1 and name in held else None
            if gradient is not None:
                mesh.reduce_tied_embeddings(state.local(gradient))

    def _average_gradients(self) -> None:
        gradients = [parameter.grad for _, parameter in self.named_local() if parameter.grad is not None]
        for some in messages(gradients, MESSAGE_ELEMENTS):
            flat = torch.cat([gradient.flatten() for gradient in some])
            self._mesh.average_copies(flat)
            for gradient, mean in zip(some, flat.split([each.numel() for each in some]), strict=True):
                gradient.copy_(mean.view_as(gradient))

    def gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the local gradient shards, and the subset that this rank contributes to the global norm."""
        every, counted = [], []
        for name, parameter in self.named_local():
            if parameter.grad is None:
                continue
            gradient = state.local(parameter.grad)
            every.append(gradient)
            if self._is_counted(name):
                counted.append(gradient)
        return every, counted

    def _is_counted(self, name: str) -> bool:
        """Whether this rank's shard of a parameter counts in a sum over all ranks, and not a replica of it."""
        at, cut = self._mesh.coordinates, self.shard_specs[name]
        return self._mesh.copy == 0 and at.pp == cut.stages[0] and (cut.dim is not None or at.tp == 0)


def reshard_fsdp(root: nn.Module) -> None:
    """Replace gathered parameters by the sharded ones.

    After a forward without a backward, FSDP keeps the gathered parameters, in the dtype of the forward.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _over_data(parameter: Any) -> bool:
    """Whether a parameter is currently sharded by FSDP."""
    return state.is_sharded(parameter) and "shard" in parameter.device_mesh.mesh_dim_names


def messages(tensors: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Yield the tensors in groups of at most `most` elements each: a small message costs as much as a large one."""
    run: list[Tensor] = []
    for tensor in tensors:
        if run and sum(each.numel() for each in run) + tensor.numel() > most:
            yield run
            run = []
        run.append(tensor)
    if run:
        yield run
