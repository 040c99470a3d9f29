"""Sampling written out: the distributions of a row's tokens, by the plain Hugging Face model in one forward."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.engine import Finished, ModelConfig, Request, Sampling, end_tokens, model_path

Weights = dict[str, Tensor]
"""Whole fp32 parameters by their Hugging Face names, tied ones once."""


class Reference:
    """A model whose weights are given, as those of an engine are. It shares no code with engines."""

    def __init__(self, model: ModelConfig) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = model_path(model.path)
        self.hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.end_ids = end_tokens(model, self.tokenizer)
        config = self.hf.config.get_text_config()
        self.vocab, self.longest = int(config.vocab_size), int(config.max_position_embeddings)

    def draw_weights(self, seed: int) -> Weights:
        """Return weights that no other seed gives. The distributions are flat, so that samples differ and some end."""
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for name, parameter in self.hf.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            weights[name] = (0.5 + 0.1 * noise) if "norm" in name and "weight" in name else 0.1 * noise
        return weights

    def load(self, weights: Weights) -> None:
        """Take over weights."""
        with torch.no_grad():
            for name, parameter in self.hf.named_parameters():
                parameter.copy_(weights[name])

    @torch.no_grad()
    def log_probs(self, request: Request, row: Finished) -> Tensor:
        """Return fp32 [tokens, vocab]: the log-probs from which each token of a response is drawn."""
        ids = torch.tensor([[*request.prompt, *row.tokens]])
        logits = self.hf(input_ids=ids).logits[0, len(request.prompt) - 1 : -1].float()
        return torch.stack([self._cut(at, number, request.sampling) for number, at in enumerate(logits)])

    def _cut(self, logits: Tensor, number: int, sampling: Sampling) -> Tensor:
        if number < sampling.min_tokens:
            logits[self.end_ids] = -torch.inf
        probs, order = (logits / (sampling.temperature or 1.0)).softmax(-1).sort(descending=True)
        kept = sampling.top_k or len(probs)
        if sampling.top_p < 1:
            probs = probs / probs[:kept].sum()
            kept = min(kept, int((probs.cumsum(0) - probs < sampling.top_p).sum()))
        cut = torch.full_like(logits, -torch.inf)
        cut[order[:kept]] = (probs[:kept] / probs[:kept].sum()).log()
        return cut
