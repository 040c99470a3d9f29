"""Rollouts on vLLM, in the worker's own process."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.config import ModelConfig
from rlcore.end_tokens import end_tokens
from rlcore.engine.parallel.tensor_parallel import shard_dims
from rlcore.engine.responses import ends_with_stop
from rlcore.engine.rollout import Finished, Reason, Request, RolloutEngine, check_requests, refuse_in_flight
from rlcore.engine.weights.fingerprint import sum_checksums
from rlcore.engine.weights.meter import Group
from rlcore.engine.weights.transfer import Shapes, check_same_parameters, checked
from rlcore.engines.vllm.config import VLLMConfig
from rlcore.engines.vllm.internals import (
    arguments,
    choose_runner,
    drain,
    explaining,
    import_vllm,
    installed,
    output_so_far,
    sample_by_name,
    shut_down,
    starting,
    tensor_parallel,
    tokens_so_far,
    untested,
)
from rlcore.engines.vllm.memory import Needs, measure, plan
from rlcore.engines.vllm.noise import EXTRA
from rlcore.engines.vllm.shards import checksums, with_shards
from rlcore.engines.vllm.sleeper import Sleeper
from rlcore.errors import DataError
from rlcore.model_folder import load_model_config, model_dtype, model_path, read_tokenizer

REASONS: dict[str, Reason] = {"stop": "end", "length": "length", "abort": "abort"}
"""rlcore's reasons by vLLM's; rlcore itself looks for stop strings."""


@dataclass(frozen=True)
class _InFlight:
    """A request and its id in vLLM."""

    request: Request
    internal_id: str


class VLLMRollout(RolloutEngine):
    """Decodes with vLLM. It starts without weights, and has none after an interrupted update.

    Rows with the same prompt share the full blocks of its key-value cache.

    `tensor_group`: the ranks that decode the same rows together, each with its shard of every layer. All ranks of all
    such groups start together; `engine_order` lists them, group after group. The ranks of a group sample the same
    tokens, as they have the same logits, noise and schedule. The rest: see RolloutSetup.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        config: VLLMConfig,
        device: torch.device,
        tensor_group: Group | None = None,
        engine_order: Sequence[int] = (),
        beside_training: bool = False,
        training_bytes: int = 0,
        kept_bytes: int = 0,
        gpu_share: float = 1.0,
        row_tokens: int = 0,
    ) -> None:
        folder = model_path(model.path, code=model.trust_remote_code)
        self.tokenizer = read_tokenizer(model)
        ranks = 1 if tensor_group is None else len(tensor_group.ranks)
        self._tensor_group = tensor_group
        self.shapes, self.shard_shapes = _describe(model, ranks)
        self.end_ids = end_tokens(model, self.tokenizer)
        self.device, on_cpu = device, device.type == "cpu"
        self._joined = dist.is_initialized()  # vLLM uses an existing default group, or creates one
        needs = Needs.of(
            load_model_config(model.path, model.trust_remote_code),
            self.shapes,
            model_dtype(model),
            rows=config.batch_size,
            row_tokens=row_tokens,
            ranks=ranks,
            beside_training=beside_training,
            training=training_bytes,
            kept=kept_bytes,
        )
        memory = plan(config, *measure(needs, device, gpu_share, tensor_group))
        self.runner = choose_runner(on_cpu=on_cpu)
        self.untested = untested(self.runner)
        with (
            explaining(self.untested),
            starting(self.runner, on_cpu=on_cpu),
            tensor_parallel(tensor_group, engine_order, device) as sharded,
        ):
            self.llm: Any = import_vllm()(
                str(folder),
                trust_remote_code=model.trust_remote_code,
                dtype=str(model_dtype(model)).removeprefix("torch."),
                max_num_seqs=config.batch_size,
                kv_cache_memory_bytes=memory.cache,
                **{**arguments(self.runner, on_cpu=on_cpu, sleeps=memory.sleeps), **sharded},
            )
            self.llm.collective_rpc(sample_by_name, args=(self.runner,))
        cache = f"{memory.cache / 1e9:.2f} GB for keys and values"
        self.description = f"vLLM {installed()[1]} with its {self.runner} model runner, {cache}"
        self._sleeper = Sleeper(self.llm, device) if memory.sleeps else None
        if self._sleeper is not None:
            self.description += ", asleep while it trains"
            self._sleeper.sleep()  # training measures and takes its memory before the first rows
        self._requests: dict[str, _InFlight] = {}
        self.longest = int(self.llm.llm_engine.model_config.max_model_len)

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int, shapes: Shapes) -> None:
        """See RolloutEngine. Tensors go into the model one by one, and the prefix cache is emptied."""
        refuse_in_flight(self.in_flight)
        check_same_parameters(self.shapes, shapes)
        self._load(weights, version, shapes)

    def adopt(self, shards: Iterator[tuple[str, Tensor]], version: int, shapes: Shapes) -> None:
        """See RolloutEngine. They are copied, as by `sync`."""
        refuse_in_flight(self.in_flight)
        check_same_parameters(self.shard_shapes, shapes)
        self._load(shards, version, shapes)

    def _load(self, weights: Iterator[tuple[str, Tensor]], version: int, shapes: Shapes) -> None:
        def load(module: Any) -> None:
            with closing(with_shards(module, checked(weights, shapes), self.shapes)) as loading:
                module.load_weights(loading)

        self.version = -1
        if self._sleeper is not None:
            self._sleeper.wake("weights")
        drain(self.llm.llm_engine)
        self.llm.apply_model(load)
        if not self.llm.reset_prefix_cache():
            raise DataError("vLLM could not empty its prefix cache, which holds keys and values of the old weights")
        self.version = version

    def fingerprint(self) -> dict[str, int] | None:
        """See RolloutEngine. None for a model whose parameters vLLM rearranges in a way that is not known here."""
        group = self._tensor_group
        rank, ranks = (0, 1) if group is None else (group.ranks.index(dist.get_rank()), len(group.ranks))
        parts: list[Any] = self.llm.apply_model(
            lambda module: checksums(module, self.shapes, self.shard_shapes, rank, ranks)
        )
        if group is not None:
            mine, parts = parts[0], [None] * ranks
            dist.all_gather_object(parts, mine, group=group.handle)
        found = None if None in parts else sum_checksums(parts)
        return found if found is not None and found.keys() == self.shapes.keys() else None

    def add(self, requests: Sequence[Request]) -> None:
        """See RolloutEngine. Raises DataError also for a row that does not fit into the key-value cache."""
        if self.version < 0:
            raise DataError("the vLLM engine has no complete set of weights: call sync before the first request")
        check_requests(requests, self._requests)
        most = max((len(each.prompt) + each.sampling.max_tokens for each in requests), default=0)
        if most > self.longest:
            raise DataError(
                f"a prompt and its new tokens make {most}, but vLLM has room for {self.longest} (by the model's "
                "max_position_embeddings and rollout.vllm.memory); set rollout.response_len or data.prompt_len "
                "lower, or rollout.vllm.memory higher"
            )
        if self._sleeper is not None:
            self._sleeper.wake("kv_cache")
        for request in requests:
            prompt = {"prompt_token_ids": [*request.prompt, *request.sampled]}
            # vLLM gives requests ids of its own; its engine core knows only those.
            internal_id = self.llm.llm_engine.add_request(request.id, prompt, self._parameters(request))
            self._requests[request.id] = _InFlight(request, internal_id)

    @property
    def in_flight(self) -> Collection[str]:
        """See RolloutEngine."""
        return self._requests.keys()

    def step(self) -> list[Finished]:
        """See RolloutEngine. One iteration of vLLM's scheduler."""
        if not self._requests:
            return []
        ended = [output for output in self.llm.llm_engine.step() if output.finished]
        finished = [self._finished(output.request_id, output.outputs[0]) for output in ended]
        return finished + self._stop()

    def so_far(self, ids: Collection[str]) -> dict[str, Sequence[int]]:
        """See RolloutEngine."""
        asked = [self._requests[each] for each in ids if each in self._requests]
        engine = self.llm.llm_engine
        return {each.request.id: [*each.request.sampled, *tokens_so_far(engine, each.internal_id)] for each in asked}

    def _stop(self) -> list[Finished]:
        """Return the rows whose newest token completed a stop string, and take them out of vLLM."""
        engine, stopped = self.llm.llm_engine, []
        for each in [each for each in self._requests.values() if each.request.sampling.stop]:
            if self._stopped(each.request, tokens_so_far(engine, each.internal_id)):
                output = output_so_far(engine, each.internal_id)
                engine.abort_request([each.internal_id], internal=True)
                stopped.append(self._finished(each.request.id, output))
        return stopped

    def _stopped(self, request: Request, tokens: Sequence[int]) -> bool:
        response = [*request.sampled, *tokens] if request.sampled else tokens
        enough = tokens and len(response) >= request.sampling.min_tokens
        return bool(enough) and ends_with_stop(response, request.sampling.stop, self.tokenizer)

    def abort(self, ids: Collection[str]) -> list[Finished]:
        """See RolloutEngine."""
        if unknown := [each for each in ids if each not in self._requests]:
            raise DataError(f"cannot abort {', '.join(map(repr, unknown))}: no such request is in flight")
        engine, gone = self.llm.llm_engine, [self._requests[each] for each in dict.fromkeys(ids)]
        outputs = [output_so_far(engine, each.internal_id) for each in gone]
        engine.abort_request([each.internal_id for each in gone], internal=True)
        return [self._finished(each.request.id, output) for each, output in zip(gone, outputs, strict=True)]

    def sleep(self) -> None:
        """See RolloutEngine. Frees weights, keys and values, if memory is short; `sync` and `add` take it again."""
        refuse_in_flight(self.in_flight)
        if self._sleeper is not None:
            drain(self.llm.llm_engine)
            self.version = -1
            self._sleeper.sleep()

    @property
    def metrics(self) -> Mapping[str, float]:
        """See RolloutEngine."""
        return {} if self._sleeper is None else self._sleeper.metrics

    def close(self) -> None:
        """See RolloutEngine. Destroys vLLM's process groups, and the default group if vLLM created it."""
        shut_down(self.llm, joined=self._joined)

    def _parameters(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling, done = request.sampling, len(request.sampled)
        return SamplingParams(
            max_tokens=sampling.max_tokens - done,
            min_tokens=max(
                0, min(sampling.min_tokens, sampling.max_tokens) - done
            ),  # vLLM refuses min_tokens > max_tokens
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=self.end_ids,
            ignore_eos=True,  # the tokenizer's; those of the generation config are in stop_token_ids
            logprobs=None if sampling.temperature == 0 else 0,  # of the sampled token only
            detokenize=False,  # `_stopped` looks for stop strings, also across the border to earlier tokens
            output_kind=RequestOutputKind.FINAL_ONLY,
            seed=0 if self.runner == "V2" else None,  # unused; V2 would draw one, and V1 make a generator of it
            extra_args={EXTRA: (request.key, len(request.prompt))},
        )

    def _finished(self, request_id: str, output: Any) -> Finished:
        """Return a row from vLLM's CompletionOutput, and forget its request."""
        request = self._requests.pop(request_id).request
        tokens = list(output.token_ids)
        if request.sampling.temperature == 0:
            log_probs = [0.0] * len(tokens)  # a greedy token has probability 1
        else:
            log_probs = [at[token].logprob for at, token in zip(output.logprobs or (), tokens, strict=True)]
        reason: Reason = REASONS[output.finish_reason]
        if reason != "end" and self._stopped(request, tokens):
            reason = "stop"
        response = [*request.sampled, *tokens], [*request.sampled_log_probs, *log_probs]
        return Finished(request_id, *response, reason, self.version)


def _describe(model: ModelConfig, ranks: int) -> tuple[Shapes, Shapes]:
    """Return the parameters' full shapes, and their shapes on `ranks` tensor-parallel ranks.

    Shapes are by Hugging Face name, tied parameters once.
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(load_model_config(model.path, model.trust_remote_code))
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    dims = shard_dims(module, ranks) if ranks > 1 else {}
    shards = {
        name: tuple(size // ranks if dim == dims.get(name) else size for dim, size in enumerate(shape))
        for name, shape in shapes.items()
    }
    return shapes, shards
