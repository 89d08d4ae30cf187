"""A user's Gluon script with BytePS that has never heard of dpro; it prints what it trained to."""

import hashlib

import byteps.mxnet as bps
import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import nn


def main() -> None:
    bps.init()
    mx.random.seed(0)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(3):
            net.add(nn.Dense(256, activation="tanh", in_units=256))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    parameters = net.collect_params()
    trainer = bps.DistributedTrainer(parameters, "adam", {"learning_rate": 0.001})
    values = np.random.RandomState(bps.rank())
    for _ in range(60):
        x = mx.nd.array(values.randn(8, 256))
        with autograd.record():
            loss = net(x).square().mean()
        loss.backward()
        trainer.step(1)
        loss.asscalar()
    bits = b"".join(p.data().asnumpy().tobytes() for p in parameters.values())
    print(f"rank {bps.rank()} trained to {hashlib.sha256(bits).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
