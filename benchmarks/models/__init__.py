"""The four models of the benchmark matrices, cut to fit a two-core machine; each says how.

``make(name)`` gives the model with its data; ``CUTS[name]`` is the cut in words, printed with every figure.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.models import bert, inception, resnet, vgg
from benchmarks.models.emulated import Emulated

NAMES = ("resnet50", "vgg16", "inceptionv3", "bert-base")
CUTS = {"resnet50": resnet.CUT, "vgg16": vgg.CUT, "inceptionv3": inception.CUT, "bert-base": bert.CUT}


@dataclass
class Task:
    """A model, one batch of fixed noise for it, and the labels; the loss is cross entropy."""

    name: str
    model: nn.Module
    inputs: Tensor
    labels: Tensor

    def loss(self, model: nn.Module) -> Tensor:
        """Of ``model``, which is this task's, wrapped or not."""
        return nn.functional.cross_entropy(model(self.inputs), self.labels)


def make(name: str, emulated: bool = False) -> Task:
    """A task with the same initial weights on every rank, and every rank's own batch (by torch's own seed).

    ``emulated``: the model's layers sleep instead of computing (:mod:`benchmarks.models.emulated`).

    Raises:
        ValueError: no such model.
    """
    if name not in NAMES:
        raise ValueError(f"no model {name!r}: there are {', '.join(NAMES)}")
    module = {"resnet50": resnet, "vgg16": vgg, "inceptionv3": inception, "bert-base": bert}[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = module.build()
    inputs, classes = module.batch()
    labels = torch.randint(classes, (len(inputs),))
    return Task(name, Emulated(model, inputs, classes) if emulated else model, inputs, labels)


def gradient_mb(model: nn.Module) -> float:
    """Bytes of all gradients together, MB (10^6)."""
    sizes: list[int] = [p.numel() * p.element_size() for p in model.parameters() if p.requires_grad]
    return sum(sizes) / 1e6
