"""The net and the data of the demo and of the overhead measurement: 96 MB of parameters, no download.

A small vision transformer: a convolutional stem, two stages of encoder blocks (the second wider, as in pyramid nets),
a classifier head. Layer sizes are as uneven as real ones: from 512 bytes to 6.5 MB, many small ones between few large.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

CLASSES = 1000


class Blocks(nn.Sequential):
    """``depth`` pre-norm encoder blocks of width ``width``; [batch, tokens, width] in and out."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__(*(self._block(width) for _ in range(depth)))

    @staticmethod
    def _block(width: int) -> nn.Module:
        return nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)


class Net(nn.Module):
    """Images [batch, 3, 64, 64] to logits [batch, 1000]."""

    def __init__(self, width: int = 384, depth: tuple[int, int] = (4, 3)) -> None:
        super().__init__()
        wide = width * 5 // 3
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 3, stride=2, padding=1), nn.GELU(),
            nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.GELU(),
            nn.Conv2d(128, width, 2, stride=2),
        )  # fmt: skip
        self.first = Blocks(depth[0], width)
        self.merge = nn.Linear(2 * width, wide)
        self.second = Blocks(depth[1], wide)
        self.norm = nn.LayerNorm(wide)
        self.head = nn.Linear(wide, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.stem(images).flatten(2).transpose(1, 2)  # [batch, 64, width]
        tokens = self.first(tokens)
        tokens = self.merge(tokens.reshape(len(tokens), tokens.shape[1] // 2, -1))  # pairs of tokens become one
        logits: Tensor = self.head(self.norm(self.second(tokens)).mean(dim=1))
        return logits


class Images(torch.utils.data.Dataset):
    """``length`` labelled noise images, the same for the same index whatever the rank."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 64, 64, generator=generator), index % CLASSES
