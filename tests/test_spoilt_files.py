"""Every file that is read, checkpoints and all else, spoilt: it is read.

Or refused in lines that name it, in bounded time and memory; nothing else is raised, and nothing is written.
"""

import functools
import io
import json
import shutil
from contextlib import suppress

import pytest
from rich.console import Console

from concord import writing
from concord.conformance import dump, golden_files, record, report
from concord.conformance.html import page
from concord.porting import certificate
from concord.spec.errors import SpecError
from concord.spec.files import read_json, write_text
from concord.spec.sources import table
from concord.speed import presets
from concord.speed.table import markdown, show
from concord.training import data
from tests.conftest import small_config
from tests.test_data import LINES, PAIRS, WORDS, encoder_of
from tests.test_data import written as written_as
from tests.toys import records
from tests.toys.checkpoints import SENTENCES, SHARDS, read, read_as_it_is, written
from tests.toys.dumps import answer, exported
from tests.toys.spoiling import campaign
from tests.toys.surroundings import ROOT

# Checkpoints.

INDEX = "model.safetensors.index.json"

CHECKPOINTS = {
    "safetensors, this project's own": ("concord", "weights.safetensors"),
    "safetensors": ("hugging-face", "model.safetensors"),
    "safetensors in two files": (
        SHARDS,
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ),
    "torch": ("torch", "model.pt"),
    "torch, by names of Hugging Face": ("hugging-face-bin", "pytorch_model.bin"),
    "paddle": ("paddle", "model.pdparams"),
    "h5": ("keras-h5", "model.weights.h5"),
    "h5 of Keras 2": ("hugging-face-tf", "tf_model.h5"),
    "keras": ("keras", "model.keras"),
    "TensorFlow": ("tensorflow", "model.ckpt.index"),
    "TensorFlow 1": ("google-bert", "bert_model.ckpt.index", "bert_model.ckpt.data-00000-of-00001"),
    "msgpack": ("jax-msgpack", "model.msgpack"),
    "msgpack, by names of Hugging Face": ("hugging-face-flax", "flax_model.msgpack"),
    "orbax": ("jax-orbax",),
    "config.json": ("hugging-face", "config.json"),
    "config.toml": ("torch-safetensors", "config.toml"),
    "config.toml, this project's own": ("concord", "config.toml"),
    "contents.json": ("concord", "contents.json"),
    "the index of several files": (SHARDS, INDEX),
    "modules.json": (SENTENCES, "modules.json", "1_Pooling/config.json"),
    "part.json": ("torch-safetensors", "part.json"),
    "what is carried over": ("torch-safetensors", "labels.json", "tokenizer.json", "vocab.txt"),
}
"""Each kind of file: a format that has it, and what it is called there; of Orbax all files."""

# All else.


def answered(folder):
    """A small case with its run."""
    name = "keras-attention-single-attention"
    (path,) = answer(exported(folder, name, dtypes=["float64"], part="attention")).rglob("run.json")
    deviation = {"name": "softmax_floor", "value": -64.0, "reason": "so it is"}
    info = {"not_exposed": ["*.x"], "deviations": [deviation]}
    path.write_text(json.dumps({"backend": "mine", "info": info}))


def copied(*paths):
    return lambda folder: [shutil.copy(path, folder / path.name) for path in paths] and None


def quietly():
    return Console(file=io.StringIO(), width=200)


def show_dumps(folder):
    result = dump.judge_dumps(folder)
    report.show(result, quietly(), "title")
    page(record.made(result, "check", "title"))


def show_speed(folder):
    made, _ = writing.read_page(folder / "speed-forward.json")
    data = record.data(made)
    show(data, quietly())
    markdown(data)


def verify(folder):
    """Look at the files of a certificate, whose digest fits whatever else it says."""
    path = folder / records.NAME
    with suppress(SpecError, RecursionError):
        data = read_json(path)
        if isinstance(data, dict):
            write_text(path, record.lines(certificate.seal(data)))
    certificate.verify(certificate.read(path).outcome, folder, folder, files_alone=True)


SOURCE = ROOT / "spec" / "sources" / "keras-attention.toml"
GOLDEN = sorted(golden_files.INCLUDED.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
TRAINING = sorted(golden_files.SHARED.glob("*/train_*.safetensors"), key=lambda path: path.stat().st_size)
CONFIG = ROOT / "spec" / "variants" / "bert.toml"

READERS = {
    "a case and its run": (answered, show_dumps),
    "a folder of golden files": (copied(GOLDEN[len(GOLDEN) // 2]), golden_files.collect),
    **{
        f"a golden file of {kind}": (
            copied(path),
            lambda folder, path=path: golden_files.read(folder / path.name),
        )
        for kind, path in (("outputs", GOLDEN[0]), *(("training", path) for path in TRAINING[:1]))
    },
    **{
        f"a record of {kind}": (
            functools.partial(records.write, kind),
            lambda folder: writing.read_page(folder / records.NAME),
        )
        for kind in records.RECORDS
    },
    "a certificate": (functools.partial(records.write, "certificate"), verify),
    "a speed record": (copied(ROOT / "conformance" / "results" / "speed-forward.json"), show_speed),
    "a configuration": (copied(CONFIG), lambda folder: presets.named(str(folder / CONFIG.name))),
    "a table of a source": (copied(SOURCE), lambda folder: table.read(folder / SOURCE.name)),
    **{
        f"texts in {name}": (
            functools.partial(written_as, name=name, content=content),
            lambda folder, name=name: data.read(folder / name, on_error="skip"),
        )
        for name, content in (("train.tsv", PAIRS), ("train.txt", WORDS), ("train.jsonl", LINES))
    },
    "an encoder of texts": (
        lambda folder: [
            (folder / name).write_text(text) for name, text in encoder_of(small_config()).files().items()
        ],
        lambda folder: data.TextEncoder.read(folder).encode("abcd 你好", "e"),
    ),
    "a page with markers": (
        lambda folder: (
            (folder / "README.md").write_text("a\n<!-- begin check -->\nb\n<!-- end check -->\nc\n") and None
        ),
        lambda folder: report.within(folder / "README.md", "check", "x"),
    ),
    **{
        kind: (
            functools.partial(written, format, carried=kind == "what is carried over"),
            read_as_it_is if format == "concord" else read,
            names,
        )
        for kind, (format, *names) in CHECKPOINTS.items()
    },
}
"""What writes right files, what reads them, and which of them are spoilt; by default all."""


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_spoilt_file_is_read_or_refused(reader, many, tmp_path):
    make, read, *names = READERS[reader]
    few, most = (15, 10_000) if reader in CHECKPOINTS else (25, 500)
    tally = campaign(make, read, most if many else few, tmp_path, 1000 if many else 0, *names)
    assert tally.wrong == []
    assert tally.counts["refused"]
