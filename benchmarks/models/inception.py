"""InceptionV3 (Szegedy et al., CVPR 2016): branches, so that gradients of one block become ready close together."""

from __future__ import annotations

import torch
from torch import Tensor, nn

IMAGE, BATCH, CLASSES, CUT_BY = 139, 12, 1000, 4
CUT = (
    "InceptionV3 with all 11 blocks, without the auxiliary classifier and dropout: width 1/4 (8 of 32 channels at the "
    "stem), 139x139 images, batch 12"
)


class Conv(nn.Sequential):
    """Convolution, batch norm, ReLU. Channels are the original's, cut here."""

    def __init__(self, channels: int, width: int, kernel: int | tuple[int, int], stride: int = 1, pad: bool = True):
        sides = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = tuple(side // 2 for side in sides) if pad else (0, 0)
        before, after = (channels if channels == 3 else channels // CUT_BY), width // CUT_BY
        convolution = nn.Conv2d(before, after, sides, stride=stride, padding=padding, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(after), nn.ReLU())


class Branches(nn.Module):
    """All branches on the same input, their outputs side by side."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def _chain(channels: int, *layers: tuple[int, int | tuple[int, int]]) -> nn.Sequential:
    made = []
    for width, kernel in layers:
        made.append(Conv(channels, width, kernel))
        channels = width
    return nn.Sequential(*made)


def _pooled(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), Conv(channels, width, 1))


def _block_a(channels: int, pool: int) -> Branches:
    return Branches(
        _chain(channels, (64, 1)),
        _chain(channels, (48, 1), (64, 5)),
        _chain(channels, (64, 1), (96, 3), (96, 3)),
        _pooled(channels, pool),
    )


def _block_b(channels: int) -> Branches:
    narrow = nn.Sequential(Conv(channels, 64, 1), Conv(64, 96, 3), Conv(96, 96, 3, 2, pad=False))
    return Branches(Conv(channels, 384, 3, 2, pad=False), narrow, nn.MaxPool2d(3, 2))


def _block_c(width: int) -> Branches:
    across, down = (1, 7), (7, 1)
    return Branches(
        _chain(768, (192, 1)),
        _chain(768, (width, 1), (width, across), (192, down)),
        _chain(768, (width, 1), (width, down), (width, across), (width, down), (192, across)),
        _pooled(768, 192),
    )


def _block_d() -> Branches:
    left = nn.Sequential(Conv(768, 192, 1), Conv(192, 320, 3, 2, pad=False))
    right = nn.Sequential(_chain(768, (192, 1), (192, (1, 7)), (192, (7, 1))), Conv(192, 192, 3, 2, pad=False))
    return Branches(left, right, nn.MaxPool2d(3, 2))


def _block_e(channels: int) -> Branches:
    def split() -> Branches:
        return Branches(Conv(384, 384, (1, 3)), Conv(384, 384, (3, 1)))

    return Branches(
        _chain(channels, (320, 1)),
        nn.Sequential(Conv(channels, 384, 1), split()),
        nn.Sequential(_chain(channels, (448, 1), (384, 3)), split()),
        _pooled(channels, 192),
    )


def build() -> nn.Module:
    """The network: stem, blocks A, A, A, B, C, C, C, C, D, E, E, classifier."""
    return nn.Sequential(
        Conv(3, 32, 3, 2, pad=False), Conv(32, 32, 3, pad=False), Conv(32, 64, 3), nn.MaxPool2d(3, 2),
        Conv(64, 80, 1), Conv(80, 192, 3, pad=False), nn.MaxPool2d(3, 2),
        _block_a(192, 32), _block_a(256, 64), _block_a(288, 64), _block_b(288),
        _block_c(128), _block_c(160), _block_c(160), _block_c(192), _block_d(),
        _block_e(1280), _block_e(2048),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048 // CUT_BY, CLASSES),
    )  # fmt: skip


def batch() -> tuple[Tensor, int]:
    """Images [batch, 3, side, side] and the number of classes."""
    return torch.randn(BATCH, 3, IMAGE, IMAGE), CLASSES
