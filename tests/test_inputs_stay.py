"""Nothing that a command reads is lost by what it writes, however either is spelled."""

import pytest

from concord import output_files, porting
from tests.toys.checkpoints import shards
from tests.toys.ready import hugging_face, texts
from tests.toys.surroundings import commands, contents, toy


@pytest.fixture
def source(tmp_path):
    """A checkpoint in several files, whose folder is in another that looks like a checkpoint too.

    And has a checkpoint in it.
    """
    folder = hugging_face(tmp_path / "outer" / "source")
    shards(folder)
    (tmp_path / "outer" / "config.json").write_text("{}")
    hugging_face(folder / "inner")
    return folder


def linked(source):
    path = source.parent.parent / "link"
    path.symlink_to(source)
    return path


def links(source, kind):
    """A folder of links to all files."""
    path = source.parent.parent / "links"
    path.mkdir()
    for file in source.iterdir():
        if file.is_file():
            getattr(path / file.name, kind)(file)
    return path


SPELLINGS = {
    "itself": lambda source: (source, source),
    "a link": lambda source: (source, linked(source)),
    "above": lambda source: (source, source.parent),
    "above a link": lambda source: (linked(source), source.parent),
    "inside, new": lambda source: (source, source / "new" / "one"),
    "a file": lambda source: (source, source / "config.json"),
    "where a link leads": lambda source: (links(source, "symlink_to"), source),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_checkpoint_is_not_ported_onto_itself(tmp_path, source, spelling, refused):
    given, target = SPELLINGS[spelling](source)
    before = contents(tmp_path)
    lines = refused(f"port {given} -o {target} --to concord --force")
    assert len(lines) == 1
    assert (
        "which is read; name another folder" in lines[0]
        or "cannot be written" in lines[0]
        or "is no folder" in lines[0]
    )
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


# Files that commands write.

LINES = {
    "check": "check {source} --backend tests.toys.numpy_backend:NumpyBackend --texts {texts} --json {out}",
    "attention": "show attention {source} cat --html {out}",
    "diff": "diff {texts} {source} --json {out}",
    "certify": "certify {source} {source} --texts {texts} --html {out}",
    "speed": "speed {source} --texts {texts} --json {out}",
}


WAYS = ("a file", "a link to a file", "a hard link", "a file of the folder", "a link to a file of the folder")


@pytest.mark.parametrize(
    ("command", "what"),
    [
        *(("check", way) for way in WAYS),
        *((command, WAYS[n % len(WAYS)]) for n, command in enumerate(LINES)),
    ],
)
def test_a_file_that_is_read_is_not_replaced(tmp_path, command, what, refused):
    source = hugging_face(tmp_path / "source")
    weights = source / "model.safetensors"
    given = texts(tmp_path / "given.txt") if "{texts}" in LINES[command] else weights
    out = {"a file": given, "a file of the folder": weights}.get(what, tmp_path / "out.html")
    if "link" in what:
        link = out.hardlink_to if what == "a hard link" else out.symlink_to
        link(weights if "folder" in what else given)
    before = contents(tmp_path)
    lines = refused(*LINES[command].format(source=source, texts=given, out=out).split())
    assert any("is read" in line for line in lines), lines
    assert contents(tmp_path) == before


def test_what_a_command_made_of_a_folder_may_be_made_anew(tmp_path, entered):
    source = hugging_face(tmp_path / "source")
    for _ in range(2):
        entered(f"show attention {source} cat --backend {toy('NumpyBackend')} --html {source / 'page.html'}")


WRITTEN = {"--json", "--html", "--markdown", "--certificate", "--out", "--output", "--runs"}


@pytest.mark.parametrize("command", commands().values(), ids=commands())
def test_every_option_for_a_file_says_whether_it_is_read_or_written(command):
    for one in command.params:
        if "Path" in str(one.type_descriptor.annotation):
            about = one.type_descriptor.parameter_info
            written = bool(WRITTEN & {*one.opts}) or str(about.help).startswith("An empty folder")
            assert about.parser is (output_files.output if written else output_files.path), one.name


def test_a_table_is_not_replaced_by_the_checkpoint(tmp_path, source, refused):
    target = hugging_face(tmp_path / "target")
    given = texts(target / "given.txt")
    before = contents(tmp_path)
    lines = refused(f"port {source} -o {target} --to concord --force --table {given}")
    assert "given.txt, which is read" in lines[0]
    assert contents(tmp_path) == before
