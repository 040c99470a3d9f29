"""The parts, each a function that measures and returns figures; the doctor runs each in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.sizes import Shape, Size
from benchmarks.gpu.trained import GB, HERE, PartFailed, Trained, grpo, on_device, train
from benchmarks.report import Figure

TRL_STEPS = 2
GIVEN_MODEL = "BENCH_MODEL"
"""The environment variable with the folder that `--model` names, for the processes of the parts."""


class NotHere(Exception):
    """A part needs a package that is not installed; the text names it."""


def models(size: Size, folder: Path) -> list[Figure]:
    """Write the models and the data that the other parts read."""
    from benchmarks.gpu.folders import write_folders

    start = time.perf_counter()
    write_folders(folder, size)
    return [Figure("making the models", "time", "s", [time.perf_counter() - start])]


def ceilings(size: Size, folder: Path) -> list[Figure]:
    """Measure the device's ceilings: a matrix product and a copy."""
    import torch

    side, device = size.matrix, size.device
    dtype = torch.bfloat16 if size.is_card else torch.float32
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    source = torch.randn(size.copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    product = timed(lambda: torch.mm(a, b), device)
    copy = timed(lambda: target.copy_(source), device)
    return [
        Figure("card", "matrix product", "TFLOP/s", [2 * side**3 / each / 1e12 for each in product]),
        Figure("card", "copy, read and written", "TB/s", [2 * size.copy_bytes / each / 1e12 for each in copy]),
    ]


def timed(call: Callable[[], object], device: str, *, rounds: int = 10, warm: int = 3) -> list[float]:
    """Return the seconds of each call, on the device's own clock where it has one."""
    import torch

    for _ in range(warm):
        call()
    if device == "cpu":
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return seconds
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for begin, end in pairs:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def grpo_half(size: Size, folder: Path) -> list[Figure]:
    """Measure GRPO of the 0.5B model."""
    return _grpo(size, folder, "half", size.half, "rlcore hf 0.5B", steps=4)


def grpo_larger(size: Size, folder: Path) -> list[Figure]:
    """Measure GRPO of the 1.5B model."""
    return _grpo(size, folder, "larger", size.larger, "rlcore hf 1.5B", steps=3)


def grpo_given(size: Size, folder: Path) -> list[Figure]:
    """Measure GRPO of the model that `--model` names: real text has real entropies, which random weights have not."""
    given = os.environ.get(GIVEN_MODEL, "")
    if not Path(given, "config.json").is_file():
        raise NotHere(f"model in the folder {given!r} (--model FOLDER)")
    settings = grpo(size, "half", folder, prompts=size.prompts, response_len=size.response_len)
    run = train(folder / "run_given", [*settings, *on_device(size), f"model.path={given}"], stop=4)
    side = f"rlcore hf {Path(given).name}, given"
    entropies = after_first([step["loss/entropy"] for step in run.steps])
    return [
        *step_figures(side, run),
        *rate_figures(side, run, size.rows),
        Figure(side, "entropy of a token", "nats", entropies),
    ]


def grpo_cudnn(size: Size, folder: Path) -> list[Figure]:
    """Measure GRPO of the 0.5B model with cuDNN's attention allowed, which rlcore does not allow."""
    environment = {"BENCH_CUDNN": "1"}
    side = "rlcore hf 0.5B, cuDNN attention"
    return _grpo(size, folder, "half", size.half, side, steps=2, environment=environment)


def grpo_vllm(size: Size, folder: Path) -> list[Figure]:
    """Measure GRPO of the 0.5B model with vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise NotHere("vllm")
    return _grpo(size, folder, "half", size.half, "rlcore vllm 0.5B", steps=4, extra=["rollout=vllm"])


def grpo_vllm_asleep(size: Size, folder: Path) -> list[Figure]:
    """Measure GRPO of the 0.5B model with vLLM that frees its memory while the GPU trains."""
    if importlib.util.find_spec("vllm") is None:
        raise NotHere("vllm")
    side = "rlcore vllm 0.5B, asleep while it trains"
    return _grpo(size, folder, "half", size.half, side, steps=3, extra=["rollout=vllm", "rollout.vllm.sleep=on"])


def _grpo(
    size: Size,
    folder: Path,
    model: str,
    shape: Shape,
    side: str,
    *,
    steps: int,
    extra: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> list[Figure]:
    settings = grpo(size, model, folder, prompts=size.prompts, response_len=size.response_len)
    out = folder / f"run_{side.replace(' ', '_').replace(',', '')}"
    run = train(out, [*settings, *on_device(size), *extra], stop=steps, environment=environment)
    return [
        *step_figures(side, run),
        *rate_figures(side, run, size.rows),
        Figure(side, "arithmetic of an update", "TFLOP/s", _update_rates(run, shape, size, folder)),
    ]


def step_figures(side: str, run: Trained) -> list[Figure]:
    """Return the seconds of a step and of its parts, without the first step where there are more, and peak memory."""
    names = {"step": "a step", "actor_generate": "generate", "actor_log_probs": "old log-probs"}
    names |= {"actor_update": "update", "actor_sync": "switch of weights"}
    figures = [Figure(side, text, "s", after_first(run.times(name))) for name, text in names.items()]
    gaps = [("train_rollout_logprob_diff", "mean"), ("train_rollout_logprob_diff_max", "largest")]
    figures += [
        Figure(side, f"sampler's log-probs from the trainer's, {text}", "nats", _metric(run, f"rollout/{name}"))
        for name, text in gaps
        if _metric(run, f"rollout/{name}")
    ]
    sleeps = [("time/rollout_sleep", "falling asleep", "s"), ("time/rollout_wake", "waking", "s")]
    sleeps += [("memory/rollout_sleep_freed_gb", "freed by sleep", "GB")]
    figures += [Figure(side, text, unit, _metric(run, name)) for name, text, unit in sleeps if _metric(run, name)]
    return [*figures, Figure(side, "first step", "s", run.times("step")[:1]), peak_figure(side, run)]


def peak_figure(side: str, run: Trained) -> Figure:
    """Return the most memory of tensors on the device."""
    return Figure(side, "peak memory of tensors", "GB", [run.peak / GB])


def rate_figures(side: str, run: Trained, rows: int) -> list[Figure]:
    """Return sampled tokens per second while generating, and over the whole step."""
    sampled = [step["response/mean_length"] * rows for step in run.steps]
    made = []
    for name, text in (("actor_generate", "sampled tokens while generating"), ("step", "sampled tokens of a step")):
        rates = [count / seconds for count, seconds in zip(sampled, run.times(name), strict=True) if seconds > 0]
        made.append(Figure(side, text, "1/s", after_first(rates)))
    return made


def after_first(values: Sequence[float]) -> Sequence[float]:
    """Leave out the first of several, in which kernels are chosen and compiled."""
    return values[1:] if len(values) > 1 else values


def _metric(run: Trained, name: str) -> Sequence[float]:
    return after_first([step[name] for step in run.steps if name in step])


def _update_rates(run: Trained, shape: Shape, size: Size, folder: Path) -> list[float]:
    """Return the TFLOP/s of each update: 6 a weight and token, a prompt that samples share counted once.

    Products of attention scores, which are a few percent at this length, and recomputed ones do not count.
    """
    prompt = mean_prompt_tokens(folder)
    made = []
    for step, seconds in zip(run.steps, run.times("actor_update"), strict=True):
        responses = step["response/mean_length"] * size.rows
        work = 6 * (shape.decoder_parameters * (responses + prompt * size.prompts) + shape.head_parameters * responses)
        made.append(work / seconds / 1e12)
    return list(after_first(made))


def mean_prompt_tokens(folder: Path) -> float:
    """Return the mean length of the training prompts as chats, in tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "half")
    lengths = []
    for line in (folder / "data" / "train.jsonl").read_text().splitlines()[:64]:
        chat = [{"role": "user", "content": json.loads(line)["prompt"]}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        lengths.append(len(tokenizer(text, add_special_tokens=False)["input_ids"]))
    return statistics.mean(lengths)


def trl(size: Size, folder: Path) -> list[Figure]:
    """Measure TRL's GRPO of the 0.5B model on the same rows: fp32 weights, bf16 autocast, micro-batches of 32 rows."""
    if importlib.util.find_spec("trl") is None:
        raise NotHere("trl")
    out = folder / "trl"
    out.mkdir(exist_ok=True)
    asked = {
        "model": str(folder / "half"),
        "data": str(folder / "data"),
        "reward": str(folder / "reward.py"),
        "out": str(out),
        "prompts": size.prompts,
        "samples": size.samples,
        "response_len": size.response_len,
        "micro_batch": min(32, size.rows),
        "steps": TRL_STEPS,
        "bf16": size.dtype == "bf16",
        "on_cpu": not size.is_card,
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "trl_side.py"), json.dumps(asked)], capture_output=True, text=True
    )
    if done.returncode:
        raise PartFailed(f"TRL ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found = json.loads((out / "steps.json").read_text())
    side = f"TRL {found['version']} 0.5B"
    return [
        Figure(side, "a step", "s", after_first(found["seconds"])),
        Figure(side, "first step", "s", found["seconds"][:1]),
        Figure(side, "peak memory of tensors", "GB", [found["peak"] / GB]),
    ]


def long_tail(size: Size, folder: Path) -> list[Figure]:
    """Measure responses of geometric length, 512 rows of a mean of 256 tokens and at most 2,048."""
    settings = grpo(size, "tail", folder, prompts=size.tail_prompts, response_len=size.tail_limit)
    run = train(folder / "run_tail", [*settings, *on_device(size)], stop=2, limit=110)
    side = "rlcore hf 0.5B, long tail"
    lengths = Figure(side, "mean length", "tokens", [step["response/mean_length"] for step in run.steps])
    return [*step_figures(side, run), *rate_figures(side, run, size.tail_prompts * size.samples), lengths]


def head(size: Size, folder: Path) -> list[Figure]:
    """Measure log-probs and entropy of tokens from hidden states, forward and backward."""
    return [*_head(size, "head", compiled=size.is_card), *_head(size, "head, not compiled", compiled=False)]


def _head(size: Size, side: str, *, compiled: bool) -> list[Figure]:
    import torch

    from rlcore.ops import chunked_log_probs

    device, tokens, shape = size.device, size.head_positions, size.half
    dtype = torch.bfloat16 if size.is_card else torch.float32
    hidden = torch.randn(tokens, shape.hidden, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(shape.vocabulary, shape.hidden, device=device) * 0.02).to(dtype).requires_grad_()
    labels = torch.randint(shape.vocabulary, (tokens,), device=device)

    def once() -> None:
        log_probs, entropy = chunked_log_probs(hidden, weight, labels, compiled=compiled)
        (log_probs.mean() + 0.01 * entropy.mean()).backward()
        hidden.grad = weight.grad = None

    once()
    if size.is_card:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if size.is_card else 0
    seconds = timed(once, device, rounds=5, warm=2)
    peak = (torch.cuda.max_memory_allocated() if size.is_card else 0) - before
    products = 6 * tokens * shape.head_parameters
    logits = 4 * tokens * shape.vocabulary
    return [
        Figure(side, "forward and backward", "ms", [each * 1e3 for each in seconds]),
        Figure(side, "arithmetic", "TFLOP/s", [products / each / 1e12 for each in seconds]),
        Figure(side, "memory, of all logits in fp32", "%", [100 * peak / logits]),
    ]


def ray_switch(size: Size, folder: Path) -> list[Figure]:
    """Measure a run on Ray whose sampling is on a pool of its own, so that weights travel between two processes."""
    if importlib.util.find_spec("ray") is None:
        raise NotHere("ray")
    settings = grpo(size, "half", folder, prompts=size.prompts, response_len=min(32, size.response_len))
    pools = "cluster.pools={main: [actor], gen: [rollout]}"
    extra = ["trainer.total_steps=3", pools, "engine.offload=false"]
    run = train(folder / "run_ray", [*settings, *on_device(size, on_ray=True, share=0.5), *extra], stop=3, limit=150)
    side = "rlcore hf 0.5B on Ray, two pools"
    sent = [
        sum(v for k, v in step.items() if k.startswith("time/") and k.endswith(("sync", "send"))) for step in run.steps
    ]
    return [Figure(side, "a step", "s", after_first(run.times("step"))), Figure(side, "switch", "s", after_first(sent))]


def numbers(size: Size, folder: Path) -> list[Figure]:
    """Compare log-probs and gradients of one update in fp32 on the device with those on the CPU."""
    found = {where: _numbers_of(where, size, folder) for where in {size.device, "cpu"}}
    import torch
    from safetensors.torch import load_file

    mine, theirs = found[size.device], found["cpu"]
    log_probs = [torch.load(out / "log_probs.pt") for out in (mine, theirs)]
    before = load_file(folder / "half" / "model.safetensors")
    moved = [_weights(out) for out in (mine, theirs)]
    apart = squares = 0.0
    for name, one in moved[0].items():
        # The update took the gradient from the weights, a thousand times: see _numbers_of.
        gradients = [weights[name].double() - before[name].double() for weights in moved]
        apart += float((gradients[0] - gradients[1]).square().sum())
        squares += float(gradients[1].square().sum())
        del one
    largest = float((log_probs[0] - log_probs[1]).abs().max())
    return [
        Figure("device against CPU, fp32", "log-probs, largest difference", "nats", [largest]),
        Figure("device against CPU, fp32", "gradient, |difference| / |gradient|", "", [(apart / squares) ** 0.5]),
    ]


def _numbers_of(where: str, size: Size, folder: Path) -> Path:
    """Run one update whose step is a thousand times the gradient: lr / eps of AdamW, with eps beyond any gradient."""
    out = folder / f"run_numbers_{where}"
    settings = [
        "algo=gpu_numbers",
        f"model.path={folder / 'half'}",
        "model.dtype=fp32",
        "data=file",
        f"data.path={folder / 'data'}",
        f"reward.path={folder / 'reward.py'}:score",
        f"data.batch_size={size.numbers_rows}",
        "data.shuffle=false",
        "rollout.response_len=32",
        "engine.lr=1e13",
        "engine.eps=1e10",
        "engine.clip_grad=0",
        "trainer.total_steps=1",
        "cluster=in_process",
        f"cluster.gpus_per_worker={1.0 if where == 'cuda' else 0.0}",
        f"cluster.cpus_per_worker={os.cpu_count() or 1}",
    ]
    train(out, settings, plugins=[HERE / "numbers_algorithm.py"])
    return out


def _weights(out: Path) -> dict:
    from safetensors.torch import load_file

    (folder,) = (out / "checkpoints").glob("step_*")
    return load_file(folder / "actor" / "model" / "model.safetensors")


def resume(size: Size, folder: Path) -> list[Figure]:
    """Compare a run that was killed and went on with one that was not, bit by bit, with deterministic kernels."""
    import torch

    settings = [
        "experiment=quickstart",
        f"model.dtype={size.dtype}",
        "trainer.total_steps=4",
        "trainer.checkpoint_every=2",
        "engine.lr=1e-4",
        "trainer.deterministic=true",
        *on_device(size),
    ]
    whole = train(folder / "run_whole", settings)
    train(folder / "run_killed", settings, stop=3)
    (folder / "run_killed" / "metrics.jsonl").read_text()
    resumed = train(folder / "run_killed", settings)
    clocks = ("time/", "timeline/", "throughput/")
    kept = [
        [{k: v for k, v in step.items() if not k.startswith(clocks)} for step in run.steps if step["step"] > 2]
        for run in (whole, resumed)
    ]
    weights = [_last_weights(folder / name) for name in ("run_whole", "run_killed")]
    same = all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    return [
        Figure("resumed against uninterrupted", "weights are equal, bit by bit", "1: yes", [float(same)]),
        Figure("resumed against uninterrupted", "metrics are equal", "1: yes", [float(kept[0] == kept[1])]),
    ]


def _last_weights(out: Path) -> dict:
    from safetensors.torch import load_file

    last = max((out / "checkpoints").glob("step_*"))
    return load_file(last / "actor" / "model" / "model.safetensors")


@dataclass(frozen=True)
class Part:
    """A part of the doctor."""

    run: Callable[[Size, Path], list[Figure]]
    seconds: float
    """The most that it may take."""
    on_request: bool = False
    """The part runs only when it is named."""


PARTS = {
    "models": Part(models, 60),
    "ceilings": Part(ceilings, 40),
    "grpo_0.5b": Part(grpo_half, 150),
    "trl": Part(trl, 150),
    "grpo_1.5b": Part(grpo_larger, 150),
    "given": Part(grpo_given, 100),
    "long_tail": Part(long_tail, 120),
    "head": Part(head, 60),
    "numbers": Part(numbers, 120),
    "resume": Part(resume, 100),
    "vllm": Part(grpo_vllm, 180),
    "vllm_asleep": Part(grpo_vllm_asleep, 180, on_request=True),
    "ray_switch": Part(ray_switch, 160),
    "cudnn": Part(grpo_cudnn, 120, on_request=True),
}
"""The parts in the order in which they run: what matters most comes first."""
