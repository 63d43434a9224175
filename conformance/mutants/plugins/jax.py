"""The JAX backend with bugs on request."""

import jax
import jax.numpy as jnp

from concord.backends.jax.backend import Adapter
from concord.conformance.mutants.mutant_backend import Injection, Mutating


class JaxInjection(Injection):
    """Operations in JAX."""

    libraries = (jnp, jax.nn, jax.lax)

    def sum(self, x, axis=None):
        return jnp.sum(x, axis=axis, keepdims=axis is not None)

    def max(self, x, axis):
        return jnp.max(x, axis=axis, keepdims=True)

    concat = staticmethod(jnp.concatenate)

    def where(self, condition, a, b):
        return jnp.where(condition, a, jnp.asarray(b, dtype=a.dtype))

    def constant(self, values, like=None):
        return jnp.asarray(values, dtype=None if like is None else like.dtype)

    def with_gradient(self, x, function):
        @jax.custom_vjp
        def same(values):
            return values

        same.defvjp(lambda values: (values, None), lambda _, gradient: (function(gradient),))
        return same(x)

    def held(self, layer, kind):
        names = {"positions": "embedding", "gamma": "scale", "beta": "bias"}
        parameter = getattr(layer, names.get(kind, kind))
        return None if parameter is None else parameter[...]


class Mutated(Mutating, Adapter):
    """The JAX backend with bugs."""

    context = JaxInjection
