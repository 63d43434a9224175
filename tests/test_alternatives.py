"""Right alternatives are not flagged, and ways that are not admissible are (SPEC ALG-1 to ALG-9)."""

import numpy as np
import pytest

from concord.backends.interface import Request
from concord.conformance.bugs import algorithms, alternatives
from concord.conformance.bugs.alternatives import log_sum_exp, norm
from concord.conformance.bugs.attention import WEIGHTS, without_maximum
from concord.conformance.bugs.bug import Change
from concord.conformance.bugs.catalogue import ALTERNATIVES
from concord.conformance.bugs.edited_model import run
from concord.conformance.bugs.norms import NORMS
from concord.conformance.fuzz.plan import Plan, sample
from concord.conformance.judging.family import expect
from concord.conformance.mutants.matrix import plugin
from concord.conformance.run.standard_jobs import job_of
from concord.spec.arithmetic import Arithmetic
from concord.spec.cases import build_case, standard_cases
from concord.spec.deviations import NONE, declared, in_precision
from concord.spec.elementary import contract
from tests.toys.surroundings import EACH_BACKEND

ALL = tuple(ALTERNATIVES.values())

each_alternative = pytest.mark.parametrize("alternative", ALL, ids=lambda alternative: alternative.name)


def request_of(job):
    return Request(job.config, job.weights, job.batch, job.part, job.dtype)


def verdict_of(change, variant, scenario, dtype="float32"):
    job = job_of(build_case(variant, scenario), dtype)
    return job.judge(run(change, request_of(job)))


def flagged(verdict):
    return {row.tensor: row.ratio for row in verdict.table if row.status == "diverges"}


# Right ways.

CASES = (
    ("bert", "ragged", "float32"),
    ("bert", "full", "bfloat16"),
    ("bert-pytorch", "equal", "float32"),
    ("bert-pytorch", "tiny", "float64"),
    ("keras-attention", "offset", "float32"),
    ("nndl-paddle", "equal", "float64"),
    ("nndl-paddle", "full", "float64"),
    ("tf1-text-classifier", "sigmoid", "float32"),
    ("vanilla-encoder", "peaked", "float32"),
    ("vanilla-encoder", "single", "float64"),
)


@pytest.mark.clause("ALG-1", "ALG-2", "ALG-3", "ALG-4", "ALG-5", "ALG-6", "ALG-7", "ALG-8", "ALG-9")
@pytest.mark.parametrize(
    ("place", "alternative"), enumerate(ALL), ids=lambda value: getattr(value, "name", "")
)
def test_alternative_is_not_flagged(place, alternative):
    """Each way meets a third of the cases, in turn; the slow test below meets all."""
    for variant, scenario, dtype in CASES[place % 3 :: 3]:
        assert not flagged(verdict_of(alternative.change, variant, scenario, dtype)), (
            variant,
            scenario,
            dtype,
        )


@pytest.mark.clause("ALG-3")
@pytest.mark.parametrize(
    "alternative",
    [alternative for alternative in ALL if alternative.clause == "ALG-3"],
    ids=lambda alternative: alternative.name,
)
def test_alternative_of_the_derivative_of_softmax_is_not_flagged_among_many_keys(
    alternative,
):
    assert not flagged(verdict_of(alternative.change, "bert", "long"))


@each_alternative
def test_alternative_computes_otherwise(alternative):
    """What yields the same bits everywhere proves nothing."""

    def differs(variant, scenario, dtype):
        request = request_of(job_of(build_case(variant, scenario), dtype))
        one, other = (run(way, request) for way in (Change(), alternative.change))
        pairs = [(one.taps[name], other.taps[name]) for name in one.taps if name in other.taps] + [
            (one.gradients[name], other.gradients[name]) for name in one.gradients
        ]
        return any(not np.array_equal(a, b, equal_nan=True) for a, b in pairs)

    if alternative.change.arithmetic is algorithms.Softplus:
        logits = np.linspace(-9, 9, 91).astype(np.float32)
        losses = [
            a.sigmoid_cross_entropy(a.leaf(logits), np.ones(91, np.float32)).value
            for a in (Arithmetic("float32"), algorithms.Softplus("float32"))
        ]
        assert not np.array_equal(*losses)
    else:
        cases = CASES if alternative.name != "gelu_exponential" else (("bert-pytorch", "full", "float32"),)
        assert any(differs(*case) for case in cases)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_no_alternative_is_flagged_in_any_standard_or_random_case(dtype):
    drawn = sample(Plan(names=(), dtypes=(dtype,), seed=2027), range(60))
    jobs = [job_of(case, dtype) for case in standard_cases()] + [
        case.job(f"random {i}") for i, case in enumerate(drawn)
    ]
    found = []
    for job in jobs:
        for alternative in ALL:
            wrong = flagged(job.judge(run(alternative.change, request_of(job))))
            found += [(alternative.name, job.name, tensor, ratio) for tensor, ratio in wrong.items()]
    assert not found


# The same in the frameworks.


@pytest.fixture(params=EACH_BACKEND)
def mutated(request, open_worker):
    """Each of the four backends in turn, in a process of its own."""
    return open_worker(plugin(request.param))


OF_SOFTMAX = ("ALG-1", "ALG-2", "ALG-3", "ALG-4")

EDITS = [alternative.name for alternative in ALL if alternative.change.edit]


@pytest.mark.in_turn
@pytest.mark.parametrize("name", EDITS)
def test_alternative_in_a_framework_computes_otherwise_and_is_not_flagged(mutated, name):
    job = job_of(build_case("bert-pytorch", "full"), "float32")
    plain, run = (
        mutated.run(job.config, job.weights, job.batch, job.part, job.dtype, way)
        for way in ("explicit", f"alternative:{name}")
    )
    assert not flagged(job.judge(run))
    assert any(not np.array_equal(plain.gradients[key], run.gradients[key]) for key in run.gradients)


def clips(job, run):
    """Whether a floor of softmax that the run declares changes what is right: one written out has none."""
    declared_by = in_precision(declared(run.info["deviations"]), job.dtype)
    floored, plain = (
        expect(job.config, job.weights, job.batch, job.part, job.dtype, deviations).values
        for deviations in (declared_by, NONE)
    )
    return any(not np.array_equal(floored[name], plain[name], equal_nan=True) for name in floored)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_no_alternative_in_a_framework_is_flagged_in_any_standard_case(mutated, dtype):
    found = []
    for job in (job_of(case, dtype) for case in standard_cases()):
        for alternative in ALL:
            if not alternative.change.edit:
                continue
            run = mutated.run(
                job.config, job.weights, job.batch, job.part, dtype, f"alternative:{alternative.name}"
            )
            if (wrong := flagged(job.judge(run))) and alternative.clause in OF_SOFTMAX and clips(job, run):
                continue
            found += [(alternative.name, job.name, tensor, ratio) for tensor, ratio in wrong.items()]
    assert not found


# Ways that are not admissible.


class NarrowSums(Arithmetic):
    """Partial sums of products are rounded to the precision."""

    def _contract(self, subscripts, a, b):
        total = np.zeros_like(contract(subscripts, a, b))
        for product in algorithms.single_products(subscripts, a, b):
            total = self.precision.round(total + product)
        return total


ONE_PASS = Change(taps=NORMS, edit=lambda m: norm(m, *alternatives.one_pass(m, m.x[..., :1] * 0.0)))
"""The mean square less the square of the mean, of which nothing was taken off."""

WRONG = (
    (
        Change(taps=(WEIGHTS,), edit=without_maximum),
        "vanilla-encoder",
        "peaked",
        "float32",
        "weights",
    ),
    (  # also where a mask constant absorbs the logarithm
        Change(
            taps=(WEIGHTS,),
            edit=lambda m: m.exp(m.unnormalised - log_sum_exp(m, m.unnormalised)),
        ),
        "nndl-paddle",
        "ragged",
        "float32",
        "weights",
    ),
    (ONE_PASS, "bert", "offset", "float32", "norm"),
    (ONE_PASS, "nndl-paddle", "offset", "float64", "norm"),
)


@pytest.mark.parametrize(("way", "variant", "scenario", "dtype", "tensor"), WRONG)
def test_way_that_is_not_admissible_is_flagged(way, variant, scenario, dtype, tensor):
    first = verdict_of(way, variant, scenario, dtype).first_divergence
    assert first.tensor.endswith(tensor) or f"{tensor}1" in first.tensor


def test_partial_sums_in_bfloat16_are_flagged_where_there_are_many_terms():
    job = job_of(build_case("bert", "full", "dot_product", {"d_model": 512}), "bfloat16")
    assert not flagged(job.judge(run(ALTERNATIVES["sums_sequential"].change, request_of(job))))
    assert flagged(job.judge(run(Change(arithmetic=NarrowSums), request_of(job))))


def test_logarithm_of_the_softmax_is_flagged_where_a_share_vanishes():
    case = build_case("bert", "ragged")
    weights = {**case.weights, "classifier.weight": case.weights["classifier.weight"] * 256}
    request = Request(case.config, weights, case.batch)
    job = job_of(case, "float32")
    job = type(job)(job.group, job.case, job.dtype, job.part, job.config, weights, job.batch)
    assert not flagged(job.judge(run(ALTERNATIVES["log_softmax_from_normalizer"].change, request)))
    logarithm = Change(taps=("log_probabilities",), edit=lambda m: m.log(m.softmax(m.x, 1)))
    assert "log_probabilities" in flagged(job.judge(run(logarithm, request)))
