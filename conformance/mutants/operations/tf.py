"""The operations in TensorFlow."""

import numpy as np
import tensorflow as tf

from concord.conformance.bugs.operations import FrameworkOperations


class TensorFlowOperations(FrameworkOperations):
    """The operations in TensorFlow."""

    def einsum(self, subscripts, a, b):
        return tf.einsum(subscripts, a, b)

    def sum(self, x, axis=None):
        return tf.reduce_sum(x, axis=axis, keepdims=axis is not None)

    def max(self, x, axis):
        return tf.reduce_max(x, axis=axis, keepdims=True)

    def sqrt(self, x):
        return tf.sqrt(x)

    def exp(self, x):
        return tf.exp(x)

    def log(self, x):
        return tf.math.log(x)

    def tanh(self, x):
        return tf.tanh(x)

    def erf(self, x):
        return tf.math.erf(x)

    def sigmoid(self, x):
        return tf.sigmoid(x)

    def relu(self, x):
        return tf.nn.relu(x)

    def softmax(self, x, axis):
        return tf.nn.softmax(x, axis=axis)

    def log_softmax(self, x, axis):
        return tf.nn.log_softmax(x, axis=axis)

    def reshape(self, x, shape):
        return tf.reshape(x, tuple(shape))

    def transpose(self, x, axes):
        return tf.transpose(x, perm=tuple(axes))

    def concat(self, parts, axis):
        return tf.concat(list(parts), axis=axis)

    def where(self, condition, a, b):
        return tf.where(condition, a, b if tf.is_tensor(b) else tf.constant(b, dtype=a.dtype))

    def take(self, table, ids):
        return tf.gather(table, ids, axis=0)

    def constant(self, values, like=None):
        return tf.constant(np.array(values), dtype=None if like is None else like.dtype)

    def dtype(self, x):
        return x.dtype.name

    def stop_gradient(self, x):
        return tf.stop_gradient(x)

    def with_gradient(self, x, function):
        return tf.custom_gradient(lambda values: (tf.identity(values), function))(x)

    def gain(self, norm):
        return self.variable(norm, "gamma")

    def offset(self, norm):
        return self.variable(norm, "beta")

    def variable(self, layer, name):
        return next(variable for variable in layer.weights if variable.name == name).value

    def table(self, embedding):
        return embedding.embeddings.value

    def weight(self, linear):
        return linear.kernel.value

    def bias(self, linear):
        return None if linear.bias is None else linear.bias.value

    def submodule(self, owner, name):
        return getattr(owner, {"layers": "blocks", "output": "projection"}.get(name, name))
