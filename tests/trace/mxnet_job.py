"""A small job that profiles itself: ``mxnet_job.py FOLDER``; the tests read what it leaves.

``rank0.json`` as MXNet wrote it, ``net-symbol.json`` its network (blocks of three branches), ``facts.json`` what the
clocks read around it and what MXNet's own table counts. Each branch has an operator of its own (a deconvolution of
step 1 is a convolution), so that a test may make one operator of the two and knows which is which all the same.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

STEPS = 2


class Block(gluon.HybridBlock):
    """Two convolutions and two beside them, added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        with self.name_scope():
            self.body = nn.HybridSequential(prefix="body_")
            self.body.add(nn.Conv2D(channels, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"))
            self.body.add(nn.Conv2D(channels, 3, padding=1))
            self.side = nn.Conv2DTranspose(channels, 1, prefix="side_")
            self.wide = nn.Conv2DTranspose(channels, 3, padding=1, prefix="wide_")

    def hybrid_forward(self, F: object, x: object) -> object:
        return F.Activation(self.body(x) + self.side(x) + self.wide(x), act_type="relu")


def main(folder: Path) -> None:
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3), Block(8), Block(16), nn.Flatten(), nn.Dense(8, activation="relu"), nn.Dense(3))
    net.initialize()
    net.hybridize(static_alloc=True)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    images, labels = mx.nd.random.normal(shape=(4, 1, 24, 24)), mx.nd.array([0, 1, 2, 0])

    def step() -> None:
        with autograd.record():
            loss = loss_of(net(images), labels)
        loss.backward()
        trainer.step(4)

    for _ in range(3):
        step()
    mx.nd.waitall()
    mx.profiler.set_config(profile_all=True, aggregate_stats=True, filename=str(folder / "rank0.json"))
    facts = {"realtime": [time.time_ns()]}
    mx.profiler.set_state("run")
    for _ in range(STEPS):
        step()
        mx.nd.waitall()
    mx.profiler.set_state("stop")
    mx.profiler.dump()
    facts["realtime"].append(time.time_ns())
    table = mx.profiler.dumps().partition("\noperator\n")[2]
    facts["counts"] = dict(re.findall(r"^(\w+) +(\d+) ", table, re.MULTILINE))
    net.export(str(folder / "net"))
    (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
