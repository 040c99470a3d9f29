"""The workers behind a model role.

ModelWorker: a train engine, and the rollout engine that samples with its weights in the same process.
SamplingWorker: a rollout engine in processes of its own, which samples in the role's place with received weights.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from rlcore.config import EngineConfig, ModelConfig, RolloutConfig
from rlcore.engine.collectives import Ranks
from rlcore.engine.device import explains_memory, free_bytes, has_memory_figures, peak_bytes, prepare_device
from rlcore.engine.generators import random_state, set_random_state
from rlcore.engine.parallel.layout import Layout
from rlcore.engine.reward_tokenizer import TextEncoder
from rlcore.engine.rollout import Episodes, EpisodeSource, RolloutEngine, RolloutSetup, Sampling
from rlcore.engine.room import (
    GRADIENT_BYTES,
    MOMENT_BYTES,
    local_parameters,
    room_for,
    sampling_remedies,
    training_remedies,
)
from rlcore.engine.train import TrainEngine, TrainSetup
from rlcore.engine.update.items import UpdateItem
from rlcore.engine.update.loss_accumulator import row_names
from rlcore.engine.update.micro_batch_size import (
    LARGEST_PROBE,
    MicroBatchSize,
    choose,
    enough_tokens,
    measure,
    place_of,
)
from rlcore.engine.weights.fingerprint import CHECK_EVERY
from rlcore.engine.weights.generation import GenerationLayout
from rlcore.engine.weights.meter import ProcessGroups
from rlcore.engine.weights.routes import Received, WeightRoute, choose_route
from rlcore.engine.weights.transfer import RemoteWeights, object_column, pack_weights, packed_specs
from rlcore.errors import DataError
from rlcore.plugins import Role, RolloutEngineSpec, TrainEngineSpec
from rlcore.protocol import DataProto
from rlcore.protocol.columns import ColumnSpec
from rlcore.protocol.glossary import column_specs
from rlcore.workers import Dispatch, Worker, register

log = logging.getLogger(__name__)

TOKENS = ("prompts", "responses")
GENERATED = column_specs(
    "responses",
    "response_mask",
    "rollout_log_probs",
    "response_text",
    "prompt_length",
    "response_length",
    "finished",
    "weights_version",
    "exact_log_probs",
)
"""The columns of `generate`."""


def _log_probs_gives(batch: DataProto, name: str, entropy: bool) -> dict[str, ColumnSpec]:
    return {name: ColumnSpec.ragged(torch.float32), **(column_specs("entropy") if entropy else {})}


def _score_gives(batch: DataProto, name: str, keep_failed: bool) -> dict[str, ColumnSpec]:
    return {name: ColumnSpec.dense(torch.float32)}


@dataclass(frozen=True)
class RoleSetup:
    """The start-up arguments of a role's workers: the role, its configs and its engines.

    `train_config` and `rollout_config`: the engines' own sections, `engine.NAME` and `rollout.NAME`; None without one.
    `frozen`: only forwards read the weights; they are not trained, followed, sent or sampled with. `reads_text`: a
    reward model that reads texts, as its tokenizer differs from the actor's. `row_tokens`: as in RolloutSetup.
    `base_of`: the role in the same processes whose model without its adapter this role is, so that it loads none.
    """

    role: Role
    model: ModelConfig
    engine: EngineConfig
    rollout: RolloutConfig
    train_engine: TrainEngineSpec[Any]
    rollout_engine: RolloutEngineSpec[Any]
    train_config: Any
    rollout_config: Any
    seed: int
    total_steps: int
    deterministic: bool = False
    frozen: bool = False
    reads_text: bool = False
    row_tokens: int = 0
    base_of: str | None = None


class _GeneratingWorker(Worker):
    """The part of both workers that has a rollout engine. Before generating it brings the newest weights."""

    def __init__(self, setup: RoleSetup) -> None:
        self.setup = setup
        self._seconds: dict[str, float] = {}
        self.rollout: RolloutEngine | None = None
        self.route: WeightRoute | None = None
        self._fitting_rows: int | None = None
        self._episodes: dict[str, EpisodeSource] = {}

    def _engines(self) -> list[TrainEngine | RolloutEngine]:
        return [] if self.rollout is None else [self.rollout]

    @register(Dispatch.RANK_ZERO)
    def describe(self) -> str:
        """Return where and how rank 0 computes, for the run's first lines."""
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        engines = [each.description for each in self._engines()]
        return ", ".join([device, self.setup.model.dtype, *filter(None, engines)])

    def _create_rollout(
        self, generation: GenerationLayout, groups: ProcessGroups, shared: torch.nn.Module | None
    ) -> RolloutEngine:
        setup, sharded = self.setup, generation.tp > 1
        workers = {id(worker): worker for worker in self._trained}.values()
        training = [self._training_bytes(worker) for worker in workers]
        return setup.rollout_engine.create(
            RolloutSetup(
                model=setup.model,
                rollout=setup.rollout,
                config=setup.rollout_config,
                device=self.device,
                shared=shared if setup.rollout_engine.capabilities.shares_module else None,
                tensor_group=groups.own(generation.groups("tp")) if sharded else None,
                engine_order=generation.engine_order if sharded else (),
                beside_training=any(worker.setup.role.trains for worker in workers),
                training_bytes=sum(total for total, _ in training),
                kept_bytes=sum(kept for _, kept in training),
                gpu_share=min(1.0, self._context.gpus) or 1.0,  # 0: a CPU
                row_tokens=setup.row_tokens,
            )
        )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def _trained(self) -> list[ModelWorker]:
        """The workers of all train engines in this process."""
        return [worker for worker in (self, *self._siblings.values()) if isinstance(worker, ModelWorker)]

    def _training_bytes(self, worker: ModelWorker) -> tuple[int, int]:
        """Return RolloutSetup's `training_bytes` and `kept_bytes` of one worker; 0 before its start."""
        if not (worker.setup.role.trains and hasattr(worker, "train")):
            return 0, 0
        local = local_parameters(worker.train)
        total = (GRADIENT_BYTES + MOMENT_BYTES) * local
        # `offload` moves the moments out before a row is sampled.
        return total, GRADIENT_BYTES * local if self.setup.engine.offload else total

    def _fits(self, call: str, batches: Sequence[DataProto], remedies: Iterable[str]) -> AbstractContextManager[None]:
        """Name the call, its rows and the keys that lower its memory if the device runs out of it."""
        can_offload = any(each.setup.train_engine.capabilities.offload for each in self._trained)
        offload = ["engine.offload=true"] if can_offload and not self.setup.engine.offload else []
        tokens = sum(int(batch.view(name).lengths.sum()) for batch in batches for name in TOKENS if name in batch)
        return explains_memory(call, sum(map(len, batches)), tokens, self.device, chain(remedies, offload))

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def seconds(self) -> dict[str, float]:
        """Return the seconds of each kind of work since the last call, and reset them."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    @register(Dispatch.ALL_MICRO_DP_3D, blocking=False, reads=("prompts", "uid", "sample_index"), gives=GENERATED)
    def generate(self, batch: DataProto, sampling: Sampling) -> DataProto:
        """Return the response columns of RolloutEngine.generate for the rows of this rank's generating replica."""
        engine = self._ready_to_sample()
        return self._sample("generate", batch, sampling, engine.generate, exact=lambda: engine.exact)

    @register(Dispatch.ALL_MICRO_DP_3D, reads=("prompts", "prompt_text", "uid", "sample_index", "episode_row"))
    def rollout_episodes(self, batch: DataProto, sampling: Sampling, episodes: Episodes) -> DataProto:
        """Return the rows of the episodes of this rank's rows: as many as their branches."""
        engine = self._ready_to_sample()
        if episodes.key not in self._episodes:
            self._episodes[episodes.key] = episodes.open(engine)
        source = self._episodes[episodes.key]
        out = self._sample("rollout", batch, sampling, source.play, exact=lambda: engine.exact and source.is_exact)
        self._seconds["env_wait"] = self._seconds.get("env_wait", 0.0) + source.waited()
        return out

    def _ready_to_sample(self) -> RolloutEngine:
        """Return the rollout engine with the newest weights. Raises DataError for a role that does not generate."""
        if self.rollout is None or self.route is None:
            raise DataError("this role does not generate; declare it with Role(generates=True)")
        # The memory of the last update's gradients is for sampling now.
        for worker in self._trained:
            worker.train.zero_grad()
        # Versions are equal on all ranks, so either all of them enter the collectives of the route or none does.
        if not self.route.is_current:
            with self._timed("sync"):
                self.route.bring()
        # After the switch, which reads the trained weights on the device.
        if self.setup.engine.offload:
            with self._timed("offload"):
                self._offload()
        return self.rollout

    def _offload(self) -> None:
        for worker in self._trained:
            worker.train.offload()

    def _set_route(self, route: WeightRoute) -> None:
        """Sample with the weights of this route. Its trial needs the memory that sampling gets later."""
        self.route = route
        route.offload, route.leads = self._offload if self.setup.engine.offload else None, self.rank == 0

    def _sample(
        self,
        call: str,
        batch: DataProto,
        sampling: Sampling,
        sample: Callable[[DataProto, Sampling], DataProto],
        *,
        exact: Callable[[], bool],
    ) -> DataProto:
        """Return the rows of `sample`, with the column `exact_log_probs`; then let the engine sleep.

        `exact` tells after the call whether the engine's log-probs may replace the train engine's.
        """
        assert self.rollout is not None
        try:
            with self._timed("generate"), self._fits(call, [batch], sampling_remedies(self.setup)):
                out = self._sample_fitting(self.rollout, batch, sampling, sample)
        finally:
            # Also after an error, which leaves none of its rows: training needs the memory. Rows of others stay awake.
            if not self.rollout.in_flight:
                self.rollout.sleep()
        # `log_probs` uses the role's temperature; at another one the numbers would differ.
        same = exact() and sampling.is_plain and sampling.temperature == self.setup.rollout.temperature
        out["exact_log_probs"] = torch.full((len(out),), same, dtype=torch.bool)
        return out

    def _sample_fitting(
        self,
        engine: RolloutEngine,
        batch: DataProto,
        sampling: Sampling,
        sample: Callable[[DataProto, Sampling], DataProto],
    ) -> DataProto:
        """Sample for as many rows at a time as have fitted so far, and for half of them where they do not fit.

        In fp32 a row's tokens do not depend on the rows beside it, so they are the same. Ranks of one tensor group have
        to make the same calls, so they do not try again.
        """
        parts: list[DataProto] = []
        start = 0
        while start < len(batch) or not parts:
            size = min(self._fitting_rows or len(batch), len(batch) - start)
            rows = batch if size == len(batch) else batch[start : start + size]
            try:
                parts.append(sample(rows, sampling))
                start += size
                continue
            except torch.OutOfMemoryError:
                if size <= 1 or self.setup.rollout.tp > 1 or engine.in_flight:
                    raise
            # After the handler, which holds the failed call's tensors.
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            key = self.setup.rollout_engine.capabilities.slots_key or ""
            decoding = getattr(self.setup.rollout_config, key.rpartition(".")[2], size)
            told = self._fitting_rows is not None
            self._fitting_rows = min(size, decoding) // 2 or 1
            log.log(
                logging.INFO if told else logging.WARNING,
                "generate of %d rows does not fit into the memory of %s: from now on %d rows at a time",
                *(size, self.device, self._fitting_rows),
            )
        return parts[0] if len(parts) == 1 else DataProto.concat(parts)

    @register(Dispatch.ONE_TO_ALL)
    def switch_bytes(self) -> dict[str, int]:
        """Return the counts of Meter over this rank's weight switches; {} for a role that does not generate."""
        return {} if self.route is None else self.route.meter.report()

    def shutdown(self) -> None:
        """See Worker."""
        for source in self._episodes.values():
            source.close()
        self._episodes = {}
        if self.rollout is not None:
            self.rollout.close()
            self.rollout = None


class ModelWorker(_GeneratingWorker):
    """One rank of a model role, with its train engine."""

    def __init__(self, setup: RoleSetup) -> None:
        super().__init__(setup)
        self.ranks: Ranks
        self.train: TrainEngine
        self._texts: TextEncoder | None = None
        self._micro_batch: MicroBatchSize | None = None
        self._sends = 0

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def start(self) -> None:
        """Join the other ranks and load the model. Raises ConfigError for a model that cannot be loaded."""
        setup = self.setup
        prepare_device(self.device, deterministic=setup.deterministic)
        if self.world_size > 1:
            self.init_process_group()
        # For draws from torch's global generator, such as dropout. Sampling has noise of its own, by row.
        torch.manual_seed(setup.seed + self.rank)
        self.ranks = Ranks(self.rank, self.world_size, self.device)
        self.train = self._create_train_engine()
        layout = self.train.layout
        generation = GenerationLayout(layout, tp=setup.rollout.tp if setup.role.generates else 1)
        if self.world_size > 1:
            at = layout.coordinates(self.rank)
            self.set_mesh(pp=at.pp, tp=at.tp, dp=at.dp, micro_dp=generation.coordinates(self.rank).micro_dp)
        if setup.reads_text:
            self._texts = TextEncoder.of(setup.model)
        if setup.role.generates:
            groups = ProcessGroups(self.rank)
            can = setup.rollout_engine.capabilities
            self.rollout = self._create_rollout(generation, groups, self.train.shared_module)
            self._set_route(choose_route(self.train, self.rollout, can, generation, groups))

    def _create_train_engine(self) -> TrainEngine:
        setup = self.setup
        if setup.base_of is not None:
            owner = self.sibling(setup.base_of)
            assert isinstance(owner, ModelWorker)
            return owner.train.without_adapter()
        return setup.train_engine.create(
            TrainSetup(
                model=setup.model,
                engine=setup.engine,
                config=setup.train_config,
                ranks=self.ranks,
                trains=setup.role.trains,
                kind=setup.role.kind,
                new_head=setup.role.may_start_headless,
                frozen=setup.frozen,
                temperature=setup.rollout.temperature,
                total_steps=setup.total_steps,
                seed=setup.seed,
            )
        )

    def _engines(self) -> list[TrainEngine | RolloutEngine]:
        return [self.train, *super()._engines()]

    @register(Dispatch.RANK_ZERO)
    def describe(self) -> str:
        """See _GeneratingWorker. Adds the measured tokens of a micro-batch."""
        size = self._micro_batch
        of_size = [] if size is None else [f"micro-batches of {size.tokens} tokens ({size.reason})"]
        return ", ".join([super().describe(), *of_size])

    @register(Dispatch.ONE_TO_ALL)
    def fit_micro_batches(self, kept: MicroBatchSize | None, longest: int) -> MicroBatchSize | None:
        """Find the tokens of a micro-batch for `engine.micro_batch_tokens=auto`, train with them, and return them.

        kept: the result of an earlier call in this run; it holds if card and layout are the same, and else the memory
        is measured again. longest: most tokens of a row. On a CPU, and with a given number, nothing is measured: None.
        All ranks call it together, and before the optimizer's first step.
        """
        if self.setup.engine.micro_batch_tokens != "auto" or not has_memory_figures(self.device):
            return None
        place = place_of(self.train, torch.cuda.get_device_name(self.device))
        if kept is None or kept.place != place:
            room = room_for(self.train, self._trained, min(1.0, self._context.gpus), longest)
            with explains_memory("measuring a micro-batch", *LARGEST_PROBE, self.device, self._training_remedies()):
                line = measure(self.train, partial(peak_bytes, self.device))
            layout = self.train.layout
            on_one_gpu = sum(map(math.prod, self.train.shapes.values())) // (layout.pp * layout.tp)
            kept = choose(line, room, longest, place, self.ranks.gather, enough_tokens(on_one_gpu))
            free_bytes(self.device)  # gives back the blocks of the measurement
        self.train.micro_batch_tokens = kept.tokens
        self._micro_batch = kept
        return kept

    def _trains(
        self, call: str, batches: Sequence[DataProto], items: Sequence[UpdateItem] = ()
    ) -> AbstractContextManager[None]:
        """Return `_fits` for a call of the train engine, an update of these `items`."""
        return self._fits(call, batches, self._training_remedies(items))

    def _training_remedies(self, items: Sequence[UpdateItem] = ()) -> Iterator[str]:
        return training_remedies(self.setup, self.train.micro_batch_tokens, self._micro_batch, items)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=TOKENS, gives=_log_probs_gives)
    def log_probs(self, batch: DataProto, name: str, entropy: bool) -> DataProto:
        """Return the log-probs of the responses as column `name`, and the column `entropy` if `entropy` is True.

        Returns the batch's `rollout_log_probs` if every row was sampled with the current weights, from the same
        distribution and with the same arithmetic.
        """
        with self._timed("log_probs"):
            # All ranks must agree: one that computes would wait forever in the collectives of its forward.
            if not entropy and all(self.ranks.gather(self._rollout_serves(batch))):
                return DataProto.from_single_dict({name: batch.view("rollout_log_probs")})
            with self._trains("log_probs", [batch]):
                columns = self.train.compute(batch, ["log_probs", "entropy"] if entropy else ["log_probs"])
            columns[name] = columns.pop("log_probs")
            return DataProto.from_single_dict(columns)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=TOKENS, gives=column_specs("values"))
    def values(self, batch: DataProto) -> DataProto:
        """Return the column `values`."""
        with self._timed("values"), self._trains("values", [batch]):
            return DataProto.from_single_dict(self.train.compute(batch, ["values"]))

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, gives=_score_gives)
    def score(self, batch: DataProto, name: str, keep_failed: bool) -> DataProto:
        """Return the scores as column `name`.

        Raises DataError naming the rows whose score is not finite; with `keep_failed` these get NaN.
        """
        with self._timed("score"):
            if self._texts is not None:
                batch = batch.union(self._texts.encode(batch))
            with self._trains("score", [batch]):
                scores = self.train.compute(batch, ["scores"])["scores"]
        assert isinstance(scores, torch.Tensor)
        bad = ~scores.isfinite()
        if keep_failed:
            scores = scores.masked_fill(bad, torch.nan)
        elif bad.any():
            raise DataError(
                f"the reward model's scores of {int(bad.sum())} rows are not finite: {row_names(batch[bad])}"
            )
        return DataProto.from_single_dict({name: scores})

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def follow(self, tau: float) -> None:
        """Move the weights by the share `tau` of the way to those of the followed role, in the same process."""
        assert self.setup.role.follows is not None
        with self._timed("follow"):
            leader = self.sibling(self.setup.role.follows)
            assert isinstance(leader, ModelWorker)
            self.train.follow(leader.train, tau)

    @register(Dispatch.RANK_ZERO)
    def parameter_names(self) -> list[str]:
        """Return the Hugging Face names of all parameters, tied ones once."""
        return list(self.train.shapes)

    @register(Dispatch.ALL_RANKS_PROTO, blocking=False, reads=("name",), gives=packed_specs)
    def send_weights(self, names: DataProto, dtype: torch.dtype) -> DataProto:
        """Return the whole parameters named by this rank's rows, in the columns of `packed_specs`; all ranks gather.

        The first call and every CHECK_EVERY-th after it bring checksums.
        """
        with self._timed("send"):
            mine, self._sends = names.view("name").tolist(), self._sends + 1
            trained = self.train.fingerprint(dtype) if self._sends % CHECK_EVERY == 1 else {}
            packed = pack_weights(mine, self.train.export(dtype), self.train.shapes, dtype, self.train.version)
            packed["checksum"] = object_column([trained.get(name) for name in mine])
        return packed

    @register(Dispatch.ONE_TO_ALL)
    def fingerprint(self) -> dict[str, int]:
        """Return the fingerprint of the weights: the masters, or those of a frozen role in the dtype of its forward."""
        return self.train.fingerprint(self.train.dtype if self.setup.frozen else torch.float32)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def take_weights(self, weights: DataProto, tau: float = 1.0) -> None:
        """Move the weights by the share `tau` of the way to those of another role's `send_weights`; 1 copies.

        Raises DataError naming the parameters that do not fit.
        """
        sent = RemoteWeights(weights)
        with self._timed("follow"):
            self.train.load(sent, sent.shapes, tau)

    def _rollout_serves(self, batch: DataProto) -> bool:
        if "rollout_log_probs" not in batch:
            return False
        made_now = batch.view("weights_version") == self.train.version
        return bool((batch.view("exact_log_probs") & made_now).all())

    @register(Dispatch.DP_COMPUTE, blocking=False)
    def update(self, items: Sequence[UpdateItem], epochs: int, step: int) -> dict[str, float]:
        """Take the optimizer steps of TrainEngine.update on the rows of this data-parallel rank."""
        with self._timed("update"), self._trains("update", [item.batch for item in items], items):
            metrics = self.train.update(items, epochs=epochs, step=step)
        return metrics if self.rollout is None else {**metrics, **self.rollout.metrics}

    @register(Dispatch.ONE_TO_ALL)
    def version(self) -> int:
        """Return the version of the weights."""
        return self.train.version

    @register(Dispatch.ONE_TO_ALL)
    def save_pretrained(self, folder: str) -> None:
        """Write a Hugging Face folder."""
        self.train.save_pretrained(Path(folder))

    @register(Dispatch.ONE_TO_ALL)
    def save_state(self, folder: str) -> None:
        """Write the state from which `load_state` resumes."""
        self.train.save(Path(folder))

    @register(Dispatch.ONE_TO_ALL)
    def load_state(self, folder: str, keep_random_state: bool = False) -> None:
        """Read the state of `save_state`; with `keep_random_state` without that of the random generators."""
        before = random_state()
        self.train.restore(Path(folder))
        if keep_random_state:
            set_random_state(before)


class SamplingWorker(_GeneratingWorker):
    """One rank of a role's copy in other processes: it has no train engine and samples with received weights."""

    route: Received

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def start(self) -> None:
        """Start the rollout engine. Consecutive ranks form one replica; each receives whole weights.

        Raises ConfigError for a model that cannot be loaded.
        """
        prepare_device(self.device, deterministic=self.setup.deterministic)
        shards = self.setup.rollout.tp
        layout = Layout(tp=shards, dp=self.world_size // shards)
        # Replicas of one rank never communicate.
        if shards > 1:
            self.init_process_group()
        if self.world_size > 1:
            at = layout.coordinates(self.rank)
            self.set_mesh(pp=at.pp, tp=at.tp, dp=at.dp)
        self.rollout = self._create_rollout(GenerationLayout(layout, tp=shards), ProcessGroups(self.rank), None)
        self._set_route(Received(self.rollout))

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def take_weights(self, weights: DataProto) -> None:
        """Copy the weights of a role's `send_weights`. Raises DataError naming the parameters that do not fit."""
        with self._timed("sync"):
            self.route.receive(RemoteWeights(weights))
