"""The engine that the checks of a rollout engine share, its rows, and the reference for them."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from rlcore import Config, DataError, DataProto, PluginManager, Ragged
from rlcore.config import compose
from rlcore.engine import Finished, Request, RolloutEngine, RolloutSetup, Sampling
from rlcore.ops import noise_key
from rlcore_plugin_testing.report import PLAIN, CheckFailed, CheckSuite
from rlcore_plugin_testing.rollout_engine.reference import Reference, Weights

SLOTS = 6
"""Rows that decode at once, where the engine's capabilities say by which key that is set."""
TOLERANCE = 1e-3
"""Largest difference of a log-prob, in nats, to the plain model and to the same row in other company, in fp32."""
EXACT = 1e-4
"""The same for an engine that is `exact`: its log-probs replace those of the train engine."""

Plan = Sequence[tuple[int, Request]]
"""Requests, each with the number of the step before which it is added."""


class RolloutEngineSuite(CheckSuite):
    """One engine of a spec on a small model, in this process. The checks share it; the last one closes it.

    `settings` may give another `model.path` where the engine cannot load the shipped model.
    """

    noun = "rollout engine"
    group = "rollout"

    def __init__(self, name: str, *args: Any, **options: Any) -> None:
        super().__init__(name, *args, **options)
        self.spec = self.manager.rollout_engines()[name]
        self.newest = 0
        self.had_weights = self.closed = False
        self._stack.callback(self.close)

    @classmethod
    def names(cls, plugins: PluginManager) -> Sequence[str]:
        """See CheckSuite."""
        return list(plugins.rollout_engines())

    @property
    def config(self) -> Config:
        """The config with this engine."""

        def make() -> Config:
            slots = self.spec.capabilities.slots_key
            few = [] if slots is None else [f"{slots}={SLOTS}"]
            overrides = [f"rollout.name={self.name}", *few, *PLAIN, *self.settings]
            return compose(overrides, self.manager)

        return self.once("config", make)

    @property
    def reference(self) -> Reference:
        """The reference that the engine has to equal; it has the weights of the engine's last sync."""
        return self.once("reference", lambda: Reference(self.config.model))

    @property
    def engine(self) -> RolloutEngine:
        """The engine, with the first weights; idle, whatever an earlier check left."""

        def make() -> RolloutEngine:
            if "memory" in self.checks:  # it takes a second
                self.bytes_before = held_bytes()
            engine = self.create()
            self.had_weights = self._takes_requests(engine)
            return engine

        self.reference  # noqa: B018  (its bytes are not the engine's)
        if self.closed:
            raise CheckFailed("the engine is closed: this check has to run before `memory`")
        engine = self.once("engine", make)
        if not self.newest:
            self.sync()
        engine.abort(list(engine.in_flight))
        return engine

    def create(self, shared: nn.Module | None = None) -> RolloutEngine:
        """Create an engine in fp32, which may be lent a module."""
        section = self.config.sections.get(f"rollout.{self.name}")
        model = replace(self.config.model, dtype="fp32")
        return self.spec.create(RolloutSetup(model, self.config.rollout, section, self.device, shared))

    @property
    def created(self) -> RolloutEngine:
        """The engine as it is, with its requests in flight."""
        engine: RolloutEngine = self._kept["engine"]
        return engine

    def _takes_requests(self, engine: RolloutEngine) -> bool:
        try:
            engine.add([Request("early", (5,), 0, Sampling(max_tokens=1))])
        except DataError:
            return False
        engine.abort(["early"])
        return True

    def sync(self, *, adopt: bool = False) -> int:
        """Give the engine and the reference new weights, and return their version."""
        weights = self.reference.draw_weights(self.newest + 1)
        take = self.created.adopt if adopt else self.created.sync
        held = {name: tensor.to(self.device) for name, tensor in weights.items()} if adopt else weights
        take(iter(held.items()), self.newest + 1, shapes_of(weights))
        self.reference.load(weights)
        self.newest += 1
        return self.newest

    @property
    def device(self) -> torch.device:
        """Where the engine computes."""
        return torch.device("cuda" if self.config.cluster.gpus_per_worker else "cpu")

    @property
    def tolerance(self) -> float:
        """Largest difference of a log-prob."""
        return EXACT if self.engine.exact else TOLERANCE

    def close(self) -> weakref.ref[RolloutEngine] | None:
        """Close the engine, if there is one, and forget it; return a weak reference to it."""
        engine = self._kept.pop("engine", None)
        self.closed = True
        if not isinstance(engine, RolloutEngine):
            return None
        engine.close()
        return weakref.ref(engine)

    # Rows

    def requests(self, count: int = 12, *, most: int = 40, seed: int = 0, **options: Any) -> list[Request]:
        """Return rows with prompts of 1 to `most` tokens, a third of them with the same one, and different limits.

        `options` are fields of Sampling.
        """
        numbers = random.Random(seed)
        rows = []
        for row in range(count):
            length = 7 if row % 3 == 0 else numbers.randint(1, most)
            prompt = self.prompt(length, 0 if row % 3 == 0 else row + 1)
            sampling = Sampling(**{"max_tokens": numbers.randint(4, 40), **options})
            rows.append(Request(str(row), prompt, noise_key("suite", seed, row), sampling))
        return rows

    def prompt(self, length: int, seed: int) -> tuple[int, ...]:
        """Return random token ids, none of which ends a response."""
        ids = sorted(set(range(3, self.reference.vocab)) - set(self.reference.end_ids))
        return tuple(random.Random(seed).choices(ids, k=length))

    def batch(self, groups: int = 2, size: int = 2, length: int = 9) -> DataProto:
        """Return rows for `generate`: `size` of each of some prompts."""
        prompts = [torch.tensor(self.prompt(length + group, group)) for group in range(groups)]
        return DataProto.from_single_dict(
            {
                "prompts": Ragged.from_list([prompt for prompt in prompts for _ in range(size)]),
                "uid": [f"0:{group}" for group in range(groups) for _ in range(size)],
                "sample_index": torch.arange(size).repeat(groups),
            }
        )

    def run(self, plan: Plan, most: int = 5000) -> dict[str, Finished]:
        """Add each request before its step, and step until all have ended; return the rows by id."""
        engine, plan, done = self.engine, list(plan), {}
        for step in range(most):
            if now := [request for when, request in plan if when == step]:
                engine.add(now)
            plan = [(when, request) for when, request in plan if when > step]
            for row in engine.step():
                if row.id in done:
                    raise CheckFailed(f"row {row.id} was returned twice")
                done[row.id] = row
            if not plan and not engine.in_flight:
                return done
        raise CheckFailed(f"after {most} steps, requests {', '.join(list(engine.in_flight)[:5])} have not ended")

    def alone(self, **options: Any) -> dict[str, Finished]:
        """Return each row of `requests(**options)`, sampled with no other in the engine."""

        def make() -> dict[str, Finished]:
            done: dict[str, Finished] = {}
            for request in self.requests(**options):
                done.update(self.run([(0, request)]))
            return done

        return self.once(f"alone {sorted(options.items())} {self.newest}", make)

    # Comparisons

    def expect_likely(
        self, requests: Sequence[Request], rows: Mapping[str, Finished], tolerance: float | None = None
    ) -> float:
        """Return how far log-probs are from the plain model's, at most; raise CheckFailed beyond the tolerance.

        `tolerance` is the suite's own by default.
        """
        tolerance = self.tolerance if tolerance is None else tolerance
        worst = 0.0
        for request in requests:
            row = rows[request.id]
            wanted = self.reference.log_probs(request, row)
            own = wanted.gather(-1, torch.tensor(row.tokens)[:, None])[:, 0]
            if request.sampling.temperature == 0:
                off, what = wanted.amax(-1) - own, "a greedy token is less likely than another"
                off = torch.maximum(off, torch.tensor(row.log_probs).abs())
            else:
                off, what = (torch.tensor(row.log_probs) - own).abs(), "a log-prob differs from the plain model's"
            at = int(off.argmax())
            if not float(off[at]) <= tolerance:
                raise CheckFailed(
                    f"{what}: by {float(off[at]):.3g} nats at token {at} of {len(row.tokens)}, after a prompt of "
                    f"{len(request.prompt)} tokens with {request.sampling}"
                )
            worst = max(worst, float(off[at]))
        return worst

    def expect_same(self, got: Mapping[str, Finished], want: Mapping[str, Finished], what: str) -> None:
        """Raise CheckFailed unless the rows have the same tokens, and log-probs within the tolerance."""
        for name, row in want.items():
            other = got.get(name)
            if other is None:
                raise CheckFailed(f"{what}: row {name} is missing")
            if list(other.tokens) != list(row.tokens) or other.reason != row.reason:
                raise CheckFailed(
                    f"{what}: row {name} has the tokens {list(other.tokens)} ({other.reason}), not {list(row.tokens)} "
                    f"({row.reason})"
                )
            off = max((abs(a - b) for a, b in zip(other.log_probs, row.log_probs, strict=True)), default=0.0)
            if not off <= self.tolerance:
                raise CheckFailed(f"{what}: a log-prob of row {name} differs by {off:.3g} nats")


def continued(request: Request, row: Finished, count: int) -> Request:
    """Return a request that goes on after the first `count` tokens of a row."""
    return replace(request, sampled=tuple(row.tokens[:count]), sampled_log_probs=tuple(row.log_probs[:count]))


def shapes_of(weights: Weights) -> dict[str, tuple[int, ...]]:
    """Return the shapes by name."""
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def held_bytes() -> int:
    """Return the bytes of all torch tensors that this process holds."""
    gc.collect()
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages()}
    return sum(sizes.values())


def storages() -> Iterator[Any]:
    """Yield the storages of all torch tensors that this process holds."""
    for each in gc.get_objects():
        if issubclass(type(each), Tensor) and not issubclass(type(each), FakeTensor):
            yield each.untyped_storage()
