"""What is said of mistakes that nobody foresaw.

The tensor, the clause, and what is seen, but no cause that is not theirs.
"""

import dataclasses
import re
from functools import cache

import numpy as np
import pytest

from concord import spec
from concord.conformance.bugs.bug import Bug
from concord.conformance.bugs.catalogue import BUGS
from concord.conformance.expectation import JudgedProblem
from concord.conformance.explain import Diagnosis
from concord.conformance.explain.computation import Prediction
from concord.conformance.explain.conclusions import conclude
from concord.conformance.explain.description import describe
from concord.conformance.explain.hypothesis import Hypothesis, caused
from concord.conformance.explain.question import Question
from concord.conformance.record import plain
from concord.conformance.verdict import Result, Verdict, divergence_lines
from concord.spec.arithmetic import Arithmetic
from concord.spec.cases import build_case
from concord.spec.reference import compute
from tests.toys import rounded
from tests.toys.ports import SOUND, option, run_with, step
from tests.toys.ports import run_of as ported
from tests.toys.unseen import UNSEEN, Unseen, edited, run_of, said

UNSAID = {"residual halved"}
"""Those of which what an engineer would want to be told is not said."""


@cache
def verdict_of(name):
    mistake = UNSEEN[name]
    case = build_case(mistake.home, mistake.scenario)
    return rounded.verdict_of(case, run_of(case, mistake), end_to_end=False).explained()


@pytest.mark.parametrize("name", UNSEEN)
def test_an_unforeseen_mistake_is_placed_and_described(name):
    mistake, verdict = UNSEEN[name], verdict_of(name)
    diagnosis = verdict.diagnosis
    assert re.fullmatch(mistake.first, diagnosis.tensor)
    if name not in UNSAID:
        assert diagnosis.clause in mistake.clauses.split(), diagnosis
        assert said(mistake, "; ".join(diagnosis.lines)), diagnosis.lines
    assert not (diagnosis.cause and diagnosis.cause.confident) or said(mistake, diagnosis.cause.text), (
        diagnosis.cause
    )
    if diagnosis.description:
        assert plain(diagnosis)["description"]["text"] == diagnosis.description.text
        assert diagnosis.description.wrong <= diagnosis.description.size


@pytest.mark.parametrize(
    ("name", "cause", "text"),
    [
        ("value one token late", None, "is the right one with each token taken from another"),
        ("padded queries zeroed", None, "only in padded tokens (392 of 770 elements): there it is zero"),
        ("bias in the first head alone", "missing_bias", "left out (WGT-2), only in head 1"),
        ("one head without scale", "no_score_scale", "only in head 1"),
        ("last class suppressed", None, "only in class 2 (5 of 15 elements): there it is 7 too small"),
        ("temperature", None, "is multiplied by 1.1"),
    ],
)
def test_what_is_seen_is_said_and_a_bug_of_one_place_is_named(name, cause, text):
    found = verdict_of(name).diagnosis
    assert (found.cause and found.cause.hypothesis) == cause
    assert text in (found.cause.text if cause else found.description.text)


# All cases of a backend together.


def run_in(case, wrong):
    if isinstance(wrong, Bug):
        return run_with(wrong, case)
    return run_of(case, wrong) if isinstance(wrong, Unseen) else ported(case, wrong)


def results_of(wrong, variant, scenarios):
    found = []
    for scenario in scenarios:
        case = build_case(variant, scenario)
        verdict = rounded.verdict_of(case, run_in(case, wrong), end_to_end=False)
        found.append(Result("toy", variant, case.name, "float32", verdict.status, verdict=verdict))
    return found


def test_a_cause_that_other_cases_refute_is_not_named():
    """In a batch of one every head of a sample is every head of the batch: one case alone cannot tell."""
    results = results_of(BUGS["score_scale_missing"], "bert", ("ragged", "full", "long"))
    results, (conclusion,) = conclude(results)
    assert "scores are not divided by sqrt(K) (ATT-4) fits 3 of them" in conclusion.text
    assert {result.verdict.cause.hypothesis for result in results} == {"no_score_scale"}


def test_what_the_wrong_cases_have_in_common_is_said():
    doubled = Unseen("", "", (), {"*.scores": edited(lambda run, name, y: 2 * y if len(y) == 1 else y)})
    results = results_of(doubled, "bert", ("ragged", "single", "full", "equal"))
    results, (conclusion,) = conclude(results)
    assert (conclusion.tensor, conclusion.clause, conclusion.cases) == (
        "layers.*.attention.scores",
        "ATT-4",
        1,
    )
    assert "it is wrong only where there is one sample" in conclusion.text


def of_shape(status, samples, tokens):
    """Return a run of so many samples and tokens that is judged to be right, or wrong in its scores."""
    case = build_case("bert", "full")
    batch = spec.example_batch(case.config, samples, tokens, padding="none")
    diagnosis = Diagnosis("layers.0.attention.scores", ("ATT-4",)) if status == "diverges" else None
    verdict = Verdict([], diagnosis, case=JudgedProblem(case.config, case.weights, batch))
    return Result("toy", "bert", f"{samples}x{tokens}", "float32", status, verdict=verdict)


def condition_of(wrong, right):
    runs = [of_shape("diverges", *shape) for shape in wrong] + [of_shape("agrees", *shape) for shape in right]
    _, (conclusion,) = conclude(runs)
    return conclusion.text.partition("it is wrong only where ")[2]


def test_the_plainest_condition_is_named_and_every_one_that_is_as_plain():
    assert condition_of([(1, 5), (1, 7)], [(2, 3), (3, 11)]) == "there is one sample"
    assert condition_of([(1, 1)], [(2, 3), (3, 7)]) == "there is one sample; only where there is one token"


def epsilons(case, *numbers):
    """Return a run that was judged by its logits alone, and may have any of several epsilons, or none."""
    those = [Hypothesis("norm_epsilon", f"norm_epsilon = {one:g}", "NRM-2") for one in numbers]
    found = Diagnosis("logits", ("NRM-2",), caused("logits", those, False)) if those else None
    status = "diverges" if those else "agrees"
    return Result("toy", "bert", case, "float32", status, verdict=Verdict([], found))


def test_runs_together_say_what_most_of_them_do_and_of_a_precision_only_what_another_shows():
    wrong, right = [epsilons("tiny", 1e-10, 1e-6), epsilons("long", 1e-6)], epsilons("full")
    other = dataclasses.replace(right, dtype="float64")
    first, second, third = (conclude([*wrong, *more])[1][0].text for more in ((), (right,), (other,)))
    assert first == second
    assert first.endswith("; norm_epsilon = 1e-06 (NRM-2) fits 2 of them")
    assert third.endswith("it is wrong only where the precision is float32")


def test_a_neighbour_that_would_show_elsewhere_is_not_named():
    """A wrong step of one case alone, which is that of a known mistake, where other cases are right."""
    quick = BUGS["gelu_quick"]
    results = [
        *results_of(quick, "bert", ("ragged",)),
        *results_of(SOUND, "bert", ("full", "equal", "offset")),
    ]
    assert results[0].verdict.explained().cause.confident
    results, (conclusion,) = conclude(results)
    assert results[0].verdict.cause is None
    assert "gelu" not in conclusion.text


def test_the_lowest_finite_number_for_a_mask_constant_is_read_off():
    """Shorter ways to write it are infinite in float64."""
    case = build_case("nndl-paddle", "ragged")
    lowest = float(np.finfo(np.float64).min)
    run = ported(case, option(mask_value=lowest, mask_fill="replace"), "float64")
    diagnosis = rounded.verdict_of(case, run).explained().diagnosis
    assert "masked_scores" in diagnosis.tensor
    assert "mask" in diagnosis.cause.text
    assert not any("failed" in note for note in diagnosis.notes)


def test_a_mistake_that_no_model_of_width_1_can_have_does_not_end_the_search(small):
    config = small(
        "bert-pytorch", d_model=1, num_heads=1, norm_variance="biased", final_norm=True, norm_epsilon=1e-3
    )
    case = JudgedProblem(config, spec.initialize(config, seed=3), spec.example_batch(config, 3, 7))
    right = rounded.run_of(case)
    run = rounded.other(right, "gradients.final_norm.weight", lambda gradient: gradient + np.float32(0.5))
    verdict = rounded.verdict_of(case, run).explained()
    assert verdict.first_divergence.tensor == "gradients.final_norm.weight"
    assert not [note for note in verdict.diagnosis.notes if "failed" in note]
    assert verdict.diagnosis.lines


# Numbers that are none, and counts.


@pytest.mark.parametrize("seed", range(7))
def test_what_is_no_number_is_no_relation(seed):
    """Infinities and NaN in the run, in the oracle and in sigma, in any places."""
    random, case = np.random.default_rng(seed), build_case("bert", "ragged")
    truth = compute(case.config, case.weights, case.batch, Arithmetic("float32"), False, dtype="float32")
    tensor = list(truth.taps)[random.integers(len(truth.taps) - 1)]
    actual = truth.taps[tensor].astype(np.float64) + 1e-3 * random.standard_normal(truth.taps[tensor].shape)
    taps = {name: array.astype(np.float64) for name, array in truth.taps.items() if name != "loss"}
    question = Question(JudgedProblem(case.config, case.weights, case.batch), taps, tensor, actual)
    right = question.right
    value, sigma = (
        np.array(np.broadcast_to(array, actual.shape), np.float64) for array in (right.value, right.sigma)
    )
    for array in (
        one for place, one in enumerate((value, sigma, question.actual)) if (seed + 1) >> place & 1
    ):
        hit = random.random(array.shape) < random.choice([0.1, 0.6, 1.0])
        array[hit] = random.choice([np.nan, np.inf, -np.inf], hit.sum())
    question.__dict__["right"] = Prediction(value, sigma)
    with np.errstate(all="ignore"):
        seen, _ = describe(question)
    if seen is not None:
        assert not re.search(r"\b(nan|inf)\b", seen.text)


# What to do next.


def lines_of(case, run, exported=False):
    verdict = rounded.verdict_of(case, run)
    return divergence_lines(
        Result("toy", "bert", case.name, "float32", verdict.status, verdict=verdict, seconds=1.0), exported
    )


def noisy(run, tensor):
    kind, name = (
        (run.gradients, tensor.removeprefix("gradients."))
        if tensor.startswith("gradients.")
        else (run.taps, tensor)
    )
    kind[name] = (
        kind[name] + 1e-3 * abs(kind[name]).max() * np.random.default_rng(5).standard_normal(kind[name].shape)
    ).astype(np.float32)
    return dataclasses.replace(run, output=run.taps["logits"])


def test_the_next_tap_to_deliver_is_named():
    case = build_case("bert", "ragged")
    run = noisy(ported(case, SOUND), "layers.1.norm1")
    for name in ("layers.1.attention.output", "layers.1.residual1", "layers.0.norm1"):
        del run.taps[name]
    last = lines_of(case, run)[-1]
    assert last == (
        "  next: deliver layers.1.attention.output, the first of 2 missing between "
        "layers.1.attention.context (right) and layers.1.norm1 (wrong)"
    )


def test_a_case_that_has_all_taps_is_made_smaller():
    case = build_case("bert", "ragged")
    run = noisy(ported(case, SOUND), "layers.1.norm1")
    assert (
        lines_of(case, run, exported=True)[-1]
        == "  next: concord case reduce cases/bert-ragged-float32 --backend toy -o smaller"
    )
    lines = lines_of(case, run)
    clause = re.search(r"\(SPEC (\S+)\)", lines[1])[1]
    assert lines[-1] == f"  next: compare this step with SPEC {clause}"


def test_a_cause_that_is_sure_is_to_be_mended():
    case = build_case("bert", "ragged")
    assert (
        lines_of(case, ported(case, option(activation="gelu_tanh")), exported=True)[-1]
        == "  next: mend this and run it again"
    )


def test_that_only_gradients_diverge_is_said_first():
    case = build_case("bert", "ragged")
    lines = lines_of(case, noisy(ported(case, SOUND), "gradients.layers.1.norm1.weight"))
    assert lines[0].endswith(": the forward pass agrees, only gradients diverge")
    assert lines[1].startswith("  first at gradients.layers.1.norm1.weight")
    assert "--forward-only" in lines[-1]
    both = noisy(noisy(ported(case, SOUND), "gradients.layers.1.norm1.weight"), "layers.1.norm1")
    assert "the forward pass agrees" not in "\n".join(lines_of(case, both))


def test_an_option_that_the_rest_of_the_layer_contradicts_holds_in_one_tensor_alone():
    def unnormed(run, name, y):
        entered = run.taken["embeddings.sum"] if "0." in name else run.taken["layers.0.residual2"]
        return run.a.reshape(run.linear(name, entered), y.shape)

    case = build_case("bert-pytorch", "ragged")
    cause = rounded.verdict_of(case, ported(case, step("*.value", unnormed))).explained().cause
    assert not cause.confident
    assert cause.text == (
        "`layers.0.attention.value` may be explained by norm_placement = post instead of pre (NRM-1), "
        "here alone: `layers.0.norm1` would be wrong too"
    )
