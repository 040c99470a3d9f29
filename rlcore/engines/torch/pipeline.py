"""Pipeline stages: a model split by decoder layers, and micro-batches that run through it by the 1F1B schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.engine.parallel.mesh import TrainMesh
from rlcore.engines.torch.model import PackedModel
from rlcore.engines.torch.selection import Selection
from rlcore.errors import ConfigError, RLCoreError

Finish = Callable[[int, Tensor], Tensor]
"""Called on the last stage with a micro-batch's index and hidden state [tokens, hidden]; returns the loss."""


class PassThrough(nn.Module):
    """Replaces a module that another stage holds: returns its input."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the first argument."""
        return hidden_states


def stage_of_layer(layers: int, stages: int) -> list[int]:
    """Return the stage of each layer: consecutive runs with lengths that differ by at most one, longer ones first."""
    size, longer = divmod(layers, stages)
    by_layer: list[int] = []
    for stage in range(stages):
        by_layer += [stage] * (size + (stage < longer))
    return by_layer


def stages_of(hf: Any, names: Sequence[str], stages: int) -> dict[str, tuple[int, ...]]:
    """Return the stages of each parameter: embeddings on the first, norm and head on the last, tied ones on both."""
    if stages == 1:
        return dict.fromkeys(names, (0,))
    base = f"{hf.base_model_prefix}."
    by_layer = stage_of_layer(len(getattr(hf, hf.base_model_prefix).layers), stages)
    embeddings = hf.get_input_embeddings().weight
    tied = _is_tied(hf)
    held: dict[str, tuple[int, ...]] = {}
    for name in names:
        if name.startswith(f"{base}layers."):
            held[name] = (by_layer[int(name.removeprefix(f"{base}layers.").split(".")[0])],)
        elif hf.get_parameter(name) is embeddings:
            held[name] = (0, stages - 1) if tied else (0,)
        else:
            held[name] = (stages - 1,)
    return held


def check_stages(hf: Any, layers: Sequence[str], stages: int) -> None:
    """Raise ConfigError for a pipeline stage with none of the adapted layers: it would have nothing to train."""
    held = stages_of(hf, [f"{name}.weight" for name in layers], stages)
    found = {stage for name in held for stage in held[name]}
    if idle := sorted(set(range(stages)) - found):
        raise ConfigError(
            f"model.lora.targets: none of the {len(layers)} adapted layers is on pipeline stage {idle[0]} of {stages}; "
            "adapt a layer of each stage, as all-linear does, or set engine.pp=1"
        )


def keep_stage(model: PackedModel, stage: int, stages: int) -> None:
    """Replace the modules of other stages, in place, by pass-throughs; the names of the rest do not change.

    Raises ConfigError for a model whose forward cannot be split.
    """
    hf, base = model.hf, model.base
    if not model.packed or not getattr(model, "fused_head", True) or not hasattr(base, "layers"):
        raise ConfigError(
            f"{type(hf).__name__} cannot be split into pipeline stages (engine.pp={stages}): it needs layers that "
            "read packed rows and a head that is one linear layer; set engine.pp=1 (the log says which is missing)"
        )
    last = stage == stages - 1
    if stage > 0 and not (last and _is_tied(hf)):
        base.embed_tokens = PassThrough()
    for index, owner in enumerate(stage_of_layer(len(base.layers), stages)):
        if owner != stage:
            base.layers[index] = PassThrough()
    if not last:
        base.norm = PassThrough()
        for head in ("lm_head", "score"):
            if hasattr(hf, head):
                setattr(hf, head, PassThrough())


def _is_tied(hf: Any) -> bool:
    head = hf.get_output_embeddings()
    return head is not None and head.weight is hf.get_input_embeddings().weight


class Stage(nn.Module):
    """One stage of the forward: its layers, and on the last stage `finish`."""

    def __init__(self, model: PackedModel, mesh: TrainMesh) -> None:
        super().__init__()
        self.model = model
        self.is_first_stage, self.is_last_stage = mesh.is_first_stage, mesh.is_last_stage
        self.selections: Sequence[Selection] = ()
        self.finish: Finish | None = None

    def forward(self, received: Tensor, *, index: Tensor) -> Tensor:
        """Return the hidden state [1, tokens, hidden]; on the last stage the loss, fp32 [1].

        `received`: the output of the stage before; the first stage gets a placeholder. `index` int64 [1]: the number of
        the micro-batch.
        """
        number = int(index)
        hidden = self.model.decode(self.selections[number].packing, None if self.is_first_stage else received)
        if not self.is_last_stage:
            return hidden
        assert self.finish is not None
        return torch.stack([self.finish(number, hidden[0])])


class Pipeline:
    """Runs the micro-batches of a step through all stages. All ranks of a data-parallel copy call it together."""

    def __init__(self, stage: Stage, mesh: TrainMesh, width: int, dtype: torch.dtype) -> None:
        self.stage, self.mesh, self.width, self.dtype = stage, mesh, width, dtype

    def run(self, selections: Sequence[Selection], finish: Finish, *, backward: bool) -> None:
        """Run micro-batches with equal numbers of tokens, at least one for each stage.

        `finish` runs on the last stage only. A DataError in it is raised here, on that stage.
        """
        # Schedules pass tensors only, so the stage looks its micro-batch up by index.
        self.stage.selections, self.stage.finish = selections, finish
        indices = torch.arange(len(selections))
        placeholder = torch.zeros(len(selections), 1, device=self.mesh.ranks.device)
        received = (placeholder,) if self.mesh.is_first_stage else ()
        schedule = self._schedule(len(selections[0].packing.input_ids), len(selections))
        try:
            if backward:
                schedule.step(*received, target=indices, return_outputs=False, index=indices)
            else:
                schedule.eval(*received, target=indices, index=indices)
        except RuntimeError as error:
            if isinstance(error.__cause__, RLCoreError):
                raise error.__cause__ from None  # torch wraps the module's error
            raise
        finally:
            # Or the stage would keep the last step's batches alive.
            self.stage.selections, self.stage.finish = (), None

    def _schedule(self, tokens: int, count: int) -> Any:
        # A new schedule for each step, as a PipelineStage keeps buffers for one number of tokens.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        device, layout = self.mesh.ranks.device, self.mesh.layout
        hidden = torch.empty(1, tokens, self.width, dtype=self.dtype, device="meta", requires_grad=True)
        stage = PipelineStage(
            self.stage,
            self.mesh.coordinates.pp,
            layout.pp,
            device,
            input_args=torch.empty(1, 1, device="meta") if self.mesh.is_first_stage else hidden,
            output_args=torch.empty(1, device="meta") if self.mesh.is_last_stage else hidden,
            group=self.mesh.group("pp"),
        )
        # Losses are divided by global counts already, so gradients are not scaled by the number of micro-batches.
        return Schedule1F1B(stage, count, loss_fn=_sum_loss, scale_grads=False)


def _sum_loss(loss: Tensor, index: Tensor) -> Tensor:
    return loss.sum()
