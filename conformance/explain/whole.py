"""What explains an output that comes without the taps before it.

Each bug in all layers at once, the whole table, and each in one layer.

Of a model that hands back its output alone nothing says where a bug lies, and each has to be run through
the whole model. So it is looked for in one sample, first in the arithmetic of the run and then, where that
comes near, with its own tolerance.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from concord.conformance.bugs.context import Context
from concord.conformance.bugs.tape import Value
from concord.conformance.estimate import SAMPLES
from concord.conformance.expectation import root_mean_square
from concord.conformance.explain.hypothesis import RIGHT, Hypothesis
from concord.conformance.explain.question import Question
from concord.conformance.explain.search import MUCH_BETTER
from concord.conformance.explain.step import group_of, place_of
from concord.conformance.explain.suspects import bugs_at, likeliest_first, of_hidden
from concord.conformance.wording import gather
from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array
from concord.spec.masks import real_tokens
from concord.spec.precision import PRECISIONS
from concord.spec.tensors import taps

LARGE_ERROR = 0.1
"""Share of the largest error of a sample from which on another one shows the bug as well."""

MOST_NEAR = 5
"""How many hypotheses of a kind are held against the tensor with a tolerance of their own."""

MOSTLY = 0.75
"""Share of elements whose error a hypothesis at least halves that is worth that."""

LAYER = re.compile(r"\blayers\.\d+\b")


def hidden(question: Question) -> list[str]:
    """Return the taps that were computed on the way to a tensor since the last one that was delivered."""
    before = question.before
    last = max((place for place, name in enumerate(before) if name in question.pinned), default=-1)
    return before[last + 1 :]


def reaches_far(question: Question) -> bool:
    """Return whether a bug may lie in another layer than the one that a tensor belongs to."""
    return any(group_of(name) != group_of(question.tensor) for name in hidden(question))


class Whole(Question):
    """A tensor in question that anything may have gone wrong before."""

    same_name, trial = False, 0.6

    @property
    def span(self) -> tuple[str, ...]:
        return (*hidden(self), self.tensor)

    @property
    def arithmetic(self) -> Arithmetic:
        """What hypotheses are first tried in: that of the run, which has no weights to convert."""
        return Arithmetic(self.case.dtype if self.case.dtype in PRECISIONS else "float32")

    def values(self, hypothesis: Hypothesis) -> Array:
        """Return the tensor under a hypothesis, rounded as the run is.

        What comes before the bug is computed once for all.
        """
        with contextlib.suppress(KeyError):  # it takes something of what is not computed again
            return self._rounded(
                hypothesis,
                {
                    name: array
                    for name, array in self.ends.items()
                    if place_of(group_of(name)) < self.place(hypothesis)
                },
            )
        return self._rounded(hypothesis, {})

    def _rounded(self, hypothesis: Hypothesis, ends: Mapping[str, Array]) -> Array:
        run = self.run(dataclasses.replace(hypothesis, inputs=ends), self.arithmetic)
        return np.asarray(self._taken(run), np.float64)

    @functools.cached_property
    def ends(self) -> dict[str, Array]:
        """What comes out of the embeddings and of each layer if nothing is wrong, by the tap."""
        right, last = self.run(RIGHT, self.arithmetic).values, {}
        for name in self.span:
            last[group_of(name)] = name
        return {
            name: right[name] for group, name in last.items() if group.startswith(("embeddings", "layers."))
        }

    def place(self, hypothesis: Hypothesis) -> int:
        """Return from which place on in the order of computation a hypothesis changes anything."""
        if hypothesis.fields or hypothesis.factors:
            return -1
        touched = [*hypothesis.weights, *(name for name in self.span if hypothesis.changes(name))]
        return min((place_of(group_of(name)) for name in touched), default=-1)

    def chosen(self, tried: Iterator[tuple[Hypothesis, Array]]) -> Iterable[Hypothesis]:
        """Return the few that come nearest to the tensor: each tolerance takes many runs."""
        apart = [(root_mean_square(np.nan_to_num(self.actual - value)), one) for one, value in tried]
        nearest = sorted(apart, key=lambda pair: pair[0])[:MOST_NEAR]  # of equals the first
        return [one for size, one in apart if (size, one) in nearest and size <= MUCH_BETTER * nearest[0][0]]

    def near(self, hypothesis: Hypothesis, value: Array) -> bool:
        """Return whether a value halves the error in most places, whatever rounding makes of the rest."""
        if value.shape != self.actual.shape or not np.array_equal(
            np.isfinite(value), np.isfinite(self.actual)
        ):
            return False
        before, left = abs(self.actual - self.usual), abs(self.actual - value)
        return bool(np.isfinite(self.actual).all()) and float(np.mean(left <= before / 2)) >= MOSTLY

    @functools.cached_property
    def usual(self) -> Array:
        """What the tensor should be, rounded as the run is."""
        return self.values(RIGHT)

    def side_by_side(self, elements: int) -> int:
        """Return how large samples are to count.

        Weights are squared for each group of them, and one sample has few numbers beside these.
        """
        return elements // SAMPLES

    def of_one_sample(self) -> Whole:
        """Return the same of the one sample that shows most, where samples are computed each by itself."""
        ids, config = self.case.batch.input_ids, self.case.config
        axes = taps(config, self.case.part, list(self.case.batch.arrays()))
        if (
            ids is None
            or len(ids) == 1
            or config.mask_assignment == "batch_major"
            or axes[self.tensor].shape.split()[:1] != ["batch"]
        ):
            return self
        apart = abs(self.actual - self.usual).reshape(len(ids), -1).max(1)
        shows = ~(apart < LARGE_ERROR * apart.max())
        padding = ~real_tokens(config, ids)
        segments = self.case.batch.segment_ids
        kinds = (
            np.zeros(len(ids)) if segments is None else np.array([len(np.unique(row)) for row in segments])
        )
        # Of those that show it: one whose padding is masked, of several segments, of many words.
        best = max(
            np.flatnonzero(shows).tolist(),
            key=lambda row: (0 < padding[row].sum() < ids.shape[1], kinds[row], -int(padding[row].sum())),
        )
        batch = dataclasses.replace(
            self.case.batch, **{name: array[[best]] for name, array in self.case.batch.arrays().items()}
        )
        pinned = {
            name: array[[best]] if axes[name].shape.split()[:1] == ["batch"] else array
            for name, array in self.pinned.items()
        }
        return Whole(dataclasses.replace(self.case, batch=batch), pinned, self.tensor, self.actual[[best]])


def stages(question: Whole) -> Iterator[Iterable[Hypothesis]]:
    """Yield what may be wrong before a tensor before which nothing was delivered.

    An option or one bug in all layers, one layer, the table.
    """
    yield likeliest_first(everywhere(question))
    yield likeliest_first(somewhere(question))
    yield of_hidden(question)


def everywhere(question: Whole) -> Iterator[Hypothesis]:
    """Yield options, bugs outside of layers, and those that are made in each layer."""
    options: set[str] = set()
    for places in _kinds(question):
        alike = gather((one for tap in places for one in bugs_at(question, tap)), _key)
        for first, *others in alike.values():
            if first.fields and first.text not in options:
                options.add(first.text)
                yield first
            elif not first.fields and 1 + len(others) == len(places):
                yield _in_all([first, *others]) if others else first


def somewhere(question: Whole) -> Iterator[Hypothesis]:
    """Yield bugs that are made in one of several layers."""
    for places in _kinds(question):
        for tap in places if len(places) > 1 else ():
            for one in bugs_at(question, tap):
                if not one.fields:
                    at = "" if LAYER.search(one.text) else f" at `{tap}`"
                    yield dataclasses.replace(one, text=f"{one.text}{at}")


def _kinds(question: Question) -> Iterable[list[str]]:
    """Return the taps, those together that are the same but for the layer."""
    return gather(question.span, functools.partial(LAYER.sub, "layers.*")).values()


def _key(one: Hypothesis) -> tuple[str, str]:
    """Return what a bug is called, whatever the layer."""
    return one.name, LAYER.sub("layers.*", one.text)


def _in_all(ones: Sequence[Hypothesis]) -> Hypothesis:
    """Return a bug that is made in each of several layers."""
    by_tap = {one.on[0]: one.change for one in ones if one.change}

    def change(m: Context) -> Value:
        found: Value = by_tap[m.tap](m)
        return found

    return dataclasses.replace(
        ones[0],
        text=f"{LAYER.sub('layers.*', ones[0].text)}, in every layer",
        weights={name: made for one in ones for name, made in one.weights.items()},
        change=change if by_tap else None,
        on=tuple(by_tap),
    )
