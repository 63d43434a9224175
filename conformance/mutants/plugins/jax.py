"""The JAX backend with bugs on request."""

from concord.backends.jax.backend import Adapter
from concord.conformance.mutants.mutated import Mutating
from concord.conformance.mutants.operations.jax import JaxOperations


class Mutated(Mutating, Adapter):
    """The JAX backend with bugs on request."""

    operations = JaxOperations()
