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
from concord.conformance.judging import judge
from concord.spec.cases import build_case
from concord.spec.config import CHOICES
from concord.spec.errors import ConfigError

VARIED = {
    name: choices
    for name, choices in CHOICES.items()
    if name not in ("positions", "position_layout", "position_exponent")
}


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


def random_config(seed: int) -> spec.EncoderConfig:
    """Draw a member of the family from the whole option space, with the sizes of the standard cases."""
    generator = np.random.default_rng(seed)
    base = build_case("nndl-paddle-api", "ragged").config
    while True:
        drawn = {name: str(generator.choice(choices)) for name, choices in VARIED.items()}
        learned = bool(generator.integers(2))
        table = (
            {"position_layout": None, "position_exponent": None, "position_base": None}
            if learned
            else {
                "position_layout": str(generator.choice(CHOICES["position_layout"])),
                "position_exponent": str(generator.choice(CHOICES["position_exponent"])),
            }
        )
        flags = {
            name: bool(generator.integers(2))
            for name in ("embedding_norm", "qkv_bias", "output_projection", "final_norm")
        }
        other = {
            "positions": "learned" if learned else "sinusoidal",
            "position_start": int(generator.integers(2))
            if drawn["position_of_padding"] != "pad_row"
            else base.pad_id + 1,
            "mask_value": float(generator.choice([-1e9, -1e4, -4294967295.0])),
            "norm_epsilon": float(generator.choice([1e-12, 1e-6, 1e-5])),
            "num_classes": int(generator.choice([1, 3])),
            "l2_weight": float(generator.choice([0.0, 0.1])),
            "token_padding_row": [None, 0, 1][int(generator.integers(3))],
            "segment_padding_row": [None, 0][int(generator.integers(2))],
            "position_padding_row": [None, 0, 1][int(generator.integers(3))] if learned else None,
            "max_positions": 11 if drawn["pooling"] == "flatten" else 13,
        }
        try:
            return base.replace(**{**drawn, **table, **flags, **other})
        except ConfigError:
            continue


@pytest.mark.in_turn
@pytest.mark.parametrize("seed", range(8))
def test_random_member_of_the_family_conforms(worker, seed):
    config = random_config(seed)
    padding = "none" if config.pooling == "flatten" and config.position_start else "ragged"
    tokens = min(11, config.max_positions - config.position_start)
    if config.pooling == "flatten" and tokens != config.max_positions:
        config = config.replace(position_start=0, position_of_padding="counted")
        tokens = 11
    weights, batch = (
        spec.initialize(config, seed=seed),
        spec.example_batch(config, 5, tokens, seed=seed, padding=padding),
    )
    for dtype in ("float64", "float32"):
        assert_conforms(worker, config, weights, batch, "model", dtype)


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
