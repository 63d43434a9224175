"""Every file that a command reads, spoilt: it is read.

Or refused in lines that name it, in bounded time and memory; nothing else is raised.
"""

import functools
import io
import json
import shutil
from contextlib import suppress

import pytest
from rich.console import Console

from concord import writing
from concord.conformance import check_jobs, dump, published, record, report
from concord.conformance.golden_files import read as read_golden
from concord.conformance.html import page
from concord.porting import certificate
from concord.spec.errors import SpecError
from concord.spec.files import read_json, write_text
from concord.spec.sources import table
from concord.speed import presets
from concord.speed import record as speed_record
from concord.speed.table import markdown, show
from concord.training import data
from tests.conftest import small_config
from tests.test_data import LINES, PAIRS, WORDS, encoder_of, written
from tests.toys import records
from tests.toys.spoiling import campaign
from tests.toys.standalone import answer
from tests.toys.surroundings import ROOT


def exported(folder):
    """A small case with its run."""
    (job,) = check_jobs(["keras-attention"], ["float64"], "attention", ["keras-attention-single-attention"])
    for name, content in dump.case_files(job).items():
        (folder / name).write_bytes(content)
    answer(folder, None)
    about = {
        "backend": "mine",
        "info": {
            "not_exposed": ["*.x"],
            "deviations": [{"name": "softmax_floor", "value": -64.0, "reason": "so it is"}],
        },
    }
    (folder / "run.json").write_text(json.dumps(about))


def copied(*paths):
    return lambda folder: [shutil.copy(path, folder / path.name) for path in paths] and None


def quietly():
    return Console(file=io.StringIO(), width=200)


def show_dumps(folder):
    result = dump.judge_dumps(folder)
    report.show(result, quietly(), "title")
    page(record.made(result, "check", "title"))


def show_speed(folder):
    path = folder / "speed-forward.json"
    writing.read_page(path)
    data = speed_record.read(path)
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


SOURCE = "keras-attention"
GOLDEN = sorted(published.INCLUDED.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
TRAINING = sorted(published.SHARED.glob("*/train_*.safetensors"), key=lambda path: path.stat().st_size)
CONFIG = next((ROOT / "spec" / "variants").glob("bert.toml"))

READERS = {
    "a case and its run": (exported, show_dumps),
    "a golden file": (copied(GOLDEN[0]), lambda folder: read_golden(folder / GOLDEN[0].name)),
    "a folder of golden files": (copied(GOLDEN[len(GOLDEN) // 2]), published.collect),
    **(
        {"a training file": (copied(TRAINING[0]), lambda folder: read_golden(folder / TRAINING[0].name))}
        if TRAINING
        else {}
    ),
    **{
        f"a record of {kind}": (
            functools.partial(records.write, kind),
            lambda folder: writing.read_page(folder / records.NAME),
        )
        for kind in records.RECORDS
    },
    "a certificate": (functools.partial(records.write, "certificate"), verify),
    "a speed record": (copied(ROOT / "conformance" / "results" / "speed-forward.json"), show_speed),
    "a configuration": (copied(CONFIG), lambda folder: presets.own_config(folder / CONFIG.name)),
    "a table of a source": (
        copied(ROOT / "spec" / "sources" / f"{SOURCE}.toml"),
        lambda folder: table.read(folder / f"{SOURCE}.toml"),
    ),
    **{
        f"texts in {name}": (
            functools.partial(written, name=name, content=content),
            lambda folder, name=name: data.read(folder / name, on_error="skip"),
        )
        for name, content in (("train.tsv", PAIRS), ("train.txt", WORDS), ("train.jsonl", LINES))
    },
    "an encoder of texts": (
        lambda folder: encoder_of(small_config()).write(folder),
        lambda folder: data.TextEncoder.read(folder).encode("abcd 你好", "e"),
    ),
    "a page with markers": (
        lambda folder: (
            (folder / "README.md").write_text("a\n<!-- begin check -->\nb\n<!-- end check -->\nc\n") and None
        ),
        lambda folder: report.within(folder / "README.md", "check", "x"),
    ),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("times", "first"), [(25, 0), pytest.param(500, 1000, marks=pytest.mark.slow)])
def test_a_spoilt_file_is_read_or_refused(reader, times, first, tmp_path):
    tally = campaign(*READERS[reader], times, tmp_path, first=first)
    assert tally.wrong == []
    assert tally.counts["refused"]
