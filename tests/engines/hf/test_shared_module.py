"""A rollout engine that decodes with the train engine's own module."""

import torch

from rlcore.config import ModelConfig
from rlcore.engine.rollout import Request, Sampling
from rlcore.engines.hf.rollout import HFRollout


def test_a_shared_module_goes_back_to_its_training_state_when_the_last_request_has_left(make_engine, model_folder):
    train = make_engine(activation_checkpointing=True)
    module = train.shared_module
    model = ModelConfig(path=str(model_folder()))
    rollout = HFRollout(model, batch_size=4, device=torch.device("cpu"), shared=module)
    rollout.version = 0
    modes = [each.training for each in module.modules()]
    assert any(modes)
    assert not all(modes)
    before = module.config._attn_implementation

    def is_training() -> bool:
        assert (module.config._attn_implementation == before) == ([each.training for each in module.modules()] == modes)
        return module.config._attn_implementation == before == "rlcore_packed"

    sampling = Sampling(max_tokens=50, min_tokens=50)
    rollout.add([Request("a", (5, 6), 1, sampling), Request("b", (7,), 2, sampling)])
    rollout.step()
    assert not is_training()
    rollout.abort(["a"])
    assert not is_training()
    rollout.abort(["b"])
    assert is_training()
    rollout.add([Request("a", (5, 6), 1, Sampling(max_tokens=1))])
    assert [row.id for row in rollout.step()] == ["a"]
    assert is_training()
