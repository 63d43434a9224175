"""Models that treat padding in ways of their own, and right where there is a token.

What other projects do, on the reference's arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from concord.backends.interface import Run
from concord.spec.arithmetic import Arithmetic
from concord.spec.cases import Case
from concord.spec.masks import real_tokens
from concord.spec.model import Model
from concord.spec.reference import compute


class OuterMask(Model):
    """Its mask is an outer product, so that padded queries see nothing either."""

    def attention(self, name: str, query: Any, key: Any, value: Any, key_mask: Any, query_mask: Any) -> Any:
        return super().attention(
            name, query, key, value, key_mask[:, :, None] & key_mask[:, None, :], query_mask
        )


class Unpadded(Model):
    """It computes no row of padding: each is this number."""

    filling = 0.0

    def tap(self, name: str, tensor: Any) -> Any:
        real = real_tokens(self.config, self.batch.required("input_ids"))
        if tensor.value.ndim > 2 and tensor.shape[:2] == real.shape:
            tensor = self.a.replace(
                tensor, real.reshape(*real.shape, *[1] * (tensor.value.ndim - 2)), self.filling
            )
        return super().tap(name, tensor)


class Uninitialised(Unpadded):
    """What nobody computes is whatever memory held; it is handed out, and nothing is computed from it."""

    def observe(self, observer: Any, gradients: bool, part: str) -> int:
        real = real_tokens(self.config, self.batch.required("input_ids"))

        def spoilt(name: str, array: Any) -> None:
            if array.ndim > 2 and array.shape[:2] == real.shape:
                array = np.where(real.reshape(*real.shape, *[1] * (array.ndim - 2)), array, np.nan)
            observer(name, array)

        return super().observe(spoilt, gradients, part)


class BlindZero(Model):
    """As PyTorch's scaled_dot_product_attention: a query without any visible key has a context of zero."""

    def dot_product(self, name: str, q: Any, k: Any, v: Any, key_mask: Any, query_mask: Any) -> Any:
        softmax, self.a.softmax = (
            self.a.softmax,
            lambda *given: self.a.replace(softmax(*given), key_mask.any(-1)[:, None, None, None], 0.0),
        )
        try:
            return super().dot_product(name, q, k, v, key_mask, query_mask)
        finally:
            self.a.softmax = softmax


def run_of(
    case: Case,
    model: type[Model],
    dtype: str = "float32",
    batch: Any = None,
    declares: str = "",
    **weights: Any,
) -> Run:
    """Return what a backend with such a model returns.

    Args:
        batch: the inputs, if not those of the case.
        declares: the deviation that it declares.
        weights: that are other ones.
    """
    given = batch or case.batch
    made = compute(
        case.config,
        {**case.weights, **weights},
        given,
        Arithmetic(dtype, shuffle=89),
        True,
        case.part,
        dtype,
        model=model,
    )
    info = {"deviations": [{"name": declares, "value": 1, "reason": "it is made so"}]} if declares else {}
    return Run(made.output, made.loss, dict(made.taps), dict(made.gradients), "numpy", dtype, info)
