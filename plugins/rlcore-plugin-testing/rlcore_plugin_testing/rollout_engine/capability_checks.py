"""The checks on the capabilities that save a copy of the weights, for engines that declare them."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

from rlcore import DataError
from rlcore.engine import Finished, Request, RolloutEngine, Sampling, model_path
from rlcore_plugin_testing.report import CheckFailed, NotApplicable
from rlcore_plugin_testing.rollout_engine.suite import RolloutEngineSuite, shapes_of, storages


def adopted_weights(suite: RolloutEngineSuite) -> str:
    """An engine that adopts weights decodes from the very tensors of `adopt` and copies none."""
    if not suite.spec.capabilities.adopts_weights:
        raise NotApplicable("the spec has no adopts_weights")
    engine, version = suite.engine, suite.newest + 1
    weights = {name: each.to(suite.device) for name, each in suite.reference.draw_weights(version).items()}
    engine.adopt(iter(weights.items()), version, shapes_of(weights))
    suite.reference.load(weights)
    suite.newest = version
    addresses = {name: each.untyped_storage().data_ptr() for name, each in weights.items()}
    del weights
    gc.collect()
    alive = {storage.data_ptr() for storage in storages()}
    if copied := [name for name, address in addresses.items() if address not in alive]:
        raise CheckFailed(
            f"it copied {len(copied)} of {len(addresses)} adopted tensors, such as {copied[0]}; adopts_weights "
            "says that it decodes from the tensors themselves"
        )
    requests = _requests(suite)
    suite.expect_likely(requests, suite.run([(0, row) for row in requests]))
    return f"{len(addresses)} tensors of another owner"


def shared_module(suite: RolloutEngineSuite) -> str:
    """An engine that is lent the trained module decodes with it, with its newest weights, and leaves it as it was."""
    if not suite.spec.capabilities.shares_module:
        raise NotApplicable("the spec has no shares_module")
    from transformers import AutoModelForCausalLM

    tolerance, requests = suite.tolerance, _requests(suite)
    folder = model_path(suite.config.model.path)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(suite.device).train()
    before = _state(module)
    engine = suite.create(module)
    try:
        for version in (1, 2):
            weights = suite.reference.draw_weights(100 + version)
            suite.reference.load(weights)
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    parameter.copy_(weights[name])
            engine.version = version
            suite.expect_likely(requests, _run(engine, requests), tolerance)
            for name, parameter in module.named_parameters():
                if not torch.equal(parameter.detach().cpu(), weights[name]):
                    raise CheckFailed(f"it changed the weight {name} of the trained module")
            if changed := [what for what, was in before.items() if _state(module).get(what) != was]:
                raise CheckFailed(f"with no row in flight the trained module differs: {', '.join(changed[:3])}")
    finally:
        engine.close()
        suite.sync()  # the reference and the suite's own engine have the same weights again
    return "2 versions of the trained module, which stays as training left it"


def _requests(suite: RolloutEngineSuite) -> list[Request]:
    sampling = Sampling(max_tokens=12, temperature=0.0)
    return [Request(str(length), suite.prompt(length, length), 1, sampling) for length in (3, 11)]


def _run(engine: RolloutEngine, requests: list[Request]) -> dict[str, Finished]:
    done: dict[str, Finished] = {}
    try:
        engine.add(requests)
    except DataError as error:
        raise CheckFailed(f"it refused rows although rlcore has set its version: {error}") from error
    while engine.in_flight:
        done.update((row.id, row) for row in engine.step())
    return done


def _state(module: nn.Module) -> dict[str, Any]:
    """Return what an engine may change for decoding and has to put back, by a description."""
    state: dict[str, Any] = {
        f"the mode of {name or 'the model'}": each.training for name, each in module.named_modules()
    }
    state |= {f"requires_grad of {name}": each.requires_grad for name, each in module.named_parameters()}
    # The optimizer knows parameters by identity; their memory may have moved.
    state |= {f"the parameter {name}": id(each) for name, each in module.named_parameters()}
    config: Any = module.config  # of transformers
    return state | {"its attention": config._attn_implementation}
