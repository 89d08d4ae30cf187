"""A user's Keras script for Horovod that has never heard of dpro; it prints what it trained to."""

import hashlib

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf


def main() -> None:
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    layers = [
        tf.keras.layers.Dense(64, "tanh", kernel_initializer=tf.keras.initializers.GlorotUniform(seed))
        for seed in range(4)
    ]
    model = tf.keras.Sequential([tf.keras.Input((64,)), *layers])
    model.compile(optimizer=hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.001)), loss="mse")
    drawn = np.random.RandomState(hvd.rank())
    x = drawn.normal(size=(60 * 8, 64)).astype("f")
    model.fit(
        x,
        x[:, ::-1],
        batch_size=8,
        shuffle=False,
        verbose=0,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()],
    )
    bits = b"".join(weight.tobytes() for weight in model.get_weights())
    print(f"rank {hvd.rank()} trained to {hashlib.sha256(bits).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
