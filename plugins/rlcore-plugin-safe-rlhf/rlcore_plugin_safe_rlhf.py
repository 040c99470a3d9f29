"""Safe RLHF: PPO that raises the reward while the mean cost stays below a limit (arXiv 2310.12773).

Each response has a score s and a cost c (higher is worse); the cost comes from a cost model or a reward function. The
cost's weight lambda is a Lagrangian multiplier. It grows while the step's mean cost is above the limit and falls while
it is below (section 3.3, with the ascent in log space, so that it stays positive):

    log lambda <- min(log lambda + lambda_lr * lambda * (mean(c) - cost_limit), log lambda_max)

With actions t = 1..T, the tokens with response_mask 1, and KL_t = log pi_old(y_t) - log pi_ref(y_t), half of the KL
penalty lowers the reward and half raises the cost, so that its weight in A does not depend on lambda:

    r_t = [t = T] s - kl_coef / 2 * KL_t                 c_t = [t = T] c + kl_coef / 2 * KL_t

There are two critics, V for the reward and V^c for the cost. GAE (arXiv 1506.02438) gives their advantages and returns
A^r, R and A^c, R^c. With q_t = pi(y_t) / pi_old(y_t), M the mean over the actions of a mini-batch and P the mean over
the response tokens of demonstrations from a further data set (both terms of L_actor share each optimizer step),

    A_t     = (A^r_t - lambda A^c_t) / (1 + lambda)
    L_actor = - M[ min(q_t A_t, clip(q_t, 1 - clip, 1 + clip) A_t) ] - ptx_coef P[ log pi(z_t) ]
    L_V     = M[ max((V'_t - R_t)^2, (clip(V'_t, V_t - value_clip, V_t + value_clip) - R_t)^2) ] / 2     (and of V^c)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore import (
    CRITIC,
    REWARD,
    Algorithm,
    AlgorithmSpec,
    Config,
    ConfigError,
    CriticHandle,
    DataError,
    DataProto,
    Ragged,
    RewardHandle,
    Role,
    Run,
    hookimpl,
    option,
)
from rlcore.ops import (
    Loss,
    Outputs,
    Term,
    episodes,
    gae,
    kl_estimate,
    masked_sum,
    metric,
    needs,
    objective,
    one_row_each,
)

RLCORE_API = 1


@dataclass(frozen=True)
class SafeRLHFConfig:
    """Settings of Safe RLHF. The cost comes from either `cost_model` or `cost_function`."""

    samples: int = option(1, "responses per prompt", min=1)
    cost_model: str | None = option(
        None, "folder or hub name of a model with one label that gives the cost of a response", hub="model"
    )
    cost_function: str | None = option(
        None, "name in reward.functions, with the weight 0 there, of the function whose scores are the cost"
    )
    cost_limit: float = option(0.0, "limit of the mean cost")
    lambda_init: float = option(1.0, "weight of the cost at the start", min=1e-6)
    lambda_lr: float = option(0.1, "step size of log lambda; 0 keeps lambda as it is", min=0.0)
    lambda_max: float = option(5.0, "largest weight of the cost", min=1e-6)
    kl_coef: float = option(0.01, "weight of the KL to the frozen reference; 0: no reference", min=0.0)
    gamma: float = option(1.0, "discount per token", min=0.0, max=1.0)
    lam: float = option(0.95, "GAE's lambda: 0 trusts the critic's next value, 1 the sampled return", min=0.0, max=1.0)
    clip: float = option(0.2, "the ratio is clipped at 1 - clip and 1 + clip", min=0.0, max=1.0)
    value_clip: float = option(5.0, "bound on the change of values in an update; 0: no clipping", min=0.0)
    critic_model: str | None = option(
        None, "folder or hub name that the reward's critic starts from (default: model.path)", hub="model"
    )
    cost_critic_model: str | None = option(
        None, "folder or hub name that the cost's critic starts from (default: model.path)", hub="model"
    )
    critic_lr: float | None = option(None, "peak learning rate of both critics (default: engine.lr)", min=0.0)
    ptx_path: str | None = option(None, "JSONL with columns prompt and response; none: no pretraining loss")
    ptx_coef: float = option(16.0, "weight of the pretraining loss", min=0.0)
    ptx_batch_size: int = option(16, "demonstrations per step", min=1)
    epochs: int = option(1, "passes over each rollout", min=1)
    mini_batches: int = option(1, "optimizer steps per pass", min=1)


def next_log_lambda(log_lambda: float, mean_cost: float, config: SafeRLHFConfig) -> float:
    """Return log lambda after one ascent step on the excess of `mean_cost` over the limit."""
    ascended = log_lambda + config.lambda_lr * math.exp(log_lambda) * (mean_cost - config.cost_limit)
    return min(ascended, math.log(config.lambda_max))


def mixed_advantages(of_reward: Tensor, of_cost: Tensor, multiplier: float) -> Tensor:
    """Return (A^r - lambda A^c) / (1 + lambda); the two tensors and the result are [rows, tokens]."""
    return (of_reward - multiplier * of_cost) / (1 + multiplier)


def estimate(batch: DataProto, *, config: SafeRLHFConfig, multiplier: float) -> dict[str, Ragged]:
    """Return `advantages`, `returns` and `safe_rlhf_cost_returns`, ragged fp32, 0 on tokens with response_mask 0.

    Reads `scores`, `safe_rlhf_cost`, `response_mask`, `values`, `safe_rlhf_cost_values` and, with a kl_coef,
    `old_log_probs` and `ref_log_probs`.
    """
    lengths = batch.view("response_mask").lengths
    mask = batch.view("response_mask").to_padded().bool()
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    penalty = torch.zeros(mask.shape)
    if config.kl_coef > 0:
        old, reference = (batch.view(name).to_padded() for name in ("old_log_probs", "ref_log_probs"))
        penalty = config.kl_coef / 2 * kl_estimate(old, reference, "k1")
    rewards = torch.where(last, batch.view("scores")[:, None], 0.0) - penalty
    costs = torch.where(last, batch.view("safe_rlhf_cost")[:, None], 0.0) + penalty
    values, cost_values = (batch.view(name).to_padded() for name in ("values", "safe_rlhf_cost_values"))
    of_reward, returns = gae(rewards, values, mask, gamma=config.gamma, lam=config.lam)
    of_cost, cost_returns = gae(costs, cost_values, mask, gamma=config.gamma, lam=config.lam)
    advantages = mixed_advantages(of_reward, of_cost, multiplier)
    made = {"advantages": advantages, "returns": returns, "safe_rlhf_cost_returns": cost_returns}
    return {name: Ragged.from_padded(value, lengths) for name, value in made.items()}


@needs("log_probs", "entropy")
def policy_loss(out: Outputs, batch: Mapping[str, Any], config: SafeRLHFConfig) -> dict[str, Term]:
    """Return the clipped part of L_actor; tokens with response_mask 0 are ignored."""
    mask, advantages = batch["response_mask"], batch["advantages"]
    count = mask.sum()
    gain, clipped = out.clipped_surrogate(batch["old_log_probs"], advantages, config.clip, config.clip)
    terms = {
        "policy": objective(-masked_sum(gain, mask), count),
        "entropy": metric(masked_sum(out.entropy, mask), count),
        "clipped": metric(masked_sum(clipped.float(), mask), count),
        "kl_old": metric(
            masked_sum(kl_estimate(batch["old_log_probs"], out.log_probs, "k3", out.log_ratio_bound), mask), count
        ),
    }
    if config.kl_coef > 0:
        terms["kl"] = metric(masked_sum(kl_estimate(out.log_probs, batch["ref_log_probs"], "k1"), mask), count)
    return terms


def ptx_loss(out: Outputs, batch: Mapping[str, Any], config: SafeRLHFConfig) -> dict[str, Term]:
    """Return the mean negative log-likelihood of the demonstrations' response tokens."""
    return {"ptx": objective(-masked_sum(out.log_probs, batch["response_mask"]), batch["response_mask"].sum())}


@needs("values")
def value_loss(out: Outputs, batch: Mapping[str, Any], config: SafeRLHFConfig) -> dict[str, Term]:
    """Return the terms of L_V; tokens with response_mask 0 are ignored."""
    mask, returns = batch["response_mask"], batch["returns"]
    count = mask.sum()
    error, _ = out.clipped_value_error(batch["values"], returns, config.value_clip)
    return {
        "value_loss": objective(masked_sum(error, mask) / 2, count),
        "value": metric(masked_sum(out.values, mask), count),
        "return": metric(masked_sum(returns, mask), count),
    }


class SafeRLHF(Algorithm):
    """One step: sample, score, cost, move lambda, give each token its advantage, update both critics and the actor."""

    config_class = SafeRLHFConfig
    config: SafeRLHFConfig

    def __init__(self, config: SafeRLHFConfig) -> None:
        super().__init__(config)
        self.log_lambda = math.log(config.lambda_init)

    def roles(self) -> Mapping[str, Role]:
        """Return the actor, the two critics, the reference if the KL is used, and the cost model if there is one."""
        config = self.config
        roles = {
            "actor": Role(trains=True, generates=True),
            "critic": Role(trains=True, kind=CRITIC, model=config.critic_model, lr=config.critic_lr),
            "cost_critic": Role(trains=True, kind=CRITIC, model=config.cost_critic_model, lr=config.critic_lr),
        }
        if config.kl_coef > 0:
            roles["ref"] = Role()
        if config.cost_model is not None:
            roles["cost_model"] = Role(kind=REWARD, model=config.cost_model)
        return roles

    def data(self, config: Config) -> Mapping[str, Any]:
        """Return the demonstrations of the pretraining loss as the data set "ptx"."""
        if self.config.ptx_path is None:
            return {}
        size, path = self.config.ptx_batch_size, self.config.ptx_path
        texts = replace(config.data, name="file", path=path, prompt_key="prompt", answer_key="response")
        texts = replace(texts, subset=None, train_split=None, eval_split=None, max_rows=0)
        return {"ptx": replace(texts, batch_size=size)}

    def check(self, config: Config) -> None:
        """Raise ConfigError for a missing or ambiguous source of the cost, and for contradictory settings."""
        algo, functions = self.config, config.reward.functions
        if (algo.cost_model is None) == (algo.cost_function is None):
            raise ConfigError(
                "Safe RLHF needs the cost of a response: give either algo.cost_model=FOLDER, a model with one label, "
                "or algo.cost_function=NAME, one of reward.functions with the weight 0; not both"
            )
        if algo.cost_function is not None and functions.get(algo.cost_function) != 0:
            weights = ", ".join(f"{name}: {weight:g}" for name, weight in functions.items())
            raise ConfigError(
                f"algo.cost_function={algo.cost_function} must be one of reward.functions and have the weight 0 there, "
                f"so that it adds nothing to the reward; reward.functions={{{weights}}}"
            )
        if algo.lambda_init > algo.lambda_max:
            raise ConfigError(
                f"algo.lambda_init={algo.lambda_init:g} is above algo.lambda_max={algo.lambda_max:g}; lower it, or "
                "raise lambda_max"
            )
        if algo.ptx_path is not None and not Path(algo.ptx_path).expanduser().exists():
            raise ConfigError(
                f"algo.ptx_path={algo.ptx_path}: there is no such file; give a JSONL with columns prompt and response"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the multiplier's logarithm."""
        return {"log_lambda": self.log_lambda}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the multiplier's logarithm."""
        self.log_lambda = state["log_lambda"]

    def step(self, run: Run, prompts: DataProto) -> Mapping[str, Any]:
        """Run one step and return the metrics of the three updates, the critics' under `critic/` and `cost_critic/`."""
        batch = run.actor.generate(prompts.repeat(self.config.samples))
        batch = batch.union(run.reward(batch))
        batch = self._with_cost(run, batch)
        batch = batch.union(run.actor.log_probs(batch, name="old_log_probs"))
        batch = batch.union(run.critic.values(batch))
        cost_critic = run.role("cost_critic", CriticHandle)
        batch = batch.union(cost_critic.values(batch).rename("values", "safe_rlhf_cost_values"))
        reads = ["scores", "safe_rlhf_cost", "response_mask", "values", "safe_rlhf_cost_values"]
        if self.config.kl_coef > 0:
            batch = batch.union(run.ref.log_probs(batch, name="ref_log_probs"))
            reads += ["old_log_probs", "ref_log_probs"]
        made = partial(estimate, config=self.config, multiplier=math.exp(self.log_lambda))
        batch = batch.union(batch.map(made, reads=reads))
        return self._update(run, batch)

    def _with_cost(self, run: Run, batch: DataProto) -> DataProto:
        """Return the batch with `safe_rlhf_cost`, fp32 [rows], after moving lambda by its mean."""
        if self.config.cost_function is None:
            batch = batch.union(run.role("cost_model", RewardHandle).score(batch, name="safe_rlhf_cost"))
        else:
            file, _, function = self.config.cost_function.rpartition(":")
            batch["safe_rlhf_cost"] = batch[f"score/{Path(file).stem}.{function}" if file else f"score/{function}"]
        rows, _ = one_row_each(episodes(batch))
        mean_cost = float(batch["safe_rlhf_cost"][rows].mean())
        if math.isnan(mean_cost):
            raise DataError(
                f"algo.cost_function={self.config.cost_function} returned None for a response; it must return a number"
            )
        self.log_lambda = next_log_lambda(self.log_lambda, mean_cost, self.config)
        run.log({"safe_rlhf/cost": mean_cost, "safe_rlhf/lambda": math.exp(self.log_lambda)})
        return batch

    def _update(self, run: Run, batch: DataProto) -> dict[str, float]:
        epochs, mini_batches = self.config.epochs, self.config.mini_batches
        of_critics: dict[str, Mapping[str, float]] = {}
        of_cost, plain = ["safe_rlhf_cost_values", "safe_rlhf_cost_returns"], ["values", "returns"]
        costs = batch.rename([*plain, *of_cost], ["safe_rlhf_values", "safe_rlhf_returns", *plain])
        for name, critic, rows in (("critic", run.critic, batch), ("cost_critic", run.cost_critic, costs)):
            of_critics[name] = critic.update(rows, loss=value_loss, epochs=epochs, mini_batches=mini_batches)
        items: list[tuple[DataProto, Loss, float]] = [(batch, policy_loss, 1.0)]
        if self.config.ptx_path is not None:
            texts = run.next_prompts("ptx")
            items.append((texts.union(run.encode(texts, "answer")), ptx_loss, self.config.ptx_coef))
        of_actor = run.actor.update(items, epochs=epochs, mini_batches=mini_batches)
        # All three updates have started before any result is read, so on several pools they run at the same time.
        metrics: dict[str, float] = {}
        for name, found in of_critics.items():
            metrics.update({f"{name}/{key.rpartition('/')[2]}": value for key, value in found.items()})
        return metrics | dict(of_actor)


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register Safe RLHF."""
    return AlgorithmSpec("safe_rlhf", SafeRLHF)
