"""The train engine on torch's FSDP2 (`fully_shard`); with one rank nothing is sharded and nothing is sent."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlcore.config import EngineConfig, ModelConfig
from rlcore.engine.ranks import Ranks
from rlcore.engine.train import state
from rlcore.engine.train.accounting import Account, Totals, call_loss, merge_totals, row_names, sum_counts
from rlcore.engine.train.base import TrainEngine, UpdateItem
from rlcore.engine.train.importance import correct, forward_needs, is_corrected, staleness
from rlcore.engine.train.microbatch import column_values, micro_batches
from rlcore.engine.train.model import PackedModel, load_causal_lm, load_scalar_model
from rlcore.engine.train.packing import Packing
from rlcore.engine.train.schedule import learning_rate
from rlcore.engine.weights import Shapes, Weights, check_fit
from rlcore.errors import DataError
from rlcore.ops import Outputs, needs_of
from rlcore.protocol import DataProto, Ragged

log = logging.getLogger(__name__)


class FSDPEngine(TrainEngine):
    """A model of a `kind` (see Role) sharded over the ranks, with AdamW if it `trains`.

    `new_head`: a critic or reward model may start from a folder without a score head, and gets one of zeros.
    `temperature` divides the logits, as it did when the responses were sampled; `total_steps` is the run's, for the
    learning-rate schedule.
    """

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        *,
        ranks: Ranks,
        trains: bool,
        kind: Literal["policy", "critic", "reward"] = "policy",
        new_head: bool = True,
        temperature: float = 1.0,
        total_steps: int = 1,
    ) -> None:
        self.config, self.model_config, self.ranks = engine, model, ranks
        self.temperature = temperature if temperature > 0 else 1.0
        self.total_steps = total_steps
        self.dtype = torch.bfloat16 if model.dtype == "bf16" else torch.float32
        self.kind = kind
        self.model: PackedModel
        if kind == "policy":
            self.model = load_causal_lm(
                model, padding_free=engine.padding_free, chunk=engine.logits_chunk, device=ranks.device
            )
        else:
            self.model = load_scalar_model(
                model, new_head=new_head, padding_free=engine.padding_free, device=ranks.device
            )
        self.model.requires_grad_(trains)
        if trains and engine.activation_checkpointing:
            self.model.hf.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in self.model.modules():
                if isinstance(layer, GradientCheckpointingLayer):
                    layer.training = True  # of the layer alone: what is inside it keeps its dropout off
        if ranks.world_size > 1:
            self._shard()
        self.optimizer: torch.optim.AdamW | None = None
        if trains:
            self.optimizer = torch.optim.AdamW(
                self.model.parameters(),
                lr=engine.lr,
                betas=(engine.betas[0], engine.betas[1]),
                eps=engine.eps,
                weight_decay=engine.weight_decay,
                fused=True,
            )

    def _shard(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(self.ranks.device.type, (self.ranks.world_size,), mesh_dim_names=("dp",))
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        # Layers apart, so that only one is whole at a time; a small model in one piece, which gathers once, not a dozen
        # times.
        layers = set(getattr(self.model.hf, "_no_split_modules", None) or ())
        if sum(parameter.numel() for parameter in self.model.parameters()) > self.config.layerwise_above:
            for module in self.model.modules():
                if type(module).__name__ in layers:
                    fully_shard(module, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)

    # Forward

    def _autocast(self) -> AbstractContextManager[Any]:
        # Sharded, FSDP's mixed precision casts the parameters; alone, autocast does.
        if self.ranks.world_size > 1 or self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.ranks.device.type, dtype=self.dtype)

    def _forward(self, batch: DataProto | None, needs: Collection[str]) -> dict[str, Tensor]:
        """Return what `needs` names for the response tokens of all rows, laid end to end, [tokens, ...].

        A reward model gives its scores at the last token of each row, [rows]. None stands for a rank without
        rows, which still has to take part in the collectives: one token, one output.
        """
        device = self.ranks.device
        if batch is None:
            packing = Packing.of([torch.zeros(1, dtype=torch.int64)]).to(device)
            select = labels = torch.zeros(1, dtype=torch.int64, device=device)
        else:
            prompts, responses = batch.view("prompts").to_list(), batch.view("responses").to_list()
            labels = batch.view("responses").values.to(device)
        if batch is not None and self.kind == "reward":
            packing = Packing.of([torch.cat(row) for row in zip(prompts, responses, strict=True)]).to(device)
            select = packing.lengths.cumsum(0) - 1
        elif batch is not None:
            # The last response token predicts nothing, so it is left out; an empty response leaves a prompt of which
            # nothing is selected.
            rows = [torch.cat([p, r])[: max(1, len(p) + len(r) - 1)] for p, r in zip(prompts, responses, strict=True)]
            packing = Packing.of(rows).to(device)
            starts = packing.lengths.cpu().cumsum(0) - packing.lengths.cpu()
            spans = [
                torch.arange(len(p) - 1, len(p) - 1 + len(r)) + start
                for p, r, start in zip(prompts, responses, starts.tolist(), strict=True)
            ]
            select = torch.cat(spans).to(device)
        with self._autocast():
            return self.model(packing, select, labels, needs, self.temperature)

    def _cut(self, batch: DataProto, together: str | None) -> list[DataProto | None]:
        """Cut rows into micro-batches, padded with None to the largest number on any rank."""
        lengths = (batch.view("prompts").lengths + batch.view("responses").lengths).tolist()
        limits = (self.config.micro_batch_rows, self.config.micro_batch_tokens)
        cuts = micro_batches(lengths, column_values(batch, together), *limits)
        most = max(self.ranks.gather(len(cuts)))
        return [batch[rows] for rows in cuts] + [None] * (most - len(cuts))

    @torch.no_grad()
    def compute(self, batch: DataProto, names: Sequence[str]) -> dict[str, Ragged | Tensor]:
        """See TrainEngine."""
        order: list[Tensor] = []
        pieces: dict[str, list[Tensor]] = {name: [] for name in names}
        numbered = batch.select(["prompts", "responses"], [])
        numbered["row"] = torch.arange(len(batch))
        for part in self._cut(numbered, None):
            out = self._forward(part, names)
            if part is None:
                continue
            order.append(part.view("row"))
            for name in names:
                lengths = part.view("responses").lengths.tolist()
                pieces[name].extend(out[name].cpu().split(1 if self.kind == "reward" else lengths))
        back = torch.cat(order).argsort().tolist() if order else []
        rows = {name: [values[i] for i in back] for name, values in pieces.items()}
        if self.kind == "reward":
            return {name: torch.cat(values) if values else torch.zeros(0) for name, values in rows.items()}
        return {name: Ragged.from_list(values, dtype=torch.float32) for name, values in rows.items()}

    # Update

    def update(self, items: Sequence[UpdateItem], *, epochs: int, step: int) -> dict[str, float]:
        """See TrainEngine."""
        if self.optimizer is None:
            raise DataError("this role is frozen; declare it with Role(trains=True) to update it")
        lr = learning_rate(self.config, step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        behind = staleness(items, self.version, self.ranks)
        totals: list[Totals] = []
        norms: list[float] = []
        skipped = 0
        for _ in range(epochs):
            for index in range(len(items[0].sizes)):
                done = self._optimizer_step([(item, _mini_batch(item, index)) for item in items])
                if done is None:
                    skipped += 1
                    continue
                totals.append(done[0])
                norms.append(done[1])
        metrics = {key: total / count for key, (total, count) in merge_totals(totals).items() if count > 0}
        return {
            **metrics,
            **behind,
            "train/grad_norm": sum(norms) / len(norms) if norms else 0.0,
            "train/lr": lr,
            "train/optimizer_steps": float(len(norms)),
            "train/skipped_updates": float(skipped),
        }

    def _optimizer_step(self, work: Sequence[tuple[UpdateItem, DataProto]]) -> tuple[Totals, float] | None:
        """Accumulate the gradient of one mini-batch and step; None if no rank has anything to optimise."""
        assert self.optimizer is not None
        device = self.ranks.device
        cuts = [self._cut(batch, item.keep_together) for item, batch in work]
        counts = [
            # On the whole, so that a count that depends on the cut is found out; logits of the whole are too many.
            sum_counts(item, parts if "logits" in needs_of(item.loss) else [batch], self.model.vocab_size, device)
            for (item, batch), parts in zip(work, cuts, strict=True)
        ]
        everyone = self.ranks.gather(counts)
        global_counts: list[dict[str, float]] = []
        for index in range(len(work)):
            merged = merge_totals([{k: (0.0, c) for k, c in mine[index].items()} for mine in everyone])
            global_counts.append({key: count for key, (_, count) in merged.items()})
        if not any(count > 0 for counted in global_counts for count in counted.values()):
            return None
        self.optimizer.zero_grad(set_to_none=True)
        accounts = [
            self._accumulate(item, parts, counted)
            for (item, _), parts, counted in zip(work, cuts, global_counts, strict=True)
        ]
        for account, counted in zip(accounts, counts, strict=True):
            account.check_counts(counted)
        reports = self.ranks.gather([(account.totals, account.bad) for account in accounts])
        bad = [text for report in reports for _, texts in report for text in texts]
        if bad:
            self.optimizer.zero_grad(set_to_none=True)
            raise DataError(f"the loss is not finite: {' | '.join(bad)}; the weights were left as they were")
        norm = self._clip([batch for _, batch in work])
        self.optimizer.step()
        self.version += 1
        return merge_totals([totals for report in reports for totals, _ in report]), norm

    def _accumulate(
        self, item: UpdateItem, parts: Sequence[DataProto | None], global_counts: dict[str, float]
    ) -> Account:
        # FSDP divides gradients by the number of ranks; the counts are global already.
        account = Account(item, global_counts, scale=float(self.ranks.world_size))
        needs = forward_needs(item)
        for part in parts:
            flat = self._forward(part, needs)
            if part is None:
                loss = sum(value.sum() for value in flat.values()) * 0.0
            else:
                responses = part.view("responses")
                by_row = {name: _pad_rows(v, responses.lengths) for name, v in flat.items() if name != "scores"}
                out = Outputs({**flat, **by_row})
                if is_corrected(item):
                    out = correct(out, part, account, self.ranks.device)
                loss = account.add(call_loss(item, out, part, self.ranks.device), part)
            loss.backward()  # type: ignore[union-attr]
        return account

    def _clip(self, batches: Sequence[DataProto]) -> float:
        # torch's clip_grad_norm_ reduces each sharded gradient's norm by itself; this reduces all of them at once.
        grads = [state.local(p.grad) for p in self.model.parameters() if p.grad is not None]
        squares = torch.stack(torch._foreach_norm(grads)).square().sum()
        if self.ranks.world_size > 1:
            torch.distributed.all_reduce(squares)
        value = float(squares.sqrt())
        limit = self.config.clip_grad
        if 0 < limit < value:
            torch._foreach_mul_(grads, limit / value)
        if not math.isfinite(value):
            assert self.optimizer is not None
            self.optimizer.zero_grad(set_to_none=True)
            rows = " | ".join(self.ranks.gather("; ".join(row_names(b) for b in batches if len(b))))
            raise DataError(f"the gradient's norm is {value} over rows {rows}; the weights were left as they were")
        return value

    # Weights

    @torch.no_grad()
    def follow(self, other: TrainEngine, share: float) -> None:
        """See TrainEngine."""
        if not isinstance(other, FSDPEngine):
            raise DataError(f"an FSDPEngine follows another one, not {type(other).__name__}")
        other._reshard()
        theirs = dict(other.model.hf.named_parameters())
        self._move(other.shapes, lambda name, _: theirs[name], share)

    @torch.no_grad()
    def take(self, weights: Weights, share: float) -> None:
        """See TrainEngine. Each rank copies its own part."""
        self._move(weights.shapes, lambda name, mine: state.like(weights[name], mine), share)

    def _move(self, shapes: Shapes, target: Callable[[str, Tensor], Tensor], share: float) -> None:
        """Move each parameter by `share` of the way to `target(name, parameter)`, which is cut like the parameter."""
        self._reshard()
        check_fit(self.shapes, shapes)
        for name, parameter in self.model.hf.named_parameters():
            own, towards = state.local(parameter), state.local(target(name, parameter))
            own.copy_(towards) if share == 1 else own.lerp_(towards, share)
        self.version += 1

    def _reshard(self) -> None:
        """Put the sharded parameters back in place.

        After a forward without a backward FSDP leaves the gathered ones there, in the precision of the forward.
        """
        from torch.distributed.fsdp import FSDPModule

        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @property
    def shapes(self) -> Shapes:
        """See TrainEngine."""
        return {name: tuple(parameter.shape) for name, parameter in self.model.hf.named_parameters()}

    @property
    def shared_module(self) -> nn.Module | None:
        """See TrainEngine."""
        return self.model.hf if self.ranks.world_size == 1 else None

    def rollout_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See TrainEngine."""
        from torch.distributed.fsdp import FSDPModule

        if self.ranks.world_size == 1:
            yield from ((name, parameter.to(self.dtype)) for name, parameter in self.full_parameters())
            return
        self._reshard()
        for prefix, module in self.model.named_modules():
            if not isinstance(module, FSDPModule):
                continue
            module.unshard()  # one gather for all of its parameters; those of modules inside it stay sharded
            for name, parameter in nn.Module.named_parameters(module):  # type: ignore[arg-type]
                if not state.is_sharded(parameter):
                    yield f"{prefix}.{name}".removeprefix(".").removeprefix("hf."), parameter.detach()
            module.reshard()

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See TrainEngine."""
        self._reshard()
        for name, parameter in self.model.hf.named_parameters():
            yield name, state.whole(parameter.detach())

    def save_pretrained(self, folder: Path) -> None:
        """See TrainEngine."""
        state.save_pretrained(self.model.hf, self.full_parameters(), self.model_config, folder, self.ranks)

    def save_state(self, folder: Path) -> None:
        """See TrainEngine."""
        self.save_pretrained(folder / "model")
        self._reshard()
        state.save_engine_state(self.model.hf, self.optimizer, self.version, folder, self.ranks)

    def load_state(self, folder: Path) -> None:
        """See TrainEngine."""
        self._reshard()
        state.load_weights(self.model.hf, folder / "model")
        self.version = state.load_engine_state(self.model.hf, self.optimizer, folder, self.ranks)


def _mini_batch(item: UpdateItem, index: int) -> DataProto:
    """Return this rank's rows of one mini-batch."""
    start = sum(item.sizes[:index])
    return item.batch[start : start + item.sizes[index]]


def _pad_rows(values: Tensor, lengths: Tensor) -> Tensor:
    """Lay out [tokens, ...] as [rows, longest, ...], differentiably, zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence(list(values.split(lengths.tolist())), batch_first=True)
