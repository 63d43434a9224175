"""What may be wrong with a step of the model, in the order in which it is tried."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import numpy as np

from concord.conformance.bugs.bug import Bug, Change, fits
from concord.conformance.bugs.catalogue import ALL, TRIED
from concord.conformance.bugs.norms import NORMS
from concord.conformance.explain.hypothesis import Hypothesis
from concord.conformance.explain.masks import of_mask
from concord.conformance.explain.numbers import of_numbers
from concord.conformance.explain.options import (
    of_derivatives,
    of_fitted_epsilon,
    of_options,
    of_other_constants,
)
from concord.conformance.explain.question import SHORTER, Question
from concord.conformance.explain.readings import (
    limits_of_zeros,
    of_cancellation,
    of_dropout,
    of_dropped_weights,
    of_format,
    of_limit,
    of_recovered,
    of_rows,
    of_sign,
    of_small,
)
from concord.conformance.explain.step import group_of
from concord.conformance.explain.weights import of_weights
from concord.spec.parameters import trainable

LIMITS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Norms that gradients are clipped to."""


def of_tap(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield the bugs that edit a tap."""
    for bug in TRIED:
        edit = None if bug.of_gradients else bug.change.at(tap)
        if edit:
            yield hypothesis(bug, Change(taps=(tap,), edit=edit))


def of_gradient(question: Question) -> Iterator[Hypothesis]:
    """Yield what may have become of the gradient of a parameter afterwards (SPEC GRD-1)."""
    every = (question.exact.gradient(name) for name in trainable(question.config, question.case.part))
    length = math.sqrt(sum(float(np.square(gradient).sum()) for gradient in every))
    clipped = {
        f"gradients that were clipped together to the norm {limit:g}": limit / length
        for limit in LIMITS
        if length > limit
    }
    for name, factors in (
        ("no_gradient", {"no gradient at all": 0.0}),
        ("gradient_accumulated", {"a gradient that was counted twice": 2.0}),
        ("gradient_clipped", clipped),
    ):
        if name == "no_gradient" and (question.actual.any() or limits_of_zeros(question)):
            continue  # some of it is there, or in all gradients what is small is zero
        for text, factor in factors.items():
            yield Hypothesis(name, text, "GRD-1", gradient=functools.partial(np.multiply, factor))


def of_backward(question: Question) -> Iterator[Hypothesis]:
    """Yield the bugs of the backward pass alone; those of a table are its own."""
    table = (
        f"gradients.{question.tensor.split('.')[1]}" == "gradients.embeddings" or ".taps." in question.tensor
    )
    for bug in TRIED if question.parameter else ():
        of_table = all(tap.startswith("embeddings.") for tap in bug.change.taps)
        if bug.change.edit and bug.of_gradients and (table or not of_table):
            yield hypothesis(bug, bug.change)


def of_factors(question: Question) -> Iterator[Hypothesis]:
    """Yield products whose factors are rounded first (SPEC PRC-1 to PRC-3)."""
    shorter = SHORTER.get(question.case.dtype, ())
    for name in shorter:
        short = "tf32" if name == "float16" else name  # which has as many bits
        bits = "11 bits, as TF32 and float16 have" if short == "tf32" else short
        text = f"products whose factors are rounded to {bits}"
        yield Hypothesis(f"{short}_products", text, "PRC-2", factors=short)
    if shorter:
        text = "products whose factors are cut off, not rounded, to 11 bits (TF32)"
        yield Hypothesis("tf32_products", text, "PRC-2", factors="tf32 cut off")


def of_hidden(question: Question) -> Iterator[Hypothesis]:
    """Yield every bug on the way to a tensor from what a run delivered: in a kernel, or a whole model.

    There one bug may change several taps, or weights, which explanations of a single tap do not stand for.
    """
    hidden = (*question.hidden, question.tensor)
    for bug in sorted(ALL, key=lambda bug: _place(_name(bug))) if question.hidden else ():
        there = "request" in bug.change.places or any(bug.change.at(name) for name in hidden)
        if there and not (bug.after or bug.of_gradients):
            yield hypothesis(bug, bug.change)


def hypothesis(bug: Bug, change: Change) -> Hypothesis:
    """Return a bug as something that a run may contain.

    Args:
        change: what it changes there.
    """
    return Hypothesis(_name(bug), bug.text, bug.clause, change=change)


def _name(bug: Bug) -> str:
    """Return what a bug is called as an explanation.

    Its own name where that is one, else the first of those it may have.
    """
    causes = bug.cause.split(" or ")
    return bug.name if bug.name in causes else causes[0]


Family = Callable[[Question, str], Iterator[Hypothesis]]

FAMILIES: tuple[Family, ...] = (of_options, of_weights, of_tap)
"""What may be wrong with a tap: an option, its weights, or a bug of the catalogue."""

LIKELY = (
    ("activation", "quick_gelu", "silu"),
    ("norm_epsilon*", "norm_placement", "norm_variance"),
    ("mask_*", "query_mask*", "pad_id"),
    ("segment*", "token_padding*"),
    ("missing_bias", "*_missing", "*_left_out", "*_skipped"),
    ("transposed_weight", "weight_in_wrong_order", "swapped_weights", "heads_*", "fused_weight"),
    ("*scale*",),
)
"""Kinds of bugs (patterns of names) that people make most often, the most frequent first.

They are tried first, and the rest after them.
"""

READINGS = (
    *(of_format, of_limit, of_sign, of_small, of_dropout, of_dropped_weights),
    *(of_rows, of_mask, of_recovered, of_cancellation),
)
"""In the order in which they are tried; the first that says something is believed."""


def stages(question: Question) -> Iterator[Iterable[Hypothesis]]:
    """Yield what may be wrong: what is tried together.

    Where other layers are hidden too, a bug of all of them is as likely as one of the last step.
    """
    far = any(group_of(name) != group_of(question.tensor) for name in question.hidden)
    yield likeliest_first(chain(simple(question), of_hidden(question) if far else ()))
    yield chain(() if far else of_hidden(question), unusual(question))


def readings(question: Question) -> Iterator[Hypothesis]:
    """Yield what the tensor shows by itself."""
    for look in READINGS:
        yield from look(question)


def simple(question: Question) -> Iterator[Hypothesis]:
    """Yield single bugs."""
    if question.parameter:
        yield from of_gradient(question)
        yield from of_derivatives(question)
        yield from of_backward(question)
    yield from bugs(question)
    yield from of_factors(question)


def unusual(question: Question) -> Iterator[Hypothesis]:
    """Yield values that nobody uses."""
    for tap in question.span:
        if fits(tap, NORMS):
            yield from of_fitted_epsilon(question)
        if fits(tap, ("*.masked_scores",)):
            yield from of_other_constants(question, tap)
        yield from of_numbers(question, tap)


def bugs(question: Question) -> Iterator[Hypothesis]:
    """Yield the single bugs that the step of a tap may contain."""
    for tap in question.span:
        for family in FAMILIES:
            yield from family(question, tap)


def like(question: Question, hypothesis: Hypothesis) -> Hypothesis | None:
    """Return the hypothesis of the same name and text that may be made of the tensor in question."""
    wanted = (hypothesis.name, hypothesis.text)
    known = (one for some in (simple, unusual) for one in some(question))
    return next((one for one in known if (one.name, one.text) == wanted), None)


def likeliest_first(hypotheses: Iterable[Hypothesis]) -> Iterator[Hypothesis]:
    """Yield hypotheses in the order in which they are tried; last come those that hardly anyone makes."""
    yield from sorted(hypotheses, key=lambda one: (one.rare, _place(one.name)))


def _place(name: str) -> int:
    """Return where an explanation stands in :data:`LIKELY`."""
    return next((i for i, names in enumerate(LIKELY) if fits(name, names)), len(LIKELY))
