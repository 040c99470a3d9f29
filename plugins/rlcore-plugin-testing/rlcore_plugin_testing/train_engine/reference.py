"""Training written out: one row at a time on the plain Hugging Face model, torch's autograd and torch's AdamW."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rlcore import DataProto, RoleKind
from rlcore.config import EngineConfig
from rlcore.engine import UpdateItem
from rlcore.engine.update.loss_accumulator import LossBatch
from rlcore.ops import Outputs

Weights = dict[str, Tensor]
"""Whole fp32 parameters by their Hugging Face names, tied ones once."""


class Reference:
    """A model and its optimizer. It shares no code with engines and nothing of the Updater."""

    def __init__(self, folder: Path, kind: RoleKind, config: EngineConfig, temperature: float) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        auto = AutoModelForCausalLM if kind.is_language_model else AutoModelForSequenceClassification
        self.hf = auto.from_pretrained(folder, dtype=torch.float32).eval()
        self.kind, self.temperature, self.clip = kind, temperature, config.clip_grad
        self.optimizer = torch.optim.AdamW(
            self.hf.parameters(),
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    def outputs(self, prompt: Tensor, response: Tensor) -> dict[str, Tensor]:
        """Return all that the model gives for one row: [1, tokens, ...], a reward model's score [1]."""
        ids = torch.cat([prompt, response])[None]
        if self.kind.is_language_model:
            logits = self.hf(input_ids=ids).logits[:, len(prompt) - 1 : -1] / self.temperature
            log_p = logits.log_softmax(-1)
            chosen = log_p.gather(-1, response[None, :, None]).squeeze(-1)
            return {"log_probs": chosen, "entropy": -(log_p.exp() * log_p).sum(-1), "logits": logits}
        numbers = self.hf.score(self.hf.base_model(input_ids=ids).last_hidden_state).squeeze(-1)
        return {"scores": numbers[:, -1]} if self.kind.scores_rows else {"values": numbers[:, len(prompt) - 1 : -1]}

    def terms(self, batch: DataProto, item: UpdateItem) -> dict[str, tuple[Tensor, float, float]]:
        """Return each term's sum over rows, its sum of counts, and its weight in the objective."""
        found: dict[str, tuple[Tensor, float, float]] = {}
        for row in range(len(batch)):
            one = batch[row : row + 1]
            out = Outputs(self.outputs(one["prompts"][0], one["responses"][0]))
            columns = LossBatch(one, torch.device("cpu"), constants=item.constants)
            for name, term in item.loss(out, columns, item.config).items():
                total, count, _ = found.get(name, (torch.zeros(()), 0.0, 0.0))
                found[name] = (total + term.total, count + float(term.count), term.weight or 0.0)
        return found

    def step(self, items: Sequence[UpdateItem], lr: float, mini_batch: int = 0) -> dict[str, float]:
        """Take one optimizer step on a mini-batch of the items; return the loss terms' means and the gradient norm."""
        self.optimizer.zero_grad()
        metrics: dict[str, float] = {}
        loss = torch.zeros(())
        for item in items:
            for name, (total, count, weight) in self.terms(item.mini_batch(mini_batch), item).items():
                metrics[f"loss/{name}"] = float(total.detach()) / count
                loss = loss + total * weight * item.weight / count
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in self.hf.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        if 0 < self.clip < norm:
            for gradient in gradients:
                gradient.mul_(self.clip / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return {**metrics, "train/grad_norm": norm}

    @property
    def weights(self) -> Weights:
        """The parameters, copied."""
        return {name: parameter.detach().clone() for name, parameter in self.hf.named_parameters()}


def difference(got: Mapping[str, Tensor], want: Weights, start: Weights) -> tuple[float, str]:
    """Return the largest difference of a parameter, relative to the norm of its change from `start`, and its name.

    A change below a ten-thousandth of the whole model's counts as that much: rounding dominates it.
    """
    changes = {name: float((tensor - start[name]).norm()) for name, tensor in want.items()}
    least = 1e-4 * math.sqrt(sum(change**2 for change in changes.values()))
    off = {name: float((got[name].cpu() - want[name]).norm()) / max(changes[name], least, 1e-30) for name in want}
    worst = max(off, key=lambda name: math.inf if math.isnan(off[name]) else off[name])
    return off[worst], worst
