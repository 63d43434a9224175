"""Checkpoints of other projects: which format a folder holds, what its tensors are, and what is refused."""

import json
import re

import numpy as np
import pytest

from concord import conformance, porting, spec
from concord.backends.interface import Run
from concord.porting import registry
from concord.porting.containers import TORCH, safetensors
from concord.porting.containers.container import INDEX
from concord.porting.tensors import in_memory
from concord.spec.errors import SpecError
from concord.spec.sources import table
from tests.toys.checkpoints import CONFIG, SIZES, WEIGHTS, bits, drawn, in_bytes
from tests.toys.ready import hugging_face
from tests.toys.surroundings import python


def test_of_the_files_of_a_folder_of_the_hub_the_first_is_read_as_by_transformers(tmp_path):
    order = ["hugging-face", "hugging-face-bin", "hugging-face-tf", "hugging-face-flax"]
    names, folder = [registry.FORMATS[form].weights[0] for form in order], tmp_path / order[0]
    wanted = [{name: array + number for name, array in WEIGHTS.items()} for number in range(4)]
    for form, name, weights in zip(order, names, wanted, strict=True):
        porting.write(porting.from_weights(CONFIG, weights), tmp_path / form, form)
        (tmp_path / form / name).rename(folder / name)
    for place, (form, name, weights) in enumerate(zip(order, names, wanted, strict=True)):
        found = porting.recognise(folder)
        assert (found.format, bits(folder)) == (form, in_bytes(weights))
        assert all(other in found.why for other in names[place:])
        assert bits(folder / name) == in_bytes(weights)
        (folder / name).unlink()


def test_of_two_files_that_say_nothing_of_each_other_one_must_be_named(tmp_path):
    for form in ("torch", "torch-safetensors"):
        porting.write(porting.from_weights(CONFIG, WEIGHTS), tmp_path / form, form)
    (tmp_path / "torch/model.pt").rename(tmp_path / "torch-safetensors/model.pt")
    with pytest.raises(SpecError, match=r"model\.safetensors, model\.pt; name the one to read"):
        porting.read(tmp_path / "torch-safetensors")
    assert bits(tmp_path / "torch-safetensors/model.pt") == in_bytes(WEIGHTS)


def test_shards_of_pytorchs_own_files_are_read_through_their_index(tmp_path):
    hugging_face(tmp_path)
    right = bits(tmp_path)
    tensors = {**safetensors.read(tmp_path / "model.safetensors")}
    shards = {f"pytorch_model-0000{n}-of-00002.bin": [*tensors][n - 1 :: 2] for n in (1, 2)}
    for shard, names in shards.items():
        TORCH.write(tmp_path / shard, {name: tensors[name] for name in names})
    (tmp_path / "model.safetensors").unlink()
    index = {name: shard for shard, names in shards.items() for name in names}
    (tmp_path / f"pytorch_model.bin{INDEX}").write_text(json.dumps({"weight_map": index}))
    assert porting.recognise(tmp_path).format == "hugging-face-bin"
    assert bits(tmp_path) == right


# Writing.


def test_a_port_there_and_back_is_the_same_checkpoint(tmp_path):
    source = hugging_face(
        tmp_path / "source",
        change=lambda found: {**found, "bert.embeddings.position_ids": np.arange(19)[None]},  # a buffer
        hidden_dropout_prob=0.25,
        id2label=dict(enumerate("abc")),
    )
    there = tmp_path / "own"
    porting.write(porting.read(source), there, "concord")
    porting.write(porting.read(there), tmp_path / "back", "hugging-face")
    back, first = porting.read(tmp_path / "back"), porting.read(source)
    assert (back.config, back.labels, bits(back)) == (first.config, first.labels, bits(first))
    assert json.loads(back.files["config.json"]) == json.loads(first.files["config.json"])


def test_what_is_there_is_replaced_by_force_alone_and_nothing_is_left_of_a_failure(tmp_path):
    read = porting.read(hugging_face(tmp_path / "one"))
    porting.write(read, tmp_path / "out", "concord")
    with pytest.raises(SpecError, match="--force replaces it"):
        porting.write(read, tmp_path / "out", "hugging-face")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.txt").write_text("")
    with pytest.raises(SpecError, match="it is no checkpoint"):
        porting.write(read, tmp_path / "other", "concord", force=True)
    config = spec.variant("nndl-paddle", **SIZES)
    with pytest.raises(SpecError, match="norm_sharing is 'shared'"):
        porting.write(
            porting.from_weights(config, spec.initialize(config)), tmp_path / "never", "hugging-face"
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "other", "out"]


def test_a_table_of_ones_own_is_read(tmp_path):
    text = (table.TABLES / "bert-hugging-face.toml").read_text().replace("bert.encoder.layer", "bert.blocks")
    (tmp_path / "mine.toml").write_text(text.replace('source = "bert-hugging-face"', 'source = "mine"'))
    source = hugging_face(
        tmp_path / "source",
        change=lambda found: {
            name.replace("bert.encoder.layer", "bert.blocks"): array for name, array in found.items()
        },
    )
    assert porting.read(source, table=tmp_path / "mine.toml").weights().keys() == WEIGHTS.keys()
    with pytest.raises(SpecError, match="names of no format"):
        porting.read(source)


# Every format there is.

NATIVE = [name for name, form in registry.FORMATS.items() if not form.source and name != registry.ONNX]
SOURCES = [
    (name, part)
    for name, form in registry.FORMATS.items()
    if form.source
    for part in form.parts
    if part in ("model", "encoder", "pooled")
]


def bare(folder, config, format):
    """Write an encoder whose names have no prefix; return its weights."""
    weights = drawn(config, "encoder")
    porting.write(porting.from_weights(config, weights, "encoder"), folder, format)
    found = safetensors.read(folder / "model.safetensors")
    plain = {name.partition(".")[2]: in_memory(tensor.bits().copy()) for name, tensor in found.items()}
    safetensors.write(folder / "model.safetensors", plain)
    return weights


@pytest.mark.parametrize(
    ("kind", "format"), [("bert", "hugging-face"), ("xlm-roberta", "hugging-face-roberta")]
)
def test_bare_models_of_the_same_names_are_told_apart_by_their_kind(tmp_path, kind, format):
    config = CONFIG if kind == "bert" else spec.variant("roberta", **SIZES)
    weights = bare(tmp_path / "bare", config, format)
    stated = json.loads((tmp_path / "bare/config.json").read_text())
    (tmp_path / "bare/config.json").write_text(json.dumps({**stated, "model_type": kind}))
    assert porting.recognise(tmp_path / "bare").format == format
    read = porting.read(tmp_path / "bare")
    assert (read.part, read.config.position_start) == ("encoder", 0 if kind == "bert" else 2)
    assert bits(read) == in_bytes(weights)
    porting.write(read, tmp_path / "again", format)
    assert json.loads((tmp_path / "again/config.json").read_text())["model_type"] == kind
    if kind != "bert":
        (tmp_path / "bare/config.json").write_text(json.dumps({**stated, "pad_token_id": 3}))
        with pytest.raises(SpecError, match="POS-6"):
            porting.read(tmp_path / "bare")


@pytest.mark.parametrize(
    ("variant", "end", "pretraining"),
    [
        ("bert", "", "cls.predictions"),
        ("roberta", "-roberta", "lm_head"),
        ("distilbert", "-distilbert", "vocab_transform"),
    ],
)
def test_other_heads_are_left_out_or_refused(tmp_path, variant, end, pretraining):
    segments = {"num_segments": 0} if variant == "distilbert" else {}
    bare(tmp_path / "bare", spec.variant(variant, **SIZES, **segments), f"hugging-face{end}")
    path = tmp_path / "bare/model.safetensors"
    plain = {name: in_memory(tensor.bits().copy()) for name, tensor in safetensors.read(path).items()}
    for head, why in (("qa_outputs", "question answering"), (pretraining, "pretraining")):
        name = f"{head}.weight"
        safetensors.write(path, {**plain, name: in_memory(np.ones((2, 14), np.float32))})
        read = porting.read(tmp_path / "bare")
        ignored = [entry.foreign for entry in read.ledger if why in entry.reason]
        assert (read.part, ignored) == ("encoder", [name])
    # One of tokens has the name of a classifier of texts.
    safetensors.write(path, {**plain, "classifier.weight": in_memory(np.ones((2, 14), np.float32))})
    with pytest.raises(SpecError, match=r"classifier|pooler"):
        porting.read(tmp_path / "bare")


@pytest.mark.parametrize(
    ("variant", "part"), [(name, ("model", "encoder")[n % 2]) for n, name in enumerate(spec.variants())]
)
def test_native_formats_come_back_bit_for_bit_one_through_the_other(tmp_path, variant, part):
    config = spec.variant(variant, **SIZES)
    part = "pooled" if (variant, part) == ("sentence-bert", "model") else part
    weights = drawn(config, part, seed=7)
    read = porting.from_weights(config, weights, part)
    slow = () if (variant, part) == ("bert", "model") else ("tensorflow", "jax-orbax")
    for form in (name for name in NATIVE if name not in slow):
        porting.write(read, tmp_path / form, form)
        assert porting.recognise(tmp_path / form).format == form
        read = porting.read(tmp_path / form)
        assert (read.config, read.part, bits(read)) == (config, part, in_bytes(weights)), form


@pytest.mark.parametrize(("name", "part"), SOURCES)
def test_every_source_is_recognised_and_comes_back_bit_for_bit(tmp_path, name, part):
    form = registry.FORMATS[name]
    entry = form.table.parts[part]
    config = spec.variant(
        form.table.variant,
        **{field: size for field, size in SIZES.items() if field in entry.fields},
        **entry.constants,
    )
    weights = drawn(config, part, seed=5)
    porting.write(porting.from_weights(config, weights, part), tmp_path / "one", name)
    assert porting.recognise(tmp_path / "one").format == name
    read = porting.read(tmp_path / "one")
    assert (read.config, read.part) == (config, part)
    computed = {table.POSITIONS} if config.positions == "sinusoidal" else set()
    found, wanted = bits(read), in_bytes(weights)
    assert [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)] in ([], [*computed])


# ONNX.


@pytest.mark.parametrize(
    ("variant", "part"),
    [("sentence-bert", "pooled"), *zip(spec.variants(), 4 * ("model", "encoder"), strict=False)],
)
def test_a_graph_of_onnx_computes_every_tap(tmp_path, variant, part):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    config = spec.variant(variant, **SIZES)
    # In float64 ONNX Runtime lacks what some variants need, such as erf.
    dtype = "float64" if config.activation == "relu" else "float32"
    weights, tokens = spec.initialize(config, part=part), 13 - config.position_start
    batch = spec.example_batch(config, 5, tokens, seed=0, padding="ragged", part=part)
    held = {name: array.astype(dtype) for name, array in weights.items()}
    porting.write(porting.from_weights(config, held, part), tmp_path / "graph", "onnx", taps=True)
    runtime.set_default_logger_severity(3)
    session = runtime.InferenceSession(tmp_path / "graph/model.onnx")
    names = [output.name for output in session.get_outputs()]
    given = {name: array for name, array in batch.arrays().items() if name in ("input_ids", "segment_ids")}
    found = dict(zip(names, session.run(names, given), strict=True))
    truth = spec.reference(config, weights, batch, part=part)
    # A graph has no labels, and so no loss.
    unseen = {"loss", "log_probabilities", "losses"} & truth.taps.keys()
    assert found.keys() == truth.taps.keys() - unseen
    output, loss = found[spec.output_name(config, part)], truth.loss.astype(dtype)
    run = Run(output, loss, found, backend="onnxruntime", dtype=dtype, requested=("taps",))
    rows = {row.tensor: row.status for row in conformance.judge(config, weights, batch, run, part).table}
    assert rows.keys() >= found.keys()
    assert {name for name, status in rows.items() if status != "agrees"} <= unseen


def test_what_no_graph_can_be_is_refused(tmp_path):
    pytest.importorskip("onnx", reason="onnx is not installed")
    stack = porting.from_weights(CONFIG, spec.initialize(CONFIG, part="stack"), "stack")
    with pytest.raises(SpecError, match="the part 'stack' cannot be written as onnx"):
        porting.write(stack, tmp_path / "graph", "onnx")
    mixed = {**WEIGHTS, "classifier.bias": WEIGHTS["classifier.bias"].astype(np.float64)}
    with pytest.raises(SpecError, match="must have one dtype"):
        porting.write(porting.from_weights(CONFIG, mixed), tmp_path / "graph", "onnx")
    assert list(tmp_path.iterdir()) == []


LOADED = {"torch-safetensors": "torch", "paddle": "paddle", "keras-h5": "tf", "jax-msgpack": "jax"}


@pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=[pytest.mark.slow] * (form in ("paddle", "keras-h5"))) for form in LOADED],
)
def test_port_prints_lines_that_load_the_result_in_its_framework(form, tmp_path, entered, open_worker):
    open_worker(LOADED[form])  # skips where it is not installed
    hugging_face(tmp_path / "bert")
    output, _ = entered("port", tmp_path / "bert", "-o", tmp_path / "out", "--to", form)
    lines = re.findall("^  (.*)", output.partition("load it with\n")[2], re.MULTILINE)
    done = python("-c", "\n".join([*lines, "assert type(model).__name__ == 'TextClassifier'"]))
    assert done.returncode == 0, done.stderr


def test_formats_are_asked_for_by_their_frameworks_too(tmp_path, refused):
    errors = refused("port", tmp_path, "-o", tmp_path / "out")
    assert all(name in errors[0] for name in porting.formats())
    called = {"flax": "jax-msgpack", "pytorch": "torch-safetensors", "hf": "hugging-face", "tf": "keras"}
    assert {name: registry.known(name).name for name in called} == called
