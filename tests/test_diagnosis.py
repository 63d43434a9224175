"""What is said of mistakes that nobody foresaw: the tensor, the clause, and what is seen, but no cause that is not theirs."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest

from concord import spec
from concord.backends.interface import Run
from concord.conformance import codec
from concord.conformance.campaign import Result
from concord.conformance.comparison import Verdict
from concord.conformance.diagnosis.campaign import conclude
from concord.conformance.faults.catalogue import FAULTS
from concord.conformance.faults.fault import Fault
from concord.conformance.judging import judge
from concord.spec.arithmetic import Arithmetic
from concord.spec.cases import Case, build_case
from concord.spec.reference import compute
from tests.toys.ports import SOUND, Port, option, run_with, step
from tests.toys.ports import run_of as ported
from tests.toys.unseen import UNSEEN, Unseen, edited, run_of, said

UNSAID = {"residual halved"}
"""Those of which what an engineer would want to be told is not said."""


@cache
def verdict_of(name: str) -> Verdict:
    mistake = UNSEEN[name]
    case = build_case(mistake.home, mistake.scenario)
    return judge(case.config, case.weights, case.batch, run_of(case, mistake), case.part, end_to_end=False)


@pytest.mark.parametrize("name", UNSEEN)
def test_an_unforeseen_mistake_is_placed_and_described(name):
    mistake, verdict = UNSEEN[name], verdict_of(name)
    diagnosis = verdict.diagnosis
    assert re.fullmatch(mistake.first, diagnosis.tensor)
    if name not in UNSAID:
        assert diagnosis.clause in mistake.clauses.split(), diagnosis
        assert said(mistake, diagnosis.text), diagnosis.text
    assert not (diagnosis.cause and diagnosis.cause.confident) or said(mistake, diagnosis.cause.text), diagnosis.cause
    if diagnosis.description:
        assert codec.plain(diagnosis)["description"]["text"] == diagnosis.description.text
        assert diagnosis.description.wrong <= diagnosis.description.size


# All cases of a backend together.


def run_in(case: Case, wrong: Unseen | Fault | Port) -> Run:
    if isinstance(wrong, Fault):
        return run_with(wrong, case)
    return run_of(case, wrong) if isinstance(wrong, Unseen) else ported(case, wrong)


def results_of(wrong: Unseen | Fault | Port, variant: str, scenarios: tuple[str, ...]) -> list[Result]:
    found = []
    for scenario in scenarios:
        case = build_case(variant, scenario)
        verdict = judge(case.config, case.weights, case.batch, run_in(case, wrong), case.part, end_to_end=False)
        found.append(Result("toy", variant, case.name, "float32", verdict.status, verdict=verdict))
    return found


def test_a_cause_that_other_cases_refute_is_not_named():
    """In a batch of one every head of a sample is every head of the batch: one case alone cannot tell."""
    results = results_of(FAULTS["score_scale_missing"], "bert", ("ragged", "full", "long"))
    (conclusion,) = conclude(results)
    assert "scores without a scale (ATT-4) fits 3 of them" in conclusion.text
    assert "not scores that are divided by sqrt(H) instead of sqrt(K): it explains 1 of 3 runs" in conclusion.text
    assert {result.verdict.cause.hypothesis for result in results} == {"no_score_scale"}


def test_what_the_wrong_cases_have_in_common_is_said():
    doubled = Unseen("", "", (), {"*.scores": edited(lambda run, name, y: 2 * y if len(y) == 1 else y)})
    results = results_of(doubled, "bert", ("ragged", "single", "full", "equal"))
    (conclusion,) = conclude(results)
    assert (conclusion.tensor, conclusion.clause, conclusion.cases) == ("layers.*.attention.scores", "ATT-4", 1)
    assert "it is wrong only where the number of samples is 1 or less" in conclusion.text


def test_a_neighbour_that_would_show_elsewhere_is_not_named():
    """A wrong step of one case alone, which is that of a known mistake, where other cases are right."""
    quick = FAULTS["gelu_quick"]
    results = [*results_of(quick, "bert", ("ragged",)), *results_of(SOUND, "bert", ("full", "equal", "offset"))]
    assert results[0].verdict.cause.confident
    (conclusion,) = conclude(results)
    assert "it would show in bert-full" in conclusion.text or "only where" in conclusion.text


def test_an_option_that_would_change_right_steps_is_not_named():
    def unnormed(run, name, y):
        entered = run.taken["embeddings.sum"] if "0." in name else run.taken["layers.0.residual2"]
        return run.a.reshape(run.linear(name, entered), y.shape)

    case = build_case("bert-pytorch", "ragged")
    diagnosis = judge(case.config, case.weights, case.batch, ported(case, step("*.value", unnormed)), case.part).diagnosis
    assert "not norm_placement = post instead of pre: `layers.0.norm1` would be wrong too, and is right" in diagnosis.text
    assert "what entered the sublayer" in diagnosis.cause.text
    assert not diagnosis.cause.confident


def test_an_epsilon_is_read_off_the_rows_of_a_norm():
    diagnosis = verdict_of("epsilon in one norm").diagnosis
    assert "has the deviation of an epsilon of 0.37 inside the root" in diagnosis.text


def test_the_lowest_finite_number_for_a_mask_constant_is_read_off():
    """Shorter ways to write it are infinite in float64."""
    case = build_case("nndl-paddle", "ragged")
    lowest = float(np.finfo(np.float64).min)
    run = ported(case, option(mask_value=lowest, mask_fill="replace"), "float64")
    diagnosis = judge(case.config, case.weights, case.batch, run, case.part).diagnosis
    assert "masked_scores" in diagnosis.tensor
    assert "mask" in diagnosis.cause.text
    assert not any("failed" in note for note in diagnosis.notes)


def test_a_mistake_that_no_model_of_width_1_can_have_does_not_end_the_search(small):
    config = small("bert-pytorch", d_model=1, num_heads=1, norm_variance="biased", final_norm=True, norm_epsilon=1e-3)
    weights, batch = spec.initialize(config, seed=3), spec.example_batch(config, 3, 7)
    truth = compute(config, weights, batch, Arithmetic("float32"), gradients=True, dtype="float32")
    wrong = {**truth.gradients, "final_norm.weight": truth.gradients["final_norm.weight"] + 0.5}
    verdict = judge(config, weights, batch, Run(truth.output, truth.loss, truth.taps, wrong, "toy", "float32", tap_gradients=truth.tap_gradients))
    assert verdict.first_divergence.tensor == "gradients.final_norm.weight"
    assert not [note for note in verdict.diagnosis.notes if "failed" in note]
    assert verdict.diagnosis.text
