"""Training with torch's own parallelism: FSDP2 along dp, DTensor along tp, 1F1B pipelines along pp.

If every rank holds the full model, the module is not wrapped.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlcore.adapter_folder import AdapterFolder, file_name
from rlcore.engine.adapter import (
    LoraLinear,
    adapted,
    add_adapters,
    is_part,
    merge_adapter,
    merged,
    merged_weight,
    train_adapters_only,
    with_dropout,
)
from rlcore.engine.model_folder import adapter_settings, check_writable, write_adapter_folder, write_model_folder
from rlcore.engine.parallel.layout import ShardSpec
from rlcore.engine.parallel.model_shape import check_model_layout, layout_of
from rlcore.engine.train import Approve, Finish, TrainEngine, TrainSetup
from rlcore.engine.update.items import UpdateItem
from rlcore.engine.weights.fingerprint import sum_checksums
from rlcore.engine.weights.transfer import Shapes, check_same_parameters
from rlcore.engines.torch import state
from rlcore.engines.torch.config import TorchConfig, check_layout
from rlcore.engines.torch.model import PackedModel, load_causal_lm, load_scalar_model
from rlcore.engines.torch.offload import Offloader
from rlcore.engines.torch.parameters import Parameters, reshard_fsdp
from rlcore.engines.torch.pipeline import Pipeline, Stage, check_stages
from rlcore.engines.torch.rounded import rounded_weights
from rlcore.engines.torch.selection import Selection, total_tokens
from rlcore.engines.torch.without_adapter import WithoutAdapter
from rlcore.errors import DataError, WeightsError
from rlcore.ops import Need
from rlcore.protocol import DataProto

SAMPLED = 16
"""Elements of each parameter whose change shows that the optimizer steps the model."""


class TorchEngine(TrainEngine):
    """`engine=torch`: a Hugging Face model, spread over the ranks by the keys of `engine`, with AdamW if it trains."""

    def __init__(self, setup: TrainSetup[TorchConfig]) -> None:
        layout = layout_of(setup.engine, setup.ranks.world_size)
        super().__init__(setup, layout, setup.config.shard)
        self.config: TorchConfig = setup.config
        check_model_layout(setup.model, layout)
        check_layout(self.config, layout)
        self.model = self._load_model(setup)
        if setup.trains:
            check_writable(self.model.hf, setup.model, self.ranks)
        self.description = self.model.description
        self.model.requires_grad_(setup.trains)
        # Of all stages: the scales by adapted layer, and the values of adapter_config.json.
        self._scales: Mapping[str, float] = {}
        self._adapter_settings: Mapping[str, Any] = {}
        self._adapt(setup)
        if setup.frozen and self.dtype is torch.bfloat16:
            self._keep_in_bf16()
        if setup.trains and self.config.activation_checkpointing:
            self._checkpoint_activations()
        # The order matters: tensor shards and stages first, then FSDP, then the optimizer on the final parameters.
        self.parameters = Parameters(self.model, self.mesh)
        self.root: nn.Module = self.model
        self._pipeline: Pipeline | None = None
        if layout.pp > 1:
            self.root = stage = Stage(self.model, self.mesh)
            width = self.model.hf.config.get_text_config().hidden_size
            self._pipeline = Pipeline(stage, self.mesh, width, self.dtype)
        if not self.mesh.is_whole:
            self._shard()
        self.optimizer: torch.optim.Optimizer | None = self._adamw() if setup.trains else None
        self._offloader = Offloader(self.root, self.optimizer, self.ranks.device, weights=self.shared_module is None)

    def _load_model(self, setup: TrainSetup[TorchConfig]) -> PackedModel:
        own, device = setup.config, setup.ranks.device
        # Shards are gathered by hooks around each layer, which were not tried with compiled layers.
        compiles_layers = own.compile == "auto" and self.mesh.is_whole
        if self.kind.is_language_model:
            return load_causal_lm(
                setup.model,
                padding_free=own.padding_free,
                chunk=own.logits_chunk,
                device=device,
                compiles=own.compile == "auto",
                compiles_layers=compiles_layers,
            )
        return load_scalar_model(
            setup.model,
            new_head=setup.new_head,
            padding_free=own.padding_free,
            device=device,
            compiles_layers=compiles_layers,
        )

    def _adapt(self, setup: TrainSetup[TorchConfig]) -> None:
        """Add the adapter of `model.lora` to a model that trains; merge it into another model."""
        lora, hf = setup.model.lora, self.model.hf
        start = None if lora.path is None else AdapterFolder.of(lora.path)
        if not (setup.trains and lora.is_on):
            if start is not None:
                merge_adapter(hf, start)
            return
        layers = add_adapters(hf, lora, start, setup.seed)
        train_adapters_only(hf)
        check_stages(hf, list(layers), self.layout.pp)
        rank = next(iter(layers.values())).rank
        self.description += f", adapters of rank {rank} in {len(layers)} layers"
        if self.dtype is torch.bfloat16 and self.mesh.is_whole:
            for layer in self._rounded_layers():
                for parameter in (layer.weight, layer.bias):
                    if parameter is not None and not parameter.requires_grad:
                        parameter.data = parameter.data.to(torch.bfloat16)
        self._scales = {name: layer.scale for name, layer in layers.items()}
        self._adapter_settings = adapter_settings(hf, setup.model)

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter trains, and not the model's own weights."""
        return bool(self._scales)

    def _keep_in_bf16(self) -> None:
        """Round the weights that every forward would round: half the memory, and the same outputs.

        Autocast rounds the inputs of matrix products only; FSDP rounds all sharded parameters.
        """
        modules: Sequence[nn.Module] = self._rounded_layers() if self.mesh.is_whole else [self.model]
        for module in modules:
            for parameter in module.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)

    def _checkpoint_activations(self) -> None:
        self.model.hf.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in self.model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.training = True  # only the layer's own flag: submodules keep dropout off

    def _shard(self) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = self.mesh.data
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        # A pipeline stage keeps its layers gathered between the micro-batches of a step.
        keep = False if self._pipeline is not None else None
        # A large model is sharded layer by layer, so that only one layer is gathered at a time. A small one is sharded
        # in one piece, which takes one gather instead of a dozen.
        if sum(math.prod(shape) for shape in self.shapes.values()) > self.config.layerwise_above:
            layers = set(getattr(self.model.hf, "_no_split_modules", None) or ())
            for module in self.model.modules():
                if type(module).__name__ in layers:
                    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=keep)
        fully_shard(self.root, mesh=mesh, mp_policy=policy, reshard_after_forward=keep)

    def _adamw(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            self.parameters.by_mesh(),
            lr=self.engine_config.lr,
            betas=(self.engine_config.betas[0], self.engine_config.betas[1]),
            eps=self.engine_config.eps,
            weight_decay=self.engine_config.weight_decay,
            fused=True,
        )

    # Forward and backward

    @torch.no_grad()
    def forward(self, parts: Sequence[DataProto | None], needs: Sequence[Need], finish: Finish) -> None:
        """See TrainEngine."""
        self._offloader.onload()
        if self._pipeline is not None:
            self._run_pipeline(self._pipeline, parts, needs, finish, backward=False)
            return
        with self.model.in_compiled_layers(), self._rounded_weights():
            for part in parts:
                finish(part, self._outputs(part, needs))

    def forward_backward(
        self, parts: Sequence[DataProto | None], needs: Sequence[Need], finish: Finish, *, last: bool
    ) -> None:
        """See TrainEngine."""
        self._offloader.onload()
        if self._pipeline is not None:
            self._run_pipeline(self._pipeline, parts, needs, finish, backward=True)
            return
        sharded_copies = self.mesh.copies > 1 and not self.mesh.is_whole
        dropout = with_dropout(self.adapted.values())
        with self.model.in_compiled_layers(), dropout, self._rounded_weights() as collect_gradients:
            for index, part in enumerate(parts):
                if sharded_copies:
                    # Copies of the shards all-reduce their gradients once, in the last backward before the step.
                    is_last = last and index + 1 == len(parts)
                    self.root.set_requires_all_reduce(is_last)  # type: ignore[operator]
                loss = finish(part, self._outputs(part, needs))
                loss.backward()  # type: ignore[no-untyped-call]
                collect_gradients()

    def _outputs(self, part: DataProto | None, needs: Sequence[Need]) -> dict[str, Tensor]:
        chosen = Selection.of(part, **self._selection, device=self.ranks.device)
        with self._autocast():
            return self.model(chosen.packing, chosen.select, chosen.labels, needs, self.temperature)

    @property
    def _selection(self) -> dict[str, Any]:
        return {"at_end": self.kind.scores_rows, "pack": self.model.pack}

    def _rounded_weights(self) -> AbstractContextManager[Callable[[], None]]:
        """Round the weights that autocast would round in every micro-batch; FSDP rounds sharded ones itself."""
        rounds = self.mesh.is_whole and self.dtype is not torch.float32
        return rounded_weights(self._rounded_layers() if rounds else [], self.dtype)

    def _rounded_layers(self) -> list[nn.Linear]:
        """Return the linear layers whose products autocast rounds.

        A head may be tied to the embedding, which autocast leaves in fp32.
        """
        heads = {self.model.hf.get_input_embeddings(), self.model.hf.get_output_embeddings()}
        return [each for each in self.model.modules() if isinstance(each, nn.Linear) and each not in heads]

    def _autocast(self) -> AbstractContextManager[Any]:
        # FSDP's mixed precision casts sharded parameters; an unwrapped module needs autocast.
        if not self.mesh.is_whole or self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.ranks.device.type, dtype=self.dtype)

    def _run_pipeline(
        self,
        pipeline: Pipeline,
        parts: Sequence[DataProto | None],
        needs: Sequence[Need],
        finish: Finish,
        *,
        backward: bool,
    ) -> None:
        # Stages exchange buffers of one size, so all micro-batches are padded to the largest.
        total = total_tokens(parts, **self._selection)
        selections = [Selection.of(part, **self._selection, device=self.ranks.device, total=total) for part in parts]

        def read(index: int, hidden: Tensor) -> Tensor:
            chosen = selections[index]
            selected = hidden.index_select(0, chosen.select)
            return finish(parts[index], self.model.read(selected, chosen.labels, needs, self.temperature))

        pipeline.run(selections, read, backward=backward)

    # Optimizer

    def update(self, items: Sequence[UpdateItem], *, epochs: int, step: int) -> dict[str, float]:
        """See TrainEngine. Raises WeightsError on every rank if no weight changed, though some should have."""
        before = [each.clone() for each in self._sampled()]
        metrics = super().update(items, epochs=epochs, step=step)
        self._check_moved(before, metrics["train/lr"], metrics["train/grad_norm"])
        return metrics

    def _sampled(self) -> Iterator[Tensor]:
        """Yield evenly spaced elements of this rank's shard of each parameter, about SAMPLED of each."""
        self._ensure_resharded()
        for _, parameter in self.parameters.trained():
            held = state.local(parameter.detach()).flatten()
            yield held[:: max(1, len(held) // SAMPLED)]

    def _check_moved(self, before: Sequence[Tensor], lr: float, norm: float) -> None:
        """Raise WeightsError if no sampled weight changed in steps with this learning rate and mean gradient norm.

        AdamW changes an element by about the learning rate. It changes less where gradients are as small as its
        epsilon, and nothing where the change is below the element's precision.
        """
        moved = any(not torch.equal(old, new) for old, new in zip(before, self._sampled(), strict=True))
        visible = False
        if not moved:  # the rare case
            old = torch.cat(list(before))
            visible = bool((old + lr != old).sum() > len(old) / 2)
        told = self.ranks.gather((moved, visible))
        if norm > self.engine_config.eps and any(see for _, see in told) and not any(moves for moves, _ in told):
            raise WeightsError(
                f"the update changed no weight, with learning rate {lr:g} and gradient norm {norm:.3g}: the optimizer "
                "does not step the parameters of the model. Something replaced them after the engine was made, or "
                "took them out of the optimizer"
            )

    def zero_grad(self) -> None:
        """See TrainEngine."""
        if self.optimizer is not None:
            # Not zeros: between updates no memory is held for gradients.
            self.optimizer.zero_grad(set_to_none=True)

    def step(self, lr: float, approve: Approve) -> None:
        """See TrainEngine."""
        if self.optimizer is None:
            raise DataError("this engine has no optimizer: it was created with trains=False")
        self.parameters.complete_gradients()
        # Replicated parameters count once, on one of their ranks, so that the ranks' shares add up to the global norm.
        gradients, counted = self.parameters.gradients()
        squares = float(torch.stack(torch._foreach_norm(counted)).square().sum()) if counted else 0.0
        factor = approve(squares)
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.version += 1

    # Weights

    @property
    def shapes(self) -> Shapes:
        """See TrainEngine. Of the weights with the adapter merged into them, as `export` gives them."""
        return {name: shape for name, shape in self.parameters.shapes.items() if not is_part(name)}

    @property
    def shard_specs(self) -> Mapping[str, ShardSpec]:
        """See TrainEngine."""
        return {name: spec for name, spec in self.parameters.shard_specs.items() if not is_part(name)}

    @property
    def trained_specs(self) -> Mapping[str, ShardSpec]:
        """See TrainEngine."""
        return {name: self.parameters.shard_specs[name] for name in self.parameters.trained_names}

    @property
    def vocab_size(self) -> int:
        """See TrainEngine."""
        return self.model.vocab_size

    @property
    def shared_module(self) -> nn.Module | None:
        """See TrainEngine."""
        return self.model.hf if self.mesh.is_whole else None

    def export(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """See TrainEngine."""
        # Another dtype than the forward's comes from the fp32 masters: rounding twice would lose bits. So do merged
        # weights.
        if dtype is not self.dtype or self.has_adapter:
            return ((name, tensor.to(dtype)) for name, tensor in self.masters())
        self._ensure_resharded()
        return self.parameters.iter_gathered(self.root, self.dtype)

    def export_local(self) -> Iterator[tuple[str, Tensor]]:
        """See TrainEngine."""
        self._ensure_resharded()
        shards = self.parameters.iter_tp_shards(self.root, self.dtype)
        joined = ((name, self._joined(name, shard)) for name, shard in shards)
        return ((name, shard.to(self.dtype)) for name, shard in merged(joined, self._scales))

    def _joined(self, name: str, shard: Tensor) -> Tensor:
        """Gather A or B over the tensor ranks where the product of this rank's shard of W needs all of it."""
        layer, _, kind = name.rpartition(".")
        specs = self.parameters.shard_specs
        if not is_part(name) or specs[f"{layer}.weight"].dim != {"lora_a": 0, "lora_b": 1}[kind]:
            return shard
        return self.mesh.join_tensor_shards(shard, specs[name].dim)

    def held_parameters(self) -> Mapping[str, Tensor]:
        """See TrainEngine."""
        local = self.parameters.named_local()
        return {name: state.local(parameter.detach()) for name, parameter in local if not is_part(name)}

    def fingerprint(self, dtype: torch.dtype) -> dict[str, int]:
        """See TrainEngine. Without an adapter made of the masters' shards, so it shares no code with `export`."""
        if self.has_adapter:
            return super().fingerprint(dtype)
        self._ensure_resharded()
        return sum_checksums(self.ranks.gather(self.parameters.checksums(dtype)))

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every whole parameter in fp32, with the adapter merged into it; all ranks iterate to the end."""
        self._ensure_resharded()
        return ((name, tensor.float()) for name, tensor in merged(self._whole(), self._scales))

    def masters_as_started(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every whole parameter in fp32 as it was before training; all ranks iterate to the end."""
        self._ensure_resharded()
        for name, tensor in self._whole():
            layer = self.adapted.get(name.rpartition(".")[0])
            if is_part(name):
                continue
            if (
                layer is not None
                and layer.start_a is not None
                and layer.start_b is not None
                and name.endswith(".weight")
            ):
                tensor = merged_weight(tensor, layer.start_a, layer.start_b, layer.scale)
            yield name, tensor.float()

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        return self.parameters.iter_full(dict(self.parameters.named_local()))

    @property
    def adapted(self) -> Mapping[str, LoraLinear]:
        """The layers of this rank with an adapter, by name; none for an engine that trains all weights."""
        return adapted(self.model.hf) if self.has_adapter else {}

    def without_adapter(self) -> TrainEngine:
        """See TrainEngine."""
        return WithoutAdapter(self) if self.has_adapter else super().without_adapter()

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], shapes: Shapes, tau: float) -> None:
        """See TrainEngine."""
        self._move(shapes, lambda name: self.parameters.shard_of(name, weights[name]), tau)

    @torch.no_grad()
    def follow(self, other: TrainEngine, tau: float) -> None:
        """See TrainEngine. The other engine has the same layout, so each rank reads its own shards."""
        if not isinstance(other, TorchEngine):
            raise DataError(f"a TorchEngine can follow only another TorchEngine, not a {type(other).__name__}")
        if other.has_adapter:
            super().follow(other, tau)  # the merged weights, which no rank holds a shard of
            return
        other._ensure_resharded()
        theirs = dict(other.parameters.named_local())
        self._move(other.shapes, lambda name: state.local(theirs[name]), tau)

    def _move(self, shapes: Shapes, target: Callable[[str], Tensor], tau: float) -> None:
        """Move this rank's shard of each parameter by `tau` of the way to `target(name)`, the matching shard."""
        self._ensure_resharded()
        if self.has_adapter:
            raise DataError("this engine trains an adapter (model.lora), whose base cannot take other weights")
        check_same_parameters(self.shapes, shapes)
        for name, parameter in self.parameters.named_local():
            own, towards = state.local(parameter), target(name)
            if tau == 1:
                own.copy_(towards)
            else:
                own.lerp_(towards.to(own.device), tau)
        self.version += 1

    def offload(self) -> None:
        """See TrainEngine. The metrics of the next update show the freed memory."""
        reshard_fsdp(self.root)
        self._offloader.offload()

    @property
    def metrics(self) -> Mapping[str, float]:
        """See TrainEngine."""
        return self._offloader.metrics

    def _ensure_resharded(self) -> None:
        """Bring the parameters back to the device, sharded."""
        self._offloader.onload()
        reshard_fsdp(self.root)

    def save_pretrained(self, folder: Path) -> None:
        """See TrainEngine. With an adapter: the adapter's folder, in peft's format."""
        if not self.has_adapter:
            write_model_folder(self.model.hf, self.masters(), self.model_config, folder, self.ranks)
            return
        self._ensure_resharded()
        names = self.parameters.trained_names
        whole = self.parameters.iter_full(dict(self.parameters.named_local()), names)
        weights = ((file_name(name), tensor) for name, tensor in whole)
        write_adapter_folder(self._adapter_settings, weights, self.model_config, folder, self.ranks)

    def save(self, folder: Path) -> None:
        """See TrainEngine."""
        self.save_pretrained(folder / "model")
        self._ensure_resharded()
        base = self._base_checksum()
        state.save_engine_state(self.parameters, self.optimizer, self.version, folder, self.ranks, base)

    def restore(self, folder: Path) -> None:
        """See TrainEngine."""
        self._ensure_resharded()
        state.check_base(folder, self._base_checksum(), self.model_config.path)
        state.load_weights(self.parameters, folder / "model", self.ranks, adapter=self.has_adapter)
        self.version = state.load_engine_state(self.parameters, self.optimizer, folder, self.ranks)

    def _base_checksum(self) -> str | None:
        """Return a checksum of the weights that an adapter leaves as they are; None without one."""
        if not self.has_adapter:
            return None
        trained = set(self.parameters.trained_names)
        checksums = sum_checksums(self.ranks.gather(self.parameters.checksums(self.dtype)))  # as every layout rounds it
        base = {name: checksum for name, checksum in sorted(checksums.items()) if name not in trained}
        return hashlib.sha256(json.dumps(base).encode()).hexdigest()
