"""The TensorFlow backend with bugs on request."""

from concord.backends.tf.backend import Adapter
from concord.conformance.mutants.mutated import Mutating
from concord.conformance.mutants.operations.tf import TensorFlowOperations


class Mutated(Mutating, Adapter):
    """The TensorFlow backend with bugs on request."""

    operations = TensorFlowOperations()
