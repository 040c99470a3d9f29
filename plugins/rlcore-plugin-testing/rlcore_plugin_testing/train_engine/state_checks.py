"""The checks on a train engine's weights and saved states."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlcore import POLICY, CheckpointError, ConfigError, DataError
from rlcore.engine import ENGINE_STATE, Shapes, TrainEngine
from rlcore_plugin_testing.report import CheckFailed, NotApplicable, expect_error
from rlcore_plugin_testing.train_engine.reference import Weights
from rlcore_plugin_testing.train_engine.suite import SMOOTH, TrainEngineSuite, expect_equal, weights_of

WEIGHTS = "model.safetensors"


def versions(suite: TrainEngineSuite) -> str:
    """The version starts at 0; a step, a load and a follow add one each, an update without rows adds none."""
    engine, other = suite.engine(**SMOOTH), suite.engine()
    seen = [engine.version]
    engine.update([suite.item(sizes=[6, 6])], epochs=1, step=0)
    seen.append(engine.version)
    engine.load(weights_of(other), other.shapes, 1.0)
    seen.append(engine.version)
    engine.follow(other, 0.5)
    seen.append(engine.version)
    engine.update([suite.item(sizes=[0])], epochs=1, step=0)
    seen.append(engine.version)
    if seen != [0, 2, 3, 4, 4]:
        raise CheckFailed(
            f"versions are {seen}, not [0, 2, 3, 4, 4], at the start and after two optimizer steps, load, follow and "
            "an update without rows"
        )
    return "steps, load and follow count"


def resume(suite: TrainEngineSuite) -> str:
    """A fresh engine that restores a saved state goes on bit for bit: weights, optimizer, version, random state."""
    folder = suite.folder / "state"
    straight, saved = suite.engine(**SMOOTH), suite.engine(**SMOOTH)
    for seed in (1, 2):
        for engine in (straight, saved):
            engine.update([suite.item(seed=seed)], epochs=1, step=0)
    saved.save(folder)
    expect_equal(weights_of(saved), weights_of(straight), "an engine that was saved, beside one that was not")
    drawn = _draw()
    if not (folder / ENGINE_STATE).is_file():
        raise CheckFailed(f"save() wrote no {ENGINE_STATE}; without it a state counts as incomplete")
    resumed = suite.engine(**SMOOTH)
    resumed.restore(folder)
    if _draw() != drawn:
        raise CheckFailed("restore() leaves the random generators of torch, numpy or random in another state")
    if resumed.version != saved.version:
        raise CheckFailed(f"restored, the version is {resumed.version}, not {saved.version}")
    expect_equal(weights_of(resumed), weights_of(saved), "a restored engine")
    one, other = (engine.update([suite.item(seed=3)], epochs=2, step=0) for engine in (straight, resumed))
    if one != other:
        different = [name for name in one if one[name] != other.get(name)]
        raise CheckFailed(f"after restore, the next update has other metrics: {', '.join(different)}")
    expect_equal(weights_of(resumed), weights_of(straight), "the update after restore")
    if (folder / "model" / "config.json").is_file():
        return f"{len(one)} metrics and {len(resumed.shapes)} parameters are equal"
    raise CheckFailed("save() wrote no Hugging Face folder `model`")


def _draw() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


def damaged_state(suite: TrainEngineSuite) -> str:
    """A state that cannot be read is a CheckpointError."""
    folder = suite.folder / "damaged"
    suite.engine().save(folder)
    engine = suite.engine()
    (folder / ENGINE_STATE).write_text("{")
    with expect_error(CheckpointError, f"restore() of a damaged {ENGINE_STATE}", ENGINE_STATE):
        engine.restore(folder)
    with expect_error(CheckpointError, "restore() of an empty folder"):
        engine.restore(suite.folder / "nowhere")
    return f"a damaged and a missing {ENGINE_STATE} are refused"


def export(suite: TrainEngineSuite) -> str:
    """`export` yields every parameter of the Hugging Face model once, tied ones once, whole, in the asked dtype."""
    engine = suite.engine()
    wanted = suite.reference().weights
    for dtype in (torch.float32, torch.bfloat16):
        names: list[str] = []
        for name, tensor in engine.export(dtype):
            if name in names:
                raise CheckFailed(f"export yields {name} twice")
            names.append(name)
            if tensor.dtype != dtype:
                raise CheckFailed(f"export({dtype}) yields {name} in {tensor.dtype}")
            if tensor.requires_grad:
                raise CheckFailed(f"export yields {name} with a gradient; detach it")
        exported = weights_of(engine, dtype)
        expect_equal(exported, {name: tensor.to(dtype) for name, tensor in wanted.items()}, f"export({dtype})")
    if names != list(engine.shapes):
        raise CheckFailed("export and `shapes` have their names in another order")
    return f"{len(names)} parameters in fp32 and bf16"


def load(suite: TrainEngineSuite) -> str:
    """`load` and `follow` move every weight by the share tau of the way: 1 copies bit for bit."""
    target = {name: 1.5 * tensor + 0.1 for name, tensor in suite.reference().weights.items()}
    leader = suite.engine()
    shapes = leader.shapes
    leader.load(target, shapes, 1.0)
    expect_equal(weights_of(leader), target, "load with tau=1")
    moves: dict[str, Callable[[TrainEngine, float], None]] = {
        "load": lambda engine, tau: engine.load(target, shapes, tau),
        "follow": lambda engine, tau: engine.follow(leader, tau),
    }
    for name, move in moves.items():
        copied, moved = suite.engine(trains=False), suite.engine(trains=False)
        start = weights_of(moved)
        move(copied, 1.0)
        expect_equal(weights_of(copied), target, f"{name} with tau=1")
        move(moved, 0.25)
        for key, tensor in weights_of(moved).items():
            if not torch.allclose(tensor, start[key].lerp(target[key], 0.25), rtol=1e-6, atol=1e-7):
                raise CheckFailed(f"{name} with tau=0.25 does not move {key} by a quarter of the way")
        expect_equal(weights_of(leader), target, f"the engine that {name} reads")
    return "load and follow with tau 1 and 0.25"


def other_model(suite: TrainEngineSuite) -> str:
    """`load` of weights with other names or shapes is a DataError that names them, and changes nothing."""
    engine = suite.engine()
    before = weights_of(engine)
    last = list(before)[-1]
    doubled = {name: 2 * tensor for name, tensor in before.items()}
    wrong: dict[str, Weights] = {
        "a missing parameter": {name: tensor for name, tensor in doubled.items() if name != last},
        "an unknown parameter": {**doubled, "unknown.weight": torch.zeros(2)},
        "a parameter of another shape": {**doubled, last: torch.zeros(3, 5, 7)},
    }
    for title, weights in wrong.items():
        named = "unknown.weight" if "unknown" in title else last
        with expect_error(DataError, f"load of {title}", named):
            engine.load(weights, _shapes(weights), 1.0)
        expect_equal(weights_of(engine), before, f"after load of {title}")
    if engine.version:
        raise CheckFailed(f"after refused loads the version is {engine.version}, not 0")
    return f"{', '.join(wrong)} are refused"


def incomplete_model(suite: TrainEngineSuite) -> str:
    """A model folder that lacks a weight is a ConfigError that names it; transformers would draw it at random."""
    whole, folder = suite.model(POLICY), suite.folder / "incomplete"
    if not (whole / WEIGHTS).is_file():
        raise NotApplicable(f"the weights of {whole} are not one file {WEIGHTS}")
    shutil.copytree(whole, folder)
    weights = load_file(whole / WEIGHTS)
    lacking = sorted(weights)[len(weights) // 2]
    del weights[lacking]
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    with expect_error(ConfigError, f"a model folder without {lacking}", lacking):
        suite.engine(path=folder)
    return f"a folder without {lacking} is refused"


def _shapes(weights: dict[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def save_pretrained(suite: TrainEngineSuite) -> str:
    """transformers opens the folder of each kind of role and finds the engine's fp32 weights and a tokenizer."""
    for number, kind in enumerate(suite.spec.capabilities.kinds):
        engine, folder = suite.engine(kind, **SMOOTH), suite.folder / f"saved-{number}"
        engine.update([suite.item(kind)], epochs=1, step=0)
        engine.save_pretrained(folder)
        opened = _opened(folder, kind.is_language_model)
        expect_equal(opened, weights_of(engine), f"the folder of a {kind}, opened with transformers,")
    return f"{', '.join(f'a {kind}' for kind in suite.spec.capabilities.kinds)}; {len(opened)} parameters are equal"


def _opened(folder: Path, is_language_model: bool) -> Weights:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    auto: Any = AutoModelForCausalLM if is_language_model else AutoModelForSequenceClassification
    model = auto.from_pretrained(folder)  # in the dtype of the files
    if not AutoTokenizer.from_pretrained(folder)("1+1=")["input_ids"]:
        raise CheckFailed("the tokenizer in the folder of save_pretrained gives no tokens")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def offload(suite: TrainEngineSuite) -> str:
    """`offload` changes no number: the next call of any method brings the weights and moments back that it needs."""
    plain, offloaded = suite.engine(**SMOOTH), suite.engine(**SMOOTH)
    for seed in range(3):
        offloaded.offload()
        one, other = (engine.update([suite.item(seed=seed)], epochs=1, step=0) for engine in (plain, offloaded))
        if changed := [name for name in one if one[name] != other.get(name)]:
            raise CheckFailed(f"after offload() an update has other metrics: {', '.join(changed)}")
    offloaded.offload()
    expect_equal(weights_of(offloaded), weights_of(plain), "three updates, each after offload()")
    return "3 updates are equal"
