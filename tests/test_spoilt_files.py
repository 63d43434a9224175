"""Spoilt files of every kind are read, or refused in lines that name the file, in bounded time and memory."""

import functools
import io
import json
import shutil

import pytest
from rich.console import Console

from concord import output_files, porting
from concord.conformance.golden import golden_files
from concord.conformance.judging.verdict import Judgement, Result, Row, Verdict
from concord.conformance.run import dump, record, report
from concord.conformance.run.campaign import Report, Setup
from concord.output_files import page
from concord.porting import texts
from concord.spec.errors import SpecError
from concord.spec.files import read_bytes
from concord.spec.sources import source_tables
from concord.speed import presets
from concord.speed.table import markdown, show
from tests.conftest import small_config
from tests.toys import records
from tests.toys.checkpoints import SENTENCES, SHARDS, read, read_as_it_is, written
from tests.toys.dumps import answer, exported
from tests.toys.ready import VOCABULARY
from tests.toys.spoiling import campaign, other_lengths
from tests.toys.surroundings import ROOT

pytestmark = pytest.mark.xdist_group("files")  # a process for each library reads them all

# One format of checkpoints for each kind of file; any file in it is spoilt.
NATIVE = "concord torch-safetensors torch paddle keras-h5 keras tensorflow jax-msgpack jax-orbax"
CHECKPOINTS = ("hugging-face", SHARDS, SENTENCES, *NATIVE.split())

PAIRS = "谁有狂三这张高清的\t这张高清图，谁有\n英雄联盟\n"
LINES = '{"text": "so dull", "label": "bad"}\n{"text_a": "a film", "text_b": "a movie", "id": 7}\n'


def answered(folder):
    name = "keras-attention-single-attention"
    (path,) = answer(exported(folder, name, dtypes=["float64"], part="attention")).rglob("run.json")
    deviation = {"name": "softmax_floor", "value": -64.0, "reason": "so it is"}
    info = {"not_exposed": ["*.x"], "deviations": [deviation]}
    path.write_text(json.dumps({"backend": "mine", "info": info}))


def copied(path):
    return lambda folder: shutil.copy(path, folder / path.name)


def quietly():
    return Console(file=io.StringIO(), width=200, markup=False)  # as a Terminal


def written_as(name, content):
    return lambda folder: (folder / name).write_text(content)


def show_dumps(folder):
    result = dump.judge_dumps(folder)
    report.show(result, quietly(), "title")
    page(record.make_record(result, "check", "title"))


def show_speed(folder):
    document, _ = output_files.read_page(folder / "forward.json")
    data = record.data(document)
    show(data, quietly())
    markdown(data)


def read_golden(folder):
    for path in folder.glob("*.safetensors"):
        golden_files.read(path)


def encode(folder):
    files = {"vocab.txt": read_bytes(folder / "vocab.txt")}
    encoder = texts.TextEncoder(porting.Checkpoint(small_config(), "model", {}, files=files))
    encoder.encode([texts.Text("abcd 你好", "e")])


SOURCE = ROOT / "spec" / "sources" / "keras-attention.toml"
GOLDEN = sorted(golden_files.INCLUDED.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
TRAINING = sorted(golden_files.SHARED.glob("*/train_*.safetensors"), key=lambda path: path.stat().st_size)
CONFIG = ROOT / "spec" / "variants" / "bert.toml"

# Writers of right files, and their readers.
READERS = {
    "a case and its run": (answered, show_dumps),
    "a folder of golden files": (copied(GOLDEN[len(GOLDEN) // 2]), golden_files.collect),
    "a golden file of outputs": (copied(GOLDEN[0]), read_golden),
    **({"a golden file of training": (copied(TRAINING[0]), read_golden)} if TRAINING else {}),
    **{
        f"a record of {kind}": (
            functools.partial(records.write, kind),
            lambda folder: output_files.read_page(folder / records.NAME),
        )
        for kind in records.RECORDS
    },
    "a speed record": (copied(ROOT / "conformance/results/speed/amd-epyc-26-2/forward.json"), show_speed),
    "a configuration": (copied(CONFIG), lambda folder: presets.named(str(folder / CONFIG.name))),
    "a table of a source": (copied(SOURCE), lambda folder: source_tables.read(folder / SOURCE.name)),
    "texts": (written_as("t.txt", PAIRS), lambda folder: texts.read_texts(folder / "t.txt")),
    "texts with labels": (
        written_as("t.jsonl", LINES),
        lambda folder: texts.read_texts(folder / "t.jsonl"),
    ),
    "a vocabulary": (written_as("vocab.txt", VOCABULARY), encode),
    "a page with markers": (
        written_as("README.md", "<!-- begin check -->\n<!-- end check -->\n"),
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


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_spoilt_file_is_read_or_refused(reader, many, tmp_path):
    most = 2000 if reader in CHECKPOINTS else 500
    seeds = range(1000, 1000 + most) if many else range(15)
    refused, wrong = campaign(*READERS[reader], seeds, tmp_path)
    assert wrong == []
    assert refused


@pytest.mark.parametrize("kind", records.RECORDS)
def test_a_record_with_a_list_of_another_length_is_read_or_refused(kind, tmp_path):
    # Lists that belong together have one length, so that no page fails on them.
    records.write(kind, tmp_path)
    path, refusals = tmp_path / records.NAME, []
    for text in other_lengths(path.read_text()):
        path.write_text(text)
        try:
            output_files.read_page(path)
        except SpecError as error:
            refusals += error.problems
    assert refusals
    assert all(str(path) in line and "\n" not in line for line in refusals)
    bins = [line for line in refusals if "local.histogram' is [" in line]
    assert kind != "check" or any(line.endswith("but must have at least 18 items") for line in bins)


def test_the_page_of_what_has_the_same_bits_counts_no_errors():
    # Comparing bits counts no errors, but the bins exist.
    row = Row("outputs", "", "agrees", Judgement("agrees", size=7), size=7)
    result = Result("again", "model", "inputs", "float32", "agrees", verdict=Verdict([row]))
    assert "again" in page(record.make_record(Report([result], {}, Setup()), "compare", "title"))
