"""A user's Keras script for BytePS that has never heard of dpro; it prints what it trained to."""

import hashlib

import byteps.tensorflow.keras as bps
import numpy as np
import tensorflow as tf


def main() -> None:
    bps.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    layers = [
        tf.keras.layers.Dense(256, "tanh", kernel_initializer=tf.keras.initializers.GlorotUniform(seed))
        for seed in range(3)
    ]
    model = tf.keras.Sequential([tf.keras.Input((256,)), *layers])
    model.compile(optimizer=bps.DistributedOptimizer(tf.keras.optimizers.legacy.Adam(0.001)), loss="mse")
    drawn = np.random.RandomState(bps.rank())
    x = drawn.normal(size=(60 * 8, 256)).astype("f")
    model.fit(
        x,
        x[:, ::-1],
        batch_size=8,
        shuffle=False,
        verbose=0,
        callbacks=[bps.callbacks.BroadcastGlobalVariablesCallback(0)],
    )
    bits = b"".join(weight.tobytes() for weight in model.get_weights())
    print(f"rank {bps.rank()} trained to {hashlib.sha256(bits).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
