"""The typed configuration: one frozen dataclass a group. The reference in docs/configuration.md is made from these.

`option` declares a field with its description and bounds. Hydra composes plain values, and `rlcore.config.build`
checks them and turns them into these objects. Below the CLI only these objects travel.
"""

# ruff: noqa: RUF009  (`option` copies a mutable default for each object)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

from rlcore.errors import ConfigError

C = TypeVar("C")


def option(
    default: Any = ...,
    doc: str = "",
    *,
    min: float | None = None,
    max: float | None = None,
    was: str | None = None,
    incidental: bool = False,
    auto: bool = False,
    hub: Literal["model", "dataset"] | Mapping[str, Literal["model", "dataset"]] | None = None,
    needs: str | None = None,
) -> Any:
    """Declare a config field: its default (`...`: required), its one-line description, a number's bounds.

    was: the full key that the field had in an earlier version; giving it is an error that names the new key.
    incidental: a run may be resumed with another value, which changes nothing that a step computes.
    auto: a core key that a composed config has as `auto` by default and `rlcore.config.devices` resolves; `default` is
    for objects made in Python.
    hub: the value, or each value of a dict, is a folder, or a name on the hub, whose commit composing a config pins; of
    a dict where only some keys have such a value, their kinds by key.
    needs: the settings with which alone a run reads the value, as "trainer.eval_every", a key that is set and not 0,
    "engine.schedule=linear|cosine", one of these values, or several of them with " or " between. In another run a value
    that is not the default is named at the start, as it has no effect.
    """
    metadata = {"doc": doc, "min": min, "max": max, "was": was, "incidental": incidental, "auto": auto, "hub": hub}
    metadata["needs"] = needs
    if default is ...:
        return field(metadata=metadata)
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


_ADAPTER = "model.lora.rank or model.lora.path"
ALL_LINEAR: Literal["all-linear"] = "all-linear"


@dataclass(frozen=True)
class LoraConfig:
    """The adapter that is trained in place of the model's own weights (LoRA, arXiv 2106.09685)."""

    rank: int = option(0, "rows of an adapter's A; 0: no adapter, unless `path` is one", min=0)
    alpha: float | None = option(
        None, "an adapter's B A counts alpha / rank times (default: 2 * rank)", min=0.0, needs=_ADAPTER
    )
    dropout: float = option(
        0.0, "share of an adapter's inputs that are dropped in training", min=0.0, max=1.0, needs=_ADAPTER
    )
    targets: Literal["all-linear"] | list[str] = option(
        ALL_LINEAR,
        "layers with an adapter, by the ends of their names, as [q_proj, v_proj]; all-linear: all but the head",
        needs=_ADAPTER,
    )
    path: str | None = option(
        None, "folder of an adapter to start from, in peft's format; rank and targets are its own"
    )

    @property
    def is_on(self) -> bool:
        """Whether there is an adapter."""
        return self.rank > 0 or self.path is not None

    @property
    def scale(self) -> float:
        """The factor of B A of a new adapter."""
        return (2 * self.rank if self.alpha is None else self.alpha) / self.rank


@dataclass(frozen=True)
class ModelConfig:
    """The language model that is trained."""

    path: str = option(
        "tiny",
        "a causal language model: a folder, or a name on the Hugging Face hub as ORG/NAME or ORG/NAME@REVISION; "
        "`tiny`: the shipped one",
        hub="model",
    )
    dtype: Literal["fp32", "bf16"] = option(
        "fp32",
        "precision of forward and backward; master weights are fp32. `auto`: bf16 on a GPU that has it, else fp32",
        auto=True,
    )
    attention: str = option(
        "auto",
        "attention implementation of transformers; `auto`: sdpa; eager for a family without sdpa or with a soft cap on "
        "attention; in bf16 on a GPU, kernels of variable length",
    )
    trust_remote_code: bool = option(False, "run Python code that comes with the model folder")
    chat_template: str | None = option(None, "file with a Jinja chat template to use in place of the tokenizer's own")
    chat_template_kwargs: dict[str, Any] = option({}, "arguments for the chat template, as {enable_thinking: false}")
    lora: LoraConfig = option(LoraConfig(), "train an adapter and keep the model's own weights; docs/lora.md")
    date: str | None = option(
        None,
        "today for chat templates that write the date, as 2026-11-28; `auto`: the day of the run's start",
        auto=True,
    )


@dataclass(frozen=True)
class MixConfig:
    """A source of `data.mix`. A key that is not given has the run's own value."""

    data: dict[str, Any] = option(
        {}, "its own keys of `data`, as {name: file, path: math.jsonl}; `name` is required", hub={"path": "dataset"}
    )
    reward: dict[str, Any] = option(
        {}, "its own keys of `reward`, as {functions: {math: 1.0}}; without functions, the run's or its data set's own"
    )
    weight: float = option(1.0, "its share of the prompts, relative to the weights of the other sources", min=0.0)


MEASURED: Literal["measured"] = "measured"


@dataclass(frozen=True)
class CurriculumConfig:
    """The order of an epoch by difficulty, the easiest prompts first, and the prompts that are left out of it."""

    by: str | None = option(
        None,
        "column of numbers that says how difficult a row is; `measured`: the mean reward of the row's last samples; "
        "null: no order",
    )
    easy: Literal["low", "high"] = option(
        "low", "which numbers of that column are easy: low ones, as of levels, or high", needs="data.curriculum.by"
    )
    skip: float = option(
        0.0,
        "probability with which an epoch leaves out a row whose last samples all had the same reward",
        min=0.0,
        max=1.0,
    )

    @property
    def is_on(self) -> bool:
        """Whether there is a curriculum."""
        return self.by is not None or self.measures

    @property
    def measures(self) -> bool:
        """Whether it needs the rewards of the steps before."""
        return self.by == MEASURED or self.skip > 0


@dataclass(frozen=True)
class DataConfig:
    """The prompts: where they come from and how they become batches."""

    name: str = option("arithmetic", "data set: one of the installed ones (`rlcore plugins`)")
    path: str | None = option(
        None, "the data set, if it needs one: a file, a folder, or a name on the hub as model.path", hub="dataset"
    )
    subset: str | None = option(None, "folder inside data.path that holds the splits, as `main` of openai/gsm8k")
    train_split: str | None = option(None, "split of data.path to train on; null: train")
    eval_split: str | None = option(
        None,
        "split of held-out prompts; null: test, eval, validation, valid, val or dev, else a share of the training "
        "split; the training split's name: a share of it",
    )
    held_out_share: float = option(
        0.1,
        "share of the prompts, at least one, that `file` holds out where there is no held-out split",
        min=0.0,
        max=1.0,
    )
    max_rows: int = option(0, "training rows to read, the first ones in the data set's order; 0 for all", min=0)
    prompt_key: str = option("prompt", "column that holds the prompt: a string, or a list of chat messages")
    answer_key: str = option("answer", "column that holds the reference answer")
    rendered: list[str] = option(
        [],
        "columns in which special tokens are tokens: in texts that a chat template has rendered, and in the "
        "assistant's messages of a prompt",
    )
    system_prompt: str | None = option(None, "system message put before every string prompt")
    batch_size: int = option(16, "prompts per step", min=1)
    prompt_len: int = option(512, "longest prompt, in tokens", min=1)
    overlong: Literal["filter", "cut", "error"] = option("filter", "treatment of longer prompts; `cut` keeps the end")
    shuffle: bool = option(True, "shuffle the training prompts each epoch, by the seed")
    drop_last: bool = option(True, "leave out an epoch's last, smaller batch")
    eval_size: int = option(256, "held-out prompts to evaluate on; 0 for all", min=0, needs="trainer.eval_every")
    curriculum: CurriculumConfig = option(CurriculumConfig(), "easy prompts first; docs/data.md")
    mix: dict[str, MixConfig] = option(
        {}, "data sets by name in place of `name`, as {sums: {data: {name: arithmetic}, weight: 0.3}} (docs/data.md)"
    )


@dataclass(frozen=True)
class RewardConfig:
    """How responses are scored, and the limits of reward code."""

    functions: dict[str, float] = option(
        {}, "weights by reward: installed names, or FILE.py:FUNCTION; empty: the data set's own"
    )
    path: str | None = option(None, "FILE.py:FUNCTION, used alone and in place of `functions`")
    model: str | None = option(
        None,
        "folder or hub name of a reward model; its score is added to that of `functions`, if there are any",
        hub="model",
    )
    model_weight: float = option(1.0, "weight of the reward model's score", needs="reward.model")
    timeout: float = option(10.0, "seconds that one sample may take", min=0.01)
    memory_mb: int = option(2048, "address space of a process that runs reward code, in MiB; 0 for no limit", min=0)
    error_value: float | None = option(
        None, "reward of a sample whose reward function raised, hung, or gave no finite number; null: it is left out"
    )
    max_failures: float = option(
        0.25,
        "share of a call's samples; if more have no reward, the run stops with a checkpoint",
        min=0.0,
        max=1.0,
        incidental=True,
    )
    pass_score: float = option(1.0, "a sample counts as correct from this score on")
    special_tokens: bool = option(False, "reward functions read responses with their special tokens")
    workers: int = option(1, "processes that run reward functions", min=1)


@dataclass(frozen=True)
class RolloutConfig:
    """How responses are sampled."""

    name: str = option("", "rollout engine: one of the installed ones, whose own keys are `rollout.NAME.*`")
    response_len: int = option(256, "most new tokens of a response", min=1)
    min_tokens: int = option(0, "fewest new tokens before a response may end", min=0)
    temperature: float = option(1.0, "sampling temperature; 0 is greedy", min=0.0)
    top_p: float = option(1.0, "nucleus: sample from the smallest set with this probability", min=0.0, max=1.0)
    top_k: int = option(0, "sample from the k likeliest tokens; 0 for all", min=0)
    stop: list[str] = option([], "strings that end a response (kept in it)")
    tp: int = option(1, "tensor-parallel ranks of a generating replica; has to divide engine.tp", min=1)

    def require_drawn(self, responses: str, why: str = "nothing is learned from comparing them") -> None:
        """Raise ConfigError where each token is the likeliest one, so that `responses` are equal."""
        for key, equal, remedy in (
            ("temperature", 0, "set it above 0"),
            ("top_k", 1, "set it above 1, or to 0 for all"),
        ):
            if getattr(self, key) == equal:
                raise ConfigError(f"rollout.{key}={equal} makes {responses} equal, so {why}; {remedy}")


@dataclass(frozen=True)
class EngineConfig:
    """How models are trained: the optimizer, and the cuts of a batch that fit into memory."""

    name: str = option("", "train engine: one of the installed ones, whose own keys are `engine.NAME.*`")
    pp: int = option(1, "pipeline stages, each with consecutive decoder layers", min=1, incidental=True)
    tp: int = option(
        1, "tensor-parallel ranks of a stage, which divide heads and feed-forward width", min=1, incidental=True
    )
    layouts: dict[str, list[int]] = option(
        {}, "[pp, tp] of single roles, as {critic: [1, 2]}; other roles use `pp` and `tp`", incidental=True
    )
    offload: bool = option(False, "move weights and optimizer state to main memory while responses are sampled")
    lr: float = option(1e-6, "peak learning rate", min=0.0)
    schedule: Literal["constant", "linear", "cosine"] = option("constant", "learning rate after the warm-up")
    warmup_steps: int = option(0, "steps of linear warm-up", min=0)
    min_lr_ratio: float = option(
        0.0, "the schedule ends at this share of `lr`", min=0.0, max=1.0, needs="engine.schedule=linear|cosine"
    )
    weight_decay: float = option(0.0, "AdamW weight decay", min=0.0)
    betas: list[float] = option([0.9, 0.999], "AdamW betas")
    eps: float = option(1e-8, "AdamW epsilon", min=0.0)
    clip_grad: float = option(1.0, "largest global gradient norm; 0 for no clipping", min=0.0)
    micro_batch_rows: int = option(0, "most sequences in one forward; 0 for no such limit", min=0, incidental=True)
    micro_batch_tokens: Literal["auto"] | int = option(
        "auto",
        "most tokens in one forward; 0 for no such limit. `auto`: measured at the start on a GPU, 16384 on a CPU "
        "(docs/gpu.md)",
        min=0,
        incidental=True,
    )


@dataclass(frozen=True)
class RoleConfig:
    """Settings of one of the algorithm's roles; they replace the shared ones."""

    model: str | None = option(
        None, "the role's own model, as model.path (default: the algorithm's choice, else model.path)", hub="model"
    )
    dtype: Literal["fp32", "bf16"] | None = option(None, "the role's own precision, or `auto` (default: model.dtype)")
    lr: float | None = option(None, "the role's own peak learning rate (default: engine.lr)", min=0.0)
    engine: str | None = option(None, "the role's own train engine (default: engine.name)")
    lora: dict[str, Any] = option(
        {}, "the role's own keys of model.lora, as {rank: 16}, or {rank: 0} to train all of its weights"
    )
    rollout: dict[str, Any] = option(
        {}, "the role's own rollout settings, as {temperature: 0.7}; the others come from `rollout`"
    )
    chat_template_kwargs: dict[str, Any] = option({}, "template arguments of a reward model with its own tokenizer")


@dataclass(frozen=True)
class TrainerConfig:
    """The clock of the run: steps, evaluations, checkpoints."""

    total_steps: int = option(100, "steps of the run; with more of them a finished run goes on", min=1, incidental=True)
    epochs: int | None = option(
        None, "passes over the training prompts, which count in place of `total_steps`", min=1, incidental=True
    )
    seed: int = option(0, "seeds data order, sampling and initialisation")
    eval_every: int = option(
        20, "steps between evaluations, which also run before the first and after the last; 0 for none", min=0
    )
    eval_samples: int = option(
        1, "samples per held-out prompt (pass@k needs several)", min=1, needs="trainer.eval_every"
    )
    eval_temperature: float = option(
        1.0, "sampling temperature of the evaluation; 0 is greedy", min=0.0, needs="trainer.eval_every"
    )
    best: str | None = option(
        None, "metric of the evaluations, e.g. eval/accuracy, whose best checkpoint stays, as checkpoints/best"
    )
    stop_at: dict[str, float] = option(
        {}, "the run ends after the evaluation that reaches all of these, e.g. {eval/accuracy: 0.9}", incidental=True
    )
    lower_is_better: list[str] = option([], "metrics of `best` and `stop_at` where less is better", incidental=True)
    deterministic: bool = option(
        False,
        "choose deterministic kernels on a GPU, and let the turns of episodes wait for one another, so that a resumed "
        "run goes on bit for bit; slower",
    )
    checkpoint_every: int = option(0, "steps between checkpoints; 0: only at the end and when interrupted", min=0)
    keep_checkpoints: int = option(2, "newest checkpoints to keep; 0 for all", min=0, incidental=True)
    samples_per_step: int = option(8, "samples that each step writes to samples/", min=0, incidental=True)
    rollouts_ahead: int = option(
        0, "steps that sampling may run ahead of training, on a pool `rollout` of its own; 0: in turn", min=0, max=1
    )
    importance: Literal["auto", "off", "token", "sequence", "mask", "sequence_mask"] = option(
        "auto",
        "importance weights where another policy sampled than is trained; auto: `token` with rollouts_ahead, else off",
    )
    importance_cap: float = option(
        2.0,
        "upper bound of the importance weights of token and sequence",
        min=0.0,
        needs="trainer.importance=token|sequence",
    )
    importance_band: list[float] = option(
        [0.5, 5.0],
        "importance ratios that mask and sequence_mask keep, from and to; others weigh 0",
        needs="trainer.importance=mask|sequence_mask",
    )
    log_ratio_bound: float = option(
        20.0,
        "log-ratios of probabilities are clamped to plus and minus this before exp, in nats, and k3 to at most 10; "
        "0: neither",
        min=0.0,
        max=40.0,
    )
    on_nonfinite: Literal["stop", "skip"] = option(
        "stop",
        "an optimizer step whose loss or gradient is not finite: stop the run, or skip the step, at most 5 in a row",
        incidental=True,
    )
    train_rollout_logprob_diff: float = option(
        0.05,
        "a step warns from this mean difference of the two engines' log-probs on, in nats; 0: never, and the run does "
        "not end either where the difference jumps",
        min=0.0,
        incidental=True,
        was="trainer.log_prob_gap",
    )
    trace: bool = option(
        False, "write timeline.json, the calls of all processes over time, for Perfetto or chrome://tracing"
    )

    @property
    def correction(self) -> Literal["off", "token", "sequence", "mask", "sequence_mask"]:
        """The correction for samples of another policy: `importance` without `auto`."""
        if self.importance == "auto":
            return "token" if self.rollouts_ahead else "off"
        return self.importance


@dataclass(frozen=True)
class EvalSetConfig:
    """An evaluation with a name. A key that is not given has the run's own value."""

    data: dict[str, Any] = option(
        {},
        "its own keys of `data`, as {name: file, path: math500.jsonl}; a path or name that is not the run's is another "
        "data set, which is evaluated on whole, and whose keys of rows and columns start from the defaults",
        hub={"path": "dataset"},
    )
    reward: dict[str, Any] = option({}, "its own keys of `reward`, as {functions: {math: 1.0}}")
    samples: int | None = option(None, "samples per prompt (default: trainer.eval_samples)", min=1)
    temperature: float | None = option(None, "sampling temperature (default: trainer.eval_temperature)", min=0.0)
    response_len: int | None = option(
        None,
        "most new tokens of a response (default: rollout.response_len); with the longest prompt at most "
        "data.prompt_len + rollout.response_len",
        min=1,
    )


@dataclass(frozen=True)
class EvalConfig:
    """What an evaluation evaluates on; when and how the run's own prompts are sampled is in `trainer`."""

    held_out: bool = option(
        True, "evaluate on the run's own held-out prompts; false: on `sets` alone", needs="trainer.eval_every"
    )
    sets: dict[str, EvalSetConfig] = option(
        {},
        "further evaluations by name, as {math500: {data: {name: file, path: math500.jsonl}, samples: 4}}",
        needs="trainer.eval_every",
    )


@dataclass(frozen=True)
class ClusterConfig:
    """The processes of the run."""

    executor: Literal["ray", "in_process"] = option("ray", "worker processes on Ray, or everything in this process")
    address: str | None = option(
        None, "address of a running Ray cluster; none starts one on this machine", incidental=True
    )
    workers: int = option(
        2,
        "processes of the actor and of the roles that share its pool: pp * tp * dp. `auto`: one for each GPU that is "
        "used; without a GPU 2 on Ray, and 1 in process",
        min=1,
        incidental=True,
        auto=True,
    )
    cpus_per_worker: int = option(1, "cores, and torch threads, of a worker", min=1)
    gpus_per_worker: float = option(
        0.0, "GPUs of a worker. `auto`: 1 where there is a GPU, else 0 (docs/gpu.md)", min=0.0, auto=True
    )
    pools: Literal["auto"] | dict[str, Any] = option(
        {},
        "roles by pool, as {main: [actor, ref], side: [critic]}; empty: all roles on one pool (docs/placement.md); "
        "`auto`: the best pools that `rlcore plan` finds (docs/plan.md)",
    )
    colocate: Literal["fused", "fractional"] = option(
        "fused",
        "fused: roles of one pool share a process; fractional: each has a process of its own, and they take turns",
    )
    inline_kb: float = option(
        100.0,
        "columns of a result up to this size, in kB, travel in the call's reply; larger ones stay with their producer",
    )
    start_timeout: float = option(
        120.0, "seconds to wait for Ray and for the workers to start", min=1.0, incidental=True
    )
    stall_timeout: float = option(
        30.0,
        "seconds without progress, while a role starts or in a collective, after which the run ends; 0: never",
        min=0.0,
        incidental=True,
    )


@dataclass(frozen=True)
class TrackerConfig:
    """Where metrics and samples are reported."""

    use: list[str] = option(
        ["console"], "trackers besides jsonl, which is always on: console, wandb, or an installed one"
    )


@dataclass(frozen=True)
class RunConfig:
    """The folder of the run."""

    dir: str | None = option(
        None, "folder of the run; one that has steps left is resumed with an equal config (default: runs/ALGO-TIME)"
    )
    name: str | None = option(None, "name shown by trackers (default: the folder's)")
    source: str | None = option(
        None,
        "checkpoint of another run, from which a fork starts; `rlcore train --from` sets it (docs/architecture.md)",
    )


@dataclass(frozen=True)
class Config:
    """The config of a whole run.

    `algo` is the algorithm's own frozen dataclass; `algorithm` is its name. An evaluation may have no algorithm: then
    `algorithm` is "" and `algo` None. `roles` holds the settings of single roles by name. `sections` holds plugins'
    config objects by dotted name: `rollout.NAME` and `engine.NAME` of the engines that the run uses, and the sections
    of installed plugins (see ConfigSpec). `section` returns one of them. `unused` holds what was given for engines that
    the run does not use, by dotted key; it is no part of a saved config.
    """

    algorithm: str
    algo: Any
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    roles: dict[str, RoleConfig] = field(default_factory=dict)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    sections: Mapping[str, Any] = field(default_factory=dict)
    unused: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def section(self, cls: type[C]) -> C:
        """Return the section of this class. Raises ConfigError when the run has none."""
        for value in self.sections.values():
            if isinstance(value, cls):
                return value
        raise ConfigError(
            f"this run has no config section {cls.__name__}: its plugin is not installed, or it belongs to an engine "
            f"that the run does not use. Sections: {', '.join(self.sections) or 'none'}"
        )

    def value(self, key: str) -> Any:
        """Return the value of a dotted key, as `rollout.response_len`. Raises ConfigError for an unknown key."""
        where, name = self._holder(key)
        return getattr(where, name)

    def with_values(self, values: Mapping[str, Any]) -> Config:
        """Return a copy with the values of dotted keys replaced; types and bounds are not checked again."""
        changed = self
        for key, value in values.items():
            where, name = changed._holder(key)
            new, path = replace(where, **{name: value}), key.rpartition(".")[0]
            if path in changed.sections:
                changed = replace(changed, sections={**changed.sections, path: new})
            else:
                parts: dict[str, Any] = {path: new}
                changed = replace(changed, **parts)
        return changed

    def _holder(self, key: str) -> tuple[Any, str]:
        """Return the object that holds a dotted key, and the key's name there."""
        path, _, name = key.rpartition(".")
        holder = self.sections.get(path) or getattr(self, path, None)
        if path in NO_KEYS or name not in getattr(holder, "__dataclass_fields__", ()):
            raise ConfigError(f"this run's config has no key {key!r}")
        return holder, name


NO_KEYS = ("sections", "unused")
"""Fields of Config that are no keys."""

REMOVED = {
    "engine.dp": "the data-parallel size is cluster.workers / (engine.pp * engine.tp): leave it out",
    "trainer.importance_floor": "the ratios that a mask keeps are trainer.importance_band=[0.5, 5.0], from and to",
}
"""Keys of earlier versions that have no successor, with the reason."""

SECTIONS: dict[str, type] = {
    field.name: field.default_factory  # type: ignore[misc]
    for field in fields(Config)
    if is_dataclass(field.default_factory)
}
"""The dataclass of each part of the config with core keys, by name. Plugins add further parts."""
