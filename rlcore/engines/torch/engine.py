"""The train engine on torch's own parallelism: FSDP2 along dp, DTensor along tp, 1F1B pipelines along pp.

Where every rank has the whole model, alone or beside copies of it, the module stays as it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlcore.config import EngineConfig, ModelConfig
from rlcore.engine.collectives import Ranks
from rlcore.engine.parallel.layout import Cut, Layout
from rlcore.engine.parallel.mesh import TrainMesh
from rlcore.engine.parallel.model_shape import check_model_layout, layout_of
from rlcore.engine.train import TrainEngine, UpdateItem
from rlcore.engine.update.accounting import Account, Totals, call_loss, larger, merge_totals, row_names, sum_counts
from rlcore.engine.update.importance import (
    correct,
    forward_needs,
    is_corrected,
    is_sampled,
    measure_logprob_diff,
    staleness,
)
from rlcore.engine.update.microbatch import column_values, micro_batches
from rlcore.engine.update.schedule import learning_rate
from rlcore.engine.weights.transfer import Shapes, Weights, check_fit
from rlcore.engines.torch import state
from rlcore.engines.torch.config import TorchConfig, check_layout
from rlcore.engines.torch.model import PackedModel, load_causal_lm, load_scalar_model
from rlcore.engines.torch.offload import Parking
from rlcore.engines.torch.parameters import Parameters, reshard
from rlcore.engines.torch.pipeline import Pipeline, Stage
from rlcore.engines.torch.selection import Selection, total_tokens
from rlcore.errors import DataError
from rlcore.ops import Outputs, needs_of
from rlcore.plugins import POLICY, RoleKind
from rlcore.protocol import DataProto, Ragged

log = logging.getLogger(__name__)


class FSDPEngine(TrainEngine):
    """A model of a `kind` (see Role) over the ranks as `engine` lays it out, with AdamW if it `trains`.

    `own` holds the engine's own config keys.

    `new_head`: a critic or reward model may start from a folder without a score head, and gets one of zeros.
    `temperature` divides the logits, as it did when the responses were sampled; `total_steps` is the run's, for the
    learning-rate schedule.
    """

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        own: TorchConfig,
        *,
        ranks: Ranks,
        trains: bool,
        kind: RoleKind = POLICY,
        new_head: bool = True,
        temperature: float = 1.0,
        total_steps: int = 1,
    ) -> None:
        self.config, self.own, self.model_config, self.ranks = engine, own, model, ranks
        self.temperature = temperature if temperature > 0 else 1.0
        self.total_steps = total_steps
        self.dtype = torch.bfloat16 if model.dtype == "bf16" else torch.float32
        self.kind = kind
        self.mesh = TrainMesh(ranks, layout_of(engine, ranks.world_size), own.shard)
        check_model_layout(model, self.layout)
        check_layout(own, self.layout)
        self.model: PackedModel
        if kind.is_language_model:
            self.model = load_causal_lm(
                model, padding_free=own.padding_free, chunk=own.logits_chunk, device=ranks.device
            )
        else:
            self.model = load_scalar_model(model, new_head=new_head, padding_free=own.padding_free, device=ranks.device)
        self.model.requires_grad_(trains)
        if trains and own.activation_checkpointing:
            self.model.hf.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in self.model.modules():
                if isinstance(layer, GradientCheckpointingLayer):
                    layer.training = True  # of the layer alone: what is inside it keeps its dropout off
        self._lay_out()
        self.optimizer: torch.optim.AdamW | None = None
        if trains:
            self.optimizer = torch.optim.AdamW(
                self.parameters.by_mesh(),
                lr=engine.lr,
                betas=(engine.betas[0], engine.betas[1]),
                eps=engine.eps,
                weight_decay=engine.weight_decay,
                fused=True,
            )
        self._parking = Parking(self.root, self.optimizer, ranks.device, weights=self.shared_module is None)

    def _lay_out(self) -> None:
        """Leave of the model what belongs to this rank."""
        self.parameters = Parameters(self.model, self.mesh)
        self.root: nn.Module = self.model
        self._pipeline: Pipeline | None = None
        if self.layout.pp > 1:
            self.root = stage = Stage(self.model, self.mesh)
            width = self.model.hf.config.get_text_config().hidden_size
            self._pipeline = Pipeline(stage, self.mesh, width, self.dtype)
        if not self.mesh.is_whole:
            self._shard()

    def _shard(self) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = self.mesh.data
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        # A stage keeps its layers whole between the micro-batches of a step.
        keep = False if self._pipeline is not None else None
        # Layers apart, so that only one is whole at a time; a small model in one piece, which gathers once, not a dozen
        # times.
        layers = set(getattr(self.model.hf, "_no_split_modules", None) or ())
        if sum(math.prod(shape) for shape in self.shapes.values()) > self.own.layerwise_above:
            for module in self.model.modules():
                if type(module).__name__ in layers:
                    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=keep)
        fully_shard(self.root, mesh=mesh, mp_policy=policy, reshard_after_forward=keep)

    # Forward

    def _autocast(self) -> AbstractContextManager[Any]:
        # Sharded, FSDP's mixed precision casts the parameters; whole, autocast does.
        if not self.mesh.is_whole or self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.ranks.device.type, dtype=self.dtype)

    def _cut(self, batch: DataProto, together: str | None) -> list[DataProto]:
        """Cut rows into micro-batches, on a pipeline at least one for each stage."""
        lengths = (batch.view("prompts").lengths + batch.view("responses").lengths).tolist()
        limits = (self.config.micro_batch_rows, self.config.micro_batch_tokens)
        cuts = micro_batches(lengths, column_values(batch, together), *limits, at_least=self.layout.pp)
        return [batch[rows] for rows in cuts]

    def _level(self, parts: Sequence[DataProto], everywhere: Sequence[int]) -> list[DataProto | None]:
        """Pad micro-batches with None to the largest number on any rank, and to one for each stage."""
        most = max(self.layout.pp if self.layout.pp > 1 else 0, *everywhere)
        return [*parts, *[None] * (most - len(parts))]

    def _run(
        self,
        parts: Sequence[DataProto | None],
        needs: Collection[str],
        finish: Callable[[DataProto | None, dict[str, Tensor]], Tensor],
        *,
        backward: bool,
        is_last: bool = True,
    ) -> None:
        """Give `finish` what `needs` names for each micro-batch, and go backward from what it returns.

        That is for the response tokens of all rows, laid end to end, [tokens, ...]; a reward model gives its scores at
        the last token of each row, [rows]. In a pipeline `finish` is called on the last stage alone. `is_last`: nothing
        more goes backward before the optimizer's step, so copies of the weights add up their gradients.
        """
        device = self.ranks.device
        form = {"at_end": self.kind.scores_rows, "folded": self.model.folds}
        if self._pipeline is None:
            for index, part in enumerate(parts):
                if backward and self.mesh.copies > 1 and not self.mesh.is_whole:
                    self.root.set_requires_all_reduce(is_last and index + 1 == len(parts))  # type: ignore[operator]
                chosen = Selection.of(part, **form, device=device)
                with self._autocast():
                    flat = self.model(chosen.packing, chosen.select, chosen.labels, needs, self.temperature)
                loss = finish(part, flat)
                if backward:
                    loss.backward()  # type: ignore[no-untyped-call]
            return
        total = total_tokens(parts, **form)
        selections = [Selection.of(part, **form, device=device, total=total) for part in parts]

        def read(index: int, hidden: Tensor) -> Tensor:
            chosen = selections[index]
            selected = hidden.index_select(0, chosen.select)
            return finish(parts[index], self.model.read(selected, chosen.labels, needs, self.temperature))

        self._pipeline.run(selections, read, backward=backward)

    @torch.no_grad()
    def compute(self, batch: DataProto, names: Sequence[str]) -> dict[str, Ragged | Tensor]:
        """See TrainEngine."""
        self._parking.unpark()
        numbered = batch.select(["prompts", "responses"], [])
        numbered["row"] = torch.arange(len(batch))
        cut = self._cut(numbered, None)
        parts = self._level(cut, self.ranks.gather(len(cut)))
        pieces: dict[str, list[Tensor]] = {name: [] for name in names}

        def keep(part: DataProto | None, flat: dict[str, Tensor]) -> Tensor:
            for name in names if part is not None else ():
                pieces[name].append(flat[name])
            return torch.zeros((), device=self.ranks.device)

        if parts:
            self._run(parts, names, keep, backward=False)
        filled = [part for part in parts if part is not None]
        lengths = torch.cat([part.view("responses").lengths for part in filled]) if filled else torch.zeros(0).long()
        sizes = [1] * len(lengths) if self.kind.scores_rows else lengths.tolist()
        back = torch.cat([part.view("row") for part in filled]).argsort().tolist() if filled else []
        columns: dict[str, Ragged | Tensor] = {}
        for name in names:
            flat = torch.cat(pieces[name]) if pieces[name] else torch.zeros(sum(sizes), device=self.ranks.device)
            values = self.mesh.from_stage(self.layout.pp - 1, flat).cpu().split(sizes)
            rows = [values[row] for row in back]
            if self.kind.scores_rows:
                columns[name] = torch.cat(rows) if rows else torch.zeros(0)
            else:
                columns[name] = Ragged.from_list(rows, dtype=torch.float32)
        return columns

    # Update

    def update(self, items: Sequence[UpdateItem], *, epochs: int, step: int) -> dict[str, float]:
        """See TrainEngine."""
        if self.optimizer is None:
            raise DataError("this role is frozen; declare it with Role(trains=True) to update it")
        self._parking.unpark()
        lr = learning_rate(self.config, step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        behind = staleness(items, self.version, self.ranks)
        totals: list[Totals] = []
        most: dict[str, float] = {}
        norms: list[float] = []
        skipped = 0
        for _ in range(epochs):
            for index in range(len(items[0].sizes)):
                work = [(item, _mini_batch(item, index)) for item in items]
                done = self._optimizer_step(work, most, is_first=not norms)
                if done is None:
                    skipped += 1
                    continue
                totals.append(done[0])
                norms.append(done[1])
        metrics = {key: total / count for key, (total, count) in merge_totals(totals).items() if count > 0}
        return {
            **metrics,
            **most,
            **behind,
            **self._parking.metrics,
            "train/grad_norm": sum(norms) / len(norms) if norms else 0.0,
            "train/lr": lr,
            "train/optimizer_steps": float(len(norms)),
            "train/skipped_updates": float(skipped),
        }

    def _optimizer_step(
        self, work: Sequence[tuple[UpdateItem, DataProto]], most: dict[str, float], *, is_first: bool
    ) -> tuple[Totals, float] | None:
        """Accumulate the gradient of one mini-batch and step; None if no rank has anything to optimise.

        The first of an update also measures, into `most` too, how far the weights are from what sampled the rows.
        """
        assert self.optimizer is not None
        device = self.ranks.device
        cuts = [self._cut(batch, item.keep_together) for item, batch in work]
        counts = [
            # On the whole, so that a count that depends on the cut is found out; logits of the whole are too many.
            sum_counts(item, parts if "logits" in needs_of(item.loss) else [batch], self.model.vocab_size, device)
            for (item, batch), parts in zip(work, cuts, strict=True)
        ]
        everyone = self.ranks.gather((list(map(len, cuts)), counts))
        places = self.mesh.of_places([of_rank for _, of_rank in everyone])
        levelled = [self._level(parts, [lengths[index] for lengths, _ in everyone]) for index, parts in enumerate(cuts)]
        global_counts: list[dict[str, float]] = []
        for index in range(len(work)):
            merged = merge_totals([{k: (0.0, c) for k, c in mine[index].items()} for mine in places])
            global_counts.append({key: count for key, (_, count) in merged.items()})
        if not any(count > 0 for counted in global_counts for count in counted.values()):
            return None
        self.optimizer.zero_grad(set_to_none=True)
        final = max(index for index, parts in enumerate(levelled) if parts)
        accounts = [
            self._accumulate(
                item,
                levelled[index],
                global_counts[index],
                measures=is_first and is_sampled(item),
                is_last=index == final,
            )
            for index, (item, _) in enumerate(work)
        ]
        for account, counted in zip(accounts, counts, strict=True) if self.mesh.is_last else ():
            account.check_counts(counted)
        # One gather for all that the ranks have to tell each other before the step.
        gradients, squares = self._gradients()
        told = self.ranks.gather((squares, [(account.totals, account.bad, account.most) for account in accounts]))
        reports = self.mesh.of_places([report for _, report in told])
        bad = [text for report in reports for _, texts, _ in report for text in texts]
        if bad:
            self.optimizer.zero_grad(set_to_none=True)
            raise DataError(f"the loss is not finite: {' | '.join(bad)}; the weights were left as they were")
        norm = self._clip(gradients, sum(of_rank for of_rank, _ in told), [batch for _, batch in work])
        self.optimizer.step()
        self.version += 1
        for name, value in [pair for report in reports for _, _, largest in report for pair in largest.items()]:
            most[name] = larger(most.get(name, value), value)
        return merge_totals([totals for report in reports for totals, _, _ in report]), norm

    def _accumulate(
        self,
        item: UpdateItem,
        parts: Sequence[DataProto | None],
        global_counts: dict[str, float],
        *,
        measures: bool,
        is_last: bool,
    ) -> Account:
        # FSDP divides gradients by the number of data-parallel places; the counts are global already.
        account = Account(item, global_counts, scale=float(self.layout.dp))

        def book(part: DataProto | None, flat: dict[str, Tensor]) -> Tensor:
            if part is None:
                return sum(value.sum() for value in flat.values()) * 0.0  # type: ignore[return-value]
            responses = part.view("responses")
            by_row = {name: _pad_rows(v, responses.lengths) for name, v in flat.items() if name != "scores"}
            out = Outputs({**flat, **by_row})
            if measures:
                measure_logprob_diff(out, part, account, self.ranks.device)
            if is_corrected(item):
                out = correct(out, part, account, self.ranks.device)
            return account.add(call_loss(item, out, part, self.ranks.device), part)

        if parts:
            self._run(parts, forward_needs(item), book, backward=True, is_last=is_last)
        return account

    def _gradients(self) -> tuple[list[Tensor], float]:
        """Return this rank's parts of all gradients, and the sum of their squares that no other rank counts."""
        self.parameters.complete_gradients()
        gradients, counted = self.parameters.gradients()
        return gradients, float(torch.stack(torch._foreach_norm(counted)).square().sum()) if counted else 0.0

    def _clip(self, gradients: list[Tensor], squares: float, batches: Sequence[DataProto]) -> float:
        """Scale gradients whose norm over all ranks is above `clip_grad`, and return what it was.

        Raises DataError naming the rows of all ranks if it is not finite.
        """
        value = math.sqrt(squares)
        limit = self.config.clip_grad
        if 0 < limit < value:
            torch._foreach_mul_(gradients, limit / value)
        if not math.isfinite(value):
            assert self.optimizer is not None
            self.optimizer.zero_grad(set_to_none=True)
            everyone = self.mesh.of_places(self.ranks.gather("; ".join(row_names(b) for b in batches if len(b))))
            rows = " | ".join(names for names in everyone if names)
            raise DataError(f"the gradient's norm is {value} over rows {rows}; the weights were left as they were")
        return value

    # Weights

    @torch.no_grad()
    def follow(self, other: TrainEngine, share: float) -> None:
        """See TrainEngine."""
        if not isinstance(other, FSDPEngine):
            raise DataError(f"an FSDPEngine follows another one, not {type(other).__name__}")
        other._rest()
        theirs = dict(other.parameters.here())
        self._move(other.shapes, lambda name: state.local(theirs[name]), share)

    @torch.no_grad()
    def take(self, weights: Weights, share: float) -> None:
        """See TrainEngine. Each rank copies its own part."""
        self._move(weights.shapes, lambda name: self.parameters.part(name, weights[name]), share)

    def _move(self, shapes: Shapes, target: Callable[[str], Tensor], share: float) -> None:
        """Move this rank's part of each parameter by `share` of the way to `target(name)`, which is cut like it."""
        self._rest()
        check_fit(self.shapes, shapes)
        for name, parameter in self.parameters.here():
            own, towards = state.local(parameter), target(name)
            own.copy_(towards) if share == 1 else own.lerp_(towards.to(own.device), share)
        self.version += 1

    @property
    def layout(self) -> Layout:
        """See TrainEngine."""
        return self.mesh.layout

    @property
    def cuts(self) -> Mapping[str, Cut]:
        """See TrainEngine."""
        return self.parameters.cuts

    @property
    def shapes(self) -> Shapes:
        """See TrainEngine."""
        return self.parameters.shapes

    @property
    def shared_module(self) -> nn.Module | None:
        """See TrainEngine."""
        return self.model.hf if self.mesh.is_whole else None

    def park(self) -> None:
        """See TrainEngine. The metrics of the next update say how much it was."""
        reshard(self.root)
        self._parking.park()

    def _rest(self) -> None:
        """Bring the parameters back to the device, sharded."""
        self._parking.unpark()
        reshard(self.root)

    def local_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See TrainEngine."""
        self._rest()
        return self.parameters.local(self.root, self.dtype)

    def rollout_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See TrainEngine."""
        self._rest()
        return self.parameters.gathered(self.root, self.dtype)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See TrainEngine."""
        self._rest()
        return self.parameters.whole(dict(self.parameters.here()))

    def save_pretrained(self, folder: Path) -> None:
        """See TrainEngine."""
        state.save_pretrained(self.model.hf, self.full_parameters(), self.model_config, folder, self.ranks)

    def save_state(self, folder: Path) -> None:
        """See TrainEngine."""
        self.save_pretrained(folder / "model")
        self._rest()
        state.save_engine_state(self.parameters, self.optimizer, self.version, folder, self.ranks)

    def load_state(self, folder: Path) -> None:
        """See TrainEngine."""
        self._rest()
        state.load_weights(self.parameters, folder / "model", self.ranks)
        self.version = state.load_engine_state(self.parameters, self.optimizer, folder, self.ranks)


def _mini_batch(item: UpdateItem, index: int) -> DataProto:
    """Return this rank's rows of one mini-batch."""
    start = sum(item.sizes[:index])
    return item.batch[start : start + item.sizes[index]]


def _pad_rows(values: Tensor, lengths: Tensor) -> Tensor:
    """Lay out [tokens, ...] as [rows, longest, ...], differentiably, zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence(list(values.split(lengths.tolist())), batch_first=True)
