import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from scipy import special

from concord import spec
from concord.backends.interface import Run
from concord.conformance.golden.golden_files import INCLUDED, SHARED, collect, expectation_of, read
from concord.conformance.judging.estimate import Z
from concord.conformance.judging.expectation import JudgedTraining
from concord.spec.arithmetic import Arithmetic
from concord.spec.deviations import NONE
from concord.spec.precision import precision
from concord.spec.reference import reference
from tests.toys.surroundings import refusal, sample_of

FILES = sorted(SHARED.glob("*/*.safetensors"))
TRAINED = [path for path in FILES if path.name.startswith("train_")]
with_the_collection = pytest.mark.skipif(not FILES, reason="no golden files lie beside the repository")


# Configuration of a file, without its size.
DOT_PRODUCT = '{"kind": "ScaledDotProductAttention", "pad_id": 0, "mask_value": -1e9}'


def name_of(path):
    return f"{path.parent.name}/{path.name}"


def attention_file(path, change=lambda tensors, metadata: None):
    # As the source's own dot product: B = 2, Q = 3, S = 5, K = 7, with a stored mask.
    generator = np.random.default_rng(0)
    query, key, value = (generator.standard_normal(shape) for shape in ((2, 3, 7), (2, 5, 7), (2, 5, 7)))
    mask = np.ones((2, 3, 5), np.int64)
    mask[0, 1, 2:] = mask[1, :, 4] = 0
    weights = special.softmax(np.where(mask, query @ key.swapaxes(1, 2) / np.sqrt(7), -1e9), -1)
    tensors = {"inputs/q": query, "inputs/k": key, "inputs/v": value, "inputs/mask": mask}
    tensors |= {"inputs/cotangent": np.ones((2, 3, 7)), "outputs/loss": np.sum(weights @ value)}
    tensors |= {"outputs/attention": weights, "outputs/output": weights @ value}
    config = json.loads(DOT_PRODUCT) | {"d_k": 7, "mask": "(B,Q,K) stored"}
    metadata = {"source": "keras-attention", "case": "x", "dtype": "float64", "config": json.dumps(config)}
    change(tensors, metadata)
    save_file({name: np.asarray(array) for name, array in tensors.items()}, path, metadata)
    return path


def test_a_stored_mask_for_each_query_is_read(tmp_path):
    (job,) = read(attention_file(tmp_path / "x.safetensors")).jobs
    assert (job.part, job.batch.key_mask.shape) == ("dot_product", (2, 3, 5))
    truth = spec.reference(job.config, job.weights, job.batch, part=job.part)
    expected = job.expectation(NONE)
    assert set(expected.values) == {"attention.weights", "attention.context", "loss"}
    for name, value in expected.values.items():
        assert (abs(truth.taps[name] - value) <= Z * expected.sigmas[name]).all(), name


# Files with contradictory, missing or wrong entries.


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "vanilla-encoder/a_nopad",
            lambda tensors: {"outputs/encoder_output": tensors["outputs/encoder_output"] + 1},
            "'outputs/encoder_output' differs from another tensor that is",
        ),
        (
            "tf1-text-classifier/a_nopad",
            lambda tensors: {"outputs/predictions": tensors["outputs/predictions"] + 1},
            "the predictions are not the classes that the logits give",
        ),
        (
            "vanilla-encoder/a_nopad",
            lambda tensors: {"inputs/mask": (tensors["inputs/input_ids"] == 0).astype(np.int64)},
            "'inputs/mask' must be the mask of the ids, but is not",
        ),
    ],
)
def test_tensors_of_a_source_that_contradict_each_other_are_refused(tmp_path, name, change, message):
    with safe_open(INCLUDED / f"{name}.f64.safetensors", "numpy") as file:
        names = file.keys()  # safe_open is no mapping
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in names}
    save_file(tensors | change(tensors), tmp_path / "x.safetensors", metadata)
    assert message in "\n".join(refusal(read, tmp_path / "x.safetensors"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("source", "gpt", "unknown source 'gpt': it must be one of bert-hugging-face, bert-pytorch"),
        ("dtype", "float16", "'dtype' is 'float16' but must be 'float64' or 'float32'"),
        ("config", '{"kind": "Decoder"}', "unknown 'kind' in the metadata's 'config' 'Decoder': "),
        ("config", DOT_PRODUCT, "key 'd_k' is missing but is required"),
        ("inputs/mask", None, "'inputs/key_ids' is missing but is required"),
        ("outputs/output", None, "'outputs/output' is missing but is required"),
        ("outputs/attention", np.ones((2, 4, 5)), "'outputs/attention' has shape (2, 4, 5), but layout"),
        ("weights/w", np.ones(2), "'w' is unexpected"),
    ],
)
def test_what_a_file_lacks_or_misstates_is_refused(tmp_path, name, value, message):
    def change(*tensors_and_metadata):
        table = tensors_and_metadata["/" not in name]
        table.pop(name, None)
        if value is not None:
            table[name] = value

    path = attention_file(tmp_path / "x.safetensors", change)
    lines = refusal(read, path)
    assert lines[0].startswith(f"{path}: ")
    assert message in "\n".join(lines)


# The whole collection.


@with_the_collection
@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_golden_files_are_consumed(path):
    file = read(path)
    assert not [name for name in file.unchecked if name.startswith(("weights/", "grads/"))]
    assert not [name for name, reason in file.unchecked.items() if "has no place" in reason]
    assert [job.training is not None for job in file.jobs][:1] == ["train" in path.name]


@with_the_collection
def test_selection_is_what_the_collection_holds():
    for path in INCLUDED.rglob("*.safetensors"):
        if not path.parent.name.endswith("-hugging-face"):  # made by docs/golden/hugging_face.py
            assert path.read_bytes() == (SHARED / path.relative_to(INCLUDED)).read_bytes(), path


@pytest.mark.clause("EMB-1", "EMB-2", "EMB-3", "EMB-5", "EMB-6", "POS-1", "POS-5", "POS-6", "MSK-1", "MSK-3")
@pytest.mark.clause("MSK-4", "MSK-7", "MSK-8", "ATT-1", "ATT-2", "ATT-3", "ATT-4", "ATT-5", "ATT-6", "ATT-7")
@pytest.mark.clause("NRM-1", "NRM-2", "NRM-3", "NRM-4", "NRM-5", "RES-1", "FFN-1", "FFN-2", "HED-1", "HED-2")
@pytest.mark.clause("HED-3", "LOS-1", "LOS-2", "LOS-3", "LOS-4")
@pytest.mark.parametrize(
    "job",
    sample_of(
        [job for job in collect(INCLUDED)[0] if not job.training],
        lambda place, _: (place + place // 2) % 2 == 0,
    ),  # each file in one of its two precisions
    ids=lambda job: job.name,
)
def test_reference_reproduces_the_source(job):
    rounding = precision(job.dtype).round
    truth = reference(job.config, job.weights, job.batch, gradients=True, part=job.part, dtype=job.dtype)
    taps, gradients = ({name: rounding(x) for name, x in of.items()} for of in (truth.taps, truth.gradients))
    run = Run(rounding(truth.output), rounding(truth.loss), taps, gradients, "reference", job.dtype)
    verdict = job.judge(run)
    assert verdict.passed, verdict.first_divergence
    assert "ignore" in job.case or any(row.tensor.startswith("gradients.") for row in verdict.table)


@with_the_collection
@pytest.mark.parametrize(
    "path", sample_of(TRAINED, lambda place, _: (place + place // 2) % 2 == 0), ids=name_of
)
def test_reference_trains_as_the_source_did(path):
    (job,) = read(path).jobs
    _, published, deviations, uncertain = job.expectation.args
    steps = 3  # of twenty, which take long
    job = replace(job, training=replace(job.training, steps=job.training.steps[:steps]))
    expected = {name: array for name, array in published.items() if int(name.split(".")[1]) < steps}
    assert {name.split(".")[2] for name in expected} >= {"losses", "parameters"}
    reported = {}
    problem = JudgedTraining(job.config, job.weights, job.training, job.part, job.dtype, deviations)
    problem.trajectory(Arithmetic()).run(reported.__setitem__)
    arrays = {name: precision(job.dtype).round(array) for name, array in reported.items()}
    nothing = np.zeros(1)
    run = Run(nothing, nothing, backend="reference", dtype=job.dtype, requested=("steps",), steps=arrays)
    run.info["deviations"] = [
        {"name": name, "value": value, "reason": "the source's"} for name, value in deviations.items()
    ]
    job = replace(job, expectation=partial(expectation_of, job, expected, deviations, uncertain))
    verdict = job.judge(run)
    assert verdict.passed, verdict.first_divergence
