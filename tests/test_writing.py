import json
import os
import shutil
import signal
import sys

import numpy as np
import pytest

from concord import porting, spec
from concord.spec import folders
from concord.spec.errors import SpecError
from tests.toys.checkpoints import CONFIG, SIZES, bits, drawn
from tests.toys.ready import hugging_face

OLD, NEW = (porting.from_weights(CONFIG, drawn(seed=seed)) for seed in (3, 5))

# The process is killed at each line of these files.
LINES = (
    "spec/folders.py",
    "spec/files.py",
    "porting/writing.py",
    "porting/containers/",
    "/shutil.py",
    "/pathlib.py",
)


def killed(at, act):
    # Forks, and kills the child before line number `at`. A child that survives returns the files of its
    # lines.
    lines = []

    def trace(frame, event, argument):
        name = frame.f_code.co_filename
        if event == "line":
            if len(lines) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            lines.append(name)
        return trace if any(part in name for part in LINES) else None

    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            sys.settrace(trace)
            act()
            sys.settrace(None)
            os.write(writing, "\n".join(lines).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        report = pipe.read()
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]) == (not report)
    return report.decode().splitlines()


@pytest.mark.parametrize(("format", "force"), [("concord", False), ("keras-h5", True)])
def test_a_kill_at_any_moment_leaves_the_old_one_or_the_new_one(tmp_path, format, force):
    out, old, new = tmp_path / "out", bits(OLD) if force else None, bits(NEW)

    def write():
        porting.write(NEW, out, format, force=force)

    def prepare():
        for path in tmp_path.iterdir():
            shutil.rmtree(path)
        if force:
            porting.write(OLD, out, "hugging-face")

    prepare()
    write()  # later runs load no modules
    prepare()
    lines = killed(-1, write)
    naming = [number for number, name in enumerate(lines) if name.endswith("spec/folders.py")]
    states = []
    for moment in sorted({*map(int, np.linspace(0, len(lines) - 1, 7)), *naming}):
        prepare()
        assert killed(moment, write) == []
        states.append(bits(out) if out.exists() else None)
        assert states[-1] in (old, new), (moment, lines[moment])
    assert old in states
    assert new in states


def test_without_such_a_step_two_that_write_are_still_told_from_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_renamed", lambda source, target, how: False)
    out = tmp_path / "out"
    porting.write(OLD, out, "concord")
    with pytest.raises(SpecError, match="--force replaces it"):
        porting.write(NEW, out, "concord")
    with pytest.raises(FileExistsError), folders.new_folder(out):
        pass
    porting.write(NEW, out, "concord", force=True)
    assert bits(out) == bits(NEW)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("named", [{"id2label": dict(enumerate("abc")), "pad_token_id": 3}, {}])
def test_a_port_there_and_back_is_the_same_checkpoint(tmp_path, named):
    source = hugging_face(
        tmp_path / "source",
        change=lambda arrays: {**arrays, "bert.embeddings.position_ids": np.arange(19)[None]},  # a buffer
        hidden_dropout_prob=0.25,
        **named,  # otherwise classes are counted by num_labels
    )
    porting.write(porting.read(source), tmp_path / "own", "concord")
    porting.write(porting.read(tmp_path / "own"), tmp_path / "back", "hugging-face")
    back, first = porting.read(tmp_path / "back"), porting.read(source)
    assert (back.config, back.labels, bits(back)) == (first.config, first.labels, bits(first))
    assert back.config.token_padding_row == named.get("pad_token_id", 0)
    if named:
        assert json.loads(back.files["config.json"]) == json.loads(first.files["config.json"])


def test_what_is_there_is_replaced_by_force_alone_and_nothing_is_left_of_a_failure(tmp_path):
    (tmp_path / "out").mkdir()  # an empty folder is no obstacle
    porting.write(OLD, tmp_path / "out", "concord")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.txt").write_text("")
    config = spec.variant("nndl-paddle", **SIZES)
    for refused, name, force, why in (
        (OLD, "out", False, "--force replaces it"),
        (OLD, "other", False, "--force replaces only a checkpoint"),
        (OLD, "other", True, "--force replaces only a checkpoint"),
        (porting.from_weights(config, spec.initialize(config)), "never", False, "norm_sharing is 'shared'"),
        (
            porting.from_weights(CONFIG.replace(pad_id=1), drawn()),
            "never",
            False,
            "pad_id is 1 but must be 0: in .*, 'pad_token_id' gives",
        ),
    ):
        with pytest.raises(SpecError, match=why):
            porting.write(refused, tmp_path / name, "hugging-face", force)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]
