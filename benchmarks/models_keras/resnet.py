"""ResNet50 (He et al., CVPR 2016): 161 gradients, most of them small, batch norm after every convolution."""

from __future__ import annotations

from typing import Any

import numpy as np
from tensorflow import keras

WIDTH, IMAGE, BATCH, CLASSES = 16, 96, 20, 1000


def _conv(x: Any, width: int, kernel: int, stride: int = 1) -> Any:
    """Convolution and batch norm."""
    x = keras.layers.Conv2D(width, kernel, strides=stride, padding="same", use_bias=False)(x)
    return keras.layers.BatchNormalization()(x)


def _bottleneck(x: Any, width: int, stride: int) -> Any:
    """1x1, 3x3, 1x1 and a shortcut; ``width`` channels inside, 4 x ``width`` out."""
    shortcut = x
    if stride > 1 or x.shape[-1] != 4 * width:
        shortcut = _conv(x, 4 * width, 1, stride)
    x = keras.layers.ReLU()(_conv(x, width, 1))
    x = keras.layers.ReLU()(_conv(x, width, 3, stride))
    return keras.layers.ReLU()(keras.layers.Add()([_conv(x, 4 * width, 1), shortcut]))


def build() -> Any:
    """The network: stem, 3 + 4 + 6 + 3 bottlenecks, classifier."""
    images = keras.Input((IMAGE, IMAGE, 3))
    x = keras.layers.ReLU()(_conv(images, WIDTH, 7, 2))
    x = keras.layers.MaxPooling2D(3, strides=2, padding="same")(x)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            x = _bottleneck(x, WIDTH << stage, 2 if stage and not block else 1)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, keras.layers.Dense(CLASSES)(x), name="resnet50")


def batch(noise: np.random.Generator) -> tuple[np.ndarray[Any, Any], int]:
    """Images [batch, side, side, 3] and the number of classes."""
    return noise.standard_normal((BATCH, IMAGE, IMAGE, 3), dtype=np.float32), CLASSES
