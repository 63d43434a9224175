"""The operations in JAX."""

import jax
import jax.numpy as jnp

from concord.conformance.bugs.operations import FrameworkOperations


class JaxOperations(FrameworkOperations):
    """The operations in JAX."""

    def einsum(self, subscripts, a, b):
        return jnp.einsum(subscripts, a, b)

    def sum(self, x, axis=None):
        return jnp.sum(x, axis=axis, keepdims=axis is not None)

    def max(self, x, axis):
        return jnp.max(x, axis=axis, keepdims=True)

    def sqrt(self, x):
        return jnp.sqrt(x)

    def exp(self, x):
        return jnp.exp(x)

    def log(self, x):
        return jnp.log(x)

    def tanh(self, x):
        return jnp.tanh(x)

    def erf(self, x):
        return jax.lax.erf(x)

    def sigmoid(self, x):
        return jax.nn.sigmoid(x)

    def relu(self, x):
        return jax.nn.relu(x)

    def softmax(self, x, axis):
        return jax.nn.softmax(x, axis=axis)

    def log_softmax(self, x, axis):
        return jax.nn.log_softmax(x, axis=axis)

    def reshape(self, x, shape):
        return jnp.reshape(x, tuple(shape))

    def transpose(self, x, axes):
        return jnp.transpose(x, tuple(axes))

    def concat(self, parts, axis):
        return jnp.concatenate(list(parts), axis=axis)

    def where(self, condition, a, b):
        return jnp.where(condition, a, jnp.asarray(b, dtype=a.dtype))

    def take(self, table, ids):
        return table[ids]

    def constant(self, values, like=None):
        return jnp.asarray(values, dtype=None if like is None else like.dtype)

    def dtype(self, x):
        return str(x.dtype)

    def stop_gradient(self, x):
        return jax.lax.stop_gradient(x)

    def with_gradient(self, x, function):
        @jax.custom_vjp
        def same(values):
            return values

        same.defvjp(lambda values: (values, None), lambda _, gradient: (function(gradient),))
        return same(x)

    def gain(self, norm):
        return norm.scale[...]

    def offset(self, norm):
        return norm.bias[...]

    def table(self, embedding):
        return embedding.embedding[...]

    def weight(self, linear):
        return linear.kernel[...]

    def bias(self, linear):
        return None if linear.bias is None else linear.bias[...]
