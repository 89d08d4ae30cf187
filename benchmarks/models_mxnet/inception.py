"""InceptionV3 (Szegedy et al., CVPR 2016): branches, so that gradients of one block become ready close together.

Gluon's own takes no width, so this one is built of its parts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mxnet.gluon import nn
from mxnet.gluon.contrib.nn import HybridConcurrent

IMAGE, BATCH, CLASSES, CUT_BY = 139, 12, 1000, 4
Kernel = int | tuple[int, int]


def _conv(width: int, kernel: Kernel, stride: int = 1, pad: bool = True) -> Any:
    """Convolution, batch norm, ReLU. ``width`` is the original's, cut here."""
    sides = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = tuple(side // 2 for side in sides) if pad else (0, 0)
    convolution = nn.Conv2D(width // CUT_BY, sides, strides=stride, padding=padding, use_bias=False)
    return _row(convolution, nn.BatchNorm(), nn.Activation("relu"))


def _row(*layers: Any) -> Any:
    """One after another."""
    row = nn.HybridSequential(prefix="")
    row.add(*layers)
    return row


def _branches(*branches: Any) -> Any:
    """All on the same input, their outputs side by side."""
    joined = HybridConcurrent(axis=1, prefix="")
    joined.add(*branches)
    return joined


def _chain(*layers: tuple[int, Kernel]) -> Any:
    return _row(*(_conv(width, kernel) for width, kernel in layers))


def _pooled(width: int) -> Any:
    return _row(nn.AvgPool2D(3, strides=1, padding=1), _conv(width, 1))


def _block_a(pool: int) -> Any:
    return _branches(
        _chain((64, 1)),
        _chain((48, 1), (64, 5)),
        _chain((64, 1), (96, 3), (96, 3)),
        _pooled(pool),
    )


def _block_b() -> Any:
    narrow = _row(_conv(64, 1), _conv(96, 3), _conv(96, 3, 2, pad=False))
    return _branches(_conv(384, 3, 2, pad=False), narrow, nn.MaxPool2D(3, strides=2))


def _block_c(width: int) -> Any:
    across, down = (1, 7), (7, 1)
    return _branches(
        _chain((192, 1)),
        _chain((width, 1), (width, across), (192, down)),
        _chain((width, 1), (width, down), (width, across), (width, down), (192, across)),
        _pooled(192),
    )


def _block_d() -> Any:
    left = _row(_conv(192, 1), _conv(320, 3, 2, pad=False))
    right = _row(_chain((192, 1), (192, (1, 7)), (192, (7, 1))), _conv(192, 3, 2, pad=False))
    return _branches(left, right, nn.MaxPool2D(3, strides=2))


def _block_e() -> Any:
    def split() -> Any:
        return _branches(_conv(384, (1, 3)), _conv(384, (3, 1)))

    return _branches(
        _chain((320, 1)),
        _row(_conv(384, 1), split()),
        _row(_chain((448, 1), (384, 3)), split()),
        _pooled(192),
    )


def build() -> Any:
    """The network: stem, blocks A, A, A, B, C, C, C, C, D, E, E, classifier."""
    net = nn.HybridSequential(prefix="inception_")
    with net.name_scope():
        net.add(_conv(32, 3, 2, pad=False), _conv(32, 3, pad=False), _conv(64, 3), nn.MaxPool2D(3, strides=2))
        net.add(_conv(80, 1), _conv(192, 3, pad=False), nn.MaxPool2D(3, strides=2))
        net.add(_block_a(32), _block_a(64), _block_a(64), _block_b())
        net.add(_block_c(128), _block_c(160), _block_c(160), _block_c(192), _block_d(), _block_e(), _block_e())
        net.add(nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(CLASSES))
    return net


def batch(noise: np.random.Generator) -> tuple[np.ndarray[Any, Any], int]:
    """Images [batch, 3, side, side] and the number of classes."""
    return noise.standard_normal((BATCH, 3, IMAGE, IMAGE), dtype=np.float32), CLASSES
