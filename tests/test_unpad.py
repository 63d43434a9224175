"""Runs without padding: the same model by the same judge, of which padded tokens are no rows."""

import pytest

from concord import spec
from concord.backends.interface import Request
from concord.backends.library import padding_reasons
from concord.spec.cases import build_case
from tests.toys.rounded import verdict_of
from tests.toys.small import run_case


def request_of(case, execution="unpadded", **fields):
    return Request(
        case.config,
        case.weights,
        case.batch,
        part=case.part,
        implementation="library",
        execution=execution,
        **fields,
    )


def test_only_what_follows_the_encoder_is_delivered(worker):
    case = build_case("bert", "equal")
    run = run_case(worker, case, implementation="library", execution="unpadded")
    assert list(run.taps) == [
        "pooling",
        "pooler.dense",
        "pooler.output",
        "logits",
        "log_probabilities",
        "losses",
        "loss",
    ]
    verdict = verdict_of(case, run)
    assert {
        row.status
        for row in verdict.table
        if row.tensor not in run.taps and not row.tensor.startswith("gradients.")
    } == {"not exposed"}


# The host's share.


@pytest.mark.parametrize(
    ("options", "part", "reason"),
    [
        ({}, "encoder", "part='encoder'"),
        ({"pooling": "flatten", "pooler": "none", "max_positions": 11}, "model", "pooling='flatten'"),
        ({"mask_assignment": "batch_major"}, "model", "mask_assignment='batch_major'"),
        ({"mask_value": -10000.0}, "model", "mask_value=-10000.0: in float32"),
    ],
)
def test_what_needs_its_padding_is_said(options, part, reason):
    case = build_case("bert", "full", part, options)
    (found,) = padding_reasons(request_of(case))
    assert found.startswith(reason)


def test_a_mask_constant_is_judged_as_the_precision_holds_it():
    case = build_case("nndl-paddle", "full")
    assert padding_reasons(request_of(case, dtype="bfloat16")) == []
    assert padding_reasons(request_of(case, dtype="float16"))[0].startswith(
        "mask_value=-1000000000.0: in float16"
    )


@pytest.mark.clause("PRC-4", "ATT-5")
def test_floor_of_a_softmax_reaches_no_key_that_was_left_out():
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
