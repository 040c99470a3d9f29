"""On-policy distillation: a student learns from a teacher's log-probs of the student's own samples.

For each prompt, G responses are sampled from the current student pi_old. A frozen teacher pi_T gives the log-probs of
the sampled tokens, and the reverse KL becomes a reward for each token (arXiv 2306.13649, section 3, with samples of the
student and the reverse KL; as a reward without a discount: https://thinkingmachines.ai/blog/on-policy-distillation),

    a_it = log pi_T(y_it) - log pi_old(y_it) + task_coef A_i

where A_i = (s_i - mean(s)) / (std(s) + 1e-6) compares the scores of the prompt's responses; with task_coef = 0, the
default, no reward is computed. With the ratio r_it = pi(y_it) / pi_old(y_it) the student minimises, over all tokens of
the mini-batch,

    L = - mean[ min(r_it a_it, clip(r_it, 1 - clip, 1 + clip) a_it) ]

The mean of -a_it with task_coef = 0 estimates the reverse KL, KL(pi_old || pi_T), in nats per token (the metric
`distill/reverse_kl`). The gradient is that of the next token's reverse KL only: a token is not rewarded for making
later tokens easier.

The teacher may have another size, dtype and engine than the student, and must have its tokenizer. With `teachers` each
row is answered for by the teacher that its column `data_source` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlcore import (
    Algorithm,
    AlgorithmSpec,
    Config,
    ConfigError,
    DataError,
    DataProto,
    PolicyHandle,
    Role,
    Run,
    hookimpl,
    option,
)
from rlcore.ops import Outputs, Term, episodes, group_advantages, masked_sum, metric, needs, objective

RLCORE_API = 1

COLUMN = "data_source"


@dataclass(frozen=True)
class OnPolicyDistillConfig:
    """Settings of on-policy distillation. The teacher is either `teacher`, or one of `teachers` for each row."""

    teacher: str | None = option(None, "folder or hub name of the teacher", hub="model")
    teachers: dict[str, str] = option(
        {}, "folders or hub names of several teachers, by the value of a row's column data_source", hub="model"
    )
    group_size: int = option(4, "responses per prompt", min=1)
    clip: float = option(0.2, "the ratio is clipped at 1 - clip and 1 + clip", min=0.0, max=1.0)
    task_coef: float = option(0.0, "weight of the task's reward, compared within a group; 0: none", min=0.0)
    epochs: int = option(1, "passes over each rollout", min=1)
    mini_batches: int = option(1, "optimizer steps per pass", min=1)


@needs("log_probs", "entropy")
def on_policy_distill_loss(out: Outputs, batch: Mapping[str, Any], config: OnPolicyDistillConfig) -> dict[str, Term]:
    """Return the terms of the loss in the module's docstring; tokens with response_mask 0 are ignored."""
    mask = batch["response_mask"]
    surrogate, clipped = out.clipped_surrogate(batch["old_log_probs"], batch["advantages"], config.clip, config.clip)
    return {
        "policy": objective(-masked_sum(surrogate, mask), mask.sum()),
        "entropy": metric(masked_sum(out.entropy, mask), mask.sum()),
        "clipped": metric(masked_sum(clipped.float(), mask), mask.sum()),
    }


class OnPolicyDistill(Algorithm):
    """One step: sample, let the teacher read the samples, reward each token, update the student."""

    config_class = OnPolicyDistillConfig
    config: OnPolicyDistillConfig

    def __init__(self, config: OnPolicyDistillConfig) -> None:
        super().__init__(config)
        self.uses_reward = config.task_coef > 0

    def roles(self) -> Mapping[str, Role]:
        """Return the student as `actor`, and each teacher, frozen: `teacher`, or `teacher_NAME` for each of several."""
        folders = {"teacher": self.config.teacher} if self.config.teacher is not None else {}
        folders |= {role_of(name): folder for name, folder in self.config.teachers.items()}
        return {
            "actor": Role(trains=True, generates=True),
            **{role: Role(model=folder) for role, folder in folders.items()},
        }

    def check(self, config: Config) -> None:
        """Raise ConfigError for a missing or ambiguous teacher, and groups that cannot be compared or are too few."""
        algo = self.config
        if (algo.teacher is None) == (not algo.teachers):
            raise ConfigError(
                "on-policy distillation needs a teacher: give either algo.teacher=FOLDER, or several by data source as "
                "algo.teachers={NAME: FOLDER}; not both"
            )
        if algo.task_coef > 0 and algo.group_size == 1:
            raise ConfigError(
                f"algo.task_coef={algo.task_coef:g} compares a prompt's responses, but algo.group_size=1 gives only "
                "one; raise it to 2 or more, or set algo.task_coef=0"
            )
        if config.data.batch_size < algo.mini_batches:
            raise ConfigError(
                f"algo.mini_batches is {algo.mini_batches}, but a step has only data.batch_size = "
                f"{config.data.batch_size} groups; make it at most {config.data.batch_size}"
            )

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise DataError for a row whose data source has no teacher."""
        teachers = self.config.teachers
        if teachers and row.get(COLUMN) not in teachers:
            raise DataError(
                f"column {COLUMN!r} holds {row.get(COLUMN)!r:.80}, which has no teacher; algo.teachers has "
                f"{', '.join(teachers)}"
            )

    def step(self, run: Run, prompts: DataProto) -> Mapping[str, Any]:
        """Run one step and return the update's metrics."""
        algo = self.config
        batch = run.actor.generate(prompts.repeat(algo.group_size))
        rewards = run.reward(batch) if algo.task_coef > 0 else None
        batch = batch.union(run.actor.log_probs(batch, name="old_log_probs"))
        batch = batch.union(self._teacher_log_probs(run, batch))
        if rewards is not None:
            batch = batch.union(rewards)
        gain = batch["distill_log_probs"].with_values(batch["distill_log_probs"].values - batch["old_log_probs"].values)
        batch["advantages"] = gain
        moments = batch.masked_moments("advantages", "response_mask", per_episode=True)
        run.log({"distill/reverse_kl": -moments.mean if moments.count else 0.0})
        if algo.task_coef > 0:
            task = algo.task_coef * group_advantages(batch["scores"], batch["uid"], episode=episodes(batch))
            batch["advantages"] = gain.with_values(gain.values + task.repeat_interleave(gain.lengths))
        return run.actor.update(
            batch,
            loss=on_policy_distill_loss,
            epochs=algo.epochs,
            mini_batches=algo.mini_batches,
            keep_together="uid",
        )

    def _teacher_log_probs(self, run: Run, batch: DataProto) -> DataProto:
        """Return `distill_log_probs`, the teacher's, in the order of the batch."""
        if not self.config.teachers:
            return run.role("teacher", PolicyHandle).log_probs(batch, name="distill_log_probs")
        sources = list(batch[COLUMN])
        rows = {name: [row for row, source in enumerate(sources) if source == name] for name in dict.fromkeys(sources)}
        # All teachers' calls have started before any result is read.
        parts = [
            run.role(role_of(name), PolicyHandle).log_probs(batch[own], name="distill_log_probs")
            for name, own in rows.items()
        ]
        order = [row for own in rows.values() for row in own]
        return DataProto.concat(parts)[sorted(range(len(order)), key=order.__getitem__)]


def role_of(name: str) -> str:
    """Return the role of a data source's teacher."""
    return f"teacher_{name}"


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register on-policy distillation."""
    return AlgorithmSpec("on_policy_distill", OnPolicyDistill)
