"""The classifier in TensorFlow with Keras layers."""

import keras

_runs_on = keras.config.backend()
if _runs_on != "tensorflow":
    raise ImportError(
        f"concord.backends.tf is written for Keras on TensorFlow, but KERAS_BACKEND says {_runs_on!r}"
    )
