"""Models that treat padding in ways of their own, and right where there is a token.

What other projects do, on the reference's arithmetic.
"""

import dataclasses

import numpy as np

from concord.spec.arithmetic import Arithmetic
from concord.spec.masks import real_tokens
from concord.spec.model import Model
from tests.toys.rounded import as_run, truth_of


class OuterMask(Model):
    """Its mask is an outer product, so that padded queries see nothing either."""

    def attention(self, name, query, key, value, key_mask, query_mask):
        return super().attention(
            name, query, key, value, key_mask[:, :, None] & key_mask[:, None, :], query_mask
        )


class Unpadded(Model):
    """It computes no row of padding: each is this number."""

    filling = 0.0

    def tap(self, name, tensor):
        real = real_tokens(self.config, self.batch.required("input_ids"))
        if tensor.value.ndim > 2 and tensor.shape[:2] == real.shape:
            tensor = self.a.replace(
                tensor, real.reshape(*real.shape, *[1] * (tensor.value.ndim - 2)), self.filling
            )
        return super().tap(name, tensor)


class Uninitialised(Unpadded):
    """What nobody computes is whatever memory held; it is handed out, and nothing is computed from it."""

    def observe(self, observer, gradients, part):
        real = real_tokens(self.config, self.batch.required("input_ids"))

        def spoilt(name, array):
            if array.ndim > 2 and array.shape[:2] == real.shape:
                array = np.where(real.reshape(*real.shape, *[1] * (array.ndim - 2)), array, np.nan)
            observer(name, array)

        return super().observe(spoilt, gradients, part)


class BlindZero(Model):
    """As PyTorch's scaled_dot_product_attention: a query without any visible key has a context of zero."""

    def dot_product(self, name, q, k, v, key_mask, query_mask):
        softmax, self.a.softmax = (
            self.a.softmax,
            lambda *given: self.a.replace(softmax(*given), key_mask.any(-1)[:, None, None, None], 0.0),
        )
        try:
            return super().dot_product(name, q, k, v, key_mask, query_mask)
        finally:
            self.a.softmax = softmax


def run_of(case, model, dtype="float32", batch=None, declares="", **weights):
    """Return what a backend with such a model returns.

    Args:
        batch: the inputs, if not those of the case.
        declares: the deviation that it declares.
        weights: that are other ones.
    """
    given = dataclasses.replace(case, weights={**case.weights, **weights}, batch=batch or case.batch)
    info = {"deviations": [{"name": declares, "value": 1, "reason": "it is made so"}]} if declares else {}
    truth = truth_of(given, dtype, Arithmetic(dtype, shuffle=89), model=model)
    return as_run(truth, dtype, info=info)
