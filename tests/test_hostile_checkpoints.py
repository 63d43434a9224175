"""Malicious checkpoints are refused in one line, in little time and memory, without side effects."""

import io
import json
import os
import pickle
import re
import shutil
import zipfile

import h5py
import pytest

from concord import porting
from concord.porting import registry
from concord.porting.containers import isolation
from tests.toys.checkpoints import FIRST, SENTENCES, SHARDS, written
from tests.toys.spoiling import bounded
from tests.toys.surroundings import refusal


def pickled(*codes):
    return pickle.PROTO + b"\x02" + b"".join(codes) + pickle.STOP


KEEP, KEPT = pickle.BINPUT + b"\x00", pickle.BINGET + b"\x00"


def laughs():
    # A list that holds a list twice, and so on: few bytes, but exponentially many entries.
    step = pickle.EMPTY_LIST + pickle.MARK + 2 * KEPT + pickle.APPENDS + KEEP
    return pickled(pickle.EMPTY_LIST, KEEP, 40 * step)


def key_of_tuples():
    # The same nesting as the key of a dictionary, which would be hashed.
    step = pickle.MARK + 2 * KEPT + pickle.TUPLE + KEEP + pickle.POP
    entry = pickle.EMPTY_DICT + KEPT + pickle.NONE + pickle.SETITEM
    return pickled(pickle.EMPTY_TUPLE, KEEP, pickle.POP, 40 * step, entry)


def archive(member, content):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        file.writestr(member, content)
    return buffer.getvalue()


def hdf5(make):
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        make(file)
    return buffer.getvalue()


def linked(file):
    file["a"] = h5py.ExternalLink("/etc/passwd", "/a")


def virtual(file):
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource("/tmp/other.h5", "a", (4,))
    file.create_virtual_dataset("a", layout)


def dataset(*arguments, **named):
    return hdf5(lambda file: file.create_dataset("a", *arguments, "f4", **named))


# The format, the content of its file of weights, and words of the refusal.
MADE = {
    "a list in lists, for Paddle": ("paddle", laughs, "more than"),
    "a key that would be hashed": ("paddle", key_of_tuples, "no answer within"),
    "a bomb of Keras": ("keras", lambda: archive("model.weights.h5", bytes(80 << 20)), "is compressed"),
    "a way out of the archive": ("keras", lambda: archive("../../model.weights.h5", b"x"), "has 0 members"),
    "an archive that ends early": ("keras", lambda: archive("x", b"")[:-9], "zip file; it may be incomplete"),
    "a link to another file": ("keras-h5", lambda: hdf5(linked), "is a link that points elsewhere"),
    "numbers in another file": (
        "keras-h5",
        lambda: dataset((4,), external=[("/etc/passwd", 0, 16)]),
        "in another",
    ),
    "a view of another file": ("keras-h5", lambda: hdf5(virtual), "in another file"),
    "a bomb of HDF5": (
        "keras-h5",
        lambda: dataset((1 << 36,), chunks=(1 << 20,), compression="gzip"),
        "compressed",
    ),
    "a name that appears twice": ("jax-msgpack", lambda: b"\x82\xa1a\xc0\xa1a\xc0", "appears twice"),
    "a long header": (
        "hugging-face",
        lambda: (1 << 25).to_bytes(8, "little") + b" " * (1 << 25),
        "its header's length",
    ),
}


@pytest.fixture
def source(tmp_path):
    def write(format="hugging-face"):
        (tmp_path / "source").mkdir()
        written(format, tmp_path / "source")
        return tmp_path / "source"

    return write


@pytest.mark.parametrize("what", MADE)
def test_what_was_made_to_do_harm_is_refused_in_a_line(what, source, tmp_path, invoke, monkeypatch):
    format, make, message = MADE[what]
    folder = source(format)
    (folder / registry.find_format(format).weights[0]).write_bytes(make())
    if message == "no answer within":
        monkeypatch.setattr(isolation, "TIME_LIMIT", 1.0)
    with bounded():
        code, _, lines = invoke("port", folder, "-o", tmp_path / "out", "--from", format, "--to", "concord")
    assert (code, len(lines)) == (2, 1)
    assert re.search(message, lines[0]), lines
    assert len(lines[0]) < 600
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_link_out_of_the_folder_is_not_carried_over(source, tmp_path):
    (tmp_path / "secret").write_text("{}")
    folder = source()
    (folder / "vocab.txt").symlink_to(tmp_path / "secret")
    (line,) = refusal(porting.read, folder)
    assert "is a link that points outside the folder" in line


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("format", "file", "right", "where", "said"),
    [
        (SENTENCES, "modules.json", "", "config.json", "no such folder"),
        (SENTENCES, "modules.json", "", "..", "must be in"),
        (SHARDS, INDEX, FIRST, "/dev/zero", "all its files must be in"),
        (SHARDS, INDEX, FIRST, "../secret", "all its files must be in"),
        (SHARDS, INDEX, FIRST, "link", "all its files must be in"),
        (SHARDS, INDEX, FIRST, "pipe", "must be a regular file"),
    ],
)
def test_a_list_of_files_does_not_lead_out_of_the_folder(source, tmp_path, format, file, right, where, said):
    folder = source(format)
    shutil.copy(min(folder.glob("*.safetensors")), tmp_path / "secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "pipe")
    path = folder / file
    path.write_text(path.read_text().replace(json.dumps(right), json.dumps(where)))
    (line,) = refusal(porting.read, folder)
    assert said in line


def test_a_folder_of_hugging_faces_cache_is_read_through_its_links(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/0a1b"
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    written(SHARDS, blobs)
    (blobs / "vocab.txt").write_text("[PAD]\n")
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert set(porting.read(snapshot).files) == {"config.json", "vocab.txt"}
