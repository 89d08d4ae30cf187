"""ResNet50 (He et al., CVPR 2016), Gluon's own: 193 gradients, most of them small, norms after all convolutions."""

from __future__ import annotations

from typing import Any

import numpy as np
from mxnet.gluon.model_zoo.vision import BottleneckV1, ResNetV1

WIDTH, IMAGE, BATCH, CLASSES = 16, 96, 20, 1000


def build() -> Any:
    """The network: stem, 3 + 4 + 6 + 3 bottlenecks, classifier."""
    channels = [WIDTH, *(4 * WIDTH << stage for stage in range(4))]
    return ResNetV1(BottleneckV1, [3, 4, 6, 3], channels, classes=CLASSES)


def batch(noise: np.random.Generator) -> tuple[np.ndarray[Any, Any], int]:
    """Images [batch, 3, side, side] and the number of classes."""
    return noise.standard_normal((BATCH, 3, IMAGE, IMAGE), dtype=np.float32), CLASSES
