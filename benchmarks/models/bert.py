"""BERT-Base (Devlin et al., NAACL 2019): like blocks, and an embedding whose gradient is ready last."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LAYERS, HIDDEN, HEADS, VOCABULARY, LENGTH, BATCH, CLASSES = 6, 192, 3, 6144, 64, 8, 2
CUT = (
    "BERT-Base with 6 of 12 blocks, pooler and classifier: width 1/4 (192 of 768, heads of 64 as in the original), "
    "vocabulary 1/5 (6144 of 30522), sequences of 64, batch 8"
)


class Bert(nn.Module):
    """Token numbers [batch, length] to logits [batch, classes]. No dropout: runs are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(LENGTH, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(HIDDEN, HEADS, 4 * HIDDEN, 0.0, "gelu", batch_first=True)
                for _ in range(LAYERS)
            )
        )
        self.pooler = nn.Linear(HIDDEN, HIDDEN)
        self.classifier = nn.Linear(HIDDEN, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        hidden = self.blocks(self.norm(self.words(tokens) + self.positions(places)))
        logits: Tensor = self.classifier(torch.tanh(self.pooler(hidden[:, 0])))
        return logits


def build() -> nn.Module:
    """The network."""
    return Bert()


def batch() -> tuple[Tensor, int]:
    """Tokens [batch, length] and the number of classes."""
    return torch.randint(VOCABULARY, (BATCH, LENGTH)), CLASSES
