from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from concord.conformance.bugs.bug import Change
from concord.conformance.explain.family_judge import Misfit
from concord.conformance.run.campaign import Job
from concord.spec.arithmetic import Arithmetic
from concord.spec.cases import build_case
from concord.spec.deviations import BLIND_ROWS_ZERO, UNCOMPUTED_PADDING, WIDER_OUTPUT
from tests.toys.rounded import declaring, explained, put, run_with, truth_of, verdict_of

# What other projects do with padding. All of them are right where there is a token.

# Padded queries see no key either.
OUTER_MASK = Change(
    taps=("*.masked_scores",),
    edit=lambda m: m.masked(m.visible_of(m.real[:, :, None] & m.real[:, None, :])),
)

# As PyTorch's scaled_dot_product_attention: a query that sees no key has a context of zero.
BLIND_ZERO = Change(taps=("*.weights",), edit=lambda m: m.where(m.visible.any(-1)[..., None], m.y, 0.0))


def of_rows(real, shape):
    by_row = len(shape) > 2 and shape[:2] == real.shape
    return real.reshape(*real.shape, *[1] * (len(shape) - 2)) if by_row else np.ones((), bool)


UNPADDED = Change(taps=("*",), edit=lambda m: m.where(of_rows(m.real, m.y.shape), m.y, 0.0))


def uninitialised(case, dtype="float32"):
    # Like a run that skips padding and returns uninitialised memory there.
    run, real = run_with(UNPADDED, case, dtype), case.batch.required("input_ids") != case.config.pad_id
    run.taps = {
        name: np.where(of_rows(real, tap.shape), tap, np.asarray(np.nan, tap.dtype))
        for name, tap in run.taps.items()
    }
    return run


PADDINGS = (partial(run_with, OUTER_MASK), uninitialised)
ZEROS = partial(run_with, UNPADDED)


def declared(case, computing, dtype="float32", given=None):
    # Judged the way a campaign does. `given` replaces the weights of the case.
    job = Job(case.variant, case.name, dtype, case.part, case.config, case.weights, case.batch)
    judgeable = job.judgeable(declaring(computing(case, dtype), UNCOMPUTED_PADDING))
    computed = replace(case, batch=judgeable.batch, weights=given or case.weights)
    return judgeable.judge(declaring(computing(computed, dtype), UNCOMPUTED_PADDING)).explained()


@pytest.mark.clause("MSK-4", "PRC-4")
@pytest.mark.parametrize(
    ("variant", "part", "computing", "dtype"),
    [
        ("bert", "model", PADDINGS[0], "float32"),
        ("bert", "model", PADDINGS[1], "bfloat16"),
        # In these the loss covers every row.
        ("vanilla-encoder", "encoder", ZEROS, "float32"),
        ("sentence-bert", "pooled", ZEROS, "float32"),
    ],
)
def test_padding_that_is_declared_not_to_be_computed_is_not_judged(variant, part, computing, dtype):
    verdict = declared(build_case(variant, "ragged", part), computing, dtype)
    assert verdict.passed, verdict.first_divergence
    assert "padding rows" in verdict.row("layers.1.norm2").local.note
    if part == "model":
        assert verdict.row("gradients.pooler.weight").status == "agrees"


@pytest.mark.parametrize("computing", PADDINGS)
def test_padding_alone_is_recognised_and_said_first_and_a_bug_beside_it_is_not_excused(computing):
    case, name = build_case("bert", "ragged"), "layers.1.feed_forward.outer.weight"
    wrong = {**case.weights, name: put((3, 7), lambda x: 1.001 * x)(case.weights[name].copy())}
    verdict = explained(case, computing(case))
    assert verdict.undeclared == UNCOMPUTED_PADDING
    first, *rest = str(verdict).splitlines()
    assert first == "diverges: only padding rows differ"
    assert any(UNCOMPUTED_PADDING in line and "joining.md" in line for line in rest)
    declared_verdict = declared(case, computing, given=wrong)
    assert declared_verdict.first_divergence.tensor == "layers.1.feed_forward.outer"
    undeclared = explained(case, computing(replace(case, weights=wrong)))
    assert (undeclared.status, undeclared.undeclared) == ("diverges", "")


def test_wrong_results_alone_are_excused_by_no_padding():
    case = build_case("bert", "ragged")
    ids = case.batch.required("input_ids").copy()
    ids[:, 0] = case.config.pad_id  # pooling takes this token, so without padding no tensor could be judged
    case = replace(case, batch=replace(case.batch, input_ids=ids))
    right = run_with(Change(), case)
    undeclared = explained(case, replace(right, taps={}, output=1.01 * right.output))
    assert (undeclared.status, undeclared.undeclared) == ("diverges", "")


@pytest.mark.clause("MSK-5", "PRC-4")
@pytest.mark.parametrize(
    ("variant", "dtype"), [("bert", "float64"), ("nndl-paddle", "float32"), ("bert", "bfloat16")]
)
def test_blind_rows_that_are_zero_agree_if_they_are_declared(variant, dtype):
    case = build_case(variant, "ragged")
    run = run_with(BLIND_ZERO, case, dtype)
    undeclared = explained(case, run)
    assert (undeclared.status, undeclared.undeclared) == ("diverges", BLIND_ROWS_ZERO)
    assert str(undeclared).splitlines()[0] == "diverges: only rows without a visible key differ"
    assert verdict_of(case, declaring(run, BLIND_ROWS_ZERO)).passed
    run = declaring(run_with(OUTER_MASK, case, dtype), BLIND_ROWS_ZERO)  # the rows are not zero
    assert verdict_of(case, run).first_divergence.tensor == "layers.0.attention.masked_scores"


# Outputs in a wider precision than the run.


@pytest.mark.clause("PRC-2")
def test_an_output_wider_than_its_run_agrees():
    case = build_case("bert", "ragged")
    run = run_with(Change(), case, "bfloat16")
    # The classifier runs in float32 on the run's own pooled vector.
    pinned = {"pooler.output": run.taps["pooler.output"]}
    head = truth_of(case, "bfloat16", Arithmetic("float32"), pinned=pinned).taps
    outputs = {
        name: head[name].astype(np.float32) for name in ("logits", "log_probabilities", "losses", "loss")
    }
    wide = replace(run, output=outputs["logits"], loss=outputs["loss"], taps={**run.taps, **outputs})
    assert verdict_of(case, wide).passed


@pytest.mark.clause("PRC-3")
def test_an_output_that_alone_shows_the_precision_is_wider_only_if_that_is_declared():
    case = build_case("bert", "ragged")
    exact = run_with(Change(), case)
    run = replace(exact, dtype="bfloat16", taps={}, gradients={}, requested=("taps",))
    verdict = explained(case, run)
    assert verdict.first_divergence.tensor == "logits"
    assert verdict.undeclared == WIDER_OUTPUT
    assert verdict_of(case, declaring(run, WIDER_OUTPUT)).status != "diverges"


# Tensors that cannot be judged.


@pytest.mark.clause("PRC-2")
def test_a_tensor_that_nobody_asked_for_is_bad_input():
    case = build_case("bert", "ragged")
    run = run_with(Change(), case)
    run.taps["encoder.layer.0"] = run.taps["layers.0.norm2"]
    with pytest.raises(Misfit, match=r"'encoder\.layer\.0' is unknown in part"):
        verdict_of(case, run)
