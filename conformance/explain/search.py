"""The search: which hypotheses give the tensor that the run gave, and no other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from concord.conformance.bugs.bug import fits
from concord.conformance.bugs.norms import NORMS
from concord.conformance.estimate import R
from concord.conformance.expectation import Array
from concord.conformance.explain.effort import Effort
from concord.conformance.explain.formats import of_factors, of_format
from concord.conformance.explain.gradients import of_gradient
from concord.conformance.explain.hypothesis import INAPPLICABLE, Hypothesis
from concord.conformance.explain.options import of_options, of_other_constants, two_of_norms
from concord.conformance.explain.question import Prediction, Question
from concord.conformance.explain.reading import CLEAR
from concord.conformance.explain.recovered import of_recovered
from concord.conformance.explain.structure import (
    of_cancellation,
    of_dropout,
    of_dropped_weights,
    of_limit,
)
from concord.conformance.explain.tried import of_backward, of_hidden, of_tap
from concord.conformance.explain.weights import of_joined_heads, of_weights
from concord.conformance.fields import Unwritten

T = TypeVar("T")

Family = Callable[[Question, str], Iterator[Hypothesis]]

FAMILIES: tuple[Family, ...] = (of_options, of_weights, of_joined_heads, of_tap)
"""What may be wrong with a tap: an option, its weights, the order of its heads, or a bug of the catalogue."""

LIKELY = (
    ("activation", "quick_gelu", "silu"),
    ("norm_epsilon*", "norm_placement", "norm_variance"),
    ("mask_*", "query_mask*", "pad_id"),
    ("segment*", "token_padding*"),
    ("missing_bias", "*_missing", "*_left_out", "*_skipped"),
    ("transposed_weight", "weight_in_wrong_order", "swapped_weights", "heads_*", "fused_weight"),
    ("*scale*",),
)
"""Kinds of mistakes (patterns of names) that people make most often, the most frequent first.

They are tried first, and the rest after them.
"""

READINGS = (of_format, of_limit, of_dropout, of_dropped_weights, of_recovered, of_cancellation)
"""In the order in which they are tried; the first that says something is believed."""

MUCH_BETTER = 8.0
"""How many times smaller the error under one hypothesis must be for another, at the edge of its tolerance,
to be dropped.
"""

MOST_NAMED = 4
"""How many explanations a sentence names."""

SAME = 0.01
"""Tolerances within which two hypotheses come to the same numbers."""

EDGE = 0.5
"""From which share of the tolerance on an error lies at its edge."""


@dataclass(frozen=True)
class Cause:
    """What explains a divergence.

    Attributes:
        hypothesis: its name; several are joined by "or".
        text: a sentence that says so.
        confident: whether nothing else that was tried explains it as well.
        clauses: that it breaks.
        hypotheses: those that are named, as they can be tried elsewhere.
    """

    hypothesis: str
    text: str
    confident: bool
    clauses: tuple[str, ...] = field(default=(), compare=False)
    hypotheses: Unwritten = field(default=(), compare=False, repr=False)  # tuple[Hypothesis, ...]


@dataclass(frozen=True)
class Explanation:
    """A hypothesis that explains a tensor, what it predicts, and how the tensor is judged by it."""

    hypothesis: Hypothesis
    prediction: Prediction
    judgement: Any


def mistakes(question: Question) -> Iterator[Hypothesis]:
    """Yield the single mistakes that the step of a tap may contain."""
    for tap in question.span:
        yield from mistakes_at(question, tap)


def mistakes_at(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield the single mistakes that may be made at one tap."""
    for family in FAMILIES:
        yield from (hypothesis.at(tap) for hypothesis in family(question, tap))


def of_kind(question: Question, name: str) -> Iterator[Hypothesis]:
    """Yield the hypotheses of a name that may be made of the tensor in question."""
    search = Search(question, lambda *of: None, Effort())
    for hypotheses in (search.simple(), search.unusual()):
        yield from (hypothesis for hypothesis in hypotheses if hypothesis.name == name)


def likeliest_first(hypotheses: Iterable[Hypothesis]) -> list[Hypothesis]:
    """Return hypotheses in the order in which they are tried.

    By :data:`LIKELY`, then as they come, and last what hardly anyone does.
    """

    def place(one: Hypothesis) -> int:
        found = (i for i, names in enumerate(LIKELY) if fits(one.name, names))
        return len(LIKELY) + 1 if one.rare else next(found, len(LIKELY))

    return sorted(hypotheses, key=place)


class Search:
    """One search for the hypothesis that explains the tensor in question to within its tolerance.

    Args:
        judge: judges values, given what they should be, their sigma and the precision.
        effort: what it may take: when that is spent, what was found by then is the answer, and not a sure
            one.
    """

    same_name = True
    """Whether only explanations of one name are one mistake in other words where they come to the same."""

    share = 1.0
    """The share of its time that trying may take; the rest is for tolerances."""

    def __init__(self, question: Question, judge: Callable[..., Any], effort: Effort) -> None:
        self.question, self.judge, self.effort = question, judge, effort

    def cause(self) -> Cause | None:
        """Return what the first stage that explains the tensor says, or what is read off it."""
        with np.errstate(all="ignore"):  # what is not finite is compared as such
            for hypotheses in self.stages():
                found = self.explaining(hypotheses)
                if found:
                    return self.conclude(found)
            for one in self.readings() if not self.effort.untried else ():
                return caused(self.question.tensor, [one], one.sure)
        return None

    def stages(self) -> Iterable[Iterable[Hypothesis]]:
        """Yield the hypotheses that are tried together."""
        yield likeliest_first(self.simple())
        yield self.unusual()

    def readings(self) -> Iterator[Hypothesis]:
        """Yield what the tensor shows by itself."""
        return (one for look in READINGS for one in look(self.question))

    def simple(self) -> Iterator[Hypothesis]:
        """Yield single mistakes."""
        question = self.question
        if question.parameter:
            yield from of_gradient(question, question.parameter)
            yield from of_backward(question)
        yield from mistakes(question)
        yield from of_factors(question)

    def unusual(self) -> Iterator[Hypothesis]:
        """Yield pairs of mistakes, values that nobody uses, and bugs of several taps at once."""
        yield from of_hidden(self.question)
        for tap in self.question.span:
            if fits(tap, NORMS):
                yield from two_of_norms(self.question)
            if fits(tap, ("*.masked_scores",)):
                yield from of_other_constants(self.question, tap)

    def explaining(self, hypotheses: Iterable[Hypothesis]) -> list[Explanation]:
        """Return the hypotheses under which the tensor is right, and which do not leave it as it should be.

        Of several that are one mistake in other words, the first.
        """
        found: list[Explanation] = []
        for one in self.chosen(self.tried(hypotheses)):
            if found and self.effort.spent():
                self.effort.untried += 1
                continue
            try:
                prediction = self.question.predict(one)
            except INAPPLICABLE:
                continue
            known = any(
                (one.name == other.hypothesis.name or not self.same_name)
                and self.judged(prediction.value, other.prediction).ratio <= SAME
                for other in found
            )
            if not known and self.explains(prediction):
                found.append(Explanation(one, prediction, self.judged(self.question.actual, prediction)))
        return found

    def tried(self, hypotheses: Iterable[Hypothesis]) -> Iterator[tuple[Hypothesis, Array]]:
        """Yield hypotheses that come near the tensor, and what it is under each."""
        for hypothesis in self.effort.among(hypotheses, self.share):
            with contextlib.suppress(*INAPPLICABLE):
                value = self.question.values(hypothesis)
                if self.near(hypothesis, value):
                    yield hypothesis, value

    def chosen(self, tried: Iterator[tuple[Hypothesis, Array]]) -> Iterable[Hypothesis]:
        """Return those whose own tolerance is worth deriving."""
        return (hypothesis for hypothesis, _ in tried)

    def near(self, hypothesis: Hypothesis, value: Array) -> bool:
        """Return whether a value halves the error where there is one, in most places.

        Only then its own sigma is worth deriving.
        """
        actual, right = self.question.actual, self.question.right
        if value.shape != actual.shape or not _same_infinities(actual, value):
            return False
        if self.question.parameter and hypothesis.name != "no_gradient" and not value.any():
            return False  # a reason for having no gradient, and not told apart from others
        if not _same_infinities(actual, right.value):
            return True
        before, left = abs(actual - right.value), abs(actual - value)
        wrong = np.maximum(before, left) > R * right.sigma
        return bool(wrong.any()) and float(np.mean(left[wrong] <= before[wrong] / 2)) >= 0.5

    def explains(self, prediction: Prediction) -> bool:
        question, judgement = self.question, self.judged(self.question.actual, prediction)
        before = self.judged(question.actual, question.right)
        if judgement.status != "agrees" or before.ratio < CLEAR * judgement.ratio:
            return False
        if not _same_infinities(prediction.value, question.right.value):
            return True
        # Neither may pass for the other: a hypothesis without effect explains nothing, nor does a sigma that
        # allows anything.
        return all(
            judgement.status == "diverges"
            for judgement in (
                self.judged(prediction.value, question.right),
                self.judged(question.right.value, prediction),
            )
        )

    def judged(self, actual: Array, prediction: Prediction) -> Any:
        return self.judge(actual, prediction.value, prediction.sigma, self.question.case.dtype)

    def conclude(self, found: Sequence[Explanation]) -> Cause:
        kept = likeliest([(one.judgement.ratio, one) for one in found])
        sure = (
            len(found) == 1
            and found[0].judgement.ratio <= EDGE
            and not found[0].hypothesis.rare
            and not self.effort.untried
        )
        hypotheses = [one.hypothesis for one in kept]
        shown = [hypothesis for hypothesis in hypotheses if not hypothesis.rare] or hypotheses
        shown.sort(
            key=lambda hypothesis: not hypothesis.fields
        )  # an option that is wrong is the plainest reason
        return caused(self.question.tensor, shown, sure)


def likeliest(found: Sequence[tuple[float, T]]) -> list[T]:
    """Return what explains something best, and all that explains it as well.

    Args:
        found: by how many tolerances the error under each lies off, and each.
    """
    best = min(distance for distance, _ in found)
    return [one for distance, one in found if distance <= max(EDGE, MUCH_BETTER * best)]


def caused(tensor: str, hypotheses: Sequence[Hypothesis], sure: bool, since: str = "") -> Cause:
    """Return that hypotheses explain a tensor, or a step if it has no name, and say it.

    Args:
        since: from which step on, where it does not hold in steps before.
    """
    shown = " or by ".join(
        f"{hypothesis.text} ({hypothesis.clause})" for hypothesis in hypotheses[:MOST_NAMED]
    )
    more = f" or by {len(hypotheses) - MOST_NAMED} others" if len(hypotheses) > MOST_NAMED else ""
    subject, how = (f"`{tensor}` ", "is ") if tensor else ("", "")
    return Cause(
        " or ".join(dict.fromkeys(one.name for one in hypotheses)),
        f"{subject}{how if sure else 'may be '}explained by {shown}{more}{since}",
        sure,
        tuple(dict.fromkeys(one.clause for one in hypotheses)),
        tuple(hypotheses),
    )


def _same_infinities(a: Array, b: Array) -> bool:
    """Return whether two arrays are infinite, or no number, in the same places."""
    return bool(
        np.array_equal(np.where(np.isfinite(a), 0.0, a), np.where(np.isfinite(b), 0.0, b), equal_nan=True)
    )
