"""BERT-Base (Devlin et al., NAACL 2019): like blocks, and an embedding whose gradient is ready last."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
from mxnet.gluon import nn

LAYERS, HIDDEN, HEADS, VOCABULARY, LENGTH, BATCH, CLASSES = 6, 192, 3, 6144, 64, 8, 2
_DEVIATION = 0.02  # of the embeddings at the start, as in the original


class SelfAttention(nn.HybridBlock):
    """Multi-head self-attention, [length, batch, width] to the same shape."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with self.name_scope():
            self.project_in = nn.Dense(3 * HIDDEN, flatten=False, in_units=HIDDEN, prefix="in_")
            self.project_out = nn.Dense(HIDDEN, flatten=False, in_units=HIDDEN, prefix="out_")

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        mixed = self.project_in(x)  # queries, keys and values of each head beside each other
        weights = F.softmax(F.contrib.interleaved_matmul_selfatt_qk(mixed, heads=HEADS), axis=-1)
        return self.project_out(F.contrib.interleaved_matmul_selfatt_valatt(mixed, weights, heads=HEADS))


class Block(nn.HybridBlock):
    """Attention and two dense layers, each with a shortcut and a norm behind it. No dropout: runs are alike."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with self.name_scope():
            self.attention = SelfAttention(prefix="attention_")
            self.norm1 = nn.LayerNorm(in_channels=HIDDEN, prefix="norm1_")
            self.wide = nn.Dense(4 * HIDDEN, flatten=False, in_units=HIDDEN, prefix="wide_")
            self.gelu = nn.GELU()
            self.narrow = nn.Dense(HIDDEN, flatten=False, in_units=4 * HIDDEN, prefix="narrow_")
            self.norm2 = nn.LayerNorm(in_channels=HIDDEN, prefix="norm2_")

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.narrow(self.gelu(self.wide(x))))


class Bert(nn.HybridBlock):
    """Token numbers [batch, length] to logits [batch, classes]."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        start = mx.init.Normal(_DEVIATION)
        with self.name_scope():
            self.words = nn.Embedding(VOCABULARY, HIDDEN, weight_initializer=start, prefix="words_")
            self.positions = self.params.get("positions", shape=(1, LENGTH, HIDDEN), init=start)
            self.norm = nn.LayerNorm(in_channels=HIDDEN, prefix="norm_")
            self.blocks = nn.HybridSequential(prefix="")
            for number in range(LAYERS):
                self.blocks.add(Block(prefix=f"block{number}_"))
            self.pooler = nn.Dense(HIDDEN, activation="tanh", in_units=HIDDEN, prefix="pooler_")
            self.classifier = nn.Dense(CLASSES, in_units=HIDDEN, prefix="classifier_")

    def hybrid_forward(self, F: Any, tokens: Any, positions: Any) -> Any:
        x = self.norm(F.broadcast_add(self.words(tokens), positions))
        x = self.blocks(F.transpose(x, axes=(1, 0, 2)))
        first = F.squeeze(F.slice_axis(x, axis=0, begin=0, end=1), axis=0)
        return self.classifier(self.pooler(first))


def build() -> Any:
    """The network."""
    return Bert(prefix="bert_")


def batch(noise: np.random.Generator) -> tuple[np.ndarray[Any, Any], int]:
    """Tokens [batch, length] and the number of classes."""
    return noise.integers(VOCABULARY, size=(BATCH, LENGTH), dtype=np.int32), CLASSES
