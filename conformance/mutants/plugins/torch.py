"""The PyTorch backend with bugs on request."""

from concord.backends.torch.backend import Adapter
from concord.conformance.mutants.mutated import Mutating
from concord.conformance.mutants.operations.torch import TorchOperations


class Mutated(Mutating, Adapter):
    """The PyTorch backend with bugs on request."""

    operations = TorchOperations()
