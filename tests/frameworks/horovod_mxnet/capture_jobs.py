"""A captured Gluon job: what one rank does, and what it leaves for the test to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.mxnet as hvd
from mxnet.gluon import nn

from tests.frameworks.horovod_mxnet.jobs import distribute, initialised, job, mlp, small_cnn, train


def captured(
    into: str,
    steps: int = 3,
    net: str = "cnn",
    flags: dict[str, Any] | None = None,
    compression_fp16: bool = False,
    **arguments: Any,
) -> None:
    """Capture ``steps`` of a small net into ``into``."""
    from dpro_integrations.mxnet_horovod import Capture

    with job():
        model = {"cnn": small_cnn, "mlp": mlp, "wide": wide}[net](**(flags or {}))
        kind = {"cnn": {"shape": (8, 3, 16, 16)}, "mlp": {}, "wide": {"shape": (256, 192)}}[net]
        if compression_fp16:
            arguments["compression"] = hvd.Compression.fp16
        trainer = distribute(model, **arguments)
        for step in range(4):
            train(model, trainer, step, **kind)
        capture = Capture(trainer, usual_s=10.0)
        for step in range(steps):
            train(model, trainer, step, **kind)
            capture.mark_step()
        capture.finish().save(Path(into) / f"rank{hvd.rank()}.npz")


def wide() -> Any:
    """Steps of tens of milliseconds, gradients of which the wire can tell one from the other."""
    net = nn.HybridSequential(prefix="wide_")
    with net.name_scope():
        for k in range(8):
            net.add(nn.Dense(192, activation="relu", in_units=192, prefix=f"d{k}_"))
    return initialised(net)
