"""Emulated compute: layers that sleep where a model computes, and produce real gradients of the real sizes.

For more hosts than cores: the CPU is as idle as beside a GPU, while every gradient goes over the real network. A layer
is one ``autograd.Function`` with the parameters of one layer of the model, in the order of its forward pass.

The table of times: forward and backward passes take :data:`FORWARD_S` and :data:`BACKWARD_S` in all (backward twice
forward: two products for each one of forward), shared out by the multiply-accumulates of each layer of the cut model,
counted in one pass over it. So it is the same on every rank, and needs no quiet machine. Sleeps shorter than
:data:`LEAST_S` are joined to the next layer's: a sleep is about 0.1 ms too long, whatever its length.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor, nn

FORWARD_S, BACKWARD_S, LEAST_S = 0.060, 0.120, 0.002


class _Layer(torch.autograd.Function):
    """Sleeps ``forward_s``, then in the backward pass ``backward_s``; gradients are small numbers of their shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float, *parameters: Tensor) -> Tensor:
        ctx.backward_s = backward_s
        ctx.save_for_backward(*parameters)
        if forward_s:
            time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.backward_s:
            time.sleep(ctx.backward_s)
        size = float(grads[0].mean())
        return grads[0], None, None, *(torch.full_like(p, size) for p in ctx.saved_tensors)


class Emulated(nn.Module):
    """``model`` with sleeping layers: the same parameters, under the same names.

    Args:
        model: what is emulated; a forward pass over ``inputs`` counts its multiply-accumulates.
        inputs: one batch for it.
        classes: logits per sample.
    """

    def __init__(self, model: nn.Module, inputs: Tensor, classes: int) -> None:
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)
        self._classes = classes
        layers = _layers(model, inputs)
        total = sum(work for _, work in layers)
        forward = _joined([FORWARD_S * work / total for _, work in layers])
        backward = _joined([BACKWARD_S * work / total for _, work in reversed(layers)])[::-1]
        self._table = [(own, f, b) for (own, _), f, b in zip(layers, forward, backward, strict=True)]

    def forward(self, inputs: Tensor) -> Tensor:
        x = torch.zeros(len(inputs), self._classes, requires_grad=True)
        for parameters, forward_s, backward_s in self._table:
            x = _Layer.apply(x, forward_s, backward_s, *parameters)
        return x


def _layers(model: nn.Module, inputs: Tensor) -> list[tuple[list[nn.Parameter], float]]:
    """Per layer with parameters of its own, in the order of the forward pass: these, multiply-accumulates."""
    found: dict[nn.Module, float] = {}

    def count(module: nn.Module, _: Any, out: Any) -> None:
        result = out[0] if isinstance(out, tuple) else out
        weight = max((p for p in module.parameters(recurse=False)), key=Tensor.numel)
        # one product per output and per weight that feeds it; norms, embeddings and biases one per output
        per_output = math.prod(weight.shape[1:]) if isinstance(module, nn.Conv2d | nn.Linear) else 1
        if isinstance(module, nn.MultiheadAttention):
            per_output = 3 * weight.shape[1]
        found[module] = found.get(module, 0.0) + float(result.numel() * per_output)

    owners = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    handles = [module.register_forward_hook(count) for module in owners]
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    # what has no call of its own (an attention's output projection) goes with the layer before it
    layers: dict[nn.Module, list[nn.Parameter]] = {module: [] for module in found}
    last = next(iter(found))
    for module in owners:
        last = module if module in found else last
        layers[last] += list(module.parameters(recurse=False))
    return [(layers[module], work) for module, work in found.items()]


def _joined(times_s: list[float]) -> list[float]:
    """Sleeps in order, those below :data:`LEAST_S` put off to a later layer; their sum is kept."""
    out, due = [], 0.0
    for index, time_s in enumerate(times_s):
        due += time_s
        now = due if due >= LEAST_S or index == len(times_s) - 1 else 0.0
        out.append(now)
        due -= now
    return out
