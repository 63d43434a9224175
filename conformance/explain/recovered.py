"""Which numbers of a weight, taken for others, give the tensor of a linear layer (SPEC WGT-1 to WGT-4)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from concord.conformance.bugs.attention import PROJECTIONS
from concord.conformance.bugs.context import parameters_of
from concord.conformance.bugs.precision import LINEAR
from concord.conformance.expectation import Array
from concord.conformance.explain.hypothesis import Hypothesis, loaded
from concord.conformance.explain.question import Question
from concord.conformance.explain.reading import clear, within
from concord.conformance.wording import few, instead


def of_recovered(question: Question) -> Iterator[Hypothesis]:
    """Read off what is wrong with a weight or a bias: one element, the order of rows or columns, or all."""
    if not question.is_tap(LINEAR) or (
        question.config.qkv_activation == "relu" and question.is_tap(PROJECTIONS)
    ):
        return
    name = parameters_of(question.tensor)
    weight = question.case.weights[f"{name}.weight"].astype(np.float64)  # (in, out)
    # What is wrong is far larger than rounding: float64 is enough, and what linear algebra there is.
    inputs = question.exact.inputs[question.tensor].value.reshape(-1, len(weight)).astype(np.float64)
    right, sigma, error = (
        np.broadcast_to(array, question.actual.shape).reshape(len(inputs), -1).astype(np.float64)
        for array in (question.right.value, question.right.sigma, question.actual - question.right.value)
    )  # (N, out)
    if len(inputs) > 2 and np.isfinite(error).all() and np.isfinite(sigma).all():
        yield from _of_element(name, weight, inputs, right, error, sigma)
        yield from _of_all(question, name, weight, inputs, error, sigma)


def _of_element(
    name: str, weight: Array, inputs: Array, right: Array, error: Array, sigma: Array
) -> Iterator[Hypothesis]:
    """Yield the one element whose change explains everything."""
    wrong = [i for i in range(error.shape[1]) if not within(error[:, i], sigma[:, i])]
    if len(wrong) != 1 or not within(np.delete(error, wrong, axis=1), np.delete(sigma, wrong, axis=1)):
        return
    (column,) = wrong
    error, sigma = error[:, column], sigma[:, column]
    found = []
    # After the inputs come what stands for the bias, and what would be a column that is multiplied by
    # something.
    for row, factor in enumerate((*inputs.T, np.ones(len(inputs)), right[:, column])):
        power = float(np.square(factor / sigma).sum())
        change = float((factor / sigma * (error / sigma)).sum()) / power if power > 0 else 0.0
        if power > 0 and clear(error, error - factor * change, sigma):
            found.append((row, change))
    if len(found) != 1 or found[0][0] > len(weight):
        return
    row, change = found[0]
    if row == len(weight):
        text = f"element {column} of `{name}.bias` being off by {change:.3g}"
        yield Hypothesis("bias_element", text, "WGT-4", sure=False)  # or something added to it later
    elif weight[row, column] + change != weight[row, column]:
        number = instead(float(weight[row, column] + change), float(weight[row, column]))
        yield Hypothesis("weight_element", f"`{name}.weight` at {(row, column)} being {number}", "WGT-4")


def _of_all(
    question: Question, name: str, weight: Array, inputs: Array, error: Array, sigma: Array
) -> Iterator[Hypothesis]:
    """Yield any weight and bias at all: with enough rows, few tensors are linear in what went in."""
    design = np.concatenate([inputs, np.ones((len(inputs), 1))], axis=1)  # the last stands for the bias
    if len(design) < 2 * design.shape[1]:
        return
    inverse = np.linalg.pinv(design, rcond=1e-6)
    change, left = np.zeros((design.shape[1], error.shape[1])), error
    for _ in range(3):  # each time the solution's own rounding is taken off
        step = inverse @ left
        change, left = change + step, left - design @ step
    if not clear(error, left, sigma):
        return
    for axis, word in ((0, "rows"), (1, "columns")):
        old, new = (np.moveaxis(array, axis, 0) for array in (weight, weight + change[:-1]))
        source = np.array([int(np.square(old - line).sum(1).argmin()) for line in new])
        moved = np.flatnonzero(source != np.arange(len(source)))
        if moved.size and len(set(source.tolist())) == len(source):
            text = f"{word} {few(moved)} of `{name}.weight` having changed places"
            made = {f"{name}.weight": partial(np.take, weight, source, axis)}
            hypothesis = loaded("weight_permuted", text, "WGT-2", made)
            prediction = question.predict(hypothesis)
            if within(question.actual - prediction.value, prediction.sigma):
                yield hypothesis
    if within(error - error.mean(0), sigma):
        yield Hypothesis("other_bias", f"other numbers in `{name}.bias`", "WGT-4", sure=False)
    yield Hypothesis("other_weight", f"other numbers in `{name}.weight`", "WGT-4", sure=False)
