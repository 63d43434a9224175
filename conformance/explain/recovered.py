"""Which numbers of a weight, taken for others, give the tensor of a linear layer (SPEC WGT-1 to WGT-4)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.attention import PROJECTIONS
from concord.conformance.bugs.context import parameters_of
from concord.conformance.bugs.products import LINEAR
from concord.conformance.expectation import Array
from concord.conformance.explain.hypothesis import Hypothesis, loaded
from concord.conformance.explain.question import Question
from concord.conformance.explain.reading import clear, within
from concord.conformance.wording import few, instead

STRAIGHT = 1e-3
"""How far the squared cosine of two directions that may agree lies below 1."""


def of_recovered(question: Question) -> Iterator[Hypothesis]:
    """Read off what is wrong with a weight or a bias."""
    if not question.is_tap(LINEAR) or (
        question.config.qkv_activation == "relu" and question.is_tap(PROJECTIONS)
    ):
        return
    recovery = _Recovery(question)
    if recovery.usable:
        for look in (recovery.element, recovery.columns, recovery.rows, recovery.anything):
            found = look()
            if found:
                yield found
                return


class _Recovery:
    """The error of a linear layer, (N, out), beside what went into it, (N, in)."""

    def __init__(self, question: Question) -> None:
        self.question, self.name = question, parameters_of(question.tensor)
        self.weight = question.case.weights[f"{self.name}.weight"].astype(np.float64)
        # What is wrong is far larger than rounding: float64 is enough, and what linear algebra there is.
        self.inputs = (
            question.exact.inputs[question.tensor].value.reshape(-1, len(self.weight)).astype(np.float64)
        )
        shape = (len(self.inputs), -1)
        self.right, self.actual = question.right.value.reshape(shape), question.actual.reshape(shape)
        self.sigma = np.broadcast_to(question.right.sigma, question.right.value.shape).reshape(shape)
        self.usable = bool(
            np.isfinite(self.actual).all() and np.isfinite(self.sigma).all() and len(self.inputs) > 2
        )
        self.error = (self.actual - self.right).astype(np.float64)
        self.right = self.right.astype(np.float64)
        columns = range(self.error.shape[1])
        self.wrong = np.array(
            [column for column in columns if not within(self.error[:, column], self.sigma[:, column])], int
        )

    def element(self) -> Hypothesis | None:
        """Look for one element whose change explains everything."""
        if len(self.wrong) != 1 or not within(
            np.delete(self.error, self.wrong, axis=1), np.delete(self.sigma, self.wrong, axis=1)
        ):
            return None
        column = int(self.wrong[0])
        error, sigma = self.error[:, column], self.sigma[:, column]
        found = []
        # After the inputs come what stands for the bias, and what would be a column that is multiplied by
        # something.
        for row, factor in enumerate((*self.inputs.T, np.ones(len(self.inputs)), self.right[:, column])):
            power = float((np.square(factor / sigma)).sum())
            change = float((factor / sigma * (error / sigma)).sum()) / power if power > 0 else 0.0
            if power > 0 and clear(error, error - factor * change, sigma):
                found.append((row, change))
        if len(found) != 1 or found[0][0] > len(self.weight):
            return None
        row, change = found[0]
        if row == len(self.weight):
            text = f"element {column} of `{self.name}.bias` being off by {change:.3g}"
            return Hypothesis("bias_element", text, "WGT-4", sure=False)  # or something added to it later
        before = float(self.weight[row, column])
        if before + change == before:
            return None
        return Hypothesis(
            "weight_element",
            f"`{self.name}.weight` at {(row, column)} being {instead(before + change, before)}",
            "WGT-4",
        )

    def columns(self) -> Hypothesis | None:
        """Look for columns that have changed places, with their bias or without it."""
        name = f"{self.name}.bias"
        bias = (
            self.question.case.weights[name].astype(np.float64)
            if name in self.question.case.weights
            else np.zeros(self.right.shape[1])
        )
        for moved in (np.zeros_like(bias), bias):
            source = np.arange(self.right.shape[1])
            for column in self.wrong:
                distances = abs((self.right - moved)[:, self.wrong] - (self.actual - moved)[:, [column]]).sum(
                    0
                )
                source[column] = self.wrong[int(np.argmin(distances))]
            words = f"columns {few(self.wrong)} of `{self.name}.weight`"
            if moved is not bias and name in self.question.case.weights:
                words += " and its bias"
            weights = {
                f"{self.name}.weight": self.weight[:, source],
                **({} if moved is bias else {name: bias[source]}),
            }
            found = self.permuted(
                source,
                words,
                {key: array for key, array in weights.items() if key in self.question.case.weights},
            )
            if found:
                return found
        return None

    def rows(self) -> Hypothesis | None:
        """Look for one row that is another, or two that have changed places.

        Either way the error has rank 1.
        """
        if len(self.wrong) < 2:
            return None
        left, sizes, right = np.linalg.svd(self.error, full_matrices=False)
        if not within(self.error - np.outer(left[:, 0] * sizes[0], right[0]), self.sigma):
            return None
        factors = np.concatenate(
            [self.inputs, np.ones((len(self.inputs), 1))], axis=1
        )  # the last stands for the bias
        single = [row for row, factor in enumerate(factors.T) if self.spanned(factor)]
        if len(single) == 1 and single[0] < len(self.weight):
            return Hypothesis("weight_row", f"row {single[0]} of `{self.name}.weight` being another", "WGT-4")
        pairs = [] if single else self.pairs(left[:, 0])
        if len(pairs) != 1:
            return None
        source = np.arange(len(self.weight))
        source[list(pairs[0])] = pairs[0][::-1]
        words = f"rows {pairs[0][0]}, {pairs[0][1]} of `{self.name}.weight`"
        return self.permuted(source, words, {f"{self.name}.weight": self.weight[source]})

    def pairs(self, direction: Array) -> list[tuple[int, int]]:
        """Return which two rows may have changed places.

        The error is then along the difference of what goes into them.
        """
        found = []
        for i, factor in enumerate(self.inputs.T):
            differences = factor[:, None] - self.inputs
            power = np.square(differences).sum(0)
            along = np.square(direction @ differences) >= (1 - STRAIGHT) * power * np.square(direction).sum()
            found += [
                (i, int(j))
                for j in np.flatnonzero(along & (power > 0))
                if i < j and self.spanned(differences[:, j])
            ]
        return found

    def spanned(self, factor: Array) -> bool:
        """Return whether every column of the error is a multiple of one."""
        power = float(np.square(factor).sum())
        return power > 0 and clear(
            self.error, self.error - np.outer(factor, factor @ self.error / power), self.sigma
        )

    def permuted(
        self, source: NDArray[np.integer], words: str, weights: dict[str, Array]
    ) -> Hypothesis | None:
        """Return that rows or columns have changed places, if that explains the tensor."""
        if len(set(source.tolist())) < len(source) or (source == np.arange(len(source))).all():
            return None
        made = {name: partial(np.asarray, array) for name, array in weights.items()}
        hypothesis = loaded("weight_permuted", f"{words} having changed places", "WGT-2", made)
        prediction = self.question.predict(hypothesis)
        explained = within(self.question.actual - prediction.value, prediction.sigma)
        return hypothesis if explained else None

    def anything(self) -> Hypothesis | None:
        """Look for any weight and bias at all: with enough rows, few tensors are linear in what went in."""
        design = np.concatenate([self.inputs, np.ones((len(self.inputs), 1))], axis=1)
        if len(design) < 2 * design.shape[1]:
            return None
        inverse = np.linalg.pinv(design, rcond=1e-6)
        left = self.error
        for _ in range(3):  # each time the solution's own rounding is taken off
            left = left - design @ (inverse @ left)
        if not clear(self.error, left, self.sigma):
            return None
        if within(self.error - self.error.mean(0), self.sigma):
            return Hypothesis("other_bias", f"other numbers in `{self.name}.bias`", "WGT-4", sure=False)
        return Hypothesis("other_weight", f"other numbers in `{self.name}.weight`", "WGT-4", sure=False)
