"""The PyTorch backend with bugs on request."""

import numpy as np
import torch

from concord.backends.torch.backend import Adapter
from concord.conformance.bugs.context import TensorOperations
from concord.conformance.mutants.mutant_backend import Injection, Mutating


class TorchOperations(TensorOperations):
    """Operations in PyTorch."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def sum(self, x, axis=None):
        return torch.sum(x) if axis is None else torch.sum(x, dim=axis, keepdim=True)

    def max(self, x, axis):
        return torch.amax(x, dim=axis, keepdim=True)

    transpose = staticmethod(torch.permute)

    def where(self, condition, a, b):
        condition = torch.from_numpy(condition) if isinstance(condition, np.ndarray) else condition
        return torch.where(condition, a, b if torch.is_tensor(b) else torch.full_like(a, b))

    def constant(self, values, like=None):
        return torch.from_numpy(np.array(values)).to(None if like is None else like.dtype)

    stop_gradient = staticmethod(torch.detach)

    def with_gradient(self, x, function):
        x = x * 1.0  # a new tensor: a hook on a parameter would outlive the run
        if x.requires_grad:
            x.register_hook(function)
        return x


class TorchInjection(TorchOperations, Injection):
    """Operations in one run."""

    def opaque(self, function):
        return torch._dynamo.nonstrict_trace(function)

    def held(self, layer, kind):
        parameter = layer.bias if kind in ("bias", "beta") else layer.weight
        return parameter.T if kind == "kernel" else parameter  # nn.Linear stores (out, in)


class Mutated(Mutating, Adapter):
    """The PyTorch backend with bugs."""

    context = TorchInjection
