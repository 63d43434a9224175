"""The classifier in TensorFlow with Keras layers."""

import os

# Keras reads this once, when it is imported.
os.environ["KERAS_BACKEND"] = "tensorflow"
