"""The four models of the matrices in Keras (2 or 3, over TensorFlow), cut as those of :mod:`benchmarks.models` are.

Parameters are of the same number of bytes, within a few per cent; images are channels-last. The package itself imports
no framework: who only reports a figure needs no Keras.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np

#: What each model is cut to, in words, printed with every figure.
CUTS = {
    "resnet50": (
        "ResNet50 in Keras with all 50 layers: width 1/4 (16 of 64 channels at the stem), 96x96 images, batch 20"
    ),
    "vgg16": (
        "VGG16 in Keras with all 16 layers: width 1/8 (8 of 64 channels at the first layer, 512 of 4096 in the fully "
        "connected ones), 112x112 images without the last pooling, so that the last features are the original's 7x7, "
        "batch 12"
    ),
    "inceptionv3": (
        "InceptionV3 in Keras with all 11 blocks, without the auxiliary classifier and dropout: width 1/4 (8 of 32 "
        "channels at the stem), 139x139 images, batch 12"
    ),
    "bert-base": (
        "BERT-Base in Keras with 6 of 12 blocks, pooler and classifier: width 1/4 (192 of 768, heads of 64 as in the "
        "original), vocabulary 1/5 (6144 of 30522), sequences of 64, batch 8, the words' gradient dense"
    ),
}
_MODULES = {"resnet50": "resnet", "vgg16": "vgg", "inceptionv3": "inception", "bert-base": "bert"}
NAMES = tuple(_MODULES)


@dataclass
class Task:
    """A model that gives logits, one batch of fixed noise for it, and the labels; the loss is cross entropy."""

    name: str
    model: Any
    inputs: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any]


def make(name: str, seed: int) -> Task:
    """A task with the same initial weights everywhere, and a batch of its own for every ``seed``.

    Raises:
        ValueError: no such model.
    """
    if name not in NAMES:
        raise ValueError(f"no model {name!r}: there are {', '.join(NAMES)}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    from tensorflow import keras

    keras.utils.set_random_seed(0)
    model = module.build()
    noise = np.random.default_rng(seed)
    inputs, classes = module.batch(noise)
    return Task(name, model, inputs, noise.integers(classes, size=len(inputs), dtype=np.int32))


def gradient_bytes(model: Any) -> list[int]:
    """Bytes of every gradient, in the model's order of variables."""
    return [int(variable.numpy().nbytes) for variable in model.trainable_variables]
