"""Constants in arithmetic with tensors, which static programs would round to float32.

``x * c``, ``x + c``, ``x / c``, ``paddle.full_like`` and ``paddle.to_tensor(c)`` do that, beside float64 tensors too, and
``paddle.where`` also eagerly; ``paddle.full`` with a dtype does not.
"""

import paddle
from paddle import Tensor


def scalar(value: float, like: Tensor) -> Tensor | float:
    """Return a constant for arithmetic with a tensor."""
    return paddle.full([], value, dtype=like.dtype) if like.dtype == paddle.float64 else value


def filled(like: Tensor, value: float) -> Tensor:
    """Return a tensor of the shape and dtype of another, filled with a constant."""
    return paddle.full(like.shape, value, dtype=like.dtype)
