"""The PaddlePaddle backend with bugs on request."""

from backends.paddle.adapter import Adapter
from conformance.mutants.mutated import Mutating
from conformance.mutants.operations.paddle import PaddleOperations


class Mutated(Mutating, Adapter):
    """The PaddlePaddle backend with bugs on request."""

    operations = PaddleOperations()
