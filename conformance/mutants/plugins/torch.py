"""The PyTorch backend with bugs on request."""

from backends.torch.adapter import Adapter
from conformance.mutants.mutated import Mutating
from conformance.mutants.operations.torch import TorchOperations


class Mutated(Mutating, Adapter):
    """The PyTorch backend with bugs on request."""

    operations = TorchOperations()
