"""Keras jobs with a difference: what could go wrong, or is not the ordinary loop (see ``jobs.py``)."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd_tf
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from tensorflow import keras
from tensorflow.python.profiler import profiler_v2

from tests.frameworks.horovod_keras.jobs import (
    BATCH,
    GROUPS,
    WIDTH,
    batch,
    batches,
    callback,
    compiled,
    decide,
    dense,
    digest,
    fit,
    force_plans,
    group_plan,
    job,
    net,
    report,
)


class OwnStep(keras.Model):
    """A train step of the user's, with a metric of its own."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.own = keras.metrics.Mean(name="own")

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y)) + 0.001 * tf.nn.l2_loss(self.weights[0])
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        self.own.update_state(loss)
        return {"own": self.own.result()}

    @property
    def metrics(self) -> list[Any]:
        return [self.own]


def own_step(tune: str) -> dict[str, Any]:
    decide(True)
    with job():
        inner = net()
        model = compiled(OwnStep(inputs=inner.inputs, outputs=inner.outputs))
        return fit(model, callback(tune)) | {"own": float(model.own.result())}


def scheduled(tune: str, kept: bool = True) -> dict[str, Any]:
    """Adam with a learning-rate schedule, validation, and a callback that changes the model's rate of nothing."""
    decide(kept)
    with job():
        schedule = keras.optimizers.schedules.CosineDecay(0.01, 60)
        model = compiled(net(), keras.optimizers.Adam(schedule))
        found = fit(model, callback(tune), validation_data=batches(2, 7))
        state = [float(np.abs(variable.numpy()).sum()) for variable in model.optimizer.variables()]
        return found | {"state": state, "updates": int(model.optimizer.iterations)}


def mixed(tune: str, policy: str) -> dict[str, Any]:
    decide(True)
    keras.mixed_precision.set_global_policy(policy)
    try:
        with job():
            model = compiled(net())
            return fit(model, callback(tune)) | {"scaled": hasattr(model.optimizer, "inner_optimizer")}
    finally:
        keras.mixed_precision.set_global_policy("float32")


def drawing(tune: str) -> dict[str, Any]:
    """Random numbers from a seed, whose state Keras keeps in a variable."""
    decide(True)
    keras.backend.experimental.enable_tf_random_generator()
    try:
        with job():
            return fit(compiled(net(keras.layers.Dropout(0.5, seed=3))), callback(tune))
    finally:
        keras.backend.experimental.disable_tf_random_generator()


def accumulated(tune: str, passes: int = 3) -> dict[str, Any]:
    decide(True)
    with job():
        ours = callback(tune)
        seen = []
        if ours:
            step = ours[0]._step
            ours[0]._stepped = lambda: (seen.append(1), step())
        return fit(compiled(net(), backward_passes_per_step=passes), ours, steps=90) | {"updates": len(seen)}


def unusual(tune: str, kind: str) -> dict[str, Any]:
    """A model whose groups can't be changed."""
    decide(True)
    with job():
        if kind == "seeded":
            model = compiled(net(keras.layers.Dropout(0.5, seed=3)))
        elif kind == "namesakes":
            inner = keras.Sequential([keras.Input((WIDTH,)), dense("a", 9)])
            twins = keras.Sequential([keras.Input((WIDTH,)), dense("a", 8), inner, dense("head", 4, 1)])
            model = compiled(twins)
        elif kind in ("sparse", "made dense"):
            start = keras.initializers.RandomUniform(seed=1)
            embedding = keras.layers.Embedding(5, 4, embeddings_initializer=start, name="words")
            behind = [keras.layers.Flatten(), dense("head", 4, 1)]
            model = keras.Sequential([keras.Input((WIDTH,)), embedding, *behind])
            model = compiled(model, sparse_as_dense=kind == "made dense")
        elif kind == "own groups":
            model = net()
            model = compiled(model, groups=[[model.weights[0], model.weights[2]]])
        else:
            model = compiled(net())
            model.compile(model.optimizer, "mse", steps_per_execution=5)
        if kind in ("sparse", "made dense"):
            x = np.random.RandomState(hvd.rank()).randint(5, size=(50 * BATCH, WIDTH))
            ours = callback(tune, [["head/kernel", "words/embeddings" if kind == "made dense" else "head/bias"]])
            model.fit(x, np.ones((50 * BATCH, 1)), batch_size=BATCH, shuffle=False, verbose=0, callbacks=ours)
            return report(model, ours[0].outcome if ours else None)
        return fit(model, callback(tune, [["head/kernel", "head/bias"]] if kind == "namesakes" else None))


def loop(tune: str, steps: int = 50) -> dict[str, Any]:
    """``train_on_batch``, with an evaluation now and then, and a prediction once."""
    from dpro_integrations.keras import autotune
    from dpro_integrations.keras_steps import OTHER_WORK

    decide(True)
    with job() as rank:
        model = compiled(net())
        tuner = autotune(model, plan=group_plan()) if tune else None
        idle = False
        for step in range(steps):
            model.train_on_batch(*batch(step, rank))
            if step == 6:
                model.predict_on_batch(batch(step, 9)[0])
                idle = tuner is not None and tuner._last is None  # the time since the step counts for none
            if step % 5 == 4:
                model.evaluate(*batch(step, 9), verbose=0)
        found = report(model, tuner.outcome if tuner else None)
        return found | {"left": sorted({"fit", "train_on_batch", *OTHER_WORK} & vars(model).keys()), "idle": idle}


def again(tune: str, how: str) -> dict[str, Any]:
    """Two fits; dpro comes with the "first" or the "second", or with "autotune" for both.

    "frozen": with the first, and between the two the job freezes all layers of a group.
    """
    from dpro_integrations.keras import autotune

    decide(True)
    with job():
        model = compiled(net())
        if how == "autotune":
            tuner = autotune(model, plan=group_plan()) if tune else None
            for _ in range(2):
                fit(model, [], steps=20, validation_data=batches(2, 7))
            return report(model, tuner.outcome if tuner else None)
        ours = callback(tune)
        fit(model, [] if how == "second" else ours)
        if how == "frozen":
            for layer in model.layers:
                layer.trainable = not {f"{layer.name}/kernel", f"{layer.name}/bias"} & set(GROUPS[0])
            model.compile(model.optimizer, "mse", ["mae"])
        return fit(model, ours)


def compiled_anew(tune: str, at: int) -> dict[str, Any]:
    """The job compiles its model again after step ``at``."""
    from dpro_integrations.keras import autotune

    decide(True)
    with job() as rank:
        model = compiled(net())
        tuner = autotune(model, plan=group_plan()) if tune else None
        for step in range(40):
            model.train_on_batch(*batch(step, rank))
            if step == at - 1:
                model.compile(model.optimizer, "mae")
        return report(model, tuner.outcome if tuner else None)


def started_anew(tune: str, at: int) -> dict[str, Any]:
    from dpro_integrations.keras import autotune

    decide(True)
    with job() as rank:
        model = compiled(net())
        tuner = autotune(model, plan=group_plan()) if tune else None
        for step in range(30):
            model.train_on_batch(*batch(step, rank))
            if step == at - 1:
                hvd.shutdown()
                time.sleep(1.0)  # Horovod that is started again while other ranks still end crashes
                hvd.init()
        return report(model, tuner.outcome if tuner else None, restored="init" not in vars(mpi_ops._basics))


def failing(tune: str, method: str) -> dict[str, Any]:
    """One of the adapter's methods fails on rank 1."""
    from dpro_integrations import keras_horovod
    from tests.frameworks.patches import patch

    def fail(*_: Any) -> Any:
        raise OSError("no luck")

    decide(False)
    with job() as rank:
        if rank == 1:
            patch(keras_horovod.KerasHorovodAdapter, method, fail)
        return fit(compiled(net()), callback(tune))


def untraceable(tune: str) -> dict[str, Any]:
    """A train step that can't be traced a second time, on rank 1."""
    decide(True)

    class Once(OwnStep):
        def train_step(self, data: Any) -> Any:
            if hvd.rank() == 1 and len(traces) == 2:  # Keras itself traces twice: the first makes the variables
                raise ZeroDivisionError("the user's own")
            traces.append(1)
            return super().train_step(data)

    traces: list[int] = []
    with job():
        inner = net()
        return fit(compiled(Once(inputs=inner.inputs, outputs=inner.outputs)), callback(tune))


def alone(tune: str, off: int) -> dict[str, Any]:
    """Rank ``off`` was started with DPRO=off."""
    with job() as rank:
        if rank == off:
            os.environ["DPRO"] = "off"
        start = time.monotonic()
        return fit(compiled(net()), callback(tune)) | {"took_s": time.monotonic() - start}


def kill(tune: str, state: str, victim: int, note: str) -> dict[str, Any]:
    """``victim`` dies when the tuner is in ``state``: between two steps, or in the midst of a meeting."""
    from dpro_integrations import keras_horovod
    from tests.frameworks.patches import patch

    decide(True)

    def die(*_: Any) -> None:
        Path(note).write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    class Killer(keras.callbacks.Callback):
        def on_train_batch_end(self, number: int, logs: Any = None) -> None:
            tuner = ours[0]._tuner
            if hvd.rank() == victim and tuner is not None and tuner.state.name == state:
                die()

    with job() as rank:
        if rank == victim and state == "APPLY":
            patch(keras_horovod.KerasHorovodAdapter, "apply", die)
        ours = callback(tune)
        return fit(compiled(net()), ours, callbacks=[Killer()])


def joined(tune: str, ended: list[int]) -> dict[str, Any]:
    """Ranks have ``ended[rank]`` batches and join at their end."""
    from dpro_integrations.keras import autotune

    decide(True)
    join = hvd_tf.join
    with job() as rank:
        model = compiled(net())
        tuner = autotune(model, plan=group_plan()) if tune else None
        start = time.monotonic()
        for step in range(ended[rank]):
            model.train_on_batch(*batch(step, rank))
        hvd_tf.join()
        hvd_tf.broadcast_variables(model.variables, root_rank=ended.index(max(ended)))
        found = report(model, tuner.outcome if tuner else None)
        return found | {"took_s": time.monotonic() - start, "restored": hvd_tf.join is join}


def raising(tune: str, at: int) -> None:
    """An exception of the user's in a callback ends rank 1."""
    decide(True)

    class Raiser(keras.callbacks.Callback):
        def on_train_batch_end(self, number: int, logs: Any = None) -> None:
            if hvd.rank() == 1 and number == at:
                raise ZeroDivisionError("the user's own")

    with job():
        fit(compiled(net()), callback(tune), callbacks=[Raiser()])


def profiled(tune: str, first: int, until: int) -> dict[str, Any]:
    """The user's own profiler runs from after batch ``first`` to after batch ``until``."""
    decide(True)

    class Profiler(keras.callbacks.Callback):
        def on_train_batch_end(self, number: int, logs: Any = None) -> None:
            self.seen += 1
            if self.seen == first:
                tf.profiler.experimental.start("profile")
            if self.seen == until:
                tf.profiler.experimental.stop()

        def on_train_begin(self, logs: Any = None) -> None:
            self.seen = 0

    with job():
        found = fit(compiled(net()), callback(tune), callbacks=[Profiler()])
        files = [str(path) for path in Path("profile").rglob("*.xplane.pb")]
        return found | {"profiles": len(files), "running": profiler_v2._profiler is not None}


def checkpointed(tune: str) -> dict[str, Any]:
    """Saved after every epoch, in mid-tuning and with groups in force; then resumed without dpro in a new model."""
    decide(True)

    class Saver(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            tf.train.Checkpoint(model=self.model, optimizer=self.model.optimizer).write(f"{folder}/{epoch}")

    with job() as rank:
        folder = f"saved{rank}{tune}"
        model = compiled(net(), keras.optimizers.Adam(0.01))
        found = fit(model, callback(tune), steps=40, epochs=4, callbacks=[Saver()])
        names = [sorted(name for name, _ in tf.train.list_variables(f"{folder}/{epoch}")) for epoch in range(4)]
        resumed = compiled(net(), keras.optimizers.Adam(0.01))
        tf.train.Checkpoint(model=resumed, optimizer=resumed.optimizer).read(f"{folder}/3")
        again = fit(resumed, [], steps=10, epochs=1)
        return found | {"names": names, "resumed": again["weights"], "resumed_groups": again["groups"]}


def activated(tune: str, how: str = "fit", models: int = 1, own_call: bool = False) -> dict[str, Any]:
    """An unchanged script, DPRO set; ``own_call``: it tunes itself as well."""
    names = ("fit", "train_on_batch", "make_test_function", "make_predict_function")
    functions = [vars(keras.Model)[name] for name in names]
    if tune:
        decide(True)
        force_plans()
        sys.modules.pop("dpro_integrations.autoload", None)
        importlib.import_module("dpro_integrations.autoload")  # as the .pth file does
    with job() as rank:
        model = compiled(net())
        others = [compiled(net()) for _ in range(models - 1)]
        if how == "fit":
            found = fit(model, callback("search") if tune and own_call else [], validation_data=batches(2, 7))
        for step in range(50 if how == "loop" else 0):
            for one in [model, *others]:
                one.train_on_batch(*batch(step, rank))
        found = report(model, None)
        present = [vars(keras.Model)[name] for name in names]
        return found | {"restored": present == functions, "other": [digest(one) for one in others]}
