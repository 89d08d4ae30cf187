"""The four models of the matrices in Gluon (MXNet 1.9), cut as those of :mod:`benchmarks.models` are; hybridised.

Parameters are of the same number of bytes, within a few per cent. The package itself imports no framework: who only
reports a figure needs no MXNet.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np

#: What each model is cut to, in words, printed with every figure.
CUTS = {
    "resnet50": (
        "ResNet50 in Gluon (its ResNet v1: biases, and the stride in the 1x1 convolution) with all 50 layers: width "
        "1/4 (16 of 64 channels at the stem), 96x96 images, batch 20"
    ),
    "vgg16": (
        "VGG16 in Gluon with all 16 layers: width 1/8 (8 of 64 channels at the first layer, 512 of 4096 in the fully "
        "connected ones), 112x112 images without the last pooling, so that the last features are the original's 7x7, "
        "batch 12"
    ),
    "inceptionv3": (
        "InceptionV3 in Gluon with all 11 blocks, without the auxiliary classifier and dropout: width 1/4 (8 of 32 "
        "channels at the stem), 139x139 images, batch 12"
    ),
    "bert-base": (
        "BERT-Base in Gluon with 6 of 12 blocks, pooler and classifier: width 1/4 (192 of 768, heads of 64 as in the "
        "original), vocabulary 1/5 (6144 of 30522), sequences of 64, batch 8"
    ),
}
_MODULES = {"resnet50": "resnet", "vgg16": "vgg", "inceptionv3": "inception", "bert-base": "bert"}
NAMES = tuple(_MODULES)


@dataclass
class Task:
    """A network that gives logits, one batch of fixed noise for it, and the labels; the loss is cross entropy."""

    name: str
    net: Any
    inputs: Any
    labels: Any


def make(name: str, seed: int) -> Task:
    """A task with the same initial weights everywhere, and a batch of its own for every ``seed``.

    Raises:
        ValueError: no such model.
    """
    if name not in NAMES:
        raise ValueError(f"no model {name!r}: there are {', '.join(NAMES)}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    import mxnet as mx

    mx.random.seed(0)
    net = module.build()
    net.initialize(mx.init.Xavier())
    net.hybridize()
    noise = np.random.default_rng(seed)
    values, classes = module.batch(noise)
    inputs = mx.nd.array(values, dtype=values.dtype)
    labels = mx.nd.array(noise.integers(classes, size=len(values)), dtype="float32")
    # only now are there all parameters: shapes come from the input. In inference oneDNN would put the weights into a
    # layout of its own, which Horovod's broadcast can't read
    with mx.autograd.train_mode():
        net(inputs).wait_to_read()
    return Task(name, net, inputs, labels)


def gradient_bytes(net: Any) -> list[int]:
    """Bytes of every gradient, in the order of the parameters' names."""
    trained = [p for _, p in sorted(net.collect_params().items()) if p.grad_req != "null"]
    return [int(np.prod(p.shape)) * np.dtype(p.dtype).itemsize for p in trained]
