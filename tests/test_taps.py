"""Taps: the model goes on with what they return, and the loss has a gradient by each."""

import dataclasses
import zlib

import numpy as np
import pytest

from concord import spec
from concord.backends.interface import Request
from concord.conformance.campaign import Setup, conduct
from concord.conformance.check import check_jobs
from concord.conformance.judging import judge
from concord.conformance.verdict import UNUSED
from concord.spec.cases import build_case
from concord.spec.errors import SpecError
from tests.toys.built_in import changed
from tests.toys.surroundings import EACH_BACKEND

STEP = 2.0**-17
"""Of a difference, in units of a tap's largest value: the error that it makes is about its square."""

MASKED = 1e4
"""What no number reaches that is not masked."""


def case_of(name, part="model", **options):
    """Return a case of a variant with padding, one layer deep: every axis has a size of its own.

    Every sample has a real token: a mask constant that absorbs all scores of a row leaves no difference to
    take.
    """
    return build_case(name, "equal", part, options={"num_layers": 1, **options})


def run_of(worker, case, dtype="float64", **settings):
    return worker.run(case.config, case.weights, case.batch, part=case.part, dtype=dtype, **settings)


def truth_of(case, pinned=None):
    return spec.reference(case.config, case.weights, case.batch, part=case.part, pinned=pinned)


# What a tap returns is what the model goes on with.


def assert_goes_on(worker, case, tap, plain, expected):
    """Change a tap in the backend and in the oracle.

    The same tensors become others, and those keep their bits that the oracle's keep.
    """
    pinned = truth_of(case, {tap: changed(tap, expected.taps[tap])})
    run = run_of(worker, case, implementation=f"edit:{tap}:explicit", gradients=False)
    kept = {
        name
        for name in expected.taps
        if name != tap and np.array_equal(pinned.taps[name], expected.taps[name])
    }
    assert {name for name in run.taps if np.array_equal(run.taps[name], plain.taps[name])} == kept, tap


def assert_only_the_tap_diverges(worker, case, tap, dtype, implementation, execution):
    """Change a tap: judged step by step, from the run's own taps, it is the only tensor that is wrong."""
    run = run_of(
        worker,
        case,
        dtype,
        implementation=f"edit:{tap}:{implementation}",
        execution=execution,
        gradients=False,
    )
    verdict = judge(case.config, case.weights, case.batch, run, case.part)
    assert [row.tensor for row in verdict.table if row.status == "diverges"] == [tap]


@pytest.fixture(params=EACH_BACKEND)
def editing(request, open_worker):
    """Each of the four backends with one tap changed."""
    return open_worker(f"tests.toys.built_in:{request.param}")


@pytest.mark.in_turn(2)
@pytest.mark.clause("PRT-2", "ATT-7")
@pytest.mark.parametrize(
    ("name", "options"),
    [("tf1-text-classifier", {"head_computation": "looped"}), ("bert-pytorch", {}), ("bert", {})],
)
def test_model_goes_on_with_every_tap(editing, name, options):
    case = case_of(name, **options)
    plain, expected = run_of(editing, case, implementation="edit::explicit", gradients=False), truth_of(case)
    for tap in spec.taps(case.config):
        assert_goes_on(editing, case, tap, plain, expected)


@pytest.mark.in_turn
@pytest.mark.parametrize("tap", ["scores", "masked_scores", "weights", "context"])
def test_model_goes_on_with_taps_that_are_joined_from_heads(editing, tap):
    case = case_of("keras-attention", "dot_product", head_computation="looped", mask_assignment="per_sample")
    assert_only_the_tap_diverges(editing, case, f"attention.{tap}", "float64", "explicit", "eager")


def test_model_goes_on_with_taps_when_compiled(editing):
    assert_only_the_tap_diverges(
        editing,
        case_of("nndl-paddle", head_computation="looped"),
        "layers.0.attention.weights",
        "float32",
        "explicit",
        "compiled",
    )


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("tap", "execution"),
    [
        ("layers.0.attention.query", "eager"),
        ("layers.0.feed_forward.activation", "compiled"),
        ("pooler.dense", "unpadded"),
    ],
)
def test_model_goes_on_with_taps_of_library_layers(editing, tap, execution):
    assert_only_the_tap_diverges(editing, case_of("bert"), tap, "float32", "library", execution)


# Gradients of taps.


def slope(case, tap, tensor, direction):
    """Return how the oracle's loss changes with a tap along a direction, by a central difference."""
    step = STEP * float(np.abs(tensor[np.abs(tensor) < MASKED]).max())
    above, below = (
        float(truth_of(case, {tap: tensor + sign * step * direction}).loss) for sign in (1.0, -1.0)
    )
    return (above - below) / (2 * step)


def assert_gradients_of_taps(case, run, error, missing=("loss",)):
    """Compare the gradient by every tap with the oracle's slope along two directions."""
    taps = truth_of(case).taps
    assert set(run.tap_gradients) == {name for name in taps if not name.endswith(missing)}
    for name, gradient in run.tap_gradients.items():
        assert (gradient.shape, gradient.dtype) == (taps[name].shape, run.output.dtype), name
        generator = np.random.default_rng(zlib.crc32(name.encode()))
        for _ in range(2):
            direction = generator.standard_normal(gradient.shape)
            expected, found = slope(case, name, taps[name], direction), float(np.sum(gradient * direction))
            assert abs(found - expected) <= error * max(1e-3, np.linalg.norm(gradient)), (
                f"{name}: {found} for {expected}"
            )


@pytest.mark.in_turn
@pytest.mark.clause("GRD-1", "EMB-4", "EMB-5")
@pytest.mark.parametrize("name", spec.variants())
def test_loss_has_the_gradient_of_every_tap(worker, name):
    case = case_of(name)
    assert_gradients_of_taps(case, run_of(worker, case, tap_gradients=True), 1e-6)


@pytest.mark.in_turn
@pytest.mark.parametrize("part", ["encoder", "stack", "attention", "dot_product"])
def test_parts_have_gradients_of_taps(worker, part):
    case = case_of("bert", part)
    assert_gradients_of_taps(case, run_of(worker, case, tap_gradients=True), 1e-6)


def test_compiled_runs_have_gradients_of_taps(worker):
    case = case_of("bert", token_padding_row=0)
    assert_gradients_of_taps(
        case, run_of(worker, case, "float32", execution="compiled", tap_gradients=True), 1e-3
    )


def test_library_layers_have_gradients_of_their_taps(worker):
    case = case_of("bert")
    run = run_of(worker, case, "float32", implementation="library", tap_gradients=True)
    assert_gradients_of_taps(case, run, 1e-3, ("loss", "scores", "attention.weights"))


def test_gradients_of_taps_change_nothing_else(worker):
    case = case_of("nndl-paddle")
    without, run = (run_of(worker, case, "float32", tap_gradients=asked) for asked in (False, True))
    assert without.tap_gradients == {}
    for name, array in {**run.taps, **run.gradients}.items():
        assert np.array_equal(array, {**without.taps, **without.gradients}[name]), name


@pytest.mark.clause("GRD-6")
@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_weights_that_are_an_output_alone_have_no_gradient_that_could_be_wrong(open_worker, backend):
    case = case_of("bert")
    verdict = judge(
        case.config,
        case.weights,
        case.batch,
        run_of(
            open_worker(f"tests.toys.built_in:{backend}"),
            case,
            "float32",
            implementation="aside::explicit",
            tap_gradients=True,
        ),
    )
    assert verdict.status == "agrees", verdict.first_divergence
    weights = [
        row
        for row in verdict.table
        if row.tensor.startswith("gradients.taps.") and row.tensor.endswith("attention.weights")
    ]
    assert {row.note for row in weights} <= {UNUSED}


def test_gradients_of_taps_come_beside_the_others():
    case = case_of("bert")
    request = Request(case.config, case.weights, case.batch, gradients=False, tap_gradients=True)
    with pytest.raises(SpecError, match="'tap_gradients' is true but 'gradients' is false"):
        request.validate()


def test_campaigns_ask_for_gradients_of_taps_where_nobody_has_published_others():
    (job,) = check_jobs(["bert"], ["float32"], cases=["bert-single"])
    published = dataclasses.replace(job, expectation={})
    report = conduct([job, published], ["tests.toys.numpy_backend:SaysWhatItIsAsked"], Setup(threads=1))
    assert [result.detail for result in report.results] == ["tap_gradients=True", "tap_gradients=False"]
