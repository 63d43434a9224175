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

CHECKPOINTS = (
    *("concord", "hugging-face", SHARDS, SENTENCES, "torch-safetensors", "torch", "paddle"),
    *("keras-h5", "hugging-face-tf", "keras", "tensorflow", "google-bert", "jax-msgpack", "jax-orbax"),
)
"""A format of each kind of file; any file of it is spoilt."""

# All else.


def answered(folder):
    """A small case with its run."""
    name = "keras-attention-single-attention"
    (path,) = answer(exported(folder, name, dtypes=["float64"], part="attention")).rglob("run.json")
    deviation = {"name": "softmax_floor", "value": -64.0, "reason": "so it is"}
    info = {"not_exposed": ["*.x"], "deviations": [deviation]}
    path.write_text(json.dumps({"backend": "mine", "info": info}))


def copied(path):
    return lambda folder: shutil.copy(path, folder / path.name)


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
        functools.partial(written_as, name="README.md", content="<!-- begin check -->\n<!-- end check -->\n"),
        lambda folder: report.within(folder / "README.md", "check", "x"),
    ),
    **{
        format: (
            functools.partial(written, format, carried=True),
            read_as_it_is if format == "concord" else read,
        )
        for format in CHECKPOINTS
    },
}
"""What writes right files, and what reads them."""


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_spoilt_file_is_read_or_refused(reader, many, tmp_path):
    most = 10_000 if reader in CHECKPOINTS else 500
    refused, wrong = campaign(*READERS[reader], most if many else 15, tmp_path, 1000 if many else 0)
    assert wrong == []
    assert refused
