import errno
import io
import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from concord import output_files, porting
from concord.conformance.fuzz.findings import Failure, Findings
from concord.conformance.fuzz.plan import Plan, sample
from concord.conformance.fuzz.summary import write_failures
from concord.conformance.judging.verdict import Result
from concord.conformance.run.campaign import Setup
from tests.toys.checkpoints import shards
from tests.toys.dumps import answer, exported
from tests.toys.ready import hugging_face, texts
from tests.toys.records import CHECK
from tests.toys.surroundings import commands, contents, program


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    # Judged without a worker.
    folder = tmp_path_factory.mktemp("answered") / "cases"
    return answer(exported(folder, "bert-single", dtypes=["float32"]))


# Before anything runs.


@pytest.fixture
def places(tmp_path):
    # Names that cannot be written.
    (tmp_path / "dumps").mkdir()
    (tmp_path / "one").write_text("kept")
    (tmp_path / "other").hardlink_to(tmp_path / "one")
    (tmp_path / "linked").symlink_to(tmp_path / "new")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"--json {'n' * 300}", f"{'n' * 300}: cannot be written: File name too long"),
        ("--json one --html other", "other is named twice as an output"),
        ("--json new --html linked", "linked is named twice as an output"),
        ("--json dumps", "dumps: cannot be written: Is a directory"),
    ],
    ids=lambda text: text[:24],
)
def test_an_output_that_cannot_be_written_is_refused_before_anything_runs(
    refused, places, monkeypatch, line, expected
):
    monkeypatch.chdir(places)
    before = sorted(os.listdir(places))
    for command in ("check --backend tests.toys.numpy_backend:NumpyBackend", "check --from-dump dumps"):
        lines = refused(f"{command} {line}")
        assert lines == [expected]
    assert sorted(os.listdir(places)) == before
    assert (places / "one").read_text() == "kept"


def test_a_name_that_is_no_text_is_written_and_read(entered, answered, tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    shutil.copytree(answered, folder)
    entered(f"check --from-dump {folder} --json {folder / 'out.json'} --html {folder / 'out.html'}")
    entered(f"show report {folder / 'out.json'} --html {tmp_path / 'page.html'}")


# Never over an input, however either path is spelled.


@pytest.fixture
def source(tmp_path):
    # A checkpoint of several files. A checkpoint is inside its folder, and its parent looks like one.
    folder = hugging_face(tmp_path / "outer" / "source")
    shards(folder)
    (tmp_path / "outer" / "config.json").write_text("{}")
    hugging_face(folder / "inner")
    return folder


def links(source, kind):
    path = source.parent.parent / "links"
    path.mkdir()
    for file in source.iterdir():
        if file.is_file():
            getattr(path / file.name, kind)(file)
    return path


def link(source):
    path = source.parent.parent / "link"
    path.symlink_to(source)
    return path


SPELLINGS = {
    "itself": lambda source: (source, source),
    "a link": lambda source: (source, link(source)),
    "above a link": lambda source: (link(source), source.parent),
    "inside, new": lambda source: (source, source / "new" / "one"),
    "a file": lambda source: (source, source / "config.json"),
    "where a link leads": lambda source: (links(source, "symlink_to"), source),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_checkpoint_is_not_ported_onto_itself(tmp_path, source, spelling, refused):
    path, target = SPELLINGS[spelling](source)
    before = contents(tmp_path)
    (line,) = refused(f"port {path} -o {target} --to concord --force")
    whys = ("which the command reads; name another folder", "cannot be written", "is not a folder")
    assert any(why in line for why in whys), line
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", ["hardlink_to", "symlink_to"])
def test_a_folder_of_links_is_replaced_and_what_they_lead_to_stays(tmp_path, source, kind, entered):
    target, before = links(source, kind), contents(source)
    entered(f"port {source} -o {target} --to concord --force")
    assert contents(source) == before


def test_a_folder_beside_is_written(tmp_path, source, entered, monkeypatch):
    monkeypatch.chdir(source)
    entered(f"port model.safetensors.index.json -o {tmp_path / 'outer' / 'target'} --to concord")
    entered("port model.safetensors.index.json -o beside --to concord")
    assert porting.read(source / "beside").part == "model"


LINES = {
    "check": "check {source} --backend tests.toys.numpy_backend:NumpyBackend --texts {texts} --json {out}",
    "attention": "show attention {source} cat --html {out}",
    "diff": "diff {texts} {source} --json {out}",
    "certify": "certify {source} {source} --texts {texts} --html {out}",
    "speed": "speed {source} --texts {texts} --json {out}",
    "port": "port {source} -o {out} --to concord --table {texts}",
    "compare": "compare {source} mine:port {texts} --json {out}",
}


@pytest.mark.parametrize(
    ("command", "what", "link"),
    [
        ("check", "texts", None),
        ("check", "texts", "symlink_to"),
        ("check", "texts", "hardlink_to"),
        ("attention", "weights", None),
        *((command, "texts", None) for command in ("diff", "certify", "speed", "port")),
        ("speed", "weights", "symlink_to"),
        *(("compare", what, None) for what in ("texts", "weights", "port")),
    ],
)
def test_a_file_that_is_read_is_not_replaced(tmp_path, command, what, link, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, path = hugging_face(tmp_path / "source"), texts(tmp_path / "given.txt")
    out = read = {"texts": path, "weights": source / "model.safetensors", "port": texts(Path("mine.py"))}[
        what
    ]
    if link:
        out = tmp_path / "out.html"
        getattr(out, link)(read)
    before = contents(tmp_path)
    lines = refused(*LINES[command].format(source=source, texts=path, out=out).split())
    words = "which the command reads" if command == "port" else "is an input of this command"
    assert any(words in line for line in lines), lines
    assert contents(tmp_path) == before


def test_circular_links_and_records_of_another_kind_are_named(tmp_path, refused):
    (line,) = refused("certify --verify", CHECK)
    assert line.endswith("kind is 'check' but must be one of 'certificate'")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    (line,) = refused("show report", loop, "--html", tmp_path / "out.html")
    assert line.endswith(f"{loop}: cannot be read: Too many levels of symbolic links")


WRITTEN = {
    *("--json", "--html", "--markdown", "--certificate", "--out", "--output", "--runs", "--junit"),
    "--repro",
    "--node-values",
}


@pytest.mark.parametrize("command", commands().values(), ids=commands())
def test_every_option_for_a_file_says_whether_it_is_read_or_written(command):
    for parameter in command.params:
        if "Path" in str(parameter.type_descriptor.annotation):
            about = parameter.type_descriptor.parameter_info
            written = bool(WRITTEN & {*parameter.opts}) or str(about.help).startswith("An empty folder")
            assert about.parser is (output_files.output if written else output_files.path), parameter.name


# A full disk.


class Full(io.BufferedWriter):
    """Half of each write succeeds."""

    def write(self, content):
        super().write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def full(monkeypatch, tmp_path):
    # The disk fills up in the middle of write number `at`. What the tests keep elsewhere does not count.
    opened = Path.open

    def fill(at):
        written = []

        def half(path, mode="r", *how, **more):
            file = opened(path, mode, *how, **more)
            is_output = mode == "wb" and path.is_relative_to(tmp_path)
            if is_output:
                written.append(path)
            return Full(file.detach()) if is_output and len(written) - 1 == at else file

        monkeypatch.setattr(Path, "open", half)

    return fill


def test_a_full_disk_leaves_each_output_as_it_was_or_as_it_should_be(invoke, answered, tmp_path, full):
    paths = [tmp_path / "out.json", tmp_path / "out.html"]
    for at in range(len(paths) + 1):
        for path in paths:
            path.write_bytes(b"old")
        full(at)
        code, output, lines = invoke(f"check --from-dump {answered} --json {paths[0]} --html {paths[1]}")
        assert "1 agrees" in output
        lost = paths[at : at + 1]
        messages = [f"concord: error: {path}: cannot be written: No space left on device" for path in lost]
        assert (code, lines) == (2 if lost else 0, messages)
        assert sorted(tmp_path.iterdir()) == sorted(paths)
        assert [path for path in paths if path.read_bytes() == b"old"] == lost


def test_a_full_disk_leaves_no_half_of_an_export(entered, refused, tmp_path, full):
    for at in range(4):
        full(at)
        (line,) = refused(f"case export {tmp_path / 'cases'} --case bert-single")
        assert line.endswith(": cannot be written: No space left on device")
        assert not contents(tmp_path)
    full(4)
    entered(f"case export {tmp_path / 'cases'} --case bert-single")
    assert len(contents(tmp_path)) == 4


def test_a_finding_never_takes_the_place_of_another(tmp_path):
    cases = sample(Plan(names=(), parts=("dot_product",), shapes=1), range(2))
    results = [Result(f"b{i}", "fuzz", f"fuzz-0-{i}", "float64", "refused") for i in range(2)]

    def written(**fields):
        findings = Findings(failures=list(map(Failure, results, cases)))
        assert write_failures(tmp_path, findings, Setup(**fields)) == []
        return {failure.folder for failure in findings.failures}

    first = written()
    assert written() == first  # it is found again
    assert not first & written(implementation="library")
    assert len(contents(tmp_path)) == 3 * 4


# The terminal.


def test_a_reader_that_has_gone_is_no_divergence():
    line = f"{shlex.quote(sys.executable)} -m concord show variants bert | true; exit ${{PIPESTATUS[0]}}"
    assert program("bash", "-c", line).returncode == 141


@pytest.mark.parametrize(
    ("behind", "environment", "code", "said"),
    [
        (">&-", {}, 0, ""),
        ("| head -1", {}, 0, ""),
        (
            ">/dev/full",
            {},
            2,
            "concord: error: standard output: cannot be written: No space left on device\n",
        ),
        ("| cat", {"PYTHONIOENCODING": "ascii"}, 0, ""),
    ],
)
def test_what_becomes_of_standard_output_loses_no_file(answered, tmp_path, behind, environment, code, said):
    line = f"-m concord check --from-dump {answered} --json {tmp_path / 'out.json'} {behind}"
    done = program("bash", "-c", f"set -o pipefail; {shlex.quote(sys.executable)} {line}", **environment)
    assert (done.returncode, done.stderr) == (code, said)
    assert json.loads((tmp_path / "out.json").read_text())["exit_code"] == 0
