"""Online DPO: direct preference optimisation (arXiv 2305.18290) on pairs of the current policy's samples (2402.04792).

For each prompt, n responses are sampled from the current policy. Two responses are compared by their scores, or by a
judge that reads both; unless they tie, the better is chosen (w) and the other rejected (l). Let h be the log-ratio of a
whole response to the reference, summed over its tokens with response_mask 1, and D the difference within a pair,

    h(y) = sum_t log pi(y_t) - log pi_ref(y_t)                D = h(y_w) - h(y_l)

the policy minimises the mean over all pairs of the mini-batch of (1 - label_smoothing) f(D) + label_smoothing f(-D),

    sigmoid   f(D) = -log sigmoid(beta D)                     DPO, arXiv 2305.18290, equation 7
    ipo       f(D) = (D - 1 / (2 beta))^2                     IPO, arXiv 2310.12036, equation 17
    hinge     f(D) = max(0, 1 - beta D)                       SLiC-HF, arXiv 2305.10425, on log-ratios

where label_smoothing is the assumed share of wrong preferences (`robust`: of sigmoid's f the unbiased estimate for that
share, arXiv 2403.00409; see rlcore.ops.pair_loss). beta h(y) is the response's implicit reward; the metric
`margin` is the mean of beta D, and `accuracy` the share of pairs with D > 0 (a pair with D = 0 counts half).

Pairs of a prompt: `all` compares every two of its responses, and `random` one random two. `best_worst` pairs the
response that wins most comparisons of `all` with the one that wins fewest (a tie is half a win, a failed comparison is
none); by scores these are the highest and the lowest. The reference is frozen, or copied from the policy every
reference_every steps, or after each step moved towards the policy by the share reference_share of the difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import torch
from torch import Tensor

from rlcore import Algorithm, AlgorithmSpec, Config, ConfigError, DataError, DataProto, Role, Run, hookimpl, option
from rlcore.ops import (
    Outputs,
    Term,
    episodes,
    group_index,
    masked_sum,
    metric,
    needs,
    noise_key,
    one_row_each,
    preference_terms,
    uniform_noise,
)

RLCORE_API = 1


@dataclass(frozen=True)
class OnlineDPOConfig:
    """Settings of online DPO."""

    group_size: int = option(2, "responses per prompt", min=2)
    pairs: Literal["best_worst", "all", "random"] = option(
        "best_worst", "which two of a prompt's responses form a pair"
    )
    judge: Literal["scores", "pairwise"] = option(
        "scores", "source of preferences: the reward's scores, or the judge at judge.url, which reads both responses"
    )
    loss: Literal["sigmoid", "ipo", "hinge", "robust"] = option("sigmoid", "loss of a pair")
    beta: float = option(0.1, "strength of the pull to the reference", min=1e-6)
    label_smoothing: float = option(0.0, "assumed share of wrong preferences, below 0.5", min=0.0, max=0.5)
    reference: Literal["frozen", "copied", "averaged"] = option(
        "frozen", "the reference: the initial model, a copy of the policy every few steps, or its moving average"
    )
    reference_every: int = option(10, "steps between copies of the policy (reference=copied)", min=1)
    reference_share: float = option(
        0.01, "share of the policy in the moving average at each step (reference=averaged)", min=0.0, max=1.0
    )
    epochs: int = option(1, "passes over each step's pairs", min=1)
    mini_batches: int = option(1, "optimizer steps per pass", min=1)


@needs("log_probs", "entropy")
def online_dpo_loss(out: Outputs, batch: Mapping[str, Any], config: OnlineDPOConfig) -> dict[str, Term]:
    """Return the terms of the loss in the module's docstring.

    Rows with equal `dpo_pair` form a pair, in any order; `dpo_side` is 1 for the chosen and -1 for the rejected row.
    """
    mask = batch["response_mask"]
    terms = preference_terms(
        out.log_probs,
        batch,
        batch["dpo_pair"],
        batch["dpo_side"],
        kind=config.loss,
        beta=config.beta,
        label_smoothing=config.label_smoothing,
    )
    return {**terms, "entropy": metric(masked_sum(out.entropy, mask), mask.sum())}


@dataclass(frozen=True)
class Comparisons:
    """Comparisons of two rows: `preference` [comparisons] is 1: `first` wins, 0: `second`, 0.5: tie, NaN: no result."""

    first: Tensor
    second: Tensor
    preference: Tensor

    def best_against_worst(self, groups: Sequence[Sequence[int]]) -> Comparisons:
        """Return one comparison per group: the row with the highest share of wins against the one with the lowest.

        Left out are rows without a result in half of their comparisons, and groups with fewer than two other rows.
        Among equal shares the earlier row is taken; if all are equal, the comparison is a tie.
        """
        wins, results = torch.zeros(2, max(map(max, groups)) + 1)
        for rows, won in ((self.first, self.preference), (self.second, 1 - self.preference)):
            wins.index_add_(0, rows, won.nan_to_num())
            results.index_add_(0, rows, (~won.isnan()).float())
        share = wins / results
        heard = ([row for row in group if 2 * results[row] >= len(group) - 1] for group in groups)
        left = [rows for rows in heard if len(rows) > 1]
        first = torch.tensor([max(group, key=share.__getitem__) for group in left], dtype=torch.int64)
        second = torch.tensor([min(group, key=share.__getitem__) for group in left], dtype=torch.int64)
        return Comparisons(first, second, torch.where(share[first] > share[second], 1.0, 0.5))

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return the chosen and the rejected row of each comparison that has a winner."""
        decided = (self.preference != 0.5) & ~self.preference.isnan()
        first, second, first_wins = (each[decided] for each in (self.first, self.second, self.preference > 0.5))
        return torch.where(first_wins, first, second), torch.where(first_wins, second, first)


def random_twos(groups: Sequence[Sequence[int]], names: Sequence[int]) -> list[tuple[int, int]]:
    """Return two rows per group, uniformly drawn; a group's name, a key from `noise_key`, decides its draw."""
    numbers = uniform_noise(torch.tensor(names), 0, 1)[:, 0].tolist()
    twos = [list(combinations(rows, 2)) for rows in groups]
    return [two[int(number * len(two))] for two, number in zip(twos, numbers, strict=True)]


class OnlineDPO(Algorithm):
    """One step: sample, compare within each prompt, pair chosen with rejected, update the actor, move the reference."""

    config_class = OnlineDPOConfig
    config: OnlineDPOConfig
    compares_samples = True

    def __init__(self, config: OnlineDPOConfig) -> None:
        super().__init__(config)
        self.uses_reward = config.judge == "scores"

    def roles(self) -> Mapping[str, Role]:
        """Return the actor and the reference, which follows the actor unless it is frozen."""
        follows = None if self.config.reference == "frozen" else "actor"
        return {"actor": Role(trains=True, generates=True), "ref": Role(follows=follows)}

    def check(self, config: Config) -> None:
        """Raise ConfigError for settings that yield no pairs, or pairs without any information."""
        if self.config.judge == "pairwise":
            _check_judge(config)
        if self.config.label_smoothing == 0.5:
            raise ConfigError("algo.label_smoothing=0.5 treats every preference as a coin toss; set it below 0.5")
        size = self.config.group_size
        most = config.data.batch_size * (size * (size - 1) // 2 if self.config.pairs == "all" else 1)
        if self.config.mini_batches > most:
            raise ConfigError(
                f"algo.mini_batches is {self.config.mini_batches}, but a step has at most {most} pairs "
                f"(data.batch_size={config.data.batch_size}, algo.group_size={size}, algo.pairs={self.config.pairs}); "
                f"make it at most {most}"
            )

    def step(self, run: Run, prompts: DataProto) -> Mapping[str, Any]:
        """Run one step and return the update's metrics."""
        batch = run.actor.generate(prompts.repeat(self.config.group_size))
        batch = batch.union(run.reward(batch, keep_failed=not self.uses_reward))
        rows = torch.cat(self.choose(run, batch))
        distinct, place = rows.unique(return_inverse=True)
        responses = batch[distinct.tolist()]
        responses = responses.union(run.ref.log_probs(responses, name="ref_log_probs"))
        pairs = responses[place.tolist()]
        number = torch.arange(len(rows) // 2)
        pairs["dpo_pair"] = torch.cat([number, number])
        pairs["dpo_side"] = torch.cat([torch.ones(len(number)), -torch.ones(len(number))])
        metrics = run.actor.update(
            pairs,
            loss=online_dpo_loss,
            epochs=self.config.epochs,
            mini_batches=self.config.mini_batches,
            keep_together="dpo_pair",
        )
        if self.config.reference == "averaged":
            run.ref.follow(self.config.reference_share)
        elif self.config.reference == "copied" and run.step % self.config.reference_every == 0:
            run.ref.follow()
        return metrics

    def choose(self, run: Run, batch: DataProto) -> tuple[Tensor, Tensor]:
        """Return the chosen and the rejected row of each pair, int64 [pairs] each, and log the number of pairs."""
        uid = batch["uid"]
        group = group_index(uid)
        first = one_row_each(episodes(batch))[0]  # the row that stands for its episode
        groups = [first[group[first] == number].tolist() for number in range(int(group.max()) + 1)]
        groups = [rows for rows in groups if len(rows) > 1]  # of some prompts' episodes, all but one may have failed
        if not groups:
            run.log({"dpo/pairs": 0, "dpo/ties": 0, "dpo/usable_prompts": 0})
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        if self.config.pairs == "random":
            names = [noise_key("online_dpo", run.config.trainer.seed, run.step, str(uid[rows[0]])) for rows in groups]
            twos = random_twos(groups, names)
        else:
            twos = [two for rows in groups for two in combinations(rows, 2)]
        compared = self._compare(run, batch, [one for one, _ in twos], [other for _, other in twos])
        if self.config.pairs == "best_worst":
            compared = compared.best_against_worst(groups)
            run.log({"dpo/dropped": len(groups) - len(compared.first)})
        chosen, rejected = compared.pairs()
        usable = len(group[chosen].unique()) / len(groups)
        ties = len(compared.first) - len(chosen)
        run.log({"dpo/pairs": len(chosen), "dpo/ties": ties, "dpo/usable_prompts": usable})
        return chosen, rejected

    def _compare(self, run: Run, batch: DataProto, first: list[int], second: list[int]) -> Comparisons:
        if self.config.judge == "pairwise":
            judged = run.group("judge").compare(batch[first], batch[second])
            undecided = judged["judge_error"] & (judged["preference"] == 0.5)  # judge.on_error may have decided it
            preference = judged["preference"].masked_fill(undecided, math.nan)
        else:
            scores = batch["scores"]
            if not scores.isfinite().all():
                rows = (~scores.isfinite()).nonzero()[:, 0].tolist()
                raise DataError(f"scores of rows {rows} are {scores[rows].tolist()}; a comparison needs finite scores")
            preference = 0.5 + 0.5 * (scores[first] - scores[second]).sign()
            preference[batch["reward_error"][first] | batch["reward_error"][second]] = math.nan
            responses = batch["responses"].to_list()
            same = [torch.equal(responses[one], responses[other]) for one, other in zip(first, second, strict=True)]
            preference[torch.tensor(same, dtype=torch.bool)] = 0.5  # no response is better than itself
        return Comparisons(torch.tensor(first), torch.tensor(second), preference)


def _check_judge(config: Config) -> None:
    if "judge" not in config.sections:
        raise ConfigError(
            "algo.judge=pairwise needs the judge plugin, which is not installed: pip install rlcore-plugin-judge (in a "
            "checkout: pip install -e plugins/rlcore-plugin-judge), or set algo.judge=scores"
        )
    if config.value("judge.url") is None:
        raise ConfigError("algo.judge=pairwise asks a judge: set judge.url and judge.model, or algo.judge=scores")


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register online DPO."""
    return AlgorithmSpec("online_dpo", OnlineDPO)
