"""A frozen model in bf16: half the memory for its matrices, and bit for bit the outputs of rounding in each forward."""

import dataclasses

import pytest
import torch
from torch import nn

from rlcore.config import EngineConfig, ModelConfig
from rlcore.engine.collectives import Ranks
from rlcore.engine.train import TrainSetup
from rlcore.engines.torch.config import TorchConfig
from rlcore.engines.torch.engine import TorchEngine
from rlcore.plugins import POLICY, REWARD


def make(folder, **changes):
    setup = TrainSetup(
        ModelConfig(path=str(folder), dtype="bf16"), EngineConfig(), TorchConfig(), Ranks(), trains=False
    )
    return TorchEngine(dataclasses.replace(setup, **changes))


@pytest.mark.parametrize(("kind", "name"), [(POLICY, "log_probs"), (REWARD, "scores")])
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_outputs_are_those_of_rounding_in_each_forward(model_folder, random_batch, architecture, kind, name):
    folder = model_folder(architecture)
    kept, rounded = (make(folder, kind=kind, frozen=frozen) for frozen in (False, True))
    if kind is REWARD:  # a new head is of zeros
        for engine in (kept, rounded):
            engine.model.hf.score.weight.data = torch.linspace(-1, 1, 48)[None].to(engine.model.hf.score.weight.dtype)
    of_kept, of_rounded = (engine.compute(random_batch(), [name])[name] for engine in (kept, rounded))
    first, second = (found.values if kind is POLICY else found for found in (of_kept, of_rounded))
    assert first.equal(second)
    matrices = [module.weight for module in rounded.model.hf.model.layers.modules() if isinstance(module, nn.Linear)]
    assert {weight.dtype for weight in matrices} == {torch.bfloat16}
    assert rounded.model.hf.get_input_embeddings().weight.dtype == torch.float32


def test_what_trains_or_runs_in_fp32_is_kept_whole(model_folder):
    for changes in ({"trains": True}, {"frozen": True, "model": ModelConfig(path=str(model_folder()))}):
        engine = make(model_folder(), **changes)
        assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.float32}
