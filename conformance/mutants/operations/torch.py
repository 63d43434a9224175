"""The operations in PyTorch."""

import numpy as np
import torch
import torch.nn.functional as F

from concord.conformance.bugs.operations import FrameworkOperations


class TorchOperations(FrameworkOperations):
    """The operations in PyTorch."""

    def einsum(self, subscripts, a, b):
        return torch.einsum(subscripts, a, b)

    def sum(self, x, axis=None):
        return torch.sum(x) if axis is None else torch.sum(x, dim=axis, keepdim=True)

    def max(self, x, axis):
        return torch.amax(x, dim=axis, keepdim=True)

    def sqrt(self, x):
        return torch.sqrt(x)

    def exp(self, x):
        return torch.exp(x)

    def log(self, x):
        return torch.log(x)

    def tanh(self, x):
        return torch.tanh(x)

    def erf(self, x):
        return torch.erf(x)

    def sigmoid(self, x):
        return torch.sigmoid(x)

    def relu(self, x):
        return torch.relu(x)

    def softmax(self, x, axis):
        return F.softmax(x, dim=axis)

    def log_softmax(self, x, axis):
        return F.log_softmax(x, dim=axis)

    def reshape(self, x, shape):
        return torch.reshape(x, tuple(shape))

    def transpose(self, x, axes):
        return torch.permute(x, tuple(axes))

    def concat(self, parts, axis):
        return torch.cat(list(parts), dim=axis)

    def where(self, condition, a, b):
        condition = torch.from_numpy(condition) if isinstance(condition, np.ndarray) else condition
        return torch.where(condition, a, b if torch.is_tensor(b) else torch.full_like(a, b))

    def take(self, table, ids):
        return table[ids]

    def constant(self, values, like=None):
        return torch.from_numpy(np.array(values)).to(None if like is None else like.dtype)

    def dtype(self, x):
        return str(x.dtype).removeprefix("torch.")

    def stop_gradient(self, x):
        return x.detach()

    def with_gradient(self, x, function):
        x = x * 1.0  # a tensor of its own: a hook on a parameter would outlive the run
        if x.requires_grad:
            x.register_hook(function)
        return x

    def opaque(self, function):
        return torch._dynamo.nonstrict_trace(function)

    def gain(self, norm):
        return norm.weight

    def offset(self, norm):
        return norm.bias

    def table(self, embedding):
        return embedding.weight

    def weight(self, linear):
        return linear.weight.T

    def bias(self, linear):
        return linear.bias
