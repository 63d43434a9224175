"""Runs without padding: the same model by the same judge, of which padded tokens are no rows."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from concord import spec
from concord.backends.interface import Request, Unsupported
from concord.backends.library import MULTIPLE, indices, padding_reasons
from concord.backends.worker import Worker
from concord.conformance.judging import judge
from concord.spec.cases import Case, build_case


def without_empty_samples(case: Case) -> Case:
    """Give each sample a real token; and one sample padding in front, where pooling looks."""
    ids = case.batch.required("input_ids").copy()
    ids[(ids == case.config.pad_id).all(axis=1), 2] = 5
    ids[2, 0] = case.config.pad_id
    return dataclasses.replace(case, batch=spec.from_arrays({**case.batch.arrays(), "input_ids": ids}))


def request_of(case: Case, execution: str = "unpadded", **fields: Any) -> Request:
    return Request(
        case.config,
        case.weights,
        case.batch,
        part=case.part,
        implementation="library",
        execution=execution,
        **fields,
    )


def assert_conforms(worker: Worker, case: Case, dtype: str, execution: str = "unpadded") -> None:
    run = worker.run(
        case.config, case.weights, case.batch, dtype=dtype, implementation="library", execution=execution
    )
    verdict = judge(case.config, case.weights, case.batch, run)
    assert verdict.passed, verdict.first_divergence


@pytest.mark.in_turn(2)
@pytest.mark.clause("MSK-1", "MSK-4", "GRD-1", "GRD-2")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("name", "scenario"),
    [
        ("bert", "ragged"),
        ("bert", "equal"),
        ("nndl-paddle", "ragged"),
        ("bert", "single"),
    ],
)
def test_run_without_padding_conforms(worker: Worker, name: str, scenario: str, dtype: str) -> None:
    case = build_case(name, scenario)
    case = without_empty_samples(case) if scenario in ("ragged", "tiny") else case
    if (worker.name, dtype) == ("jax", "float64"):
        with pytest.raises(Unsupported, match="softmax in float32"):
            assert_conforms(worker, case, dtype)
        return
    assert_conforms(worker, case, dtype)


@pytest.mark.parametrize(
    "options",
    [
        {"norm_placement": "pre", "final_norm": True, "activation": "relu", "qkv_activation": "relu"},
        {
            "pad_id": 2,
            "position_start": 3,
            "position_of_padding": "pad_row",
            "position_padding_row": 2,
            "max_positions": 17,
            "pooling": "mean",
            "length_epsilon": 1e-12,
        },
        {
            "position_start": 1,
            "position_of_padding": "zero_row",
            "head_computation": "looped",
            "num_segments": 0,
        },
    ],
    ids="-".join,
)
def test_run_without_padding_conforms_with_other_options(worker: Worker, options: dict[str, Any]) -> None:
    assert_conforms(worker, without_empty_samples(build_case("bert", "ragged", options=options)), "float32")


@pytest.mark.xdist_group("torch")
def test_fused_kernel_runs_without_padding(open_worker: Callable[[str], Worker]) -> None:
    case = build_case("bert", "equal")
    run = open_worker("torch").run(
        case.config,
        case.weights,
        case.batch,
        dtype="float32",
        implementation="library:fused",
        execution="unpadded",
    )
    assert judge(case.config, case.weights, case.batch, run).passed


def test_compiled_run_without_padding_conforms(worker: Worker) -> None:
    assert_conforms(
        worker, without_empty_samples(build_case("nndl-paddle", "ragged")), "float32", "unpadded-compiled"
    )


def test_only_what_follows_the_encoder_is_delivered(worker: Worker) -> None:
    case = build_case("bert", "equal")
    run = worker.run(case.config, case.weights, case.batch, implementation="library", execution="unpadded")
    assert list(run.taps) == [
        "pooling",
        "pooler.dense",
        "pooler.output",
        "logits",
        "log_probabilities",
        "losses",
        "loss",
    ]
    verdict = judge(case.config, case.weights, case.batch, run)
    assert {
        row.status
        for row in verdict.table
        if row.tensor not in run.taps and not row.tensor.startswith("gradients.")
    } == {"not exposed"}


@pytest.mark.clause("PRC-3")
def test_explicit_implementation_keeps_its_padding(worker: Worker) -> None:
    case = build_case("bert", "single")
    for execution in ("unpadded", "unpadded-compiled"):
        with pytest.raises(
            Unsupported, match="keeps padding in its implementation 'explicit'; 'library' can run without"
        ):
            worker.run(case.config, case.weights, case.batch, execution=execution)
    with pytest.raises(Unsupported, match=r"a sample has no real token: .* \(MSK-5\)"):
        assert_conforms(worker, build_case("bert", "ragged"), "float32")


# The host's share.


def test_rows_kept_are_real_tokens_and_the_first_of_each_sample() -> None:
    case = without_empty_samples(build_case("bert", "ragged"))
    found = indices(request_of(case))
    kept = case.batch.required("input_ids") != case.config.pad_id
    kept[:, 0] = True
    rows, slots = found["rows"], found["slots"]
    assert np.array_equal(rows, np.flatnonzero(kept))
    assert np.array_equal(rows[slots[kept]], np.flatnonzero(kept))
    assert (slots[~kept] == 0).all()
    assert indices(request_of(case, "compiled")) == {}


def test_compiled_programs_get_rows_in_multiples() -> None:
    case = build_case("bert", "ragged")
    ids = np.full((7, 11), 5)
    ids[1:, 3:] = case.config.pad_id
    larger = dataclasses.replace(
        case,
        batch=spec.from_arrays(
            {"input_ids": ids, "segment_ids": np.zeros_like(ids), "labels": np.zeros(7, np.int64)}
        ),
    )
    for shown, count, filled in ((larger, 11 + 6 * 3, MULTIPLE), (build_case("bert", "full"), 55, 55)):
        assert len(indices(request_of(shown))["rows"]) == count
        rows = indices(request_of(shown, "unpadded-compiled"))["rows"]
        assert len(rows) == filled
        assert (rows[count:] == rows[0]).all()


@pytest.mark.parametrize(
    ("options", "part", "reason"),
    [
        ({}, "encoder", "part='encoder'"),
        ({"pooling": "flatten", "pooler": "none", "max_positions": 11}, "model", "pooling='flatten'"),
        ({"mask_assignment": "batch_major"}, "model", "mask_assignment='batch_major'"),
        ({"mask_value": -10000.0}, "model", "mask_value=-10000.0: in float32"),
    ],
)
def test_what_needs_its_padding_is_said(options: dict[str, Any], part: str, reason: str) -> None:
    case = build_case("bert", "full", part, options)
    (found,) = padding_reasons(request_of(case))
    assert found.startswith(reason)


def test_a_mask_constant_is_judged_as_the_precision_holds_it() -> None:
    case = build_case("nndl-paddle", "full")
    assert padding_reasons(request_of(case, dtype="bfloat16")) == []
    assert padding_reasons(request_of(case, dtype="float16"))[0].startswith(
        "mask_value=-1000000000.0: in float16"
    )


@pytest.mark.clause("PRC-4", "ATT-5")
def test_floor_of_a_softmax_reaches_no_key_that_was_left_out() -> None:
    """Of a batch in which padding alone reaches a row of the position table, its gradient says whether it
    does.
    """
    case = build_case("bert", "equal")
    floor = {"softmax_floor": -64.0}
    gradients = [
        spec.reference(
            case.config, case.weights, case.batch, gradients=True, deviations=deviations
        ).gradients["embeddings.position.weight"][10]
        for deviations in ({}, floor, {**floor, "padding_left_out": 1.0})
    ]
    assert not gradients[0].any()
    assert gradients[1].all()
    assert not gradients[2].any()
