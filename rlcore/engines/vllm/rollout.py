"""Rollouts on vLLM, in the worker's own process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.assets import model_path
from rlcore.config import ModelConfig
from rlcore.engine.parallel.tensor_parallel import shard_dims
from rlcore.engine.random_state import random_state, set_random_state
from rlcore.engine.responses import Response, end_tokens, ends_with_stop, response_columns
from rlcore.engine.rollout import RolloutEngine, Sampling
from rlcore.engine.weights.meter import Group
from rlcore.engine.weights.transfer import Shapes, check_same_parameters, checked
from rlcore.engines.vllm.config import VLLMConfig
from rlcore.engines.vllm.cpu import OPTIONS, starting_on_cpu
from rlcore.engines.vllm.ranks import executor, keeping_default_group, numbered, unlink_shared_memory
from rlcore.engines.vllm.shards import with_shards
from rlcore.errors import DataError
from rlcore.protocol import DataProto


class VLLMRollout(RolloutEngine):
    """Decodes with vLLM. It starts without weights, and has none again if an update broke off half-way.

    Rows with the same prompt share what its whole blocks of the key-value cache hold. A row's tokens are drawn by a
    generator of its own, seeded by Sampling.key.

    `tensor_group`: the ranks that decode the same rows together, each with its shard of every layer; all ranks of all
    such groups start together, and `engine_order` is them all, group after group. The ranks of a group sample alike:
    they have the same logits, and schedule alike.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        config: VLLMConfig,
        device: torch.device,
        tensor_group: Group | None = None,
        engine_order: Sequence[int] = (),
    ) -> None:
        from transformers import AutoTokenizer

        folder = model_path(model.path)
        options = {"trust_remote_code": model.trust_remote_code, "local_files_only": True}
        self.tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        ranks = 1 if tensor_group is None else len(tensor_group.ranks)
        self.shapes, self.shard_shapes, generation_config = _describe(str(folder), options, ranks)
        self.end_ids = end_tokens(generation_config, self.tokenizer)
        self.device, on_cpu = device, device.type == "cpu"
        self._joined = dist.is_initialized()  # vLLM makes its groups in a default group that is there, or makes one
        with ExitStack() as stack:
            stack.enter_context(_starting(on_cpu=on_cpu))
            from vllm import LLM

            sharded: dict[str, Any] = {}
            if tensor_group is not None:
                stack.enter_context(numbered(engine_order))
                backend = executor(tensor_group, engine_order, device)
                sharded = {"tensor_parallel_size": ranks, "distributed_executor_backend": backend}
            self.llm: Any = LLM(
                str(folder),
                trust_remote_code=model.trust_remote_code,
                dtype="bfloat16" if model.dtype == "bf16" else "float32",
                load_format="dummy",  # all weights come by `sync`, before the first token
                generation_config="vllm",  # what ends a response is said with each request, and no other default holds
                max_model_len=-1,  # as long as the model and the cache allow
                max_num_seqs=config.batch_size,
                kv_cache_memory_bytes=config.kv_cache_mb << 20,
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",
                **(OPTIONS if on_cpu else {"enable_chunked_prefill": True}),
                **sharded,
            )
            if sharded and on_cpu:
                unlink_shared_memory()
        self.longest = int(self.llm.llm_engine.model_config.max_model_len)

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int, shapes: Shapes) -> None:
        """See RolloutEngine. Tensors go into the model one by one, and what was cached of the old ones is forgotten."""
        check_same_parameters(self.shapes, shapes)
        self._load(weights, version, shapes)

    def adopt(self, shards: Iterator[tuple[str, Tensor]], version: int, shapes: Shapes) -> None:
        """See RolloutEngine. They are copied, as by `sync`."""
        check_same_parameters(self.shard_shapes, shapes)
        self._load(shards, version, shapes)

    def _load(self, weights: Iterator[tuple[str, Tensor]], version: int, shapes: Shapes) -> None:
        def load(module: Any) -> None:
            with closing(with_shards(module, checked(weights, shapes), self.shapes)) as loading:
                module.load_weights(loading)

        self.version = -1
        self.llm.apply_model(load)
        if not self.llm.reset_prefix_cache():
            raise DataError("vLLM did not let go of the keys and values of the former weights: requests are under way")
        self.version = version

    def generate(self, batch: DataProto, sampling: Sampling) -> DataProto:
        """See RolloutEngine. Raises DataError for a prompt that leaves no room for the tokens asked, or no weights."""
        if self.version < 0:
            raise DataError("the vLLM engine has no whole set of weights: sync comes before generate")
        prompts = [prompt.tolist() for prompt in batch.view("prompts").to_list()]
        if prompts and (most := max(map(len, prompts)) + sampling.max_tokens) > self.longest:
            raise DataError(
                f"a prompt and {sampling.max_tokens} new tokens make {most}, but vLLM has room for {self.longest} (by "
                "the model's max_position_embeddings and rollout.vllm.kv_cache_mb); set rollout.response_len or "
                "data.prompt_len lower, or rollout.vllm.kv_cache_mb higher"
            )
        keys = [
            sampling.key(str(u), int(i)) for u, i in zip(batch.view("uid"), batch.view("sample_index"), strict=True)
        ]
        # Rows with the same prompt stand together: the first computes what the others find in the prefix cache.
        order = sorted(range(len(prompts)), key=prompts.__getitem__)
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):  # vLLM draws what it drops
            outputs = self.llm.generate(
                [{"prompt_token_ids": prompts[row]} for row in order],
                [self._parameters(sampling, keys[row]) for row in order],
                use_tqdm=False,
            )
        done = {row: self._response(output.outputs[0], sampling) for row, output in zip(order, outputs, strict=True)}
        rows = [done[row] for row in range(len(prompts))]
        return response_columns(rows, batch.view("prompts").lengths, self.tokenizer, self.version)

    def close(self) -> None:
        """See RolloutEngine. With it go vLLM's process groups, and the default one if vLLM made that."""
        with keeping_default_group() if self._joined else nullcontext():
            self.llm.llm_engine.engine_core.shutdown()

    def _parameters(self, sampling: Sampling, key: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            stop_token_ids=self.end_ids,
            ignore_eos=True,  # the tokenizer's; those of the generation config are in stop_token_ids
            seed=key & (2**63 - 1),  # a seed of -1 would be none
            logprobs=None if sampling.temperature == 0 else 0,  # of the sampled token alone
            detokenize=bool(sampling.stop),
        )

    def _response(self, output: Any, sampling: Sampling) -> Response:
        tokens = list(output.token_ids)
        if sampling.temperature == 0:
            log_probs = [0.0] * len(tokens)  # a greedy token was certain
        else:
            log_probs = [at[token].logprob for at, token in zip(output.logprobs, tokens, strict=True)]
        # vLLM does not look for stop strings in the first min_tokens tokens, where one may end with the last of them.
        least = sampling.min_tokens
        if 0 < least < len(tokens) and ends_with_stop(tokens[:least], sampling.stop, self.tokenizer):
            return Response(tokens[:least], log_probs[:least], finished=True)
        return Response(tokens, log_probs, finished=output.finish_reason == "stop")


def _describe(folder: str, options: dict[str, Any], ranks: int) -> tuple[Shapes, Shapes, Any]:
    """Return the shapes of the parameters by Hugging Face name, tied ones once, and the generation config.

    Whole, and as so many tensor-parallel ranks have them.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(folder, **options)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, trust_remote_code=options["trust_remote_code"])
    try:
        generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:  # there is no such file
        generation_config = GenerationConfig.from_model_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    dims = shard_dims(module, ranks) if ranks > 1 else {}
    shards = {
        name: tuple(size // ranks if dim == dims.get(name) else size for dim, size in enumerate(shape))
        for name, shape in shapes.items()
    }
    return shapes, shards, generation_config


@contextmanager
def _starting(*, on_cpu: bool) -> Iterator[None]:
    """Set what vLLM reads while it starts, and leave the process's random state as it was: vLLM seeds it anew."""
    state = random_state()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model in this process, where weights are handed over
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # a run reports to nobody whom its config does not name
    try:
        with starting_on_cpu() if on_cpu else nullcontext():
            yield
    finally:
        set_random_state(state)
