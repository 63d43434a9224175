"""Tolerances and verdicts: rounding passes, mistakes do not, and the first tensor that is wrong is named."""

import dataclasses

import numpy as np
import pytest

from concord import spec
from concord.backends.interface import Run
from concord.conformance import family
from concord.conformance.estimate import Z
from concord.conformance.exemptions import DECLARED
from concord.conformance.expectation import JudgedProblem, Pinned
from concord.spec.arithmetic import Arithmetic
from concord.spec.cases import build_case, standard_cases
from concord.spec.deviations import KNOWN_DEVIATIONS
from concord.spec.reference import reference
from tests.toys.rounded import as_run, declaring, other, put, run_of, truth_of, verdict_of, without
from tests.toys.surroundings import quick_case, sample_of


def statuses(verdict, wanted):
    return [row.tensor for row in verdict.table if row.status == wanted]


EACH_ROUNDED = [(case, dtype) for case in standard_cases() for dtype in spec.PRECISIONS]


@pytest.mark.parametrize(
    "rounded",
    sample_of(
        EACH_ROUNDED, lambda place, entry: quick_case(place, entry[0]) and (place // 4 + place) % 2 == 0
    ),
    ids=lambda entry: f"{entry[0].name}-{entry[1]}",
)
@pytest.mark.parametrize("seed", [100, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (101, 102))])
def test_rounding_is_not_called_a_divergence(rounded, seed):
    """Each case in two precisions, in turn; the slow suite has all."""
    case, dtype = rounded
    verdict = verdict_of(case, run_of(case, dtype, Arithmetic(dtype, shuffle=seed)))
    assert verdict.status in (("agrees", "undetermined") if dtype == "float16" else ("agrees",)), (
        verdict.first_divergence
    )
    assert dtype in ("float16", "bfloat16") or not statuses(verdict, "undetermined")


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{case.name}-{dtype}")
        for name, dtype in (("tf1-text-classifier", "float32"), ("nndl-paddle", "float64"))
        for case in standard_cases([name])
    ],
)
def test_tolerance_is_a_small_share_of_every_tensor(case, dtype):
    """A tolerance as large as the tensor would let anything pass."""
    asked = JudgedProblem(case.config, case.weights, case.batch, case.part, dtype)
    truth = family.end_to_end(asked).values
    taps = {
        name: value for name, value in truth.items() if not name.startswith("gradients.") and name != "loss"
    }
    expectation = family.local(asked, Pinned(taps, {}))
    for name, value in expectation.values.items():
        flat = name.endswith("key.bias") or (
            name.startswith("gradients.") and case.scenario in ("peaked", "tiny", "offset")
        )
        if flat:
            continue
        # Heads have width 1 in some case: a row is that of all heads.
        heads = name.endswith(("query", "key", "value"))
        axis = ((-2, -1) if heads else -1) if value.ndim > 2 else None
        largest = np.max(abs(value), axis=axis, keepdims=True)
        share = np.max(Z * expectation.sigmas[name] / np.where(largest > 0, largest, np.inf))
        # A softmax by its logarithm errs by as much as the score that is taken off was rounded (SPEC ALG-1).
        weights = name.endswith("attention.weights")
        scores = abs(truth[name.replace("weights", "scores")]).max() if weights else 0.0
        least = 2.0**-36 if dtype == "float64" else 2.0**-8
        assert share < max(least, 2 * Z * scores * spec.precision(dtype).unit_roundoff), name


@pytest.fixture(scope="module")
def case():
    return build_case("bert", "ragged")


@pytest.fixture
def run(case):
    return run_of(case)


def test_beside_an_empty_text_gradients_through_a_length_are_judged():
    """Its vector is zero, and divided by epsilon: no rounding decides that."""
    case = build_case("sentence-bert", "ragged")
    run = run_of(case)
    assert not run.taps["pooling"].any(-1).all()
    for name in ("gradients.layers.1.norm2.bias", "gradients.embeddings.norm.weight"):
        wrong = other(run, name, lambda gradient: gradient * np.float32(1.001))
        assert verdict_of(case, wrong).first_divergence.tensor == name


def test_a_large_case_is_judged_by_a_first_look_where_that_is_enough(case, run, monkeypatch):
    usual, looks, exactly = verdict_of(case, run), [], family.local_exactly
    monkeypatch.setattr(family, "is_large", lambda case: True)
    monkeypatch.setattr(
        family,
        "local_exactly",
        lambda case, pinned, brief=False: looks.append(brief) or exactly(case, pinned, brief),
    )
    first = verdict_of(case, run)
    assert (first.status, looks) == ("agrees", [True])
    assert [(row.tensor, row.status) for row in first.table] == [
        (row.tensor, row.status) for row in usual.table
    ]
    far = 100 * max(found.row("layers.0.norm1").local.tolerance for found in (usual, first))
    wrong = verdict_of(case, other(run, "layers.0.norm1", put((2, 5, 7), lambda x: x + far)))
    assert (wrong.first_divergence.tensor, wrong.first_divergence.deciding.beyond) == ("layers.0.norm1", 1)
    assert looks == [True, True, False]


def test_verdict_says_where_and_by_how_much(case, run):
    row = verdict_of(case, other(run, "layers.1.norm1", put((2, 5, 7), lambda x: x + 0.25))).first_divergence
    assert (row.tensor, row.clause, row.deciding.element) == ("layers.1.norm1", "NRM-1", (2, 5, 7))
    assert (row.deciding.beyond, row.size) == (1, 770)
    assert abs(row.deciding.actual - row.deciding.expected - 0.25) < row.deciding.tolerance
    assert abs(row.ratio - 0.25 / row.deciding.tolerance) < 1


# What is not there, or not what it should be.

BIAS, WEIGHTS = "gradients.classifier.bias", "layers.0.attention.weights"
EVERYTHING = {"info": {"not_exposed": ["*"]}}

SPOILT = {
    "no number": (lambda run: other(run, BIAS, put(1, np.nan)), {BIAS: "not finite"}),
    "infinite": (lambda run: other(run, BIAS, put(1, -np.inf)), {BIAS: "not finite"}),
    "missing": (
        lambda run: without(run, WEIGHTS, "gradients.pooler.bias"),
        {WEIGHTS: "missing", "gradients.pooler.bias": "missing"},
    ),
    "a gradient that is declared away": (
        lambda run: dataclasses.replace(without(run, "gradients.pooler.bias"), **EVERYTHING),
        {"gradients.pooler.bias": "missing"},
    ),
    "an output that is not its tap": (
        lambda run: dataclasses.replace(run, output=2 * run.output),
        {"logits": "the run's output is not its tap of this name"},
    ),
    "a loss without its tap": (
        lambda run: dataclasses.replace(without(run, "loss"), loss=2 * run.loss, **EVERYTHING),
        {"loss": ""},
    ),
    "an output without its tap": (
        lambda run: dataclasses.replace(without(run, "logits"), output=run.output * np.float32(1.001)),
        {"logits": ""},
    ),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_what_is_spoilt_diverges_where_it_is(case, run, kind):
    spoil, expected = SPOILT[kind]
    verdict = verdict_of(case, spoil(run))
    found = [row for row in verdict.table if row.local is None or row.local.status == "diverges"]
    found = {row.tensor: row.note for row in found if row.status == "diverges"}
    assert found.keys() == expected.keys()
    assert all(words in found[name] for name, words in expected.items())
    assert verdict.first_divergence.tensor == next(iter(expected))
    assert "finite" not in expected.get(BIAS, "") or verdict.first_divergence.ratio == np.inf


def test_what_nothing_was_said_of_is_not_checked(case, run):
    bare = dataclasses.replace(without(run, WEIGHTS), gradients={}, info={})
    verdict = verdict_of(case, bare)
    assert (verdict.status, verdict.unjudged) == ("undetermined", ("gradients",))
    assert verdict.row(WEIGHTS).status == "not exposed"
    gradients = f"all {len(spec.trainable(case.config))} gradients"
    assert verdict.unchecked == f"not checked, since not delivered: {WEIGHTS}; {gradients}"


def test_what_was_not_requested_is_not_judged(case, run):
    verdict = verdict_of(case, Run(run.output, run.loss, {}, {}, "numpy", "float32", requested=()))
    assert verdict.passed
    assert [row.tensor for row in verdict.table] == ["logits", "loss"]
    wrong = dataclasses.replace(run, output=run.output * np.float32(1.001), taps={}, requested=("gradients",))
    first = verdict_of(case, wrong).first_divergence
    assert (first.tensor, first.local) == ("logits", None), "without taps it is judged end to end"


def test_what_is_declared_not_to_be_exposed_or_is_the_result_need_not_be_a_tap(case, run):
    hidden = [name for name in run.taps if ".attention." in name and not name.endswith("output")]
    run = without(run, *hidden, "logits", "loss")
    verdict = verdict_of(case, dataclasses.replace(run, info={"not_exposed": ["layers.*.attention.*"]}))
    assert verdict.passed, verdict.first_divergence
    assert verdict.row("layers.1.attention.scores").note == DECLARED
    assert {verdict.row(name).status for name in ("logits", "loss")} == {"agrees"}


def test_out_of_range_is_undetermined():
    case = build_case("tf1-text-classifier", "ragged")
    verdict = verdict_of(case, run_of(case, "float16"))
    assert (verdict.status, verdict.unjudged) == ("undetermined", ("gradients", "logits", "loss"))
    assert verdict.row("layers.0.attention.context").note == "392 elements are not judged: out of range"
    assert verdict.row("gradients.layers.0.attention.key.weight").status == "undetermined"
    assert verdict.row("layers.0.attention.scores").status == "agrees"


@pytest.mark.clause("GRD-4", "NRM-7")
def test_beyond_a_gradient_that_is_not_finite_only_finite_values_are_compared(small):
    config = small(
        norm_placement="post",
        norm_epsilon_placement="outside",
        qkv_activation="relu",
        embedding_norm=False,
        positions="sinusoidal",
    )
    weights, batch = spec.initialize(config), spec.example_batch(config, 7, 11)
    weights["layers.0.norm1.weight"][:] = 0.0  # then norm2 sees rows that only the feed-forward tells apart,
    weights["layers.0.feed_forward.outer.weight"][:] = 0.0  # and now nothing
    weights["layers.0.norm1.bias"][:] = weights["layers.0.feed_forward.outer.bias"][:] = 0.5
    weights["layers.0.attention.value.weight"][:] = 0.0
    weights["layers.0.attention.value.bias"][:] = -1.0  # a ReLU that is closed for all
    asked = JudgedProblem(config, weights, batch)
    run, beyond = run_of(asked), "gradients.layers.0.attention.value.bias"
    assert np.isnan(run.gradients["layers.0.norm1.bias"]).any()
    assert (run.gradients["layers.0.attention.value.bias"] == 0).all()
    assert verdict_of(asked, run).passed
    assert verdict_of(asked, other(run, beyond, lambda gradient: gradient + np.nan)).passed
    assert verdict_of(asked, other(run, beyond, np.ones_like)).first_divergence.tensor == beyond


def test_gradient_that_is_mathematically_zero_is_judged_by_its_own_rounding(case):
    name = "gradients.layers.0.attention.key.bias"
    for dtype in ("float64", "float32"):
        run = run_of(case, dtype)
        assert verdict_of(case, run).passed
        wrong = other(run, name, lambda gradient: gradient + gradient.dtype.type(1e-4))
        assert verdict_of(case, wrong).first_divergence.tensor == name


def test_gradient_of_which_rounding_leaves_no_digit_is_undetermined_in_a_half_precision(small):
    config = small("bert", pooling="first")
    weights, batch = spec.initialize(config), spec.example_batch(config, 7, 11)
    for name in ("query", "key"):
        weights[f"layers.0.attention.{name}.weight"] *= 3000.0  # a softmax with but one weight
    asked = JudgedProblem(config, weights, batch)
    run, query = run_of(asked, "bfloat16"), "gradients.layers.0.attention.query.weight"
    verdict = verdict_of(asked, run)
    assert verdict.row(query).status == "undetermined"
    assert verdict.row("gradients.layers.0.attention.value.weight").status == "agrees"
    # Zero in exact arithmetic: rounding is judged.
    assert verdict.row("gradients.layers.1.attention.key.bias").status == "agrees"
    single = verdict_of(asked, dataclasses.replace(run, dtype="float32"))
    assert single.row(query).status != "undetermined"


# Locally and end to end.


@pytest.mark.clause("PRT-2")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_only_the_step_that_erred_diverges_locally_and_all_that_follows_end_to_end(case, dtype):
    run, name = run_of(case, dtype), f"layers.{case.config.num_layers - 1}.attention.scores"
    names = list(run.taps)
    before = {earlier: run.taps[earlier] for earlier in names[: names.index(name)]}
    wrong = {**before, name: run.taps[name] * run.output.dtype.type(1.001)}
    truth = truth_of(case, dtype, Arithmetic(dtype), pinned=wrong)
    taps = {**truth.taps, **wrong}
    table = verdict_of(
        case, dataclasses.replace(as_run(truth, dtype), output=taps["logits"], loss=taps["loss"], taps=taps)
    ).table
    assert [row.tensor for row in table if row.local.status == "diverges"] == [name]
    follows = [row.tensor for row in table].index(name)
    assert all(row.end_to_end.status == "agrees" for row in table[:follows])
    arrived = [row for row in table[follows:] if not row.tensor.startswith("gradients.")]
    assert all(row.end_to_end.status == "diverges" for row in arrived)


@pytest.mark.clause("PRT-2")
def test_the_slope_of_a_relu_whose_result_is_pinned_follows_the_result():
    def pinned_to(case, taps):
        return reference(case.config, case.weights, case.batch, gradients=True, pinned=taps)

    case, name = build_case("tf1-text-classifier", "full"), "layers.0.attention.value"
    free = pinned_to(case, {})
    dead = pinned_to(case, {name: np.where(np.arange(7) == 3, 0.0, free.taps[name])})
    assert (dead.gradients[f"{name}.bias"].reshape(2, 7)[:, 3] == 0).all()
    assert (free.gradients[f"{name}.bias"].reshape(2, 7)[:, 3] != 0).any()


def test_end_to_end_says_nothing_from_where_rounding_may_have_grown_too_large():
    case = build_case("bert", "peaked")
    weights = {
        name: array * (4.0 if name.endswith(("query.weight", "key.weight")) else 1.0)
        for name, array in case.weights.items()
    }
    case = dataclasses.replace(case, weights=weights)
    table = verdict_of(case, run_of(case, "bfloat16")).table
    taps = [row for row in table if not row.tensor.startswith("gradients.")]
    found = [row.end_to_end.status for row in taps]
    first = found.index("undetermined")
    assert taps[first].tensor.startswith("layers.0.attention.")
    assert set(found[first:]) == {"undetermined"}
    assert {row.local.status for row in taps} == {"agrees"}, "each step is still judged"


# Declared deviations.


@pytest.mark.clause("PRC-4")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_deviation_agrees_only_if_it_is_declared(dtype):
    case, floor = build_case("vanilla-encoder", "ragged"), ("softmax_floor", -64.0)
    clipped = run_of(case, dtype, Arithmetic(dtype), deviations=dict([floor]))
    assert verdict_of(case, clipped).first_divergence.tensor == WEIGHTS
    assert verdict_of(case, declaring(clipped, *floor)).passed
    declared = declaring(run_of(case, dtype), *floor)
    assert verdict_of(case, declared).first_divergence.tensor == WEIGHTS, "it was declared and is not there"


BY_TRAINING = {"optimizer_constant_bits"}
BY_THE_JUDGE = {name for name, known in KNOWN_DEVIATIONS.items() if known.excuses}  # test_declarations.py
VALUES = dict.fromkeys(("softmax_floor", "log_softmax_floor"), -0.5)
VALUES |= dict.fromkeys(("norm_epsilon_bits", "gelu_constant_bits"), 2.0)


@pytest.mark.clause("PRC-4")
@pytest.mark.parametrize("name", sorted(KNOWN_DEVIATIONS.keys() - BY_TRAINING - BY_THE_JUDGE))
def test_every_deviation_changes_what_the_reference_computes(name):
    """One that nothing follows would judge whoever declares it by what it said it does not do."""
    case = build_case("bert", "ragged", options={"norm_epsilon": 0.3})
    others = {"softmax_floor": -0.5} if name == "padding_left_out" else {}

    def bits(deviations):
        truth = truth_of(case, "bfloat16", Arithmetic("bfloat16"), deviations=deviations)
        return [array.tobytes() for of in (truth.taps, truth.gradients) for array in of.values()]

    assert bits({**others, name: VALUES.get(name, 1.0)}) != bits(others)


@pytest.mark.clause("PRC-2", "PRC-4")
def test_bias_gradients_summed_in_bfloat16_agree_only_if_that_is_declared():
    """What is less than half of a sum's last bit is lost, however often it comes."""
    sizes = {"vocab_size": 23, "max_positions": 41, "d_model": 10, "num_heads": 2, "d_ff": 17}
    config = spec.variant("bert", **sizes, num_layers=1, num_classes=3)
    batch = spec.example_batch(config, batch=17, tokens=41, seed=0, part="attention")
    cotangent = np.full_like(batch.cotangent, 2.0**-8 - 2.0**-14)
    cotangent[0, 0] = 1.0
    weights = spec.initialize(config, seed=0, part="attention")
    batch = dataclasses.replace(batch, cotangent=cotangent)
    case, narrow = JudgedProblem(config, weights, batch, "attention", "bfloat16"), "narrow_bias_gradients"
    run = run_of(case, "bfloat16", Arithmetic("bfloat16"), deviations={narrow: 1.0})
    assert run.gradients["attention.output.bias"].tolist() == [1.0] * 10
    assert verdict_of(case, run).first_divergence.tensor == "gradients.attention.output.bias"
    assert verdict_of(case, declaring(run, narrow, 1)).passed
