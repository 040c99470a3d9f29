"""vLLM's fingerprint is that of the weights it was given, and weights that did not arrive are named."""

import pytest
import torch

from rlcore.engine import Untested, checksum
from rlcore.engine.weights.routes import Received
from rlcore.engine.weights.transfer import RemoteWeights, object_column, pack_weights
from rlcore.errors import WeightsError

MODELS = [("qwen2", True), ("llama", False)]
STACKED = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: f"{model[0]}-{'tied' if model[1] else 'untied'}")
def pair(request, make_pair):
    return make_pair(*request.param)


def sent(weights, version, held=None):
    """Return the weights `held` (default: the trained ones) with the checksums of the trained ones."""
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    packed = pack_weights(list(weights), (held or weights).items(), shapes, torch.float32, version)
    packed["checksum"] = object_column([checksum(tensor) for tensor in weights.values()])
    return RemoteWeights(packed)


def test_a_fingerprint_is_that_of_the_weights_by_their_names(pair):
    """Of the stacked ones too: query, key and value, gate and up."""
    seen = []
    for version in (1, 2):
        pair.draw(seed=version)
        pair.sync(version)
        seen.append(pair.rollout.fingerprint())
        assert seen[-1] == {name: checksum(tensor) for name, tensor in pair.weights().items()}
    assert all(seen[0][name] != seen[1][name] for name in seen[0])


def dropped(tensor, old):
    return old


def permuted(tensor, old):
    return tensor.roll(1, 0)


def rounded(tensor, old):
    return tensor.bfloat16().float()


@pytest.mark.parametrize("fault", [dropped, permuted, rounded])
@pytest.mark.parametrize("name", [STACKED, "model.embed_tokens.weight", "model.norm.weight"])
def test_a_weight_that_does_not_arrive_is_named(pair, fault, name):
    route = Received(pair.rollout)
    pair.draw(seed=3)
    route.receive(sent(pair.weights(), 3))
    assert route.is_current
    old = {each: tensor.clone() for each, tensor in pair.weights().items()}
    pair.draw(seed=4)
    weights = pair.weights()
    with pytest.raises(WeightsError, match=rf"VLLMRollout has not got .* by the route Received: 1 of \d+ .*: {name}\."):
        route.receive(sent(weights, 4, {**weights, name: fault(weights[name], old[name])}))
    assert pair.rollout.version == -1
    route.receive(sent(weights, 5))
    assert route.is_current


def test_a_weight_that_vllm_itself_changes_is_named(pair):
    """As a loader does that puts keys where queries are."""

    def swap(module):
        (parameter,) = (each for name, each in module.named_parameters() if "1.self_attn.qkv_proj.weight" in name)
        parameter.data[[0, -1]] = parameter.data[[-1, 0]]

    pair.draw(seed=6)
    weights, before = pair.weights(), pair.rollout.fingerprint()
    pair.sync(6)
    pair.rollout.llm.apply_model(swap)
    expected = {name: checksum(tensor) for name, tensor in weights.items()}
    found = pair.rollout.fingerprint()
    differ = [name for name in expected if found[name] != expected[name]]
    assert differ == [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qv"]
    assert before != found


def test_a_model_with_other_parameters_has_no_fingerprint(pair):
    def rename(module):
        layer = module.model.layers[0].mlp
        layer.extra = torch.nn.Parameter(torch.zeros(2))

    pair.rollout.llm.apply_model(rename)
    assert pair.rollout.fingerprint() is None
    pair.rollout.llm.apply_model(lambda module: delattr(module.model.layers[0].mlp, "extra"))
    assert pair.rollout.fingerprint() is not None


UNTESTED = Untested("vLLM 99", "vLLM 7")


def test_a_trial_passes_and_leaves_the_weights(pair, monkeypatch):
    monkeypatch.setattr(pair.rollout, "untested", UNTESTED)
    pair.draw(seed=7)
    weights = pair.weights()
    route = Received(pair.rollout)
    route.receive(sent(weights, 7))
    assert route.is_current
    assert pair.rollout.fingerprint() == {name: checksum(tensor) for name, tensor in weights.items()}


def test_a_trial_finds_noise_that_is_not_by_name(pair, monkeypatch):
    """As where vLLM no longer calls what rlcore has replaced."""
    monkeypatch.setattr(pair.rollout, "untested", UNTESTED)
    runner = pair.rollout.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    with monkeypatch.context() as own:
        own.delattr(runner.sampler.topk_topp_sampler, "forward")
        own.delattr(runner.sampler, "gather_logprobs")
        own.setattr(runner.sampler.topk_topp_sampler, "forward", runner.sampler.topk_topp_sampler.forward_native)
        with pytest.raises(WeightsError, match=r"^vLLM 99 was tried .*: the same row has tokens .* again .*: vLLM 7\."):
            Received(pair.rollout).receive(sent(pair.weights(), 8))
    assert pair.rollout.version == -1
