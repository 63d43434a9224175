"""The PaddlePaddle backend with bugs on request."""

from concord.backends.paddle.backend import Adapter
from concord.conformance.mutants.mutated import Mutating
from concord.conformance.mutants.operations.paddle import PaddleOperations


class Mutated(Mutating, Adapter):
    """The PaddlePaddle backend with bugs on request."""

    operations = PaddleOperations()
