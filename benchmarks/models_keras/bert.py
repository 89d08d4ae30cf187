"""BERT-Base (Devlin et al., NAACL 2019): like blocks, and an embedding whose gradient is ready last."""

from __future__ import annotations

from typing import Any

import numpy as np
from tensorflow import keras

LAYERS, HIDDEN, HEADS, VOCABULARY, LENGTH, BATCH, CLASSES = 6, 192, 3, 6144, 64, 8, 2
_EPSILON = 1e-5
_DEVIATION = 0.02  # of the embeddings at the start, as in the original


class Positions(keras.layers.Layer):
    """Adds a vector for each place of the sequence [batch, length, width]."""

    def build(self, shape: Any) -> None:
        start = keras.initializers.RandomNormal(stddev=_DEVIATION)
        self.table = self.add_weight(name="table", shape=tuple(shape[1:]), initializer=start)
        super().build(shape)

    def call(self, x: Any) -> Any:
        return x + self.table


def _norm(x: Any, more: Any = None) -> Any:
    """Layer norm of ``x``, or of its sum with ``more``."""
    return keras.layers.LayerNormalization(epsilon=_EPSILON)(x if more is None else keras.layers.Add()([x, more]))


def _block(x: Any) -> Any:
    """Attention and two dense layers, each with a shortcut and a norm behind it. No dropout: runs are alike."""
    x = _norm(x, keras.layers.MultiHeadAttention(HEADS, HIDDEN // HEADS)(x, x))
    wide = keras.layers.Dense(4 * HIDDEN, activation="gelu")(x)
    return _norm(x, keras.layers.Dense(HIDDEN)(wide))


def build() -> Any:
    """The network: tokens [batch, length] to logits [batch, classes]."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    start = keras.initializers.RandomNormal(stddev=_DEVIATION)
    words = keras.layers.Embedding(VOCABULARY, HIDDEN, embeddings_initializer=start)(tokens)
    x = _norm(Positions()(words))
    for _ in range(LAYERS):
        x = _block(x)
    pooled = keras.layers.Dense(HIDDEN, activation="tanh")(x[:, 0])
    return keras.Model(tokens, keras.layers.Dense(CLASSES)(pooled), name="bert")


def batch(noise: np.random.Generator) -> tuple[np.ndarray[Any, Any], int]:
    """Tokens [batch, length] and the number of classes."""
    return noise.integers(VOCABULARY, size=(BATCH, LENGTH), dtype=np.int32), CLASSES
