"""The TensorFlow backend with bugs on request."""

import numpy as np
import tensorflow as tf

from concord.backends.tf.backend import Adapter
from concord.conformance.mutants.mutant_backend import Injection, Mutating


class TensorFlowInjection(Injection):
    """Operations in TensorFlow."""

    libraries = (tf, tf.nn, tf.math)

    def sum(self, x, axis=None):
        return tf.reduce_sum(x, axis=axis, keepdims=axis is not None)

    def max(self, x, axis):
        return tf.reduce_max(x, axis=axis, keepdims=True)

    def where(self, condition, a, b):
        return tf.where(condition, a, b if tf.is_tensor(b) else tf.constant(b, dtype=a.dtype))

    def take(self, table, ids):
        return tf.gather(table, ids, axis=0)

    def constant(self, values, like=None):
        return tf.constant(np.array(values), dtype=None if like is None else like.dtype)

    def with_gradient(self, x, function):
        return tf.custom_gradient(lambda values: (tf.identity(values), function))(x)

    def held(self, layer, kind):
        if kind in ("gamma", "beta"):
            return next(variable for variable in layer.weights if variable.name == kind).value
        parameter = getattr(layer, {"embedding": "embeddings", "positions": "embeddings"}.get(kind, kind))
        return None if parameter is None else parameter.value

    def submodule(self, owner, name):
        return getattr(owner, {"layers": "blocks", "output": "projection"}.get(name, name))


class Mutated(Mutating, Adapter):
    """The TensorFlow backend with bugs."""

    context = TensorFlowInjection
