"""InceptionV3 (Szegedy et al., CVPR 2016): branches, so that gradients of one block become ready close together."""

from __future__ import annotations

from typing import Any

import numpy as np
from tensorflow import keras

IMAGE, BATCH, CLASSES, CUT_BY = 139, 12, 1000, 4
Kernel = int | tuple[int, int]


def _conv(x: Any, width: int, kernel: Kernel, stride: int = 1, pad: bool = True) -> Any:
    """Convolution, batch norm, ReLU. ``width`` is the original's, cut here."""
    padding = "same" if pad else "valid"
    x = keras.layers.Conv2D(width // CUT_BY, kernel, strides=stride, padding=padding, use_bias=False)(x)
    return keras.layers.ReLU()(keras.layers.BatchNormalization()(x))


def _chain(x: Any, *layers: tuple[int, Kernel]) -> Any:
    for width, kernel in layers:
        x = _conv(x, width, kernel)
    return x


def _pooled(x: Any, width: int) -> Any:
    return _conv(keras.layers.AveragePooling2D(3, strides=1, padding="same")(x), width, 1)


def _joined(*branches: Any) -> Any:
    return keras.layers.Concatenate()(list(branches))


def _block_a(x: Any, pool: int) -> Any:
    return _joined(
        _chain(x, (64, 1)),
        _chain(x, (48, 1), (64, 5)),
        _chain(x, (64, 1), (96, 3), (96, 3)),
        _pooled(x, pool),
    )


def _block_b(x: Any) -> Any:
    narrow = _conv(_chain(x, (64, 1), (96, 3)), 96, 3, 2, pad=False)
    return _joined(_conv(x, 384, 3, 2, pad=False), narrow, keras.layers.MaxPooling2D(3, strides=2)(x))


def _block_c(x: Any, width: int) -> Any:
    across, down = (1, 7), (7, 1)
    return _joined(
        _chain(x, (192, 1)),
        _chain(x, (width, 1), (width, across), (192, down)),
        _chain(x, (width, 1), (width, down), (width, across), (width, down), (192, across)),
        _pooled(x, 192),
    )


def _block_d(x: Any) -> Any:
    left = _conv(_chain(x, (192, 1)), 320, 3, 2, pad=False)
    right = _conv(_chain(x, (192, 1), (192, (1, 7)), (192, (7, 1))), 192, 3, 2, pad=False)
    return _joined(left, right, keras.layers.MaxPooling2D(3, strides=2)(x))


def _block_e(x: Any) -> Any:
    def split(y: Any) -> Any:
        return _joined(_conv(y, 384, (1, 3)), _conv(y, 384, (3, 1)))

    return _joined(
        _chain(x, (320, 1)),
        split(_chain(x, (384, 1))),
        split(_chain(x, (448, 1), (384, 3))),
        _pooled(x, 192),
    )


def build() -> Any:
    """The network: stem, blocks A, A, A, B, C, C, C, C, D, E, E, classifier."""
    images = keras.Input((IMAGE, IMAGE, 3))
    x = _conv(_conv(_conv(images, 32, 3, 2, pad=False), 32, 3, pad=False), 64, 3)
    x = keras.layers.MaxPooling2D(3, strides=2)(x)
    x = keras.layers.MaxPooling2D(3, strides=2)(_conv(_conv(x, 80, 1), 192, 3, pad=False))
    for pool in (32, 64, 64):
        x = _block_a(x, pool)
    x = _block_b(x)
    for width in (128, 160, 160, 192):
        x = _block_c(x, width)
    x = _block_e(_block_e(_block_d(x)))
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, keras.layers.Dense(CLASSES)(x), name="inceptionv3")


def batch(noise: np.random.Generator) -> tuple[np.ndarray[Any, Any], int]:
    """Images [batch, side, side, 3] and the number of classes."""
    return noise.standard_normal((BATCH, IMAGE, IMAGE, 3), dtype=np.float32), CLASSES
