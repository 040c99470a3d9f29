"""`rlcore plan --calibrate`: a profile of this machine, from short runs of a role on one and on two devices.

Each figure is solved from the cost model that uses it: the time of a call with few rows is the host's, with many rows
the device's. First two roles run at the same time, on one device each, so that shared resources, such as memory
bandwidth, are shared as in a run. Then one role runs on both devices, under three layouts; the differences are the time
of their messages. A machine with one device has no links to measure; their figures come from the shipped profile.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlcore import Config, ConfigError, DataProto, PolicyHandle, Ragged, Role
from rlcore.engine import GenerationLayout, Layout
from rlcore.ops import Outputs, Term, masked_sum, needs, objective
from rlcore.planning import start_roles
from rlcore.workers import ClassWithInitArgs, Dispatch, Executor, Worker, make_executor, register, wait_for
from rlcore_plugin_plan import devices, training
from rlcore_plugin_plan.config import PlanConfig
from rlcore_plugin_plan.dataflow import Call
from rlcore_plugin_plan.generation import step_seconds, transition_seconds
from rlcore_plugin_plan.inference import forward_seconds
from rlcore_plugin_plan.model_size import ModelSize, size_of
from rlcore_plugin_plan.problem import Devices
from rlcore_plugin_plan.profile import STORED, Profile, dump
from rlcore_plugin_plan.workload import Workload

if TYPE_CHECKING:
    from rlcore import PluginManager

FEW, MANY = 2, 32
"""Rows of the short runs."""
ROUNDS = 5
"""Timed repetitions of each short run, after one to warm up; the median counts."""
SQUARE = 1024
COPIED = 2**26
"""Width of a matrix, and bytes of a copy."""
SMALL, LARGE = 2**10, 2**24
"""Bytes of a message that measures latency, and of one that measures bandwidth."""


def calibrate(config: Config, plugins: PluginManager) -> Path:
    """Measure this machine with the config's model and row lengths; return the profile's file.

    The profile is named `plan.device`, or `here`. Figures that are not measured come from the shipped profile.
    """
    name = config.section(PlanConfig).device or devices.HERE
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"plan.device = {name!r} cannot be a profile's name: use letters, digits, - and _")
    # Without plan.device and plan.gpus: all devices of this machine.
    (found,) = devices.devices(config.with_values({"plan.device": None, "plan.gpus": None}))
    measured = measure(config, plugins, found)
    path = STORED.expanduser() / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump(replace(measured, name=name)), encoding="utf-8")
    return path


def measure(config: Config, plugins: PluginManager, found: Devices) -> Profile:
    """Return the profile of these devices with measured figures."""
    both = found.count > 1
    size, work = (
        size_of(config.model.path, config.model.trust_remote_code),
        Workload.of(config, plugins, cpu=found.profile.cpu),
    )
    profile = replace(found.profile, per_machine=found.count)
    gpus = 0.0 if profile.cpu else 1.0
    small = _small(config, plugins, gpus)
    times: dict[Layout, Mapping[str, float]] = {}
    with make_executor(small.cluster) as executor:
        profile = _with_rates(profile, executor, both, gpus, work)
        alone = _start(executor, small, plugins, {"one": 1, "two": 1} if both else {"one": 1})
        profile = _with_role_figures(profile, size, work, small, alone)
        for layout in (Layout(1, 1, 2), Layout(1, 2, 1), Layout(2, 1, 1)) if both else ():
            if not size.shape.problem(layout):
                laid_out = replace(small, engine=replace(small.engine, pp=layout.pp, tp=layout.tp))
                times[layout] = _short_runs(_start(executor, laid_out, plugins, {"one": 2}), small)
    if times:
        profile = _with_links(profile, size, work, times)
    today = datetime.date.today().isoformat()
    changed = [name for name in profile.sources if getattr(profile, name) != getattr(found.profile, name)]
    sources = {**profile.sources, **dict.fromkeys(changed, f"measured by rlcore plan --calibrate on {today}")}
    return replace(profile, sources=sources)


def _small(config: Config, plugins: PluginManager, gpus: float) -> Config:
    train = plugins.train_engines()[config.engine.name].capabilities.settings
    slots = plugins.rollout_engines()[config.rollout.name].capabilities.slots_key
    return config.with_values(
        {
            **{"engine.pp": 1, "engine.tp": 1, "engine.layouts": {}},
            **({train["shard"]: 0} if "shard" in train else {}),
            **{"rollout.min_tokens": config.rollout.response_len, "rollout.tp": 1},
            **({slots: MANY} if slots is not None else {}),
            **{"cluster.pools": {}, "cluster.gpus_per_worker": gpus, "trainer.rollouts_ahead": 0},
        }
    )


def _start(
    executor: Executor, config: Config, plugins: PluginManager, workers: Mapping[str, int]
) -> list[PolicyHandle]:
    """Start an actor of each name on a pool of its own. Actors of an earlier start stay, and are idle."""
    pools = {name: {"roles": [name], "workers": count} for name, count in workers.items()}
    roles = dict.fromkeys(workers, Role(trains=True, generates=True))
    handles = start_roles(config.with_values({"cluster.pools": pools}), plugins, roles, executor)
    return [handle for handle in handles.values() if isinstance(handle, PolicyHandle)]


class _Prober(Worker):
    """Measures the rates of a device and of its links by themselves."""

    @register(Dispatch.ONE_TO_ALL)
    def rates(self, width: int) -> tuple[float, float]:
        """Return FLOP/s of matrix products with elements of `width` bytes, and bytes/s of copies."""
        device, dtype = self.device, torch.bfloat16 if width == 2 else torch.float32
        a = torch.randn(SQUARE, SQUARE, device=device, dtype=dtype)
        b = torch.empty(COPIED // 4, device=device)
        c = torch.empty_like(b)
        product = _median(lambda: _finish(a @ a, device))
        copy = _median(lambda: _finish(c.copy_(b), device))
        return 2 * SQUARE**3 / product, 2 * COPIED / copy

    @register(Dispatch.ONE_TO_ALL)
    def messages(self) -> tuple[float, float]:
        """Return the seconds of gathering a small and a large message."""
        import torch.distributed as dist

        self.init_process_group()
        times = []
        for nbytes in (SMALL, LARGE):
            own = torch.zeros(nbytes // 4 // self.world_size, device=self.device)
            whole = [torch.empty_like(own) for _ in range(self.world_size)]

            def gather(whole: list[torch.Tensor] = whole, own: torch.Tensor = own) -> None:
                dist.all_gather(whole, own)
                _finish(own, self.device)

            times.append(_median(gather))
        return times[0], times[1]


def _finish(tensor: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _median(call: Callable[[], Any]) -> float:
    call()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _with_rates(profile: Profile, executor: Executor, both: bool, gpus: float, work: Workload) -> Profile:
    """Return the profile with the peak rates of matrix products, copies and messages."""
    pool = executor.resource_pool(2 if both else 1, gpus_per_worker=gpus)
    group = executor.worker_group(pool, ClassWithInitArgs(_Prober), name="probe")
    rates = group.rates(work.dtype_bytes)
    flops, copied = map(min, zip(*rates, strict=True))
    peak = {"flops_bf16" if work.dtype_bytes == 2 else "flops_fp32": flops}
    profile = replace(profile, **peak, bandwidth=copied, bandwidth_share=1.0)  # type: ignore[arg-type]
    if both:
        latency, large = (max(times) for times in zip(*group.messages(), strict=True))
        profile = replace(profile, link_latency=latency, link=LARGE / 2 / max(large - latency, 1e-9))
    return profile


@needs("log_probs")
def _likelihood(out: Outputs, batch: Mapping[str, Any], config: Any) -> dict[str, Term]:
    mask = batch["response_mask"]
    return {"likelihood": objective(-masked_sum(out.log_probs, mask), mask.sum())}


def _short_runs(handles: Sequence[PolicyHandle], config: Config) -> dict[str, float]:
    """Return the median seconds of each kind of call with FEW and with MANY rows, of all roles at the same time."""
    times: dict[str, float] = {}
    runs: dict[str, Callable[[PolicyHandle, DataProto], Any]] = {
        "generate": lambda handle, batch: handle.generate(batch.select(["prompts"], ["uid"], [])),
        "log_probs": lambda handle, batch: handle.log_probs(batch),
        "update": lambda handle, batch: handle.update(batch, loss=_likelihood),
    }
    for rows in (FEW, MANY):
        batches = _sampled(handles, rows, config)
        for name, run in runs.items():
            seen: dict[str, list[float]] = {}
            for turn in range(ROUNDS + 1):
                whole, by_kind = _timed(run, handles, batches)
                if turn:  # the first one warms up
                    for kind, seconds in by_kind.items():
                        seen.setdefault(f"{kind} {rows}", []).append(seconds)
                    seen.setdefault(f"call {name} {rows}", []).append(whole)
            times.update({kind: statistics.median(values) for kind, values in seen.items()})
        # The updates changed the weights, so the next call syncs them to the rollout engine.
        for handle, batch in zip(handles, batches, strict=True):
            dict(handle.seconds())
            handle.generate(batch.select(["prompts"], ["uid"], [])).materialize()
            times[f"sync {rows}"] = dict(handle.seconds()).get("sync", 0.0)
    return times


def _sampled(handles: Sequence[PolicyHandle], rows: int, config: Config) -> list[DataProto]:
    """Return a batch of responses for each role, all roles sampling at the same time."""
    prompts = _prompts(rows, config)
    sampled = [handle.generate(prompts) for handle in handles]
    batches = [batch.union(handle.log_probs(batch)) for handle, batch in zip(handles, sampled, strict=True)]
    for batch in batches:
        batch.materialize()
    return [batch.select(["prompts", "responses", "response_mask"], ["uid"], []) for batch in batches]


def _timed(
    run: Callable[[PolicyHandle, DataProto], Any], handles: Sequence[PolicyHandle], batches: Sequence[DataProto]
) -> tuple[float, dict[str, float]]:
    """Call all roles at the same time.

    Returns the seconds outside the workers, and the slowest role's seconds of each kind of work.
    """
    for handle in handles:
        dict(handle.seconds())
    start = time.perf_counter()
    for handle, batch in zip(handles, batches, strict=True):
        run(handle, batch)
    for handle in handles:
        for group in handle.groups:
            wait_for(group.outstanding())
    whole = time.perf_counter() - start
    by_kind: dict[str, float] = {}
    inside = [dict(handle.seconds()) for handle in handles]
    for seconds in inside:
        for kind, value in seconds.items():
            by_kind[kind] = max(by_kind.get(kind, 0.0), value)
    return whole - max(sum(seconds.values()) for seconds in inside), by_kind


def _prompts(rows: int, config: Config) -> DataProto:
    numbers = torch.Generator().manual_seed(0)
    tokens = [torch.randint(3, 64, (config.data.prompt_len,), generator=numbers) for _ in range(rows)]
    return DataProto({"prompts": Ragged.from_list(tokens)}, {"uid": [f"plan:{row}" for row in range(rows)]})


def _with_role_figures(
    profile: Profile, size: ModelSize, work: Workload, config: Config, handles: Sequence[PolicyHandle]
) -> Profile:
    """Return the profile with the figures of a role on one device."""
    times = _short_runs(handles, config)
    calls = [value for name, value in times.items() if name.startswith("call ")]
    alone = Layout()

    def flops(rows: int) -> float:
        tokens, answers = rows * work.lengths.row, rows * work.lengths.response
        return size.layers * size.layer_flops(tokens, work.lengths.context) + size.head_flops(answers)

    def growth(method: str) -> float:
        """Seconds that more rows added. Noise and fixed costs can hide some of them, but at most half."""
        few, many = (times[f"{method} {rows}"] for rows in (FEW, MANY))
        return max(many - few, many * (1 - FEW / MANY) / 2)

    span = flops(MANY) - flops(FEW)
    forward, trained = span / growth("log_probs"), 3 * span / growth("update")
    # Products of another size can be faster than the measured peak.
    peak = max(profile.flops(work.dtype_bytes), forward, trained)
    host = max(times[f"log_probs {FEW}"] - flops(FEW) / forward, 0.0) / size.layers
    profile = replace(
        profile,
        **{"flops_bf16" if work.dtype_bytes == 2 else "flops_fp32": peak},  # type: ignore[arg-type]
        forward=forward / peak,
        training=trained / peak,
        layer_seconds=host,
        optimizer_seconds=0.0,
        call_seconds=max(statistics.median(calls), 0.0),
    )
    few = training.update_seconds(size, alone, _call("update", FEW, work), work, profile)
    profile = replace(profile, optimizer_seconds=max(times[f"update {FEW}"] - few, 0.0))
    # Decoding: the rest of a step's time, if its matrix products ran as fast as those of a forward.
    replicas = GenerationLayout(alone)
    nothing = replace(
        profile, decoding=profile.forward, decode_layer_seconds=0.0, decode_step_seconds=0.0, decode_row_seconds=0.0
    )
    left = {}
    for rows in (FEW, MANY):
        context = work.lengths.prompt + work.lengths.response / 2
        prefill = size.layers * size.layer_flops(rows * work.lengths.prompt, work.lengths.prompt / 2) / forward
        prefill += size.layers * profile.layer_seconds
        a_step = (times[f"generate {rows}"] - prefill) / work.lengths.most
        left[rows] = a_step - step_seconds(size, replicas, rows, context, work, nothing)
    by_row = max((left[MANY] - left[FEW]) / (MANY - FEW), 0.0)
    by_layer = max(left[FEW] - FEW * by_row, 0.0) / size.layers
    return replace(nothing, decode_row_seconds=by_row, decode_layer_seconds=by_layer)


def _call(method: str, rows: int, work: Workload) -> Call:
    return Call("one", method, rows / work.prompts, prompts=rows / work.prompts)


def _with_links(
    profile: Profile, size: ModelSize, work: Workload, times: Mapping[Layout, Mapping[str, float]]
) -> Profile:
    """Return the profile with the figures of two devices: messages, a pipeline's host time, the transition."""

    def missing(layout: Layout, rows: int, with_profile: Profile) -> float:
        """Seconds of an update and a forward beyond the profile's prediction."""
        found = times[layout][f"update {rows}"] + times[layout][f"log_probs {rows}"]
        told = training.update_seconds(size, layout, _call("update", rows, work), work, with_profile)
        return found - told - forward_seconds(size, layout, _call("log_probs", rows, work), work, with_profile)

    tensor, pipeline, data = Layout(1, 2, 1), Layout(2, 1, 1), Layout(1, 1, 2)
    if tensor in times:
        # 6 all-reduces a layer, each a reduce-scatter and a gather.
        over = missing(tensor, FEW, profile) / (12 * size.layers)
        profile = replace(profile, link_latency=profile.link_latency + max(over, 0.0))
        moved = 12 * size.layers * (MANY - FEW) * work.lengths.row * size.hidden * work.dtype_bytes / 2
        more = missing(tensor, MANY, profile) - missing(tensor, FEW, profile)
        profile = replace(profile, link=1 / (1 / profile.link + max(more, 0.0) / moved))
    if pipeline in times:
        # Two stages, so 2 micro-batches and 3 turns, in the update and in the forward.
        profile = replace(profile, pipeline_seconds=0.0)
        profile = replace(profile, pipeline_seconds=max(missing(pipeline, FEW, profile) / 6, 0.0))
    shares = missing(data, FEW, profile)
    profile = replace(profile, optimizer_seconds=max(profile.optimizer_seconds + shares, 0.0))
    told = transition_seconds(size, GenerationLayout(data), work, replace(profile, transition_seconds=0.0))
    syncs: list[float] = []
    for seconds in times.values():
        syncs += [seconds[f"sync {FEW}"], seconds[f"sync {MANY}"]]
    synced = statistics.median(syncs)
    return replace(profile, transition_seconds=max(synced - told, 0.0), network=profile.link * profile.per_machine)
