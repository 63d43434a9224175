"""Hypotheses about a step, in the order of a search."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from concord.conformance.bugs import gradients
from concord.conformance.bugs.activations import FUNCTIONS
from concord.conformance.bugs.attention import PROJECTIONS, WEIGHTS, softmax_over
from concord.conformance.bugs.bug import Bug, Change, fits
from concord.conformance.bugs.catalogue import EXPLANATIONS
from concord.conformance.bugs.context import Context, Edit
from concord.conformance.bugs.norms import NORMS, RESIDUALS
from concord.conformance.explain.description import FEW, wrong_elements
from concord.conformance.explain.hypothesis import Hypothesis
from concord.conformance.explain.mask_rules import of_mask
from concord.conformance.explain.numbers import of_numbers
from concord.conformance.explain.operands import of_operands
from concord.conformance.explain.option_values import (
    of_derivatives,
    of_fitted_epsilon,
    of_options,
    of_other_constants,
)
from concord.conformance.explain.partial_model import group_of, role_of
from concord.conformance.explain.question import SHORTER, Question
from concord.conformance.explain.readings import (
    limits_of_zeros,
    of_cancellation,
    of_count,
    of_dropout,
    of_dropped_weights,
    of_format,
    of_labels,
    of_limit,
    of_recovered,
    of_rows,
    of_sign,
    of_small,
    of_tokens,
)
from concord.conformance.explain.weight_search import of_weights
from concord.spec.parameters import trainable
from concord.spec.tensors import clause_of

# Norms at which gradients are commonly clipped.
LIMITS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)


def of_tap(question: Question, tap: str) -> Iterator[Hypothesis]:
    for bug in EXPLANATIONS:
        if not bug.of_gradients and bug.change.at(tap):
            yield hypothesis(bug)


# Patterns of taps with a replaceable function: the name of that bug, and the functions.
FUNCTIONAL = {
    "*.feed_forward.activation": ("activation", (*FUNCTIONS,)),
    "pooler.output": ("pooler", (*FUNCTIONS,)),
    **dict.fromkeys(PROJECTIONS, ("qkv_activation", (*FUNCTIONS,))),
    WEIGHTS: ("softmax", ("none", "sigmoid")),
    "logits": ("softmax", ("softmax", "sigmoid", "tanh", "ReLU")),
    "log_probabilities": ("softmax", ("none", "softmax", "sigmoid")),
}


# The reference's own function, by the value of its option, or by the pattern of a tap without an option.
OWN = {
    "relu": "ReLU",
    "gelu_erf": "erf GELU",
    "gelu_tanh": "tanh GELU",
    WEIGHTS: "softmax",
    "log_probabilities": "log-softmax",
}


def of_functions(question: Question, tap: str) -> Iterator[Hypothesis]:
    pattern = next((pattern for pattern in FUNCTIONAL if fits(tap, (pattern,))), None)
    if pattern is None:
        return
    kind, functions = FUNCTIONAL[pattern]
    clause = "ATT-1" if pattern in PROJECTIONS else clause_of(question.config, tap, question.case.part)
    own = getattr(question.config, kind, pattern)
    for name in functions:
        text = f"an added {name}" if own in ("none", "logits") else f"{name} instead of {OWN.get(own, own)}"
        text = "no activation" if name == "none" else text
        edit = functools.partial(_applied, FUNCTIONS[name])
        yield Hypothesis(kind, text, clause, change=Change(taps=(pattern,), edit=edit))
    for axis, noun in enumerate(("samples", "heads", "queries")) if pattern == WEIGHTS else ():
        edit = functools.partial(softmax_over, axis=axis)
        change = Change(taps=(pattern,), edit=edit)
        yield Hypothesis("softmax_axis", f"a softmax over {noun}", clause, change=change)


def _applied(function: Callable[[Context, Any], Any], m: Context) -> Any:
    if fits(m.tap, PROJECTIONS):
        return function(m, m.projected())
    return function(m, m.y if m.tap == "logits" else _entering(m))


def _entering(m: Context) -> Any:
    return m.unnormalised if fits(m.tap, (WEIGHTS,)) else m.x


def of_left_out(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield the step's omission, which fails if the step's input and output differ in size."""
    clause = clause_of(question.config, tap, question.case.part)
    change = Change(taps=(tap,), edit=lambda m: m.reshape(m.x, tuple(m.y.shape)))
    text = f"`{tap}` being equal to its step's input, as if the step were left out"
    yield Hypothesis("step_left_out", text, clause, change=change)


def of_gradient(question: Question) -> Iterator[Hypothesis]:
    all_gradients = (question.exact.gradient(name) for name in trainable(question.config, question.case.part))
    length = math.sqrt(sum(float(np.square(gradient).sum()) for gradient in all_gradients))
    clipped = {
        f"gradients clipped to a global norm of {limit:g}": limit / length
        for limit in LIMITS
        if length > limit
    }
    for name, factors in (
        ("no_gradient", {"no gradient at all": 0.0}),
        ("gradient_accumulated", {"a gradient counted twice": 2.0}),
        ("gradient_clipped", clipped),
    ):
        if name == "no_gradient" and (question.actual.any() or limits_of_zeros(question)):
            continue  # part of it is present, or a limit explains the zeros in all gradients (of_small)
        for text, factor in factors.items():
            edit = functools.partial(np.multiply, factor)
            # Rare, because a gradient may be missing for many reasons.
            yield Hypothesis(name, text, "GRD-1", gradient=edit, rare=name == "no_gradient")


# Results of activations.
ELEMENTWISE = ("*.feed_forward.activation", "pooler.output")


def of_backward(question: Question) -> Iterator[Hypothesis]:
    if not question.parameter:
        return
    table = (
        f"gradients.{question.tensor.split('.')[1]}" == "gradients.embeddings" or ".taps." in question.tensor
    )
    for bug in EXPLANATIONS:
        of_table = all(tap.startswith("embeddings.") for tap in bug.change.taps)
        if bug.of_gradients and (table or not of_table):
            yield hypothesis(bug)
    for role in dict.fromkeys(map(role_of, question.names)):
        clause = clause_of(question.config, role.replace("*", "0"), question.case.part)
        for name, text, edit in _derivatives(role):
            yield Hypothesis(name, f"{text} `{role}`", clause, change=Change(taps=(role,), edit=edit))


def _derivatives(role: str) -> Iterator[tuple[str, str, Edit]]:
    # Name of the bug, its words, and the edit.
    yield "detached", "no gradient through", gradients.detached
    yield "detached_padding", "no gradient through padded rows of", _without_padding
    if fits(role, (*NORMS, *RESIDUALS, *ELEMENTWISE, WEIGHTS, "log_probabilities", "normalized")):
        yield "derivative_left_out", "the derivative left out of", _passed
    for name, function in FUNCTIONS.items() if fits(role, ELEMENTWISE) else ():
        yield "activation_in_gradient", f"the derivative of {name} in", functools.partial(_sloped, function)


def _without_padding(m: Context) -> Any:
    padded = ~m.real.reshape(*m.real.shape, *[1] * (len(tuple(m.y.shape)) - 2))
    return gradients.stopped(m, padded)


def _passed(m: Context) -> Any:
    return gradients.with_gradient_of(m, _entering(m))


def _sloped(function: Callable[[Context, Any], Any], m: Context) -> Any:
    return gradients.with_gradient_of(m, function(m, m.x))


def of_factors(question: Question) -> Iterator[Hypothesis]:
    formats = SHORTER.get(question.case.dtype, ())
    for name in formats:
        label = "tf32" if name == "float16" else name  # both have 11 bits: one hypothesis covers both
        bits = "11 bits, as TF32 and float16 have" if label == "tf32" else label
        text = f"products whose factors are rounded to {bits}"
        yield Hypothesis(f"{label}_products", text, "PRC-2", factors=label)
    if formats:
        text = "products whose factors are truncated to 11 bits, not rounded (TF32)"
        yield Hypothesis("tf32_products", text, "PRC-2", factors="tf32 cut off")


def of_hidden(question: Question) -> Iterator[Hypothesis]:
    """Yield bugs of all hidden taps before the tensor, as in a fused kernel."""
    # One bug may change several of these taps, or weights, which hypotheses about a single tap do not cover.
    hidden = (*question.hidden, question.tensor)
    roles = {role_of(name): name for name in hidden} if question.hidden else {}
    families = (of_options, of_tap, of_functions)
    candidates = (bug for tap in roles.values() for family in families for bug in family(question, tap))
    yield from likeliest_first({(bug.name, bug.text): bug for bug in candidates}.values())


def hypothesis(bug: Bug) -> Hypothesis:
    return Hypothesis(bug.name, bug.explanation, bug.clause, change=bug.change)


Family = Callable[[Question, str], Iterator[Hypothesis]]

FAMILIES: tuple[Family, ...] = (of_options, of_weights, of_tap, of_functions)

# Name patterns of the most common bugs, most frequent first, since time may run out before the others.
LIKELY = (
    ("activation",),
    ("norm_epsilon*", "norm_placement", "norm_variance"),
    ("mask_*", "query_mask*", "pad_id"),
    ("segments*", "token_padding*"),
    ("missing_bias", "*_missing"),
    ("transposed_weight", "weight_in_wrong_order", "swapped_weights", "heads_*", "fused_weight"),
    ("*scale*",),
)
# The first reading that yields a hypothesis is accepted.
READINGS = (
    # Before formats, since looked-up rows, tokens and losses have as few bits as the weights.
    *(of_rows, of_mask, of_tokens, of_labels, of_count),
    *(of_format, of_limit, of_sign, of_small, of_dropout, of_dropped_weights, of_recovered, of_cancellation),
)


def stages(question: Question) -> Iterator[Iterable[Hypothesis]]:
    """Yield groups of hypotheses, each tried as a whole."""
    # If other layers are also hidden, a bug in all of them is as likely as one in the last step.
    far = any(group_of(name) != group_of(question.tensor) for name in question.hidden)
    yield likeliest_first(chain(simple(question), of_hidden(question) if far else ()))
    yield chain(() if far else of_hidden(question), unusual(question))


def readings(question: Question) -> Iterator[Hypothesis]:
    for look in READINGS:
        yield from look(question)


def simple(question: Question) -> Iterator[Hypothesis]:
    if question.parameter:
        yield from of_gradient(question)
        yield from of_derivatives(question)
        yield from of_backward(question)
    yield from bugs(question)
    yield from of_factors(question)


def unusual(question: Question) -> Iterator[Hypothesis]:
    # One free value fits any few elements, such as a loss.
    credible = wrong_elements(question).sum() >= FEW
    for tap in question.span:
        if credible and fits(tap, NORMS):
            yield from of_fitted_epsilon(question)
        if fits(tap, ("*.masked_scores",)):
            yield from of_other_constants(question, tap)
        yield from of_left_out(question, tap)
        if credible:
            yield from of_numbers(question, tap)
    if not question.parameter:
        yield from of_operands(question)


def bugs(question: Question) -> Iterator[Hypothesis]:
    for tap in question.span:
        for family in FAMILIES:
            for bug in family(question, tap):
                change = replace(bug.change, taps=(tap,)) if bug.change.edit else bug.change
                yield replace(bug, change=change)


def like(question: Question, hypothesis: Hypothesis) -> Hypothesis | None:
    key = (hypothesis.name, hypothesis.text)
    candidates = (bug for family in (simple, unusual) for bug in family(question))
    return next((bug for bug in candidates if (bug.name, bug.text) == key), None)


def likeliest_first(hypotheses: Iterable[Hypothesis]) -> Iterator[Hypothesis]:
    yield from sorted(hypotheses, key=lambda bug: (bug.rare, _place(bug.name)))


def _place(name: str) -> int:
    return next((i for i, names in enumerate(LIKELY) if fits(name, names)), len(LIKELY))
