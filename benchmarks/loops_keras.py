"""Training loops in Keras over TensorFlow: one compiled model that trains on the same batch again and again.

A step is what ``fit`` does for a batch: the model's train function on one iterator. Not ``train_on_batch``, which makes
an iterator for each batch; a thread of tf.data's looks after each, and when the iterator is let go of, that thread may
miss it and sleep on, until 10, 30, 70, 150, 310 or 630 ms after its beginning (TensorFlow 2.15: it doubles its period).
The step ends no sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow import keras

from benchmarks.loops import MEET_S, MOMENTUM, RATE, captured_ready, put
from benchmarks.models_keras import make
from dpro.adapter import Adapter
from dpro.plan import Plan
from dpro.tuner import Tuner
from dpro_integrations import byteps_partitions

#: Of the loop's own meeting; a tuner counts its own from 1.
_TAG = "1000"


class _Loop:
    """What does not depend on who sums the gradients."""

    rank: int
    runs_behind = False

    def __init__(self, model: str, seed: int, emulated: bool) -> None:
        if emulated:
            raise ValueError("the models in Keras have no emulated compute")
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        task = make(model, seed)
        self._model = task.model
        batch = tf.constant(task.inputs), tf.constant(task.labels)
        options = tf.data.Options()
        options.autotune.enabled = False  # no such thread at all
        self._batches = iter(tf.data.Dataset.from_tensors(batch).repeat().with_options(options))
        self._adapter: Adapter | None = None
        self._tuner: Tuner | None = None

    def _compile(self, optimizer: Any) -> None:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._model.compile(optimizer=optimizer, loss=loss, run_eagerly=False, jit_compile=False)
        self._adapter = self._adapt()  # now: it looks on while the first step is traced

    def _adapt(self) -> Adapter:
        """An adapter for the model as it is now compiled."""
        raise NotImplementedError

    @property
    def adapter(self) -> Adapter:
        if self._adapter is None:
            self._adapter = self._adapt()
        return self._adapter

    def layers(self) -> list[str]:
        """All that XLA can compile, for ``Plan.compile_regions``: every outermost layer that computes something."""
        from dpro_integrations.keras_regions import layers_of

        idle = (keras.layers.Dropout, keras.layers.Flatten, keras.layers.Reshape)
        return [
            name for name, layer in layers_of(self._model).items() if "/" not in name and not isinstance(layer, idle)
        ]

    def _let_go(self) -> None:
        """A tuner comes: it leaves another train function than it finds, and ours would not know the model again."""
        self.adapter.close()
        self._adapter = None

    def step(self) -> None:
        model = self._model
        model.make_train_function()
        logs = model.train_function(self._batches)
        tf.nest.map_structure(float, logs)  # they are there when the step is over
        if self._tuner is not None:
            self._tuner.step()
            if self._tuner.outcome is not None:
                self._tuner = None

    def autotune(self, settings: dict[str, Any]) -> Tuner | None:
        from dpro_integrations.keras import make_tuner

        self._let_go()
        self._tuner = tuner = make_tuner(self._model, **settings)
        return tuner

    def ready(self) -> list[tuple[str, int]]:
        order = captured_ready(self.adapter, self.step)
        self.barrier()  # who has read its capture sooner does not train meanwhile
        return order

    def prepare(self, plans: Sequence[Plan]) -> None:
        """Each has a train step of its own, to be traced, and made ready at its first run: seconds of work."""
        for plan in plans:
            put(self.adapter, plan)
            self.step()
        put(self.adapter, None)

    def barrier(self) -> None:
        raise NotImplementedError


def _optimizer() -> Any:
    """The legacy one: BytePS 0.2.5 knows no other."""
    return keras.optimizers.legacy.SGD(RATE, momentum=MOMENTUM)


class HorovodLoop(_Loop):
    """``hvd.DistributedOptimizer`` over gloo, found by horovodrun's environment."""

    def __init__(self, model: str, seed: int, emulated: bool) -> None:
        import horovod.tensorflow.keras as hvd
        from horovod.tensorflow import broadcast_variables

        from dpro_integrations.horovod_exchange import join_exchange

        hvd.init()
        self._hvd, self.rank = hvd, hvd.rank()
        super().__init__(model, seed, emulated)
        broadcast_variables(self._model.variables, root_rank=0)
        self._exchange = join_exchange(hvd.rank(), hvd.size(), "benchmark", MEET_S)
        # dense, as it is in the other frameworks: else Horovod gathers what each rank has of an embedding's rows
        self._compile(hvd.DistributedOptimizer(_optimizer(), sparse_as_dense=True))

    def _adapt(self) -> Adapter:
        from dpro_integrations.keras import trace
        from dpro_integrations.keras_horovod import KerasHorovodAdapter

        return KerasHorovodAdapter(trace(self._model), self._exchange)

    def barrier(self) -> None:
        self._hvd.allreduce(0.0, name="benchmark.barrier")

    def close(self) -> None:
        self.barrier()
        self._hvd.shutdown()


def _make_room() -> None:
    """A sweep tries more bounds than a user's job may."""
    byteps_partitions.MOST_BOUNDS, byteps_partitions.MOST_GRADIENTS = 20, 1024


class BytePSLoop(_Loop):
    """``bps.DistributedOptimizer``, found by bpslaunch's environment."""

    def __init__(self, model: str, seed: int, emulated: bool) -> None:
        import byteps.tensorflow as bps
        from byteps.tensorflow.keras import DistributedOptimizer

        from dpro_integrations import keras_byteps

        _make_room()
        bps.init()
        self._bps, self.rank = bps, bps.rank()
        super().__init__(model, seed, emulated)  # weights are alike by their seed

        @tf.function
        def meet() -> Any:  # not eagerly: every call would be a tensor of its own to BytePS
            return bps.push_pull(tf.ones(1), scope="benchmark.barrier/")

        self._meet = meet
        self._exchange = keras_byteps.meet(_TAG)
        # dense: BytePS has nothing for others
        self._compile(DistributedOptimizer(_optimizer(), sparse_as_dense=True))

    def _adapt(self) -> Adapter:
        from dpro_integrations.keras import trace
        from dpro_integrations.keras_byteps import KerasBytePSAdapter

        return KerasBytePSAdapter(trace(self._model), self._exchange)

    def barrier(self) -> None:
        self._meet().numpy()

    def close(self) -> None:
        self.barrier()
        self._bps.shutdown()
