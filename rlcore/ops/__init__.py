"""Pure torch: log-probs, KL, advantages, importance weights, masked sums, keyed noise, and the terms of a loss."""

from rlcore.ops.advantages import (
    Columns,
    episodes,
    gae,
    group_advantages,
    group_index,
    group_means,
    leave_one_out,
    one_row_each,
)
from rlcore.ops.importance import Correction, importance_weights, sequence_ratio, train_rollout_logprob_diff
from rlcore.ops.kl import KLEstimator, adapt_kl_coef, kl_estimate
from rlcore.ops.logprobs import chunked_log_probs, token_log_probs
from rlcore.ops.loss import NEEDS, Loss, Need, Outputs, Term, clipped_surrogate, metric, needs, needs_of, objective
from rlcore.ops.masked import masked_mean, masked_sum
from rlcore.ops.noise import noise_key, uniform_noise
from rlcore.ops.policy import policy_terms
from rlcore.ops.preference import PairLoss, pair_loss, preference_terms
from rlcore.ops.ratio import LOG_RATIO_BOUND, bound_log_ratio, bounded_ratio

__all__ = [
    "LOG_RATIO_BOUND",
    "NEEDS",
    "Columns",
    "Correction",
    "KLEstimator",
    "Loss",
    "Need",
    "Outputs",
    "PairLoss",
    "Term",
    "adapt_kl_coef",
    "bound_log_ratio",
    "bounded_ratio",
    "chunked_log_probs",
    "clipped_surrogate",
    "episodes",
    "gae",
    "group_advantages",
    "group_index",
    "group_means",
    "importance_weights",
    "kl_estimate",
    "leave_one_out",
    "masked_mean",
    "masked_sum",
    "metric",
    "needs",
    "needs_of",
    "noise_key",
    "objective",
    "one_row_each",
    "pair_loss",
    "policy_terms",
    "preference_terms",
    "sequence_ratio",
    "token_log_probs",
    "train_rollout_logprob_diff",
    "uniform_noise",
]
