"""The TensorFlow backend with bugs on request."""

from backends.tf.adapter import Adapter
from conformance.mutants.mutated import Mutating
from conformance.mutants.operations.tf import TensorFlowOperations


class Mutated(Mutating, Adapter):
    """The TensorFlow backend with bugs on request."""

    operations = TensorFlowOperations()
