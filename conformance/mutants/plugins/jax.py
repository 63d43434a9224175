"""The JAX backend with bugs on request, and the operations that they are written in."""

import jax
import jax.numpy as jnp

from concord.backends.jax.backend import Adapter
from concord.conformance.bugs.operations import FrameworkOperations
from concord.conformance.mutants.mutated import Mutating


class JaxOperations(FrameworkOperations):
    """The operations in JAX."""

    einsum = staticmethod(jnp.einsum)

    def sum(self, x, axis=None):
        return jnp.sum(x, axis=axis, keepdims=axis is not None)

    def max(self, x, axis):
        return jnp.max(x, axis=axis, keepdims=True)

    sqrt = staticmethod(jnp.sqrt)
    exp = staticmethod(jnp.exp)
    log = staticmethod(jnp.log)
    tanh = staticmethod(jnp.tanh)
    erf = staticmethod(jax.lax.erf)
    sigmoid = staticmethod(jax.nn.sigmoid)
    relu = staticmethod(jax.nn.relu)
    softmax = staticmethod(jax.nn.softmax)
    log_softmax = staticmethod(jax.nn.log_softmax)
    reshape = staticmethod(jnp.reshape)
    transpose = staticmethod(jnp.transpose)
    concat = staticmethod(jnp.concatenate)

    def where(self, condition, a, b):
        return jnp.where(condition, a, jnp.asarray(b, dtype=a.dtype))

    def take(self, table, ids):
        return table[ids]

    def constant(self, values, like=None):
        return jnp.asarray(values, dtype=None if like is None else like.dtype)

    def dtype(self, x):
        return str(x.dtype)

    stop_gradient = staticmethod(jax.lax.stop_gradient)

    def with_gradient(self, x, function):
        @jax.custom_vjp
        def same(values):
            return values

        same.defvjp(lambda values: (values, None), lambda _, gradient: (function(gradient),))
        return same(x)

    def held(self, layer, kind):
        names = {"positions": "embedding", "gamma": "scale", "beta": "bias"}
        found = getattr(layer, names.get(kind, kind))
        return None if found is None else found[...]


class Mutated(Mutating, Adapter):
    """The JAX backend with bugs on request."""

    operations = JaxOperations()
