"""PPO: proximal policy optimisation (arXiv 1707.06347), as used on language models by InstructGPT (arXiv 2203.02155).

The policy samples responses; s is the score of a whole response. A response's actions are its tokens t = 1..T with
response_mask 1; tokens with response_mask 0 between them are skipped. With KL_t estimated from the sampled token
(kl_estimator), an action has the reward

    r_t = [t = T] s - kl_coef KL_t(pi_old || pi_ref)               (without the KL for kl_in=loss and kl_in=none)

The critic's V_t expects the return before action t is chosen. By GAE (arXiv 1506.02438), with V_{T+1} = 0,

    delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}        R_t = A_t + V_t

then A is normalised to mean 0 and variance 1 over the actions of the whole batch (whiten). With q_t = pi(y_t) /
pi_old(y_t) and M the mean over the actions of a mini-batch, the actor and the critic minimise

    L_actor  = - M[ min(q_t A_t, clip(q_t, 1 - clip_low, 1 + clip_high) A_t) ] - entropy_coef M[ H_t ]
    L_critic = M[ max((V'_t - R_t)^2, (clip(V'_t, V_t - value_clip, V_t + value_clip) - R_t)^2) ] / 2

kl_in=loss adds kl_coef M[ KL_t(pi || pi_ref) ] to L_actor. dual_clip=c (arXiv 1912.09729): where A_t < 0, the min in
the first M is raised to at least c A_t. kl_controller=adaptive (arXiv 1909.08593, section 2.2): after a step whose mean
KL per response is K, kl_coef is multiplied by 1 + kl_gain clip(K / kl_target - 1, -0.2, 0.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from rlcore import CRITIC, Algorithm, AlgorithmSpec, Config, ConfigError, DataProto, Ragged, Role, Run, hookimpl, option
from rlcore.ops import KLEstimator, Outputs, Term, adapt_kl_coef, gae, kl_estimate, masked_sum, metric, needs, objective

RLCORE_API = 1


@dataclass(frozen=True)
class PPOConfig:
    """Settings of PPO."""

    samples: int = option(1, "responses per prompt", min=1)
    epochs: int = option(1, "passes over each rollout, of the actor and of the critic", min=1)
    mini_batches: int = option(1, "optimizer steps per pass", min=1)
    gamma: float = option(1.0, "discount per token", min=0.0, max=1.0)
    lam: float = option(0.95, "GAE's lambda: 0 trusts the critic's next value, 1 the sampled return", min=0.0, max=1.0)
    whiten: bool = option(True, "normalise advantages to mean 0 and variance 1 over the batch")
    clip_low: float = option(0.2, "the ratio is clipped at 1 - clip_low", min=0.0, max=1.0)
    clip_high: float = option(0.2, "the ratio is clipped at 1 + clip_high", min=0.0)
    dual_clip: float = option(0.0, "bound on the ratio where the advantage is negative; 0: no bound", min=0.0)
    entropy_coef: float = option(0.0, "weight of the entropy bonus", min=0.0)
    value_clip: float = option(0.2, "bound on the change of values in an update; 0: no clipping", min=0.0)
    kl_in: Literal["reward", "loss", "none"] = option("reward", "where the KL to the frozen reference is a penalty")
    kl_coef: float = option(0.01, "weight of the KL, or the controller's start value; 0: no reference", min=0.0)
    kl_estimator: Literal["k1", "k2", "k3"] = option("k1", "how the KL is estimated from the sampled tokens")
    kl_controller: Literal["fixed", "adaptive"] = option("fixed", "whether kl_coef is steered towards kl_target")
    kl_target: float = option(6.0, "target of the adaptive controller: KL per response, in nats", min=1e-6)
    kl_gain: float = option(0.1, "speed of the adaptive controller", min=0.0, max=1.0)
    critic_model: str | None = option(None, "model that the critic starts from (default: model.path)", hub="model")
    critic_lr: float | None = option(None, "peak learning rate of the critic (default: engine.lr)", min=0.0)
    critic_warmup: int = option(0, "number of first steps in which only the critic learns", min=0)

    @property
    def uses_kl(self) -> bool:
        """Whether there is a KL penalty, and so a reference."""
        return self.kl_in != "none" and self.kl_coef > 0


def token_rewards(
    batch: DataProto, *, kl_coef: float, kl_estimator: KLEstimator, log_ratio_bound: float = 20.0
) -> dict[str, Ragged]:
    """Return `rewards`, and `ppo_kl` in nats if there are `ref_log_probs`; both 0 on tokens with response_mask 0."""
    lengths = batch.view("response_mask").lengths
    mask = batch.view("response_mask").to_padded().bool()
    last = (mask.flip(1).cumsum(1).flip(1) == 1) & mask
    rewards = torch.where(last, batch.view("scores")[:, None], 0.0)
    if "ref_log_probs" not in batch:
        return {"rewards": Ragged.from_padded(rewards, lengths)}
    old, reference = (batch.view(name).to_padded() for name in ("old_log_probs", "ref_log_probs"))
    kl = torch.where(mask, kl_estimate(old, reference, kl_estimator, log_ratio_bound), 0.0)
    return {"rewards": Ragged.from_padded(rewards - kl_coef * kl, lengths), "ppo_kl": Ragged.from_padded(kl, lengths)}


def estimate_advantages(batch: DataProto, *, gamma: float, lam: float) -> dict[str, Ragged]:
    """Return `ppo_advantages` (not whitened) and `returns` by GAE from `rewards`, `values` and `response_mask`."""
    lengths = batch.view("response_mask").lengths
    rewards, values, mask = (batch.view(name).to_padded() for name in ("rewards", "values", "response_mask"))
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    return {
        "ppo_advantages": Ragged.from_padded(advantages, lengths),
        "returns": Ragged.from_padded(returns, lengths),
    }


def shift_and_scale(batch: DataProto, *, mean: float, std: float) -> dict[str, Ragged]:
    """Return `advantages`: (ppo_advantages - mean) / std, and 0 on tokens with response_mask 0."""
    plain = batch.view("ppo_advantages")
    acts = batch.view("response_mask").values.bool()
    return {"advantages": plain.with_values(torch.where(acts, (plain.values - mean) / std, 0.0))}


@needs("log_probs", "entropy")
def actor_loss(out: Outputs, batch: Mapping[str, Any], config: PPOConfig) -> dict[str, Term]:
    """Return the terms of L_actor in the module's docstring; tokens with response_mask 0 are ignored."""
    mask, advantages = batch["response_mask"], batch["advantages"]
    count = mask.sum()
    gain, clipped = out.clipped_surrogate(batch["old_log_probs"], advantages, config.clip_low, config.clip_high)
    terms = {"clipped": metric(masked_sum(clipped.float(), mask), count)}
    if config.dual_clip > 0:
        bound = config.dual_clip * advantages
        below = (advantages < 0) & (gain < bound)
        gain = torch.where(below, bound, gain)
        terms["dual_clipped"] = metric(masked_sum(below.float(), mask), count)
    entropy = masked_sum(out.entropy, mask)
    terms = {
        "policy": objective(-masked_sum(gain, mask), count),
        "entropy": objective(entropy, count, -config.entropy_coef) if config.entropy_coef else metric(entropy, count),
        "kl_old": metric(
            masked_sum(kl_estimate(batch["old_log_probs"], out.log_probs, "k3", out.log_ratio_bound), mask), count
        ),
        **terms,
    }
    if config.uses_kl:
        kl = kl_estimate(out.log_probs, batch["ref_log_probs"], config.kl_estimator, out.log_ratio_bound)
        terms["kl"] = metric(masked_sum(kl, mask), count)
        if config.kl_in == "loss":
            terms["kl_penalty"] = objective(masked_sum(kl * batch["kl_coef"], mask), count)
    return terms


@needs("values")
def critic_loss(out: Outputs, batch: Mapping[str, Any], config: PPOConfig) -> dict[str, Term]:
    """Return the terms of L_critic in the module's docstring; tokens with response_mask 0 take no part."""
    mask, returns = batch["response_mask"], batch["returns"]
    count = mask.sum()
    error, clipped = out.clipped_value_error(batch["values"], returns, config.value_clip)
    return {
        "value_loss": objective(masked_sum(error, mask) / 2, count),
        "clipped": metric(masked_sum(clipped.float(), mask), count),
        "value": metric(masked_sum(out.values, mask), count),
        "return": metric(masked_sum(returns, mask), count),
    }


class PPO(Algorithm):
    """One step: sample, score, give each token its reward and advantage, update the critic and the actor."""

    config_class = PPOConfig
    config: PPOConfig

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.kl_coef = config.kl_coef

    def roles(self) -> Mapping[str, Role]:
        """Return the actor, the critic, and the frozen reference if the KL is used."""
        critic = Role(trains=True, kind=CRITIC, model=self.config.critic_model, lr=self.config.critic_lr)
        roles = {"actor": Role(trains=True, generates=True), "critic": critic}
        return {**roles, "ref": Role()} if self.config.uses_kl else roles

    def check(self, config: Config) -> None:
        """Raise ConfigError for contradictory settings, and for a warm-up as long as the run."""
        algo = self.config
        rows = config.data.batch_size * algo.samples
        if algo.mini_batches > rows:
            raise ConfigError(
                f"algo.mini_batches is {algo.mini_batches}, but a step has only data.batch_size * algo.samples = "
                f"{rows} responses; make it at most {rows}"
            )
        if algo.critic_warmup >= config.trainer.total_steps:
            raise ConfigError(
                f"algo.critic_warmup={algo.critic_warmup} covers all trainer.total_steps={config.trainer.total_steps}: "
                f"the actor would never learn; make it less than {config.trainer.total_steps}"
            )
        if 0 < algo.dual_clip <= 1:
            raise ConfigError(f"algo.dual_clip is {algo.dual_clip}; it must be above 1, or 0 for no bound")
        if algo.kl_controller == "adaptive" and not algo.uses_kl:
            raise ConfigError(
                f"algo.kl_controller=adaptive has nothing to steer with algo.kl_in={algo.kl_in} and "
                f"algo.kl_coef={algo.kl_coef:g}; use the KL with a kl_coef above 0, or kl_controller=fixed"
            )
        if algo.kl_in == "loss" and algo.kl_estimator == "k1":
            raise ConfigError(
                "algo.kl_estimator=k1 has zero expected gradient, so it penalises nothing in the loss "
                "(algo.kl_in=loss); use k2 or k3"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the KL controller."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the KL controller."""
        self.kl_coef = state["kl_coef"]

    def step(self, run: Run, prompts: DataProto) -> Mapping[str, Any]:
        """Run one step and return the metrics of both updates, the critic's under `critic/`."""
        batch = run.actor.generate(prompts.repeat(self.config.samples))
        rewards = run.reward(batch)
        batch = batch.union(run.actor.log_probs(batch, name="old_log_probs"))
        batch = batch.union(run.critic.values(batch))
        if self.config.uses_kl:
            batch = batch.union(run.ref.log_probs(batch, name="ref_log_probs"))
        epochs, mini_batches, kl_coef = self.config.epochs, self.config.mini_batches, self.kl_coef
        batch = self._with_advantages(run, batch.union(rewards))
        of_critic = run.critic.update(batch, loss=critic_loss, epochs=epochs, mini_batches=mini_batches)
        of_actor: Mapping[str, Any] = {}
        if run.step > self.config.critic_warmup:
            of_actor = run.actor.update(
                batch, loss=actor_loss, epochs=epochs, mini_batches=mini_batches, constants={"kl_coef": kl_coef}
            )
        # Both updates have started before either result is read, so on two pools they run at the same time.
        return {f"critic/{name.rpartition('/')[2]}": value for name, value in of_critic.items()} | dict(of_actor)

    def _with_advantages(self, run: Run, batch: DataProto) -> DataProto:
        """Return the batch with `rewards`, `advantages` and `returns`, computed where the rows are."""
        config = self.config
        kl_coef = self.kl_coef if config.kl_in == "reward" else 0.0
        reads = ["scores", "response_mask", *(["old_log_probs", "ref_log_probs"] if config.uses_kl else [])]
        bound = run.config.trainer.log_ratio_bound
        rewards = partial(token_rewards, kl_coef=kl_coef, kl_estimator=config.kl_estimator, log_ratio_bound=bound)
        batch = batch.union(batch.map(rewards, reads=reads))
        by_gae = partial(estimate_advantages, gamma=config.gamma, lam=config.lam)
        batch = batch.union(batch.map(by_gae, reads=["rewards", "values", "response_mask"]))
        moments = batch.masked_moments("ppo_advantages", "response_mask", per_episode=True)
        whitens = config.whiten and moments.count > 0
        mean, std = (moments.mean, moments.var**0.5 + 1e-8) if whitens else (0.0, 1.0)
        to_scale = partial(shift_and_scale, mean=mean, std=std)
        batch = batch.union(batch.map(to_scale, reads=["ppo_advantages", "response_mask"]))
        spread = batch.masked_moments("returns", "response_mask", per_episode=True).var
        # For every lambda, returns - values equals the GAE advantages.
        run.log({"critic/explained_variance": 1 - moments.var / spread if spread > 0 else 0.0})
        if config.uses_kl:
            self._steer(run, batch)
        return batch

    def _steer(self, run: Run, batch: DataProto) -> None:
        """Log the mean KL per response and its weight, and let the controller choose the next step's weight."""
        moments = batch.masked_moments("ppo_kl", "response_mask")
        kl = moments.mean * moments.count / len(batch) if moments.count else 0.0
        run.log({"ppo/kl": kl, "ppo/kl_coef": self.kl_coef})
        if self.config.kl_controller == "adaptive":
            self.kl_coef = adapt_kl_coef(self.kl_coef, kl, self.config.kl_target, gain=self.config.kl_gain)


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register PPO."""
    return AlgorithmSpec("ppo", PPO)
