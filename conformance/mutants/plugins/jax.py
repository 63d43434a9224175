"""The JAX backend with bugs on request."""

from backends.jax.adapter import Adapter
from conformance.mutants.mutated import Mutating
from conformance.mutants.operations.jax import JaxOperations


class Mutated(Mutating, Adapter):
    """The JAX backend with bugs on request."""

    operations = JaxOperations()
