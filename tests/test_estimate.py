import dataclasses

import numpy as np
import pytest

from concord.conformance.judging import estimate as estimates
from concord.conformance.judging import family
from concord.conformance.judging.estimate import R, Sigma, estimate
from concord.conformance.judging.expectation import Expectation, JudgedProblem
from concord.conformance.judging.scoring import independent_elements, judge_tensor
from concord.spec.arithmetic import Arithmetic
from concord.spec.batch import example_batch
from concord.spec.cases import build_case
from concord.spec.elementary import contract, erf
from concord.spec.montecarlo import MonteCarlo
from concord.spec.parameters import initialize
from concord.spec.precision import EXTENDED
from tests.toys.rounded import as_run, other, put, truth_of, verdict_of

wide = pytest.mark.skipif(EXTENDED is np.float64, reason="this platform has no type wider than float64")


@pytest.fixture(scope="module")
def case():
    return build_case("bert", "ragged")


def problem_of(case):
    return JudgedProblem(case.config, case.weights, case.batch, case.part)


def run_of(case, arithmetic=None):
    # Unshuffled arithmetic, with gradients of taps.
    truth = truth_of(case, arithmetic=arithmetic or Arithmetic("float32"))
    return as_run(truth, tap_gradients=truth.tap_gradients)


# Wider numbers.


@wide
def test_error_function_has_the_digits_of_the_widest_type():
    # Abramowitz and Stegun list these to at least 20 digits.
    x = np.array(["0.5", "2", "-0.1"], EXTENDED)
    y = np.array(["0.52049987781304653768", "0.99532226501895273416", "-0.11246291601828489220"], EXTENDED)
    assert (abs(erf(x) - y) < 2 * np.finfo(EXTENDED).eps).all()
    assert erf(np.array([np.inf, -np.inf, 7], EXTENDED)).tolist() == [1, -1, 1]


@wide
def test_products_of_split_factors_are_those_of_wide_numbers():
    random = np.random.default_rng(0)
    left, right = (
        random.standard_normal(shape).astype(EXTENDED) * EXTENDED(1.1) for shape in ((37, 53), (53, 61))
    )
    scale = contract("ij,jk->ik", abs(left), abs(right))
    assert left.size * 61 > 1 << 16, "too small to be split"
    # Large numbers meet small ones, as where padding has large weights.
    for large in (np.ones(53), 2.0 ** np.arange(53)):
        product = contract("ij,jk->ik", left * large, right / large[:, None])
        assert (abs(product - np.matmul(left, right)) < 2.0**-58 * scale).all()


@wide
def test_noise_whose_square_is_no_number_is_not_lost():
    sigma = Sigma(np.array([1e-200, 1e-100], EXTENDED), "float64")
    sigma.take(MonteCarlo("float64", 2), np.array([[2e-200, 1e-100], [0.0, 1e-100]]))
    assert round(sigma.result()[0] * 1e200, 6) == 1


# Gradients of taps.


def test_a_wrong_derivative_is_named_where_it_is(case):
    class Halved(Arithmetic):
        def tanh(self, a, absolute=False):
            value = super().tanh(a, absolute)
            (operand, pullback), *rest = value.operands
            value.operands = ((operand, lambda g: pullback(g) / 2), *rest)
            return value

    run = run_of(case, Halved("float32"))
    assert verdict_of(case, run).first_divergence.tensor == "gradients.taps.pooler.dense"
    alone = verdict_of(case, dataclasses.replace(run, tap_gradients={}))
    assert alone.first_divergence.tensor.startswith("gradients.pooler.")


def test_a_row_of_a_table_that_nothing_looked_up_must_have_no_gradient(case):
    row, name = next(row for row in range(99) if row not in case.batch.input_ids), "embeddings.token.weight"
    run = other(run_of(case), f"gradients.{name}", put((row, 3), 1e-20))
    first = verdict_of(case, run).first_divergence
    assert (first.tensor, first.deciding.element) == (f"gradients.{name}", (row, 3))


def test_a_norm_of_one_element_may_be_multiplied_out(small):
    config = small("bert", d_model=1, num_heads=1, norm_epsilon=1e-2)
    weights = initialize(config, seed=3)
    problem = JudgedProblem(config, weights, example_batch(config, 3, 7))
    run, name = run_of(problem), "gradients.taps.layers.1.residual2"
    wrong = run.tap_gradients["layers.1.norm2"] * weights["layers.1.norm2.weight"] / np.sqrt(1e-2)
    assert (run.tap_gradients["layers.1.residual2"] == 0).all()
    for units, status in ((1, "agrees"), (1000, "diverges")):
        moved = (2.0**-24 * units * wrong).astype(np.float32)
        verdict = verdict_of(problem, other(run, name, lambda gradient, moved=moved: moved))
        assert verdict.row(name).status == status


def test_a_sigmoid_loss_may_be_a_logit_minus_the_logarithm_of_its_sigmoid(small):
    config = small("bert", num_classes=1)
    weights = initialize(config, seed=3)
    weights |= {"classifier.weight": 0 * weights["classifier.weight"], "classifier.bias": np.array([-32.3])}
    batch = dataclasses.replace(example_batch(config, 1, 7), labels=np.zeros(1, np.int64))
    problem = JudgedProblem(config, weights, batch)
    run = as_run(truth_of(problem, "float64"), "float64")
    loss = -32.3 - (-32.3 - np.log1p(np.exp(-32.3)))
    assert abs(loss - np.exp(-32.3)) > 2e-15
    for wrong, status in ((loss, "agrees"), (loss + 1e-12, "diverges")):
        verdict = verdict_of(problem, other(run, "losses", lambda losses, wrong=wrong: losses * 0 + wrong))
        assert verdict.row("losses").status == status


def test_beyond_a_gradient_that_is_out_of_range_it_is_no_question_what_is_finite():
    numbers = {"gradients.a": 1.0, "gradients.b": 1e39, "gradients.c": 0.0}
    values = {name: np.array([value, 1.0]) for name, value in numbers.items()}
    for dtype, singular in (("float32", {"gradients.c"}), ("float64", set())):
        assert Expectation(dtype, values, values, dict.fromkeys(values, "")).singular == singular


# Samples.


def test_samples_one_after_the_other_say_what_samples_side_by_side_say(case, monkeypatch):
    together = family._estimate(problem_of(case), None)
    monkeypatch.setattr(estimates, "SIDE_BY_SIDE", 1)
    apart = family._estimate(problem_of(case), None)
    assert list(apart.values) == list(together.values)
    for name, value in together.values.items():
        np.testing.assert_array_equal(apart.values[name], value)
        sizes = [
            np.sqrt(np.mean(np.square(result.sigmas[name], dtype=float))) for result in (apart, together)
        ]
        assert not np.isfinite(sizes).all() or value.size <= 20 or 0.6 < sizes[0] / sizes[1] < 1.7, name


def test_what_is_all_but_zero_may_be_flushed_and_zero_may_not():
    values = np.array([[1e-42, 0.0, -1e-39]], np.float32)
    noise = MonteCarlo("float32", 16).settle(values) - values
    assert (abs(noise).max(0) > 1e-39).tolist() == [True, False, True]
    summed = MonteCarlo("float64", 16).settle_sum(np.array([[1e-306, 0.0]]), lambda: np.zeros((1, 2)), 3)
    assert (np.ptp(summed, 0) > 1e-308).tolist() == [True, False]


def test_a_sum_term_by_term_of_equal_terms_lies_within_tolerance():
    # The errors add up, because each term is rounded alike.
    x = np.tile(np.random.default_rng(0).standard_normal(13).astype(np.float32) ** 3, 61)[None]

    def compute(a, observer):
        leaf = a.leaf(x)
        observer("y", a.divide(leaf, a.sqrt(a.sum(a.multiply(leaf, leaf), -1))).value)

    values, sigmas = estimate(compute, "float32")
    in_order = x / np.sqrt(np.add.accumulate(x * x, 1)[:, -1:])
    assert judge_tensor(in_order, values["y"], sigmas["y"], "float32").rms < R
    assert judge_tensor(in_order * (1 + 2**-19), values["y"], sigmas["y"], "float32").rms > R


def test_a_score_halfway_between_two_sums_may_be_rounded_to_either():
    halfway = 0.5 + 2.0**-17  # the sum with -199.5 is rounded to multiples of 2^-16
    scores = np.broadcast_to(np.array([1.0, halfway, 0.25]), (16, 3)).astype(np.float32)
    sums = MonteCarlo("float32", 16).round_sum(scores, -199.5, "float32")
    assert [len(np.unique(column)) for column in sums.T] == [1, 2, 1]
    delivered = MonteCarlo("float32", 16).round_sum(scores[:1], -199.5, "float32")
    assert delivered.shape == (1, 3), "what a run delivered is not perturbed"
    assert (MonteCarlo("float32", 16).round_sum(scores, -1e9, "float32") == np.float32(-1e9)).all()


def test_a_product_with_a_power_of_two_is_exact_but_where_it_may_be_flushed():
    arithmetic = MonteCarlo("float32", 16)
    values = arithmetic.leaf(np.array([1.5, 3e-38, 0.0], np.float32))
    noisy = [len(np.unique(column)) > 1 for column in arithmetic.divide_by(values, 32.0).value.T]
    assert noisy == [False, True, False]
    assert len(arithmetic.scale(arithmetic.leaf(np.array([1.5, 3e-30])), 0.5).value) == 1


@pytest.mark.clause("ALG-3")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_one_of_equal_largest_entries_may_get_what_a_row_sums_to(dtype):
    # With few bits, the samples of a given tap differ, and entries that were equal in the run no longer are.
    equal = np.arange(23) % 3 == 1
    scores = np.where(equal, 2.5, -1.25)[None]
    a, gradients = MonteCarlo(dtype, 16), []
    x = a.override(a.leaf(np.zeros_like(scores)), scores)
    x.completed = lambda node: gradients.append(node.gradient)
    a.backward(a.sum(a.multiply(a.softmax(x), a.leaf(1 + np.arange(23)[None] / 64))))
    noise = np.std(np.asarray(gradients[0], np.float64), axis=0)[0]
    assert noise[equal].min() > noise[equal].max() / 3
    assert noise[~equal].max() < noise[equal].min() / 30


# The number of independent errors.


def test_the_root_mean_square_speaks_of_as_many_elements_as_sigma_is_spread_over():
    value, even = np.random.default_rng(5).standard_normal((31, 7)), np.ones((31, 7))
    rows, uneven = np.repeat(value[:1], 31, 0), even * 1e-6
    uneven[0, :3] = 1.0
    for values, sigmas, count in ((value, even, 217), (rows, even, 7), (value, uneven, 3)):
        assert round(independent_elements(values, sigmas, "float32"), 6) == count
    for values, error, status in ((rows, 7.0, "agrees"), (value, 7.0, "diverges"), (rows, 17.0, "diverges")):
        assert judge_tensor(values + error, values, even, "float32").status == status


@pytest.mark.parametrize("apart", [3, 1009])
def test_samples_say_how_many_errors_are_independent(apart):
    random, value = np.random.default_rng(apart), np.zeros((1009, 13))
    sigma = Sigma(value, "float32")
    for _ in range(16):
        errors = np.resize(random.standard_normal(apart), (1009, 1))
        sigma.take(MonteCarlo("float32", 1), (value + errors * np.ones(13))[None])
    assert apart / 15 < sigma.independent < apart
    assert Sigma(value, "float32").independent == np.inf, "where no sample was taken nothing is shared"
