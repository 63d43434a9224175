"""The estimate of how far a run may lie.

Reduced as it comes, in float64 by wider numbers, and of what a run delivers.
"""

import dataclasses

import numpy as np
import pytest

from concord.conformance import estimate as estimates
from concord.conformance import family
from concord.conformance.estimate import R, Sigma, Z, estimate
from concord.conformance.expectation import Expectation, JudgedProblem
from concord.conformance.family import expect
from concord.conformance.scoring import independent_elements, judge_tensor
from concord.spec.arithmetic import Arithmetic
from concord.spec.batch import example_batch
from concord.spec.cases import build_case
from concord.spec.cases.files import expected
from concord.spec.elementary import contract, erf
from concord.spec.montecarlo import MonteCarlo
from concord.spec.parameters import initialize
from concord.spec.precision import EXTENDED
from concord.spec.reference import compute, reference
from tests.toys.rounded import as_run, other, put, truth_of, verdict_of

wide = pytest.mark.skipif(EXTENDED is np.float64, reason="this platform has no type wider than float64")


@pytest.fixture(scope="module")
def case():
    return build_case("bert", "ragged")


def judged(case, dtype="float32", **fields):
    return JudgedProblem(case.config, case.weights, case.batch, case.part, dtype, **fields)


def run_of(case, arithmetic=None):
    """Return a run with gradients by taps, in arithmetic that is not shuffled."""
    truth = truth_of(case, case.dtype, arithmetic or Arithmetic(case.dtype))
    return as_run(truth, case.dtype, tap_gradients=truth.tap_gradients)


@wide
def test_error_function_has_the_digits_of_the_widest_type():
    # Abramowitz and Stegun give these to 20 digits and more.
    known = {
        "0.5": "0.52049987781304653768",
        "1": "0.84270079294971486934",
        "2": "0.99532226501895273416",
        "-0.1": "-0.11246291601828489220",
    }
    for x, value in known.items():
        assert abs(erf(np.array([x], EXTENDED))[0] - EXTENDED(value)) < 2 * np.finfo(EXTENDED).eps
    assert erf(np.array([np.inf, -np.inf, 7], EXTENDED)).tolist() == [1, -1, 1]


@wide
def test_products_of_split_factors_are_those_of_wide_numbers():
    random = np.random.default_rng(0)
    left, right = (
        random.standard_normal(shape).astype(EXTENDED) * EXTENDED(1.1) for shape in ((37, 53), (53, 61))
    )
    scale = contract("ij,jk->ik", abs(left), abs(right))
    assert left.size * 61 > 1 << 16, "too small to be split"
    assert (abs(contract("ij,jk->ik", left, right) - np.matmul(left, right)) < 2.0**-58 * scale).all()
    large = 2.0 ** np.arange(
        left.shape[-1]
    )  # what is large meets what is small, as where padding has large weights
    left, right = left * large, right / large[:, None]
    assert (abs(contract("ij,jk->ik", left, right) - np.matmul(left, right)) < 2.0**-58 * scale).all()


def test_samples_one_after_the_other_say_what_samples_side_by_side_say(case, monkeypatch):
    together = family._estimate(judged(case), None)
    monkeypatch.setattr(estimates, "SIDE_BY_SIDE", 1)
    apart = family._estimate(judged(case), None)
    assert list(apart.values) == list(together.values)
    for name, value in together.values.items():
        np.testing.assert_array_equal(apart.values[name], value)
        sizes = [
            np.sqrt(np.mean(np.square(found.sigmas[name], dtype=np.float64))) for found in (apart, together)
        ]
        if np.isfinite(sizes).all() and value.size > 20:
            assert 0.6 < sizes[0] / sizes[1] < 1.7, name


@pytest.mark.clause("GRD-6")
def test_gradients_by_taps_are_those_of_central_differences():
    case = build_case(
        "bert", "full"
    )  # where a sum with a mask constant absorbs a score no difference can be seen
    truth = reference(case.config, case.weights, case.batch, gradients=True)
    assert set(truth.tap_gradients) == set(truth.taps) - {"loss"}
    step, random = 1e-5, np.random.default_rng(0)
    for name in (
        "embeddings.token",
        "embeddings.position",
        "layers.0.attention.key",
        "layers.0.attention.weights",
        "layers.0.feed_forward.inner",
        "layers.0.norm1",
        "logits",
    ):
        direction = random.standard_normal(truth.taps[name].shape)
        above, below = (
            reference(
                case.config,
                case.weights,
                case.batch,
                pinned={name: truth.taps[name] + sign * step * direction},
            ).loss
            for sign in (1, -1)
        )
        slope = float((truth.tap_gradients[name] * direction).sum())
        assert abs((above - below) / (2 * step) - slope) < 1e-6 * abs(slope) + 1e-9, name


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_wrong_derivative_is_named_where_it_is(case, dtype):
    class Halved(Arithmetic):
        def tanh(self, a, absolute=False):
            value = super().tanh(a, absolute)
            (operand, pullback), *rest = value.operands
            value.operands = ((operand, lambda g: pullback(g) / 2), *rest)
            return value

    asked = judged(case, dtype)
    run = run_of(asked, Halved(dtype))
    assert verdict_of(asked, run).first_divergence.tensor == "gradients.taps.pooler.dense"
    alone = verdict_of(asked, dataclasses.replace(run, tap_gradients={}))
    assert alone.first_divergence.tensor.startswith("gradients.pooler.")


# What is delivered in part.


def test_a_row_of_a_table_that_nothing_looked_up_must_have_no_gradient(case):
    row, name = next(row for row in range(99) if row not in case.batch.input_ids), "embeddings.token.weight"
    run = other(run_of(judged(case)), f"gradients.{name}", put((row, 3), 1e-20))
    first = verdict_of(case, run).first_divergence
    assert (first.tensor, first.deciding.element) == (f"gradients.{name}", (row, 3))


def test_samples_of_monte_carlo_arithmetic_are_each_perturbed_in_another_way():
    case = build_case("keras-attention", "ragged")
    truth = expect(case.config, case.weights, case.batch)
    samples = expected(
        compute(case.config, case.weights, case.batch, MonteCarlo("float32", 5), gradients=True)
    )
    for name, value in truth.values.items():
        assert samples[name].shape[1:] == value.shape, name
        if len(samples[name]) > 1:
            assert (abs(samples[name] - value) <= Z * truth.sigmas[name]).all(), name
            assert len({sample.tobytes() for sample in samples[name]}) > (1 if value.ndim == 0 else 4), name


def test_what_is_all_but_zero_may_be_flushed_and_zero_may_not():
    values = np.array([[1e-42, 0.0, -1e-39]], np.float32)
    noise = MonteCarlo("float32", 16).settle(values) - values
    assert (abs(noise).max(0) > 1e-39).tolist() == [True, False, True]
    summed = MonteCarlo("float64", 16).settle_sum(np.array([[1e-306, 0.0]]), lambda: np.zeros((1, 2)), 3)
    assert (np.ptp(summed, 0) > 1e-308).tolist() == [True, False]


@wide
def test_noise_whose_square_is_no_number_is_not_lost():
    sigma = estimates.Sigma(np.array([1e-200, 1e-100], EXTENDED), "float64")
    sigma.take(MonteCarlo("float64", 2), np.array([[2e-200, 1e-100], [0.0, 1e-100]]))
    assert round(sigma.result()[0] * 1e200, 6) == 1


@pytest.mark.parametrize("hidden", [0, 41])
def test_a_sum_of_equal_terms_may_err_in_one_direction(hidden):
    terms = np.array([0.7] * 293 + [0.0] * hidden, np.float32)
    truth = terms.astype(np.float64).sum()
    one_by_one = np.add.accumulate(terms)[-1]
    arithmetic = MonteCarlo("float32", 16)
    sigma = np.sqrt(np.square(arithmetic.sum(arithmetic.leaf(terms), -1).value - truth).mean())
    assert 20 * 2.0**-24 * truth < abs(one_by_one - truth) < 4 * sigma
    terms = np.concatenate([terms, [0.3, 0.2]]).astype(
        np.float32
    )  # in a run such sums err less, but may as much
    assert (
        np.sqrt(
            np.square(arithmetic.sum(arithmetic.leaf(terms), -1).value - terms.sum(dtype=np.float64)).mean()
        )
        < sigma
    )


def test_a_score_halfway_between_two_sums_may_be_rounded_to_either():
    halfway = 0.5 + 2.0**-17  # the sum with -199.5 is rounded to multiples of 2^-16
    scores = np.broadcast_to(np.array([1.0, halfway, 0.25]), (16, 3)).astype(np.float32)
    sums = MonteCarlo("float32", 16).round_sum(scores, -199.5, "float32")
    assert [len(np.unique(column)) for column in sums.T] == [1, 2, 1]
    delivered = MonteCarlo("float32", 16).round_sum(scores[:1], -199.5, "float32")
    assert delivered.shape == (1, 3), "what a run delivered is not perturbed"
    assert (MonteCarlo("float32", 16).round_sum(scores, -1e9, "float32") == np.float32(-1e9)).all()


def test_a_sum_term_by_term_of_equal_terms_lies_within_tolerance():
    """Its errors add up: each term is rounded alike."""
    x = np.tile(np.random.default_rng(0).standard_normal(13).astype(np.float32) ** 3, 61)[None]

    def compute(a, observer):
        leaf = a.leaf(x)
        observer("y", a.divide(leaf, a.sqrt(a.sum(a.multiply(leaf, leaf), -1))).value)

    values, sigmas = estimate(compute, "float32")
    in_order = x / np.sqrt(np.add.accumulate(x * x, 1)[:, -1:])
    assert judge_tensor(in_order, values["y"], sigmas["y"], "float32").rms < R
    assert judge_tensor(in_order * (1 + 2**-19), values["y"], sigmas["y"], "float32").rms > R


def test_the_root_mean_square_speaks_of_as_many_elements_as_sigma_is_spread_over():
    random = np.random.default_rng(5)
    value, even = random.standard_normal((31, 7)), np.ones((31, 7))
    assert round(independent_elements(value, even, "float32"), 6) == 217
    assert round(independent_elements(np.repeat(value[:1], 31, 0), even, "float32"), 6) == 7
    uneven = even * 1e-6
    uneven[0, :3] = 1.0
    assert round(independent_elements(value, uneven, "float32"), 6) == 3
    rows = np.repeat(value[:1], 31, 0)
    assert judge_tensor(rows + 7.0, rows, even, "float32").status == "agrees", "one error in 31 rows"
    assert judge_tensor(value + 7.0, value, even, "float32").status == "diverges"
    assert judge_tensor(rows + 17.0, rows, even, "float32").status == "diverges"


@pytest.mark.parametrize("apart", [1, 3, 31, 1009])
def test_samples_say_how_many_errors_are_independent(apart):
    random, value = np.random.default_rng(apart), np.zeros((1009, 13))
    sigma = Sigma(value, "float32")
    for _ in range(16):
        errors = np.resize(random.standard_normal(apart), (1009, 1))
        sigma.take(MonteCarlo("float32", 1), (value + errors * np.ones(13))[None])
    assert apart / 15 < sigma.independent < apart
    assert Sigma(value, "float32").independent == np.inf, "where no sample was taken nothing is shared"


def test_a_product_with_a_power_of_two_is_exact_but_where_it_may_be_flushed():
    arithmetic = MonteCarlo("float32", 16)
    values = arithmetic.leaf(np.array([1.5, 3e-38, 0.0], np.float32))
    assert [len(np.unique(column)) > 1 for column in arithmetic.divide_by(values, 32.0).value.T] == [
        False,
        True,
        False,
    ]
    assert len(arithmetic.scale(arithmetic.leaf(np.array([1.5, 3e-30])), 0.5).value) == 1, (
        "noise reaches none of them"
    )


def test_beyond_a_gradient_that_is_out_of_range_it_is_no_question_what_is_finite():
    values = {
        f"gradients.{name}": np.array([value, 1.0]) for name, value in (("a", 1.0), ("b", 1e39), ("c", 0.0))
    }
    for dtype, found in (("float32", {"gradients.c"}), ("float64", set())):
        assert (
            Expectation(
                dtype, values, {name: np.ones(2) for name in values}, dict.fromkeys(values, "")
            ).singular
            == found
        )


def test_a_norm_of_one_element_may_be_multiplied_out(small):
    config = small("bert", d_model=1, num_heads=1, norm_epsilon=1e-2)
    weights, batch = initialize(config, seed=3), example_batch(config, 3, 7)
    problem, name = JudgedProblem(config, weights, batch), "gradients.taps.layers.1.residual2"
    run = run_of(problem)
    wrong = (
        run.tap_gradients["layers.1.norm2"] * weights["layers.1.norm2.weight"] / np.sqrt(config.norm_epsilon)
    )
    assert (run.tap_gradients["layers.1.residual2"] == 0).all()
    assert wrong.any()
    for units, status in ((1, "agrees"), (1000, "diverges")):
        moved = (2.0**-24 * units * wrong).astype(np.float32)
        found = verdict_of(problem, other(run, name, lambda gradient, moved=moved: moved))
        assert found.row(name).status == status


@pytest.mark.clause("ALG-3")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_one_of_equal_largest_entries_may_get_what_a_row_sums_to(dtype):
    """In few bits the samples of a given tap differ, and what was equal in the run no longer is."""
    equal = np.arange(23) % 3 == 1
    scores = np.where(equal, 2.5, -1.25)[None]
    a, found = MonteCarlo(dtype, 16), []
    x = a.override(a.leaf(np.zeros_like(scores)), scores)
    x.completed = lambda node: found.append(node.gradient)
    a.backward(a.sum(a.multiply(a.softmax(x), a.leaf(1 + np.arange(23)[None] / 64))))
    noise = np.std(np.asarray(found[0], np.float64), axis=0)[0]
    assert noise[equal].min() > noise[equal].max() / 3
    assert noise[~equal].max() < noise[equal].min() / 30
