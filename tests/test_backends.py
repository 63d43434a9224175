"""The four backends beyond the standard cases.

Parts, masks, the whole option space, half precision, compilation.
"""

import subprocess
import sys

import numpy as np
import pytest

from concord import spec
from concord.backends.interface import Unsupported
from concord.backends.worker import Worker
from concord.conformance.fuzz.plan import Plan, drawn
from concord.conformance.judging import judge
from concord.spec.cases import build_case


def assert_conforms(worker: Worker, config, weights, batch, part="model", dtype="float32", execution="eager"):
    run = worker.run(config, weights, batch, part=part, dtype=dtype, execution=execution)
    verdict = judge(config, weights, batch, run, part)
    assert verdict.passed, f"{part} {dtype} {execution}: {verdict.first_divergence}"


@pytest.mark.in_turn
@pytest.mark.clause("PRT-1", "GRD-5")
@pytest.mark.parametrize("part", ["encoder", "stack", "attention", "dot_product"])
@pytest.mark.parametrize("name", ["tf1-text-classifier", "bert-pytorch", "nndl-paddle", "keras-attention"])
def test_part_conforms_alone(worker, name, part):
    case = build_case(name, "ragged", part)
    for dtype in ("float64", "float32"):
        assert_conforms(worker, case.config, case.weights, case.batch, part, dtype)


@pytest.mark.in_turn
@pytest.mark.clause("MSK-4", "MSK-7", "ATT-3", "ATT-7")
@pytest.mark.parametrize("part", ["attention", "dot_product"])
@pytest.mark.parametrize("mask", ["none", "three-dimensional"])
@pytest.mark.parametrize(
    "mode", [("batched", "batch_major"), ("batched", "per_sample"), ("looped", "per_sample")], ids="-".join
)
def test_attention_conforms_with_every_mask_and_mode(worker, part, mask, mode):
    case = build_case(
        "keras-attention", "ragged", part, {"head_computation": mode[0], "mask_assignment": mode[1]}
    )
    arrays = {name: array for name, array in case.batch.arrays().items() if not name.endswith("_mask")}
    if mask == "three-dimensional":
        arrays["key_mask"] = np.random.default_rng(2).random((5, 6, 11)) > 0.4
    assert_conforms(worker, case.config, case.weights, spec.from_arrays(arrays), part, "float64")


@pytest.mark.in_turn
@pytest.mark.parametrize("seed", range(8))
def test_random_member_of_the_family_conforms(worker, seed):
    for dtype in ("float64", "float32"):
        plan = Plan(names=(worker.name,), seed=seed, dtypes=(dtype,), parts=("model",))
        job = drawn(plan, 0).job("random")
        run = worker.run(job.config, job.weights, job.batch, dtype=dtype, tap_gradients=True)
        verdict = job.judge(run)
        assert verdict.passed, verdict.first_divergence


@pytest.mark.clause("PRC-2", "PRC-3")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["bert", "nndl-paddle"])
def test_half_precision_conforms_or_is_unsupported(worker, name, dtype):
    case = build_case(name, "ragged")
    if worker.name == "paddle":
        with pytest.raises(Unsupported, match=f"no {dtype} matrix product on cpu"):
            worker.run(case.config, case.weights, case.batch, dtype=dtype)
    else:
        assert_conforms(worker, case.config, case.weights, case.batch, "model", dtype)


@pytest.mark.parametrize("name", ["nndl-paddle", "keras-attention"])
def test_compiled_execution_conforms(worker, name):
    case = build_case(name, "peaked")
    assert_conforms(worker, case.config, case.weights, case.batch, "model", "float32", "compiled")


@pytest.mark.clause("MSK-6")
def test_mask_constants_survive_in_float64(worker):
    """A framework that passes constants through float32 turns -2^32 + 1 into -2^32."""
    for fill in ("replace", "add"):
        case = build_case(
            "tf1-text-classifier", "ragged", "attention", {"mask_fill": fill, "query_mask": "none"}
        )
        run = worker.run(case.config, case.weights, case.batch, part="attention", dtype="float64")
        hidden = ~case.batch.key_mask[3]
        assert (run.taps["attention.masked_scores"][3][..., hidden] != -4294967296.0).all()
        assert judge(case.config, case.weights, case.batch, run, "attention").passed


def test_run_without_taps_or_gradients_delivers_output_and_loss(worker):
    case = build_case("bert", "ragged")
    run = worker.run(case.config, case.weights, case.batch, dtype="float64", taps=False, gradients=False)
    assert (run.taps, run.gradients) == ({}, {})
    verdict = judge(case.config, case.weights, case.batch, run)
    assert verdict.passed
    assert [row.tensor for row in verdict.table] == ["logits", "loss"]


def test_worker_process_needs_neither_execnet_nor_psutil():
    """Another environment's interpreter brings its framework, NumPy and safetensors, and nothing else of
    ours.
    """
    program = (
        "import sys, concord.backends.remote; print(sorted({'execnet', 'psutil', 'rich', 'typer', "
        "'pytest'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
