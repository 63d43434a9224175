"""Golden files: what a source computed, read through its table, against the reference."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from concord import spec
from concord.conformance import golden_files as golden
from concord.conformance.estimate import Z
from concord.conformance.published import computed, expectation_of
from concord.spec.deviations import NONE
from concord.spec.errors import SpecError

GOLDEN = Path(__file__).parents[2] / "shared" / "golden"
FILES = sorted(GOLDEN.glob("*/*.safetensors"))
ABSENT = "no golden files beside the repository, in ../shared/golden"


def attention_file(path, change=lambda tensors, metadata: None):
    """Write a file as the dot product's own source would, B = 2, Q = 3, S = 5, K = 7, with a stored mask."""
    generator = np.random.default_rng(0)
    query, key, value = (generator.standard_normal(shape) for shape in ((2, 3, 7), (2, 5, 7), (2, 5, 7)))
    mask = np.ones((2, 3, 5), np.int64)
    mask[0, 1, 2:] = mask[1, :, 4] = 0
    scores = np.where(mask, query @ key.swapaxes(1, 2) / np.sqrt(7), -1e9)
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    weights = exponentials / exponentials.sum(-1, keepdims=True)
    tensors = {
        "inputs/q": query,
        "inputs/k": key,
        "inputs/v": value,
        "inputs/mask": mask,
        "inputs/cotangent": np.ones((2, 3, 7)),
    }
    tensors |= {
        "outputs/attention": weights,
        "outputs/output": weights @ value,
        "outputs/loss": np.asarray(np.sum(weights @ value)),
    }
    config = {
        "kind": "ScaledDotProductAttention",
        "d_k": 7,
        "pad_id": 0,
        "mask_value": -1e9,
        "mask": "(B,Q,K) stored",
    }
    metadata = {"source": "keras-attention", "case": "x", "dtype": "float64", "config": json.dumps(config)}
    change(tensors, metadata)
    save_file(tensors, path, metadata)
    return path


def refusal(path):
    with pytest.raises(SpecError) as raised:
        golden.read(path)
    return str(raised.value)


def test_a_stored_mask_for_each_query_is_read(tmp_path):
    file = golden.read(attention_file(tmp_path / "x.safetensors"))
    (run,) = file.runs
    assert run.part == "dot_product"
    assert run.batch.key_mask is not None
    assert run.batch.key_mask.shape == (2, 3, 5)
    truth = spec.reference(run.config, run.weights, run.batch, part=run.part)
    found = computed(run, "float64", truth.taps)
    assert set(found) == {"attention.weights", "attention.context", "loss"}
    expectation = expectation_of(file, run, NONE)
    for name in run.expected:
        assert (abs(found[name] - expectation.values[name]) <= Z * expectation.sigmas[name]).all(), name


def test_two_tensors_of_one_tap_are_both_expected_where_they_differ(tmp_path):
    files = [path for path in FILES if path.parent.name == "vanilla-encoder"]
    if not files:
        pytest.skip(ABSENT)
    with safe_open(files[0], framework="numpy") as file:
        names = file.keys()  # a file is no mapping
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in names}
    tensors["outputs/encoder_output"] = tensors["outputs/encoder_output"] + 1e-3
    save_file(tensors, tmp_path / "x.safetensors", metadata)
    (run,) = golden.read(tmp_path / "x.safetensors").runs
    (key,) = [key for key in run.expected if " as " in key]
    assert key == "layers.0.norm2 as outputs/encoder_output"
    assert key in computed(run, "float64", {"layers.0.norm2": run.expected["layers.0.norm2"]})


DOT_PRODUCT = '{"kind": "ScaledDotProductAttention", "pad_id": 0, "mask_value": -1.0}'

SPOILT = [
    ("source", "gpt", "the metadata's 'source' is 'gpt' but must be one of bert-hugging-face, bert-pytorch"),
    ("dtype", "float16", "'dtype' is 'float16' but must be 'float64' or 'float32'"),
    (
        "config",
        '{"kind": "Decoder"}',
        "key 'kind' of the metadata's 'config' is 'Decoder' but must begin with one of",
    ),
    ("config", DOT_PRODUCT, "key 'd_k' is missing but is required"),
    ("inputs/mask", None, "'inputs/key_ids' is missing, but it or 'inputs/*mask*' is required"),
    ("outputs/output", None, "'outputs/output' is missing but is required: it is 'attention.context'"),
    ("outputs/attention", np.ones((2, 4, 5)), "'outputs/attention' has shape (2, 4, 5) but must be"),
    ("weights/w", np.ones(2), "'w' is unexpected"),
]
"""A tensor or an entry of the metadata, what is in its place, and the words in which that is refused."""


@pytest.mark.parametrize(("name", "value", "message"), SPOILT)
def test_what_a_file_lacks_or_misstates_is_refused(tmp_path, name, value, message):
    def change(*given):
        held = given["/" not in name]
        held.pop(name, None)
        if value is not None:
            held[name] = value

    path = attention_file(tmp_path / "x.safetensors", change)
    assert refusal(path).startswith(f"{path}: ")
    assert message in refusal(path)


@pytest.mark.skipif(not FILES, reason=ABSENT)
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_golden_files_are_consumed(path):
    file = golden.read(path)
    assert not [name for name in file.unchecked if name.startswith(("weights/", "grads/"))]
    assert not [name for name, reason in file.unchecked.items() if "has no place" in reason]
    assert (not file.runs) == ("train" in path.name)
