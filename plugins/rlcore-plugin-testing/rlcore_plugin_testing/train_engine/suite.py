"""The engines and references that the checks of a train engine share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from rlcore import POLICY, Config, PluginManager, RoleKind
from rlcore.config import LoraConfig, compose
from rlcore.engine import Ranks, TrainEngine, TrainSetup, UpdateItem, model_path
from rlcore_plugin_testing.report import PLAIN, CheckFailed, CheckSuite
from rlcore_plugin_testing.train_engine import problem
from rlcore_plugin_testing.train_engine.reference import Reference, Weights, difference

TOLERANCE = 1e-5
"""Largest relative difference of a gradient from that of plain autograd, in fp32."""
LINEAR: dict[str, Any] = {"lr": 1e9, "eps": 1e6, "clip_grad": 0.0}
"""Makes the first AdamW step 1000 times the gradient, so that weights before and after a step show the gradient.

AdamW divides by |g| + eps. With eps 1e6 that is eps to the last bit of fp32.
"""
SMOOTH: dict[str, Any] = {"lr": 0.1, "eps": 1.0, "clip_grad": 0.0}
"""Makes AdamW steps a smooth function of small gradients, so that rounding does not decide a weight's direction."""


class TrainEngineSuite(CheckSuite):
    """The engines of one spec on a small model. All run in this process, but for the check `ranks`.

    `settings` may give another `model.path` where the engine cannot load the suite's model.
    """

    noun = "train engine"
    group = "engine"

    def __init__(self, name: str, folder: Path, checks: Mapping[str, Callable[[Any], str]], **options: Any) -> None:
        super().__init__(name, folder, checks, **options)
        self.spec = self.manager.train_engines()[name]

    @classmethod
    def names(cls, plugins: PluginManager) -> Sequence[str]:
        """See CheckSuite."""
        return list(plugins.train_engines())

    @property
    def config(self) -> Config:
        """The config with this engine; a model of the suite unless the settings name one."""

        def make() -> Config:
            folder = self.folder / "policy"
            problem.write_policy(folder)
            overrides = [f"engine.name={self.name}", f"model.path={folder}", *PLAIN, *self.settings]
            return compose(overrides, self.manager)

        return self.once("config", make)

    def model(self, kind: RoleKind) -> Path:
        """Return the folder of the model of a kind of role."""
        policy = model_path(self.config.model.path)

        def make() -> Path:
            problem.write_scorer(policy, self.folder / "scorer")
            return self.folder / "scorer"

        return policy if kind.is_language_model else self.once("scorer", make)

    @property
    def own_config(self) -> Any:
        """The engine's own section of the config; None for an engine without one."""
        return self.config.sections.get(f"engine.{self.name}")

    def engine(
        self,
        kind: RoleKind = POLICY,
        *,
        trains: bool = True,
        temperature: float = 1.0,
        dtype: Literal["fp32", "bf16"] = "fp32",
        ranks: Ranks | None = None,
        path: Path | None = None,
        lora: LoraConfig | None = None,
        **options: Any,
    ) -> TrainEngine:
        """Create an engine; `options` replace keys of `engine`. Its device is a GPU where the settings ask for one.

        path: a model folder instead of the suite's. lora: the adapter that it trains, or starts from.
        """
        ranks = ranks or Ranks(device=torch.device("cuda" if self.config.cluster.gpus_per_worker else "cpu"))
        folder = str(path or self.model(kind))
        model = replace(self.config.model, path=folder, dtype=dtype, lora=lora or LoraConfig())
        config = replace(self.config.engine, **options)
        setup = TrainSetup(model, config, self.own_config, ranks, trains, kind, temperature=temperature, total_steps=10)
        return self.spec.create(setup)

    def reference(self, kind: RoleKind = POLICY, *, temperature: float = 1.0, **options: Any) -> Reference:
        """Create the reference that an engine with the same arguments must equal."""
        return Reference(self.model(kind), kind, replace(self.config.engine, **options), temperature)

    @property
    def vocab(self) -> int:
        """The number of tokens of the model."""
        return self.once("vocab", lambda: int(self.reference().hf.config.get_text_config().vocab_size))

    def item(self, kind: RoleKind = POLICY, *, seed: int = 0, sizes: Sequence[int] = (), **options: Any) -> UpdateItem:
        """Return rows with the loss of a kind of role, in one mini-batch unless `sizes` says otherwise."""
        batch = problem.rows(self.vocab, seed)
        return UpdateItem(batch, sizes or [len(batch)], problem.LOSSES[kind], None, **options)


def weights_of(engine: TrainEngine, dtype: torch.dtype = torch.float32) -> Weights:
    """Return copies of an engine's weights in main memory."""
    return {name: tensor.detach().cpu().clone() for name, tensor in engine.export(dtype)}


def expect_equal(got: Weights, want: Weights, what: str) -> None:
    """Raise CheckFailed unless two sets of weights are equal bit for bit."""
    if set(got) != set(want):
        raise CheckFailed(f"{what}: it has other parameters: {', '.join(sorted(set(got) ^ set(want))[:5])}")
    wrong = [name for name, tensor in want.items() if not torch.equal(got[name], tensor)]
    if wrong:
        raise CheckFailed(f"{what}: {len(wrong)} of {len(want)} parameters differ, as {wrong[0]}")


def expect_near(got: Weights, want: Weights, start: Weights, what: str, tolerance: float = TOLERANCE) -> float:
    """Return the largest relative difference of two updates of `start`; raise CheckFailed above `tolerance`."""
    if set(got) != set(want):
        raise CheckFailed(f"{what}: it has other parameters: {', '.join(sorted(set(got) ^ set(want))[:5])}")
    off, name = difference(got, want, start)
    if not off <= tolerance:
        raise CheckFailed(f"{what}: the update of {name} is off by {off:.2g} of its norm; allowed: {tolerance:g}")
    return off
