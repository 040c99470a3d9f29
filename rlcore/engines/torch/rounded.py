"""Weights of linear layers, rounded to bf16 once for all micro-batches of a call.

Autocast rounds the fp32 weights in every forward. Here the layers get rounded copies for the length of a call, and the
copies' gradients go to the fp32 weights after each micro-batch. All numbers are those of autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def rounded_weights(layers: Sequence[nn.Linear], dtype: torch.dtype) -> Iterator[Callable[[], None]]:
    """Give `layers` copies of their weights and biases in `dtype`, and afterwards their own again.

    Yields a function that adds the copies' gradients to those of the layers' own parameters; it is called after each
    backward, since sums in `dtype` would lose small terms.
    """
    places = [
        (layer, name, own)
        for layer in layers
        for name, own in layer.named_parameters(recurse=False)
        if own.dtype is not dtype
    ]
    masters: list[Tensor] = list(dict.fromkeys(own for _, _, own in places))
    values = [torch.empty_like(own, dtype=dtype, requires_grad=False) for own in masters]
    if masters:
        with torch.no_grad():
            torch._foreach_copy_(values, masters)
    copies = {
        own: nn.Parameter(rounded, requires_grad=own.requires_grad)
        for own, rounded in zip(masters, values, strict=True)
    }

    @torch.no_grad()
    def collect() -> None:
        sums: list[Tensor] = []
        terms: list[Tensor] = []
        for own, copy in copies.items():
            found, copy.grad = copy.grad, None
            if found is None:
                continue
            if own.grad is None:
                own.grad = found.to(own.dtype)
            else:
                sums.append(own.grad)
                terms.append(found)
        if sums:
            torch._foreach_add_(sums, terms)

    for layer, name, own in places:
        layer._parameters[name] = copies[own]
    try:
        yield collect
    finally:
        for layer, name, own in places:
            layer._parameters[name] = own
