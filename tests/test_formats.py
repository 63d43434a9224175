import re

import numpy as np
import pytest

from concord import conformance, porting, spec
from concord.backends.interface import Run
from concord.porting import registry
from concord.spec.errors import SpecError
from concord.spec.sources import source_tables
from tests.toys.checkpoints import CONFIG, SIZES, WEIGHTS, bits, drawn, in_bytes
from tests.toys.ready import hugging_face
from tests.toys.surroundings import needs, python, sample_of

pytestmark = pytest.mark.xdist_group("files")  # a process for each library reads them all

NATIVE = [name for name, form in registry.FORMATS.items() if not form.source and name != registry.ONNX]
SOURCES = [
    (name, part)
    for name, form in registry.FORMATS.items()
    if form.source
    for part in form.parts
    if part in ("model", "encoder", "pooled")
]


@pytest.mark.parametrize(
    ("variant", "part"), [("bert", "model"), ("sentence-bert", "pooled"), ("tf1-text-classifier", "encoder")]
)
def test_native_formats_come_back_bit_for_bit_one_through_the_other(tmp_path, variant, part):
    config = spec.variant(variant, **SIZES)
    weights = drawn(config, part, seed=7)
    read = porting.from_weights(config, weights, part)
    dear = ("tensorflow", "jax-orbax") if variant != "bert" else ()
    for form in (name for name in NATIVE if name not in dear):
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
    computed = {source_tables.POSITIONS} if config.positions == "sinusoidal" else set()
    actual, expected = bits(read), in_bytes(weights)
    assert [name for name in {**actual, **expected} if actual.get(name) != expected.get(name)] in (
        [],
        [*computed],
    )


# ONNX.


@pytest.mark.parametrize(
    ("variant", "part"),
    [("sentence-bert", "pooled"), *zip(spec.variants(), 4 * ("model", "encoder"), strict=False)],
)
def test_a_graph_of_onnx_computes_every_tap(tmp_path, variant, part):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    config = spec.variant(variant, **SIZES)
    # ONNX Runtime lacks float64 kernels for some variants' operations, such as erf.
    dtype = "float64" if config.activation == "relu" else "float32"
    weights, tokens = spec.initialize(config, part=part), 13 - config.position_start
    batch = spec.example_batch(config, 5, tokens, seed=0, padding="ragged", part=part)
    arrays = {name: array.astype(dtype) for name, array in weights.items()}
    porting.write(porting.from_weights(config, arrays, part), tmp_path / "graph", "onnx", taps=True)
    runtime.set_default_logger_severity(3)
    session = runtime.InferenceSession(tmp_path / "graph/model.onnx")
    names = [output.name for output in session.get_outputs()]
    inputs = {name: array for name, array in batch.arrays().items() if name in ("input_ids", "segment_ids")}
    outputs = dict(zip(names, session.run(names, inputs), strict=True))
    truth = spec.reference(config, weights, batch, part=part)
    assert truth.taps.keys() - outputs.keys() <= {"loss", "log_probabilities", "losses"}  # it has no labels
    output, loss = outputs[spec.output_name(config, part)], truth.loss.astype(dtype)
    rows = conformance.judge(
        config,
        weights,
        batch,
        Run(output, loss, outputs, backend="onnxruntime", dtype=dtype, requested=("taps",)),
        part,
    ).table
    assert outputs.keys() <= {row.tensor for row in rows if row.status == "agrees"}


def test_what_no_graph_can_be_is_refused(tmp_path):
    pytest.importorskip("onnx", reason="onnx is not installed")
    stack = porting.from_weights(CONFIG, spec.initialize(CONFIG, part="stack"), "stack")
    mixed = {**WEIGHTS, "classifier.bias": WEIGHTS["classifier.bias"].astype(np.float64)}
    for checkpoint, words in (
        (stack, "the part 'stack' cannot be written as onnx"),
        (porting.from_weights(CONFIG, mixed), "must have one dtype"),
    ):
        with pytest.raises(SpecError, match=words):
            porting.write(checkpoint, tmp_path / "graph", "onnx")
    assert list(tmp_path.iterdir()) == []


# PyTorch starts soonest, the others are slow.
LOADED = {"torch-safetensors": "torch", "paddle": "paddle", "keras-h5": "tf", "jax-msgpack": "jax"}

# Integer tensors of each framework.
IDS = {
    "torch": "import torch; input_ids = segment_ids = torch.ones(2, 3, dtype=torch.int64)",
    "paddle": "import paddle; input_ids = segment_ids = paddle.ones([2, 3], 'int64')",
    "tf": "import numpy; input_ids = segment_ids = numpy.ones((2, 3), numpy.int32)",
    "jax": "import numpy; input_ids = segment_ids = numpy.ones((2, 3), numpy.int32)",
}


@pytest.mark.parametrize("form", sample_of(LOADED, lambda place, _: place == 0))
def test_port_prints_lines_that_load_the_result_in_its_framework(form, tmp_path, entered):
    needs(LOADED[form])
    hugging_face(tmp_path / "bert")
    output, _ = entered("port", tmp_path / "bert", "-o", tmp_path / "out", "--to", form)
    lines = re.findall("^  (.*)", output.partition("load it with\n")[2], re.MULTILINE)
    call = lines[-1].removeprefix("# ").partition("): ")[0] + ")"
    done = python("-c", "\n".join([*lines, IDS[LOADED[form]], f"assert tuple({call}.shape) == (2, 3)"]))
    assert done.returncode == 0, done.stderr
