"""VGG16 (Simonyan and Zisserman, ICLR 2015): one fully connected layer holds most of the bytes, and is ready early."""

from __future__ import annotations

import torch
from torch import Tensor, nn

IMAGE, BATCH, CLASSES, HIDDEN = 112, 12, 1000, 512
CHANNELS = ((8, 2), (16, 2), (32, 3), (64, 3), (64, 3))
CUT = (
    "VGG16 with all 16 layers: width 1/8 (8 of 64 channels at the first layer, 512 of 4096 in the fully connected "
    "ones), 112x112 images whose last features are spread to the original's 7x7, batch 12"
)


def build() -> nn.Module:
    """The network: thirteen convolutions in five stages, three fully connected layers. No dropout: runs are alike."""
    layers: list[nn.Module] = []
    before = 3
    for width, convolutions in CHANNELS:
        for _ in range(convolutions):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
            before = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(),
        nn.Linear(before * 49, HIDDEN), nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
        nn.Linear(HIDDEN, CLASSES),
    )  # fmt: skip


def batch() -> tuple[Tensor, int]:
    """Images [batch, 3, side, side] and the number of classes."""
    return torch.randn(BATCH, 3, IMAGE, IMAGE), CLASSES
