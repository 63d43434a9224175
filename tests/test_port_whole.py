"""A checkpoint is written whole or not at all: a kill at any moment leaves what was there.

Or what was to be written.
"""

import os
import shutil
import signal
import sys
from contextlib import contextmanager

import numpy as np
import pytest

from concord import porting
from concord.porting import registry
from concord.spec import folders
from concord.spec.errors import SpecError
from tests.toys.checkpoints import CONFIG, bits, drawn, in_bytes
from tests.toys.ready import hugging_face

OLD, NEW = (drawn(CONFIG, seed=seed) for seed in (3, 5))

LINES = (
    "spec/folders.py",
    "spec/files.py",
    "porting/writing.py",
    "porting/containers/",
    "/shutil.py",
    "/pathlib.py",
)
"""The files whose lines are moments at which the process is killed."""

SPREAD, MANY = 6, 50
"""How many of them are tried, from the first to the last, besides all of those where a folder gets its name;
and how many in the slow suite."""

NATIVE = [
    form.name
    for form in registry.FORMATS.values()
    if (form.backend or form.name == registry.OWN) and not form.container.framework
]
"""This project's own formats that this process writes: Orbax writes in another, into a folder that is given
its name as the others are."""


@contextmanager
def each_line(act):
    """Do something before each line of what writes a folder, given the file that the line stands in."""

    def trace(frame, event, argument):
        name = frame.f_code.co_filename
        if not any(part in name for part in LINES):
            return None
        if event == "line":
            act(name)
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def killed(at, act):
    """Do something in a copy of this process that is killed before a line, counted from 0.

    Return the files of all lines if it is not.
    """
    lines = []

    def count(name):
        if len(lines) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        lines.append(name)

    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            with each_line(count):
                act()
            os.write(writing, "\n".join(lines).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]) == (not said)
    return said.decode().splitlines()


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("format", "spread"),
    [
        ("concord", SPREAD),
        ("keras-h5", SPREAD),
        *(pytest.param(format, MANY, marks=pytest.mark.slow) for format in NATIVE),
    ],
)
def test_a_kill_at_any_moment_leaves_the_old_one_or_the_new_one(tmp_path, format, spread, force):
    out, old, new = tmp_path / "out", in_bytes(OLD) if force else None, in_bytes(NEW)

    def write():
        porting.write(porting.from_weights(CONFIG, NEW), out, format, force=force)

    def prepare():
        for path in tmp_path.iterdir():
            shutil.rmtree(path)
        if force:
            porting.write(porting.from_weights(CONFIG, OLD), out, "hugging-face")

    prepare()
    write()  # what is loaded once is loaded
    prepare()
    lines = killed(-1, write)
    naming = [number for number, name in enumerate(lines) if name.endswith("spec/folders.py")]
    seen = []
    for moment in sorted({*map(int, np.linspace(0, len(lines) - 1, spread)), *naming}):
        prepare()
        assert killed(moment, write) == []
        seen.append(bits(out) if out.exists() else None)
        assert seen[-1] in (old, new), (moment, lines[moment])
    assert old in seen
    assert new in seen


def test_without_such_a_step_two_that_write_are_still_told_from_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_renamed", lambda one, other, how: False)
    old, new, out = porting.from_weights(CONFIG, OLD), porting.from_weights(CONFIG, NEW), tmp_path / "out"
    porting.write(old, out, "concord")
    with pytest.raises(SpecError, match="--force replaces it"):
        porting.write(new, out, "concord")
    with pytest.raises(FileExistsError), folders.new_folder(out):
        pass
    porting.write(new, out, "concord", force=True)
    assert bits(out) == in_bytes(NEW)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_classes_that_are_counted_but_not_named_are_still_as_many(tmp_path):
    source = hugging_face(tmp_path / "one")  # says num_labels, and no id2label
    porting.write(porting.read(source), tmp_path / "other", "hugging-face-bin")
    assert porting.read(tmp_path / "other").config == porting.read(source).config
