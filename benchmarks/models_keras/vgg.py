"""VGG16 (Simonyan and Zisserman, ICLR 2015): one fully connected layer holds most of the bytes, and is ready early."""

from __future__ import annotations

from typing import Any

import numpy as np
from tensorflow import keras

IMAGE, BATCH, CLASSES, HIDDEN = 112, 12, 1000, 512
CHANNELS = ((8, 2), (16, 2), (32, 3), (64, 3), (64, 3))


def build() -> Any:
    """The network: thirteen convolutions in five stages, three fully connected layers. No dropout: runs are alike."""
    layers: list[Any] = [keras.Input((IMAGE, IMAGE, 3))]
    for stage, (width, convolutions) in enumerate(CHANNELS):
        layers += [keras.layers.MaxPooling2D(2)] * bool(stage)
        for _ in range(convolutions):
            layers.append(keras.layers.Conv2D(width, 3, padding="same", activation="relu"))
    layers += [
        keras.layers.Flatten(),
        keras.layers.Dense(HIDDEN, activation="relu"),
        keras.layers.Dense(HIDDEN, activation="relu"),
        keras.layers.Dense(CLASSES),
    ]
    return keras.Sequential(layers, name="vgg16")


def batch(noise: np.random.Generator) -> tuple[np.ndarray[Any, Any], int]:
    """Images [batch, side, side, 3] and the number of classes."""
    return noise.standard_normal((BATCH, IMAGE, IMAGE, 3), dtype=np.float32), CLASSES
