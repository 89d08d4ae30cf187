"""A user's Gluon script that has never heard of dpro; it prints what it trained to."""

import hashlib

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import nn


def main() -> None:
    hvd.init()
    mx.random.seed(0)
    net = nn.HybridSequential()
    for _ in range(6):
        net.add(nn.Dense(64, activation="tanh", in_units=64))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    parameters = net.collect_params()
    hvd.broadcast_parameters(parameters, root_rank=0)
    trainer = hvd.DistributedTrainer(parameters, "adam", {"learning_rate": 0.001})
    values = np.random.RandomState(hvd.rank())
    for step in range(60):
        x = mx.nd.array(values.randn(8, 64))
        with autograd.record():
            loss = net(x).square().mean()
        loss.backward()
        trainer.step(1)
        if step % 10 == 0:
            hvd.allreduce(loss, name="loss").asscalar()
    bits = b"".join(p.data().asnumpy().tobytes() for p in parameters.values())
    print(f"rank {hvd.rank()} trained to {hashlib.sha256(bits).hexdigest()}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
