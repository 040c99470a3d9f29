"""LoRA adapters (arXiv 2106.09685): a linear layer with weight W computes W x + scale * B A x; only A and B train.

A is [rank, inputs] and starts as torch draws a linear layer's weight. B is [outputs, rank] and starts at 0, so that a
new adapter changes nothing. Sampling in other processes, and evaluations, use the merged weights W + scale * B A.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlcore.adapter_folder import AdapterFolder
from rlcore.config import ALL_LINEAR, LoraConfig
from rlcore.errors import ConfigError

PARTS = ("lora_a", "lora_b")
"""The parameters of an adapted layer that train, besides `weight` and `bias`, which are the base model's."""


class LoraLinear(nn.Linear):
    """A linear layer with an adapter, on the weight and bias of the given layer.

    `dropout` of the adapter's input, in training only. `start`: A and B with which the adapter started, if it started
    from a folder; else it started from nothing.
    """

    start_a: Tensor | None
    start_b: Tensor | None

    def __init__(self, linear: nn.Linear, rank: int, scale: float, dropout: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.rank, self.scale, self.dropout = rank, scale, dropout
        device = linear.weight.device
        self.lora_a = nn.Parameter(torch.zeros(rank, linear.in_features, device=device))
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, rank, device=device))
        self.register_buffer("start_a", None, persistent=False)
        self.register_buffer("start_b", None, persistent=False)
        self.as_started = False
        self.train(linear.training)

    def draw(self, seed: int) -> None:
        """Set A to random numbers of a seed, as torch does for a linear layer, and B to 0."""
        bound = 1 / math.sqrt(self.in_features)
        drawn = torch.empty(self.lora_a.shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            self.lora_a.copy_(drawn)
            self.lora_b.zero_()

    @torch.no_grad()
    def start_from(self, a: Tensor, b: Tensor) -> None:
        """Set A and B, and keep copies of them as the start."""
        self.lora_a.copy_(a)
        self.lora_b.copy_(b)
        self.start_a, self.start_b = self.lora_a.detach().clone(), self.lora_b.detach().clone()

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's outputs, with the adapter as it is, or as it started."""
        output = super().forward(input)
        a, b = (self.start_a, self.start_b) if self.as_started else (self.lora_a, self.lora_b)
        if a is None or b is None:
            return output
        into = F.dropout(input, self.dropout, self.training) if self.dropout else input
        return output + F.linear(F.linear(into, a), b) * self.scale


def adapted(hf: nn.Module) -> dict[str, LoraLinear]:
    """Return the adapted layers of a module by name."""
    return {name: module for name, module in hf.named_modules() if isinstance(module, LoraLinear)}


def add_adapters(hf: Any, lora: LoraConfig, start: AdapterFolder | None, seed: int) -> dict[str, LoraLinear]:
    """Replace the linear layers of a Hugging Face model that `lora` names by adapted ones, in place; return them.

    `start`: the folder of `lora.path`, whose rank, scale and layers hold. Otherwise A is drawn from `seed` and the
    layer's name, so it depends on no layout. Raises ConfigError for names that no layer has.
    """
    rank, scale = (lora.rank, lora.scale) if start is None else (start.rank, start.scale)
    weights = {} if start is None else start.read()
    targets = lora.targets if start is None else start.targets
    for name in target_layers(hf, targets):
        parent, _, child = name.rpartition(".")
        layer = LoraLinear(hf.get_submodule(name), rank, scale, lora.dropout)
        setattr(hf.get_submodule(parent), child, layer)
        if start is None:
            layer.draw(zlib.crc32(name.encode()) + seed)
        else:
            layer.start_from(
                *(start.tensor(weights, f"{name}.{part}", layer.get_parameter(part).shape) for part in PARTS)
            )
    if start is not None:
        # A critic may start from a policy's adapter, with a new head.
        heads = _trained_heads(hf) if start.has_score else {}
        start.check_read(weights, heads, adapted(hf))
        for name, head in heads.items():
            head.data.copy_(start.tensor(weights, name, head.shape))
    return adapted(hf)


def merge_adapter(hf: Any, start: AdapterFolder) -> None:
    """Add the adapter of a folder to the weights of a Hugging Face model, in place."""
    layers = add_adapters(hf, LoraConfig(path=str(start.path)), start, seed=0)
    for name, layer in layers.items():
        plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        plain.weight, plain.bias = layer.weight, layer.bias
        plain.weight.data = merged_weight(layer.weight, layer.lora_a, layer.lora_b, layer.scale).to(layer.weight.dtype)
        plain.train(layer.training)
        parent, _, child = name.rpartition(".")
        setattr(hf.get_submodule(parent), child, plain)


def target_layers(hf: Any, targets: str | list[str]) -> list[str]:
    """Return the names of the layers to adapt: all linear ones but the head, or those that end with a given name.

    Raises ConfigError for a name that no linear layer has.
    """
    heads = {id(head) for head in (hf.get_output_embeddings(), getattr(hf, "score", None)) if head is not None}
    linear = [name for name, each in hf.named_modules() if type(each) is nn.Linear and id(each) not in heads]
    kinds = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    if not linear:
        raise ConfigError(
            f"model.lora: {type(hf).__name__} has no torch.nn.Linear but its head, so there is nothing to adapt; leave "
            "out model.lora"
        )
    if targets == ALL_LINEAR:
        return linear
    for target in targets:
        if not any(_is_named(name, target) for name in linear):
            raise ConfigError(
                f"model.lora.targets names {target!r}, which no linear layer of {type(hf).__name__} has; it has {kinds}"
            )
    return [name for name in linear if any(_is_named(name, target) for target in targets)]


def _is_named(layer: str, target: str) -> bool:
    return layer == target or layer.endswith(f".{target}")


def _trained_heads(hf: Any) -> dict[str, nn.Parameter]:
    """Return the parameters that train whole beside adapters, by name: the head of a critic or reward model."""
    head = getattr(hf, "score", None)
    return {} if head is None else {f"score.{name}": each for name, each in head.named_parameters()}


def train_adapters_only(hf: Any) -> None:
    """Let adapters, and the head of a critic or reward model, have gradients, and nothing else."""
    hf.requires_grad_(False)
    for layer in adapted(hf).values():
        for part in PARTS:
            layer.get_parameter(part).requires_grad_(True)
    for parameter in _trained_heads(hf).values():
        parameter.requires_grad_(True)


@contextmanager
def as_started(layers: Iterable[LoraLinear]) -> Iterator[None]:
    """Meanwhile the layers compute as they started: without an adapter, or with the one of `model.lora.path`."""
    layers = list(layers)
    for layer in layers:
        layer.as_started = True
    try:
        yield
    finally:
        for layer in layers:
            layer.as_started = False


@contextmanager
def with_dropout(layers: Iterable[LoraLinear]) -> Iterator[None]:
    """Meanwhile the adapters' dropout is on."""
    layers = [layer for layer in layers if layer.dropout]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return W + scale * B A in fp32 [outputs, inputs]: a new tensor, so the base stays as it is."""
    return weight.detach().float() + (b.detach().float() @ a.detach().float()) * scale


def merged(weights: Iterable[tuple[str, Tensor]], scales: Mapping[str, float]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights with the adapters of the layers in `scales` merged into them, in fp32, and without A and B.

    A tensor of an adapted layer has to stay valid until the layer's last one. Those of other layers pass as they are.
    """
    kept: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        layer, _, kind = name.rpartition(".")
        if layer not in scales or kind not in ("weight", *PARTS):
            yield name, tensor
            continue
        parts = kept.setdefault(layer, {})
        parts[kind] = tensor
        if len(parts) == 1 + len(PARTS):
            del kept[layer]
            yield f"{layer}.weight", merged_weight(parts["weight"], parts["lora_a"], parts["lora_b"], scales[layer])


def effective_weights(hf: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights with which a module computes, by name: its parameters, with adapters merged into them."""
    return merged(hf.named_parameters(), {name: layer.scale for name, layer in adapted(hf).items()})


def is_part(name: str) -> bool:
    """Whether a parameter is A or B of an adapter."""
    return name.rpartition(".")[2] in PARTS
