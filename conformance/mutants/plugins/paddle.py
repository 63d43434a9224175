"""The PaddlePaddle backend with bugs on request."""

import numpy as np
import paddle
import paddle.nn.functional as F

from concord.backends.interface import Unsupported
from concord.backends.paddle.backend import Adapter
from concord.conformance.mutants.mutant_backend import Injection, Mutating


class PaddleInjection(Injection):
    """Operations in PaddlePaddle."""

    libraries = (paddle, F)

    def sum(self, x, axis=None):
        return paddle.sum(x) if axis is None else paddle.sum(x, axis=axis, keepdim=True)

    def max(self, x, axis):
        return paddle.amax(x, axis=axis, keepdim=True)

    def where(self, condition, a, b):
        condition = paddle.to_tensor(condition) if isinstance(condition, np.ndarray) else condition
        return paddle.where(
            condition, a, paddle.full(a.shape, b, dtype=a.dtype) if isinstance(b, float) else b
        )

    def constant(self, values, like=None):
        return paddle.to_tensor(np.array(values), dtype=None if like is None else like.dtype)

    def stop_gradient(self, x):
        return x.detach()

    def with_gradient(self, x, function):
        if not paddle.in_dynamic_mode():
            raise Unsupported(
                "paddle has no hooks in compiled code: a change to a gradient in flight cannot be traced"
            )
        x = x * 1.0  # a new tensor: a hook on a parameter would outlive the run
        if not x.stop_gradient:
            x.register_hook(function)
        return x

    def held(self, layer, kind):
        return layer.bias if kind in ("bias", "beta") else layer.weight


class Mutated(Mutating, Adapter):
    """The PaddlePaddle backend with bugs."""

    context = PaddleInjection
