"""VGG16 (Simonyan and Zisserman, ICLR 2015): one fully connected layer holds most of the bytes, and is ready early."""

from __future__ import annotations

from typing import Any

import numpy as np
from mxnet.gluon import nn

IMAGE, BATCH, CLASSES, HIDDEN = 112, 12, 1000, 512
CHANNELS = ((8, 2), (16, 2), (32, 3), (64, 3), (64, 3))


def build() -> Any:
    """The network: thirteen convolutions in five stages, three fully connected layers. No dropout: runs are alike."""
    net = nn.HybridSequential(prefix="vgg_")
    with net.name_scope():
        for stage, (width, convolutions) in enumerate(CHANNELS):
            if stage:
                net.add(nn.MaxPool2D(2))
            for _ in range(convolutions):
                net.add(nn.Conv2D(width, 3, padding=1, activation="relu"))
        net.add(nn.Flatten(), nn.Dense(HIDDEN, activation="relu"), nn.Dense(HIDDEN, activation="relu"))
        net.add(nn.Dense(CLASSES))
    return net


def batch(noise: np.random.Generator) -> tuple[np.ndarray[Any, Any], int]:
    """Images [batch, 3, side, side] and the number of classes."""
    return noise.standard_normal((BATCH, 3, IMAGE, IMAGE), dtype=np.float32), CLASSES
