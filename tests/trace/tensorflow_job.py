"""A small job that profiles itself: ``tensorflow_job.py FOLDER``; the tests read what it leaves.

``job.xplane.pb`` as TensorFlow wrote it, ``facts.json`` what TensorFlow's own protobuf classes find in it and what
the clocks read around it, ``graph_*.pb`` the graphs that ran, as the runtime had optimised them.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.tsl.profiler.protobuf import xplane_pb2

STEPS = 2


def main(folder: Path) -> None:
    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    layers = tf.keras.layers
    model = tf.keras.Sequential([layers.Conv2D(4, 3, input_shape=(12, 12, 1)), layers.BatchNormalization()])
    for layer in (layers.ReLU(), layers.Flatten(), layers.Dense(8, activation="relu"), layers.Dense(3)):
        model.add(layer)
    optimizer = tf.keras.optimizers.SGD(0.1)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(autograph=False)
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    images, labels = tf.random.normal([4, 12, 12, 1]), tf.constant([0, 1, 2, 0])
    context.context().enable_run_metadata()
    train_step(images, labels)
    ran = context.context().export_run_metadata()
    context.context().disable_run_metadata()
    train_step(images, labels)

    profiler = tf.profiler.experimental
    facts = {"realtime": [time.time_ns()], "monotonic": [time.monotonic_ns()]}
    profiler.start(str(folder / "log"), options=profiler.ProfilerOptions(host_tracer_level=3))
    with profiler.Trace("dpro_clock", monotonic_ns=time.monotonic_ns()):
        pass
    for step in range(STEPS):
        with profiler.Trace("train", step_num=step, _r=1):
            train_step(images, labels)
    profiler.stop()
    facts["realtime"].append(time.time_ns())
    facts["monotonic"].append(time.monotonic_ns())

    (written,) = (folder / "log" / "plugins" / "profile").glob("*/*.xplane.pb")
    shutil.move(written, folder / "job.xplane.pb")
    for number, graphs in enumerate(ran.function_graphs):
        for place, graph in enumerate(graphs.partition_graphs):
            (folder / f"graph_{number}_{place}.pb").write_bytes(graph.SerializeToString())
            (folder / f"graph_{number}_{place}.pbtxt").write_text(str(graph))
    concrete = train_step.get_concrete_function(images, labels).graph.as_graph_def()
    (folder / "concrete.pb").write_bytes(concrete.SerializeToString())
    facts |= read((folder / "job.xplane.pb").read_bytes())
    (folder / "facts.json").write_text(json.dumps(facts))


def read(blob: bytes) -> dict[str, list[list[object]]]:
    """Ops and steps as TensorFlow's classes see them. TensorFlow gives a display name to what it takes for an op."""
    ops, steps = [], []
    for plane in xplane_pb2.XSpace.FromString(blob).planes:
        for line in plane.lines:
            for event in line.events:
                kind = plane.event_metadata[event.metadata_id]
                start = line.timestamp_ns + event.offset_ps // 1000
                end = line.timestamp_ns + (event.offset_ps + event.duration_ps) // 1000
                if kind.display_name:
                    ops.append(
                        [kind.name.removesuffix(":" + kind.display_name), kind.display_name, line.name, start, end]
                    )
                elif kind.name == "train":
                    steps.append([start, end])
    return {"ops": ops, "steps": steps}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
