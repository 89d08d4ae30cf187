"""A Gluon job with BytePS, tuned: on every worker ``bpslaunch python examples/byteps_mxnet.py``.

(From a clone, without a GPU, after ``make backends``: ``python -m benchmarks.testbed run --byteps
.venv-backends/bin/python -- .venv-backends/bin/python examples/byteps_mxnet.py``.)
"""

import byteps.mxnet as bps
import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

from dpro_integrations.mxnet import autotune


def main() -> None:
    bps.init()
    mx.random.seed(0)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(8):
            net.add(nn.Dense(512, activation="relu", in_units=512))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    tuner = autotune(trainer)  # the added line
    mx.random.seed(1 + bps.rank())
    loss = gluon.loss.L2Loss()
    for _ in range(150):
        x, y = mx.nd.random.normal(shape=(32, 512)), mx.nd.zeros((32, 512))
        with autograd.record():
            error = loss(net(x), y)
        error.backward()
        trainer.step(32)
        error.wait_to_read()
    mx.nd.waitall()  # BytePS does not end well with sums under way
    if tuner is not None and tuner.outcome is not None and bps.rank() == 0:
        print(tuner.outcome.verdict.value, tuner.outcome.reason)


if __name__ == "__main__":
    main()
