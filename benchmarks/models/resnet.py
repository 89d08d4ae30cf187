"""ResNet50 (He et al., CVPR 2016): 161 parameter tensors, most of them small, batch norm after every convolution."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, IMAGE, BATCH, CLASSES = 16, 96, 20, 1000
CUT = "ResNet50 with all 50 layers: width 1/4 (16 of 64 channels at the stem), 96x96 images, batch 20"


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 and a shortcut; ``width`` channels inside, 4 x ``width`` out."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride=stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.norm1(self.conv1(x)))
        out = torch.relu(self.norm2(self.conv2(out)))
        return torch.relu(self.norm3(self.conv3(out)) + self.shortcut(x))


def build() -> nn.Module:
    """The network: stem, 3 + 4 + 6 + 3 bottlenecks, classifier."""
    stem = [nn.Conv2d(3, WIDTH, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU()]
    layers: list[nn.Module] = [*stem, nn.MaxPool2d(3, stride=2, padding=1)]
    channels = WIDTH
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = WIDTH << stage
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, 2 if stage and not block else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def batch() -> tuple[Tensor, int]:
    """Images [batch, 3, side, side] and the number of classes."""
    return torch.randn(BATCH, 3, IMAGE, IMAGE), CLASSES
