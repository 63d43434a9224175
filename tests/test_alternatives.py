"""Allowed alternatives are not flagged, and forbidden ones are (SPEC ALG-1 to ALG-9)."""

import dataclasses
import functools

import numpy as np
import pytest

from concord.conformance.bugs.attention import WEIGHTS
from concord.conformance.bugs.norms import NORMS
from concord.conformance.fuzz.plan import Plan, sample
from concord.conformance.run.standard_jobs import job_of
from concord.spec.arithmetic import Arithmetic
from concord.spec.cases import build_case, standard_cases
from concord.spec.elementary import contract
from tests.toys import algorithms, alternatives
from tests.toys.alternatives import ALTERNATIVES, Algorithm, log_sum_exp, norm, run
from tests.toys.small import run_case

ALL = tuple(ALTERNATIVES.values())


@functools.cache
def job_for(variant, scenario, dtype="float32"):
    return job_of(build_case(variant, scenario), dtype)


def verdict_of(change, *case):
    return job_for(*case).judge(run(change, job_for(*case)))


def flagged(verdict):
    return {row.tensor: row.ratio for row in verdict.table if row.status == "diverges"}


# Allowed alternatives.

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


@functools.cache
def plain(*case):
    return run(Algorithm(), job_for(*case))


def same_bits(first, second):
    pairs = [(first.taps[name], second.taps[name]) for name in first.taps.keys() & second.taps.keys()]
    pairs += [(first.gradients[name], second.gradients[name]) for name in first.gradients]
    return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)


@pytest.mark.clause("ALG-1", "ALG-2", "ALG-3", "ALG-4", "ALG-5", "ALG-6", "ALG-7", "ALG-8", "ALG-9")
@pytest.mark.parametrize(
    ("place", "alternative"), enumerate(ALL), ids=lambda value: getattr(value, "name", "")
)
def test_alternative_computes_otherwise_and_is_not_flagged(place, alternative):
    # Each alternative runs a third of the cases, in turn; the slow test below runs all.
    turn = CASES[place % 3 :: 3]
    many_keys = [("bert", "long")] * (alternative.clause == "ALG-3")  # which derive the softmax otherwise
    compute = functools.cache(lambda *case: run(alternative.change, job_for(*case)))
    for case in (*turn, *many_keys):
        assert not flagged(job_for(*case).judge(compute(*case))), case
    # An alternative with the same bits in every case would prove nothing.
    if alternative.change.arithmetic is not algorithms.Softplus:
        cases = (*turn, *CASES, ("bert-pytorch", "full", "float32"))
        assert not all(same_bits(plain(*case), compute(*case)) for case in cases)


def test_losses_by_softplus_have_other_bits_where_logits_are_large():
    logits = np.linspace(-9, 9, 91).astype(np.float32)
    losses = [
        a.sigmoid_cross_entropy(a.leaf(logits), np.ones(91, np.float32)).value
        for a in (Arithmetic("float32"), algorithms.Softplus("float32"))
    ]
    assert not np.array_equal(*losses)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_no_alternative_is_flagged_in_any_standard_or_random_case(dtype):
    drawn = sample(Plan(names=(), dtypes=(dtype,), seed=2027), range(60))
    jobs = [job_of(case, dtype) for case in standard_cases()] + [
        case.job(f"random {i}") for i, case in enumerate(drawn)
    ]
    alarms = []
    for job in jobs:
        for alternative in ALL:
            wrong = flagged(job.judge(run(alternative.change, job)))
            alarms += [(alternative.name, job.name, tensor, ratio) for tensor, ratio in wrong.items()]
    assert not alarms


# The same in the four frameworks.


@functools.cache
def run_in(worker, implementation):
    return run_case(worker, job_for("bert-pytorch", "full"), implementation=implementation)


@pytest.mark.in_turn
@pytest.mark.parametrize("name", [alternative.name for alternative in ALL if alternative.change.edit])
def test_alternative_in_a_framework_computes_otherwise_and_is_not_flagged(altered, name):
    plain, run, job = (
        run_in(altered, "explicit"),
        run_in(altered, f"alternative:{name}"),
        job_for("bert-pytorch", "full"),
    )
    assert not flagged(job.judge(run))
    assert any(not np.array_equal(plain.gradients[key], run.gradients[key]) for key in run.gradients)


# Forbidden alternatives.


class NarrowSums(Arithmetic):
    def _contract(self, subscripts, a, b):
        total = np.zeros_like(contract(subscripts, a, b))
        for product in algorithms.single_products(subscripts, a, b):
            total = self.precision.round(total + product)
        return total


# The mean of squares minus the square of the mean, without subtracting anything first.
ONE_PASS = Algorithm(taps=NORMS, edit=lambda m: norm(m, *alternatives.one_pass(m, m.x[..., :1] * 0.0)))

# Softmax from the log-sum-exp of the scores, even where a mask constant absorbs the logarithm.
FROM_THE_SCORES = Algorithm(
    taps=(WEIGHTS,), edit=lambda m: m.exp(m.unnormalised - log_sum_exp(m, m.unnormalised))
)


# Softmax whose powers overflow.
WITHOUT_MAXIMUM = Algorithm(
    taps=(WEIGHTS,), edit=lambda m: m.exp(m.unnormalised) / m.sum(m.exp(m.unnormalised), -1)
)


@pytest.mark.parametrize(
    ("way", "variant", "scenario", "dtype", "tensor"),
    [
        (
            WITHOUT_MAXIMUM,
            *("vanilla-encoder", "peaked", "float32", "layers.0.attention.weights"),
        ),
        (FROM_THE_SCORES, "nndl-paddle", "ragged", "float32", "layers.0.attention.weights"),
        (ONE_PASS, "bert", "offset", "float32", "embeddings.norm"),
        (ONE_PASS, "nndl-paddle", "offset", "float64", "embeddings.norm"),
    ],
)
def test_way_that_is_not_admissible_is_flagged(way, variant, scenario, dtype, tensor):
    assert verdict_of(way, variant, scenario, dtype).first_divergence.tensor == tensor


def test_partial_sums_in_bfloat16_are_flagged_where_there_are_many_terms():
    job = job_of(build_case("bert", "full", "dot_product", {"d_model": 512}), "bfloat16")
    assert not flagged(job.judge(run(ALTERNATIVES["sums_sequential"].change, job)))
    assert flagged(job.judge(run(Algorithm(arithmetic=NarrowSums), job)))


def test_logarithm_of_the_softmax_is_flagged_where_a_share_vanishes():
    job = job_of(build_case("bert", "ragged"), "float32")
    weights = {**job.weights, "classifier.weight": job.weights["classifier.weight"] * 256}
    job = dataclasses.replace(job, weights=weights)
    right = ALTERNATIVES["log_softmax_from_normalizer"].change
    assert not flagged(job.judge(run(right, job)))
    logarithm = Algorithm(taps=("log_probabilities",), edit=lambda m: m.log(m.softmax(m.x, 1)))
    assert "log_probabilities" in flagged(job.judge(run(logarithm, job)))
