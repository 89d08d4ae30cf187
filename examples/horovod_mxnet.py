"""A Gluon job with Horovod, tuned: ``horovodrun --gloo -np 2 -H localhost:2 python examples/horovod_mxnet.py``."""

import horovod.mxnet as hvd
import mxnet as mx
from mxnet import gluon
from mxnet.gluon import nn
from mxnet.gluon.contrib.estimator import Estimator

from dpro_integrations.mxnet import DproHandler


def main() -> None:
    hvd.init()
    mx.random.seed(0)
    net = nn.HybridSequential()
    for _ in range(8):
        net.add(nn.Dense(512, activation="relu", in_units=512))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    mx.random.seed(1 + hvd.rank())
    examples, targets = mx.nd.random.normal(shape=(60 * 32, 512)), mx.nd.zeros((60 * 32, 512))
    data = gluon.data.DataLoader(gluon.data.ArrayDataset(examples, targets), batch_size=32)
    estimator = Estimator(net, gluon.loss.L2Loss(), train_metrics=mx.metric.MAE(), trainer=trainer)
    tuning = DproHandler()
    estimator.fit(data, epochs=2, event_handlers=[tuning])
    if tuning.outcome is not None and hvd.rank() == 0:
        print(tuning.outcome.verdict.value, tuning.outcome.reason)


if __name__ == "__main__":
    main()
