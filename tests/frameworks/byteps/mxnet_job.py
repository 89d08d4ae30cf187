"""One rank of a BytePS job under MXNet: sums of tensors, then a Gluon training and the same in one process.

Writes what came of it to ``<folder>/<rank>.json`` and the weights to ``<folder>/<rank>.npz``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import byteps.mxnet as bps
import mxnet as mx
import numpy as np
from byteps.mxnet.ops import byteps_declare_tensor, byteps_push_pull

from tests.frameworks.byteps import sums

STEPS, BATCH, WIDTH = 40, 8, 64


def sum_rounds(rank: int, ranks: int, rounds: int) -> dict[str, object]:
    """All tensors are pushed before one is waited for, and the next round follows at once."""
    arrays = {f"sum_{n}": mx.nd.zeros(n) for n in sums.ELEMENTS}
    for name in arrays:
        byteps_declare_tensor(name)
    wrong = []
    for i in range(rounds):
        for k, (name, array) in enumerate(arrays.items()):
            array[:] = mx.nd.array(sums.pushed(array.size, i, rank))
            byteps_push_pull(array, name=name, is_average=False, priority=-k)
        wrong += [said for array in arrays.values() if (said := sums.judge(array.asnumpy(), i, ranks))]
    return {"checks": rounds * len(arrays), "wrong": wrong}


def data() -> tuple[np.ndarray, np.ndarray]:
    """[steps, ranks, batch, width] and [steps, ranks, batch, 1]: what each rank gets at each step."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((STEPS, 2, BATCH, WIDTH)).astype(np.float32)
    return x, np.tanh(x.mean(axis=-1, keepdims=True) * 8)


def network() -> mx.gluon.nn.Sequential:
    """Its first weight takes two partitions of ``sums.PARTITION_BYTES``."""
    net = mx.gluon.nn.Sequential(prefix="net_")
    with net.name_scope():
        net.add(mx.gluon.nn.Dense(400, in_units=WIDTH, activation="relu"), mx.gluon.nn.Dense(1, in_units=400))
    return net


def weights(net: mx.gluon.nn.Sequential) -> dict[str, np.ndarray]:
    return {name: parameter.data().asnumpy() for name, parameter in sorted(net.collect_params().items())}


def train(net: mx.gluon.nn.Sequential, trainer: mx.gluon.Trainer, x: np.ndarray, y: np.ndarray) -> None:
    loss = mx.gluon.loss.L2Loss()
    for step in range(STEPS):
        with mx.autograd.record():
            error = loss(net(mx.nd.array(x[step])), mx.nd.array(y[step]))
        error.backward()
        trainer.step(len(x[step]))


def main() -> None:
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    bps.init()
    rank, ranks = bps.rank(), bps.size()
    told = {"sums": sum_rounds(rank, ranks, rounds)}
    if "train" in sys.argv[3:]:
        x, y = data()
        settings = {"learning_rate": 0.01, "momentum": 0.9}
        mx.random.seed(1)  # all ranks begin with the same: BytePS broadcasts only after a first backward
        net = network()
        net.initialize(mx.init.Xavier())
        first = weights(net)
        train(net, bps.DistributedTrainer(net.collect_params(), "sgd", dict(settings)), x[:, rank], y[:, rank])
        trained = weights(net)
        if rank == 0:
            alone = network()
            alone.initialize()
            for name, parameter in alone.collect_params().items():
                parameter.set_data(mx.nd.array(first[name]))
            whole = [part.reshape(STEPS, 2 * BATCH, -1) for part in (x, y)]
            train(alone, mx.gluon.Trainer(alone.collect_params(), "sgd", dict(settings), kvstore=None), *whole)
            told["moved"] = max(float(abs(trained[name] - first[name]).max()) for name in first)
            told["off"] = max(float(abs(trained[name] - array).max()) for name, array in weights(alone).items())
        np.savez(folder / f"{rank}.npz", **trained)
    (folder / f"{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
