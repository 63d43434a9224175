"""Sessions: a model that was loaded, fed and stepped computes what one that was just built does."""

from collections.abc import Callable

import pytest

from concord import spec
from concord.backends.interface import Problem, Settings, Unsupported
from concord.backends.worker import Worker
from concord.conformance.judging import judge
from concord.spec.cases import build_case
from tests.toys.small import request_for
from tests.toys.surroundings import EACH_BACKEND


@pytest.fixture(params=EACH_BACKEND)
def stepped(request: pytest.FixtureRequest, open_worker: Callable[[str], Worker]) -> Worker:
    """Each of the four backends, in a session that had other weights and inputs before."""
    return open_worker(f"tests.toys.sessions:{request.param}_Stepped")


@pytest.fixture(params=EACH_BACKEND)
def trained(request: pytest.FixtureRequest, open_worker: Callable[[str], Worker]) -> Worker:
    """Each of the four backends, in a session that was trained before."""
    return open_worker(f"tests.toys.sessions:{request.param}_Trained")


@pytest.mark.parametrize("execution", ["eager", "compiled"])
def test_session_computes_with_what_was_loaded_and_fed_last(stepped: Worker, execution: str) -> None:
    case = build_case("bert", "ragged", options={"num_layers": 1})
    run = stepped.run(case.config, case.weights, case.batch, execution=execution, tap_gradients=True)
    verdict = judge(case.config, case.weights, case.batch, run)
    assert verdict.passed, verdict.first_divergence


@pytest.mark.parametrize("execution", ["eager", "compiled"])
def test_training_begins_anew_with_what_is_loaded(trained: Worker, execution: str) -> None:
    case = build_case("bert", "ragged", options={"num_layers": 1})
    info = trained.run(case.config, case.weights, case.batch, execution=execution, gradients=False).info
    assert info["unmoved"] == []
    assert info["moments"] == ["first_moment", "parameters", "second_moment"]
    assert info["unlike"] == []


def test_session_without_gradients_is_one_of_forward_passes(stepped: Worker) -> None:
    case = build_case("tf1-text-classifier", "ragged", options={"num_layers": 1})
    run = stepped.run(case.config, case.weights, case.batch, gradients=False)
    assert judge(case.config, case.weights, case.batch, run).passed
    assert not run.gradients


def test_reordered_weights_are_not_loaded_anew(open_worker: Callable[[str], Worker]) -> None:
    case = build_case("bert", "full", options={"num_layers": 1})
    with pytest.raises(
        Unsupported,
        match="torch keeps weights in a layout of a kernel's own in its implementation 'library:onednn'",
    ):
        open_worker("tests.toys.sessions:torch_Stepped").run(
            case.config, case.weights, case.batch, implementation="library:onednn", gradients=False
        )


def test_request_is_a_problem_with_settings(small: Callable[..., spec.EncoderConfig]) -> None:
    request = request_for(small("bert"), dtype="float64")
    assert isinstance(request, Problem)
    assert isinstance(request, Settings)
    assert (request.part, request.dtype, request.taps) == ("model", "float64", True)
