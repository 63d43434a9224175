"""Activations that a model does not go on with, whose gradient says nothing, and branches that are cut
off, which are found.
"""

import numpy as np
import pytest

from concord.backends import wire
from concord.conformance.verdict import UNUSED
from concord.spec.cases import build_case
from concord.spec.model import Model
from tests.toys.rounded import as_run, truth_of, verdict_of


class Cut(Model):
    """The reference, in which no gradient flows back beyond a tap."""

    cut = ()

    def tap(self, name, tensor):
        taken = super().tap(name, tensor)
        return self.a.freeze(taken, np.ones(taken.shape, bool)) if name in self.cut else taken


def run_with(case, cut, aside, nothing, dtype):
    """Return a run without any gradient beyond some taps, and in which others are of no use.

    Their gradient is nothing.
    """
    model = type("WithACut", (Cut,), {"cut": cut})
    truth = truth_of(case, dtype, model=model)
    by_taps = {
        name: truth.tap_gradients.get(name, np.zeros_like(tap))
        for name, tap in truth.taps.items()
        if name != "loss"
    }
    by_taps |= {name: nothing(by_taps[name]) for name in aside}
    return as_run(truth, dtype, info={}, tap_gradients=by_taps)


ATTENTION = tuple(f"layers.1.attention.{step}" for step in ("weights", "masked_scores", "scores"))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
    "aside",
    [ATTENTION[:1], ATTENTION, ("layers.0.norm1", "layers.1.feed_forward.inner", *ATTENTION)],
    ids=len,
)
def test_activation_that_the_model_does_not_go_on_with_is_said_to_be_one(aside, dtype):
    case = build_case("bert", "ragged")
    verdict = verdict_of(case, run_with(case, (), aside, np.zeros_like, dtype))
    assert verdict.status == "agrees", verdict.first_divergence
    assert {row.tensor: row.status for row in verdict.table if row.note == UNUSED} == {
        f"gradients.taps.{name}": "not exposed" for name in aside
    }


def test_gradient_by_a_tap_that_is_none_is_left_out():
    case = build_case("bert", "ragged")
    run = run_with(case, (), ATTENTION, lambda gradient: None, "float32")
    assert set(wire.returned(run).tap_gradients) == set(run.tap_gradients) - set(ATTENTION)
    verdict = verdict_of(case, run)
    assert verdict.status == "agrees", verdict.first_divergence
    assert not [
        row
        for row in verdict.table
        if row.tensor.removeprefix("gradients.taps.") in ATTENTION and row.tensor not in ATTENTION
    ]


@pytest.mark.clause("GRD-6")
@pytest.mark.parametrize(
    "cut", ["attention.weights", "attention.query", "feed_forward.activation", "residual1"]
)
def test_branch_that_is_cut_off_is_found_where_it_is_cut(cut):
    case = build_case("bert", "ragged")
    for layer, aside in (
        ("layers.0", ()),
        ("layers.0", ATTENTION[:1]),
    ):  # there may be activations of no use besides
        verdict = verdict_of(case, run_with(case, (f"{layer}.{cut}",), aside, np.zeros_like, "float32"))
        assert verdict.first_divergence.tensor == f"gradients.taps.{layer}.{cut}"
        assert [row.tensor for row in verdict.table if row.note == UNUSED] == [
            f"gradients.taps.{name}" for name in aside
        ]
        if cut == "attention.weights" and not aside:
            verdict = verdict.explained()
            assert verdict.diagnosis.clause == "ATT-6"
            assert "no gradient at all" in verdict.cause.text
