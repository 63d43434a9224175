import re
from pathlib import Path

import numpy as np
import pytest
from scipy import special

from concord.conformance.bugs.bug import REFUSED, Change
from concord.conformance.bugs.catalogue import BUGS, KNOWN, MODULES, _entries, rounding
from concord.conformance.bugs.edited_model import TapeContext, Value
from concord.spec.arithmetic import Arithmetic
from concord.spec.cases import build_case
from concord.spec.montecarlo import MonteCarlo
from tests.toys.rounded import truth_of, truth_with

SPECIFICATION = (Path(__file__).parent.parent / "spec" / "SPEC.md").read_text()


def differ(right, wrong, limit):
    return right.shape != wrong.shape or not np.isfinite(wrong).all() or abs(right - wrong).max() > limit


def test_every_edit_has_an_entry_and_every_operation_bugs():
    edited = {name for module in (*MODULES.values(), rounding) for name in module.EDITS}
    assert edited <= {*KNOWN}
    assert len(KNOWN) >= 150
    assert {bug.operation for bug in KNOWN.values()} == {*MODULES}


@pytest.mark.parametrize("bug", KNOWN.values(), ids=lambda bug: bug.name)
def test_bug_is_documented(bug):
    assert re.fullmatch("[a-z0-9_]+", bug.name)
    assert bug.text.endswith(".")
    assert f"**{bug.clause}**" in SPECIFICATION
    assert not bug.source or bug.source.startswith("https://")


@pytest.mark.parametrize("bug", BUGS.values(), ids=lambda bug: bug.name)
def test_bug_changes_its_tap_first_and_a_gradient_alone_where_it_says_so(bug):
    case, memory = build_case(bug.variant, bug.scenario, options=bug.options), {}
    if bug.after:
        before = build_case(bug.variant, bug.after, options=bug.options)
        truth_with(bug.change, before, "float64", Arithmetic(), memory)
    right = truth_of(case, "float64", Arithmetic())
    try:
        wrong = truth_with(bug.change, case, "float64", Arithmetic(), memory)
    except (IndexError, ValueError):
        assert REFUSED in bug.first
        return

    def changed(limit):
        taps = right.taps
        return [name for name in taps if differ(taps[name], wrong.taps[name], limit * abs(taps[name]).max())]

    taps, largest = changed(1e-12), max(abs(gradient).max() for gradient in right.gradients.values())
    gradients = [
        f"gradients.{name}"
        for name in right.backward
        if name in right.gradients and differ(right.gradients[name], wrong.gradients[name], 1e-9 * largest)
    ]
    assert not (taps and bug.of_gradients)
    tensors = gradients if bug.of_gradients else taps or changed(0.0)  # some differ by rounding only
    assert tensors, "the case does not show it, or it changes gradients alone, which 'first' must then name"
    assert bug.rightly_first(tensors[0])


@pytest.mark.parametrize("line", ["", "edit = 'skipped'", "edit = 'skipped'\nplace = 'norm'"])
def test_a_wrong_entry_is_refused_by_file_and_name(line, monkeypatch):
    monkeypatch.setattr("concord.conformance.bugs.catalogue.read_text", lambda path: f"[norm]\n{line}")
    with pytest.raises(
        ValueError, match=r"^norms.toml: \[norm\]: (unknown (edit|place) 'norm'|field 'text')"
    ):
        list(_entries("norms", rounding))


# Operations on the tape, compared with NumPy.

A, B = np.random.default_rng(3).standard_normal((2, 3, 5, 7))


SAME = {
    "sum": (lambda o, a, b: o.sum(a, 1), lambda a, b: a.sum(1, keepdims=True)),
    "mean": (lambda o, a, b: o.mean(a, 2), lambda a, b: a.mean(2, keepdims=True)),
    "max": (lambda o, a, b: o.max(a, 0), lambda a, b: a.max(0, keepdims=True)),
    "operators": (lambda o, a, b: 1.0 - (-a + b * 2.0) / (2.0 / b), lambda a, b: 1 - (-a + b * 2) / (2 / b)),
    "exp": (lambda o, a, b: o.exp(a), lambda a, b: np.exp(a)),
    "log": (lambda o, a, b: o.log(a * a), lambda a, b: np.log(a * a)),
    "sigmoid": (lambda o, a, b: o.sigmoid(a), lambda a, b: special.expit(a)),
    "within": (lambda o, a, b: o.within(a, -0.5, 0.5), lambda a, b: a.clip(-0.5, 0.5)),
    "log_softmax": (lambda o, a, b: o.log_softmax(a, 1), lambda a, b: special.log_softmax(a, 1)),
    "concat": (lambda o, a, b: o.concat([a, b], 1), lambda a, b: np.concatenate([a, b], 1)),
    "where": (lambda o, a, b: o.where(a > b, a, b), np.maximum),
    "index": (lambda o, a, b: a[:, None, 1:3], lambda a, b: a[:, None, 1:3]),
    "take": (lambda o, a, b: o.take(a[1] * 1.0, np.array([2, 1, 2])), lambda a, b: a[1][[2, 1, 2]]),
    "transpose": (lambda o, a, b: o.transpose(a, (2, 0, 1)), lambda a, b: a.transpose(2, 0, 1)),
    "matmul": (lambda o, a, b: a @ o.transpose(b[1], (1, 0)), lambda a, b: a @ b[1].T),
    "einsum": (lambda o, a, b: o.einsum("tqk,tsk->tqs", a, b), lambda a, b: np.einsum("tqk,tsk->tqs", a, b)),
    "value_of": (lambda o, a, b: o.value_of(a, a), lambda a, b: a),
    "with_gradient": (lambda o, a, b: o.with_gradient(a, lambda gradient: gradient), lambda a, b: a),
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
    actual = result.tensor.value
    np.testing.assert_allclose(actual, np.broadcast_to(plain(A, B), actual.shape), rtol=1e-9, atol=1e-12)
    tape.backward(operations.sum(result * result).tensor)
    moved = np.zeros_like(A)
    moved[1, 2, 3] = 1e-6
    for tensor, *by in ((a.tensor, moved, 0), (b.tensor, 0, moved)):
        above, below = (np.square(plain(A + s * by[0], B + s * by[1])).sum() for s in (1, -1))
        gradient = 0.0 if tensor.gradient is None else tensor.gradient[..., 1, 2, 3].reshape(-1)[0]
        assert gradient == pytest.approx((above - below) / 2e-6, rel=1e-6, abs=1e-8)


def test_entries_that_tie_for_the_largest_share_the_gradient():
    # Frameworks share it too. A bug that gave the whole gradient to each entry would hide where it should
    # cancel.
    tape = Arithmetic()
    leaf = tape.leaf(np.array([[3.0, 1.0, 3.0], [3.0, 3.0, 3.0], [0.0, 2.0, 1.0]]))
    operations = TapeContext(tape, None, None, "model", "float64", {})
    largest = operations.max(Value(tape, leaf), 1)
    tape.backward(operations.sum(largest * largest).tensor)
    np.testing.assert_allclose(leaf.gradient, [[3, 0, 3], [2, 2, 2], [0, 4, 0]], rtol=1e-15)


def test_context_recomputes_what_a_fused_kernel_keeps():
    case = build_case("bert", "ragged")
    right = truth_of(case, "float64", Arithmetic())

    def recomputed(m):
        shown = {name: value for name, value in m.now.items() if not name.endswith(("scores", "weights"))}
        fused = TapeContext(m.a, m.config, m.batch, m.part, m.dtype, shown)
        fused.tap = m.tap
        return fused.context(fused.used_weights)

    edited = truth_with(Change(taps=("*.context",), edit=recomputed), case, "float64", Arithmetic())
    for layer in range(case.config.num_layers):
        name = f"layers.{layer}.attention.context"
        np.testing.assert_allclose(edited.taps[name], right.taps[name], rtol=1e-12)
