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
from tests.toys.copies import in_a_copy
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

    def told():
        with each_line(count):
            act()
        return "\n".join(lines).encode()

    said, status = in_a_copy(told)
    assert os.WIFSIGNALED(status) == (not said)
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
    old, new = (in_bytes(weights) for weights in (OLD, NEW))

    def write():
        porting.write(porting.from_weights(CONFIG, NEW), tmp_path / "out", format, force=force)

    def prepared():
        for path in tmp_path.iterdir():
            shutil.rmtree(path)
        if force:
            porting.write(porting.from_weights(CONFIG, OLD), tmp_path / "out", "hugging-face")

    prepared()
    write()  # what is loaded once is loaded
    prepared()
    lines = killed(-1, write)
    assert bits(tmp_path / "out") == new
    naming = [number for number, name in enumerate(lines) if name.endswith("spec/folders.py")]
    seen = set()
    for moment in sorted({*map(int, np.linspace(0, len(lines) - 1, spread)), *naming}):
        prepared()
        assert killed(moment, write) == []
        left = bits(tmp_path / "out") if (tmp_path / "out").exists() else None
        assert left in (old if force else None, new), (moment, lines[moment])
        seen.add("new" if left == new else "old")
    assert seen == {"new", "old"}


def test_without_such_a_step_two_that_write_are_still_told_from_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_renamed", lambda one, other, how: False)
    porting.write(porting.from_weights(CONFIG, OLD), tmp_path / "out", "concord")
    with pytest.raises(SpecError, match="--force replaces it"):
        porting.write(porting.from_weights(CONFIG, NEW), tmp_path / "out", "concord")
    with pytest.raises(FileExistsError), folders.new_folder(tmp_path / "out"):
        pass
    porting.write(porting.from_weights(CONFIG, NEW), tmp_path / "out", "concord", force=True)
    assert bits(tmp_path / "out") == in_bytes(NEW)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_classes_that_are_counted_but_not_named_are_still_as_many(tmp_path):
    source = hugging_face(tmp_path / "one")  # says num_labels, and no id2label
    porting.write(porting.read(source), tmp_path / "other", "hugging-face-bin")
    assert porting.read(tmp_path / "other").config == porting.read(source).config
