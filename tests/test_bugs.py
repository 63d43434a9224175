"""The table of bugs: what each is, that its edit changes what it says, and that the tape computes as the
operations say.
"""

import dataclasses

import numpy as np
import pytest

from concord.conformance.bugs.bug import REFUSED, Change
from concord.conformance.bugs.catalogue import (
    ALL,
    ALTERNATIVES,
    ENTRIES,
    KNOWN,
    MODULES,
    alternatives,
    training,
)
from concord.conformance.bugs.tape import TapeContext, Value, with_edits
from concord.spec.arithmetic import Arithmetic
from concord.spec.cases import build_case
from concord.spec.montecarlo import MonteCarlo
from concord.spec.reference import compute
from tests.toys.rounded import explained, run_with, truth_with
from tests.toys.surroundings import sample_of


def truth_of(bug, case, memory=None):
    return truth_with(bug.change if bug else Change(), case, "float64", Arithmetic(), memory)


def differ(right, wrong, limit):
    return (
        right.shape != wrong.shape or not np.isfinite(wrong).all() or bool(abs(right - wrong).max() > limit)
    )


@pytest.mark.parametrize("bug", ALL, ids=lambda bug: bug.name)
def test_bug_changes_its_tap_first_and_a_gradient_alone_where_it_says_so(bug):
    case, memory = build_case(bug.variant, bug.scenario, options=dict(bug.options)), {}
    if bug.after:
        truth_of(bug, build_case(bug.variant, bug.after, options=dict(bug.options)), memory=memory)
    right = truth_of(None, case)
    try:
        wrong = truth_of(bug, case, memory=memory)
    except (IndexError, ValueError):
        assert REFUSED in bug.first
        return
    largest = max(abs(gradient).max() for gradient in right.gradients.values())
    taps = [
        name
        for name in right.taps
        if differ(right.taps[name], wrong.taps[name], 1e-12 * abs(right.taps[name]).max())
    ]
    gradients = [
        f"gradients.{name}"
        for name in right.backward
        if name in right.gradients and differ(right.gradients[name], wrong.gradients[name], 1e-9 * largest)
    ]
    if not bug.precisions:
        assert not [*taps, *gradients]
    elif all(pattern.startswith("gradients.") or pattern == REFUSED for pattern in bug.first):
        assert not taps
        assert bug.rightly_first(gradients[0])
    else:  # some differ in rounding alone
        taps = taps or [name for name in right.taps if differ(right.taps[name], wrong.taps[name], 0.0)]
        assert bug.rightly_first(taps[0])


def test_every_change_has_an_entry_and_every_entry_a_change():
    edited = {name for module in (*MODULES.values(), alternatives, training) for name in module.EDITS}
    assert edited <= {bug.name for bug in ENTRIES} | ALTERNATIVES.keys()
    assert len(KNOWN) == sum(bool(bug.variant) for bug in ENTRIES), "names are unique"
    assert not [bug.name for bug in ENTRIES if not bug.change.places]
    assert not [bug.what for bug in ENTRIES if (bug.change.edit and not bug.change.taps) or "{" in bug.what]


# The operations on a tape, beside NumPy.

A, B = np.random.default_rng(3).standard_normal((2, 3, 5, 7))

SAME = {
    "sum": (lambda o, a, b: o.sum(a, 1), lambda a, b: a.sum(1, keepdims=True)),
    "max": (lambda o, a, b: o.max(a, 0), lambda a, b: a.max(0, keepdims=True)),
    "operators": (lambda o, a, b: 1.0 - (-a + b * 2.0) / (2.0 / b), lambda a, b: 1 - (-a + b * 2) / (2 / b)),
    "softmax": (lambda o, a, b: o.softmax(a, 1), lambda a, b: np.exp(a) / np.exp(a).sum(1, keepdims=True)),
    "concat": (lambda o, a, b: o.concat([a, b], 1), lambda a, b: np.concatenate([a, b], 1)),
    "where": (lambda o, a, b: o.where(a > b, a, b), np.maximum),
    "index": (lambda o, a, b: a[:, None, 1:3], lambda a, b: a[:, None, 1:3]),
    "einsum": (lambda o, a, b: o.einsum("tqk,tsk->tqs", a, b), lambda a, b: np.einsum("tqk,tsk->tqs", a, b)),
}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize(
    "arithmetic", [Arithmetic, lambda: MonteCarlo("float64", 2)], ids=["exact", "samples"]
)
def test_tape_computes_and_differentiates_as_numpy_does(name, arithmetic):
    on_tape, plain = SAME[name]
    tape = arithmetic()
    operations = TapeContext(tape, None, None, "model", "float64", {})
    a, b = (Value(tape, tape.leaf(x)) for x in (A, B))
    result = on_tape(operations, a, b)
    assert result.shape == plain(A, B).shape
    found = result.tensor.value
    np.testing.assert_allclose(found, np.broadcast_to(plain(A, B), found.shape), rtol=1e-9, atol=1e-12)
    tape.backward(operations.sum(result * result).tensor)
    step = 1e-6
    for tensor, array, other in ((a.tensor, A, 0), (b.tensor, B, 1)):
        if tensor.gradient is None:
            continue
        moved = np.zeros_like(array)
        moved[1, 2, 3] = step
        both = [((A + s * moved, B) if other == 0 else (A, B + s * moved)) for s in (1, -1)]
        slope = (np.square(plain(*both[0])).sum() - np.square(plain(*both[1])).sum()) / (2 * step)
        assert tensor.gradient[..., 1, 2, 3].reshape(-1)[0] == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_context_recomputes_what_a_fused_kernel_keeps():
    case = build_case("bert", "ragged")
    right = truth_of(None, case)
    seen = {}

    def look(m):
        hidden = {name: value for name, value in m.now.items() if not name.endswith(("scores", "weights"))}
        fused = TapeContext(m.a, m.config, m.batch, m.part, m.dtype, hidden)
        fused.tap = m.tap
        seen[m.tap] = fused.context(fused.used_weights).tensor.value
        return m.y

    model = with_edits(lambda tap: look if tap.endswith("attention.context") else None)
    compute(case.config, case.weights, case.batch, Arithmetic(), False, case.part, "float64", model=model)
    for name, value in seen.items():
        np.testing.assert_allclose(value, right.taps[name], rtol=1e-12)


FORMS = [
    dataclasses.replace(bug, variant="bert", name=f"{bug.cause}: {bug.what}")
    for bug in ENTRIES
    if not bug.variant and bug.cause not in ("position_start", "loss_mean")
]
"""Explanations alone, which nobody injects but here; of the two, this case has neither positions from 1 nor a
cotangent.
"""


@pytest.mark.parametrize(
    "form", sample_of(FORMS, lambda place, form: place % 11 == 0), ids=lambda form: form.name
)
def test_other_form_of_a_bug_is_named_where_it_shows(form):
    case = build_case(form.variant, form.scenario, options=dict(form.options))
    verdict = explained(case, run_with(form.change, case, "float64"))
    if verdict.status == "diverges":
        assert form.diagnosed(verdict.cause.hypothesis if verdict.cause else "") == "right", verdict.cause
