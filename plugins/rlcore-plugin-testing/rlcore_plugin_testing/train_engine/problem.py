"""The training problem of the suite: a small random model, rows to train on, and one loss for each kind of role."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlcore import CRITIC, POLICY, REWARD, DataProto, Ragged, RoleKind
from rlcore.assets import TINY
from rlcore.ops import Loss, Outputs, Term, masked_sum, needs, objective


def write_policy(folder: Path) -> None:
    """Write a random model with tied embeddings and biases, and the shipped model's tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as notices

    notices.disable_progress_bar()  # dozens of engines load this model
    small = {"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        _write(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY, **small)), TINY, folder)


def write_scorer(policy: Path, folder: Path) -> None:
    """Write a random model of the policy's architecture with a score head in place of its vocabulary."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = AutoConfig.from_pretrained(policy, num_labels=1)
        _write(AutoModelForSequenceClassification.from_config(config), policy, folder)


def _write(model: Any, tokenizer: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    with torch.no_grad():
        for parameter in model.parameters():  # biases start at zero and norms at one, where mistakes would not show
            parameter.add_(0.05 * torch.randn_like(parameter))
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    model.config.save_pretrained(folder)
    save_file(dict(model.named_parameters()), folder / "model.safetensors", metadata={"format": "pt"})


def rows(vocab: int, seed: int = 0, groups: int = 4, size: int = 3) -> DataProto:
    """Return `groups` * `size` rows of different lengths; some tokens are masked, and all tokens of one row.

    Further columns: `weight` fp32 [rows] and `target` (ragged fp32), which the losses read, `uid` and `sample_index`.
    """
    generator = torch.Generator().manual_seed(seed)

    def tokens(most: int) -> Tensor:
        length = int(torch.randint(1, most, (), generator=generator))
        return torch.randint(3, vocab, (length,), generator=generator)

    prompts = [prompt for prompt in (tokens(7) for _ in range(groups)) for _ in range(size)]
    responses = Ragged.from_list([tokens(12) for _ in prompts])
    mask = responses.with_values((torch.rand(len(responses.values), generator=generator) > 0.2).long())
    if len(prompts) > 1:
        mask[1].zero_()
    return DataProto.from_single_dict(
        {
            "prompts": Ragged.from_list(prompts),
            "responses": responses,
            "response_mask": mask,
            "weight": torch.randn(len(prompts), generator=generator),
            "target": responses.with_values(torch.randn(len(responses.values), generator=generator)),
            "uid": [f"0:{row // size}" for row in range(len(prompts))],
            "sample_index": torch.arange(size).repeat(groups),
        }
    )


@needs("log_probs", "entropy", "logits")
def policy_loss(out: Outputs, batch: Mapping[str, Any], config: Any) -> dict[str, Term]:
    """Return three objectives, with a count of tokens or of rows; together they use all that a policy gives."""
    mask = batch["response_mask"]
    policy = -masked_sum(out.log_probs * batch["weight"][:, None], mask)
    squares = out.logits.logsumexp(-1).square()
    return {
        "policy": objective(policy, mask.sum()),
        "entropy": objective(masked_sum(out.entropy, mask), mask.sum(), -0.1),
        "logits": objective(masked_sum(squares, mask), len(mask), 0.01),
    }


@needs("values")
def value_loss(out: Outputs, batch: Mapping[str, Any], config: Any) -> dict[str, Term]:
    """Return the mean squared error of the values over tokens."""
    mask = batch["response_mask"]
    return {"value": objective(masked_sum((out.values - batch["target"]).square(), mask), mask.sum())}


@needs("scores")
def score_loss(out: Outputs, batch: Mapping[str, Any], config: Any) -> dict[str, Term]:
    """Return the mean squared error of the scores over rows."""
    return {"score": objective((out.scores - batch["weight"]).square().sum(), len(batch["weight"]))}


LOSSES: dict[RoleKind, Loss] = {POLICY: policy_loss, CRITIC: value_loss, REWARD: score_loss}
"""The loss of each kind of role."""


def nan_loss(out: Outputs, batch: Mapping[str, Any], config: Any) -> dict[str, Term]:
    """Return a loss that is NaN."""
    return {"nan": objective(out.log_probs.sum() * torch.nan, batch["response_mask"].sum())}


def steep_loss(out: Outputs, batch: Mapping[str, Any], config: Any) -> dict[str, Term]:
    """Return a finite loss with an infinite gradient: the square root at 0."""
    zero = (out.log_probs - out.log_probs.detach()).square().sqrt()
    return {"steep": objective(zero.sum(), batch["response_mask"].sum())}
