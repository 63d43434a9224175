"""HDF5 files spoilt from within, by the library that writes them; in a copy of this process.

Which a file that is spoilt already may end.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from tests.toys.copies import in_a_copy
from tests.toys.mutations import flipped

NAMES = ("", "a", "..", "../x", "a\nb", "\x1b[31m", "\u202e", "é" * 400, "layers", "x:0")


def changed(content: bytes, random: Random) -> bytes:
    """Change a dataset, a group, a link or an attribute."""
    found, _ = in_a_copy(lambda: _changed(content, random))
    random.random()  # what the copy has drawn is not drawn here
    return found or flipped(content, random)


def _changed(content: bytes, random: Random) -> bytes:
    import h5py

    buffer = io.BytesIO(content)
    with h5py.File(buffer, "r+") as file:
        names: list[str] = []
        file.visit(names.append)
        random.choice(ACTS)(file, random.choice(names), random)
    return buffer.getvalue()


def deleted(file: Any, name: str, random: Random) -> None:
    del file[name]


def renamed(file: Any, name: str, random: Random) -> None:
    file.move(name, name.rpartition("/")[0] + "/" + random.choice(NAMES))


def put_again(file: Any, name: str, random: Random) -> None:
    """Have a name lead to another entry, which may be a group that it is in."""
    names: list[str] = ["/"]
    file.visit(names.append)
    other = random.choice(names)
    target = file[other]
    where = random.choice((name, f"{name}-x"))
    if where in file:
        del file[where]
    file[where] = target


def linked(file: Any, name: str, random: Random) -> None:
    import h5py

    del file[name]
    file[name] = random.choice(
        (
            h5py.ExternalLink("/etc/passwd", "/a"),
            h5py.ExternalLink("model.weights.h5", "/"),
            h5py.SoftLink("/"),
            h5py.SoftLink(name),
            h5py.SoftLink("/nowhere"),
        )
    )


def made_anew(file: Any, name: str, random: Random) -> None:
    """Put another dataset in the place of one."""
    import h5py

    old = np.asarray(file[name]) if isinstance(file[name], h5py.Dataset) else np.zeros((2, 3), np.float32)
    del file[name]
    made: tuple[Callable[[], Any], ...] = (
        *(
            lambda kind=kind: file.create_dataset(name, data=old.astype(kind))
            for kind in (">f4", "f8", "f2", "i8", "u1", "?", "c8", "S3")
        ),
        lambda: file.create_dataset(name, data=old.astype("f4").view("V4")),
        lambda: file.create_dataset(name, data=old.astype("f2").view("V2")),
        lambda: file.create_dataset(name, (3,), h5py.string_dtype()),
        lambda: file.create_dataset(name, (3,), h5py.vlen_dtype(np.dtype("f4"))),
        lambda: file.create_dataset(name, (3,), h5py.ref_dtype),
        lambda: file.create_dataset(name, (3,), h5py.enum_dtype({"a": 1}, "i4")),
        lambda: file.create_dataset(name, (3,), np.dtype([("a", "f4"), ("b", "i8")])),
        lambda: file.create_dataset(name, (3,), np.dtype(("f4", (7, 2)))),
        lambda: file.create_dataset(name, data=h5py.Empty("f4")),
        lambda: file.create_dataset(name, data=np.float32(3)),
        lambda: file.create_dataset(name, data=old.T),
        lambda: file.create_dataset(name, data=old[..., None]),
        lambda: file.create_dataset(name, data=np.full(old.shape, np.nan, np.float32)),
        lambda: file.create_dataset(name, (0, 5), "f4"),
        lambda: file.create_dataset(name, (1 << 40, 1 << 10), "f4"),
        lambda: file.create_dataset(name, (1 << 36,), "f4", chunks=(1 << 20,), compression="gzip"),
        lambda: file.create_dataset(
            name, data=np.zeros((4, 6), np.float32), chunks=(2, 3), maxshape=(None, 6)
        ),
        lambda: file.create_dataset(name, data=old.astype("f4"), fletcher32=True, chunks=True),
        lambda: file.create_dataset(name, (4,), "f4", external=[("/etc/passwd", 0, 16)]),
        lambda: file.create_group(name).create_group("x"),
        lambda: file.create_dataset(name, (1,) * 32, "f4"),
    )
    random.choice(made)()


def nested(file: Any, name: str, random: Random) -> None:
    file.create_group(f"{name}-x" + "/a" * random.choice((30, 49, 51, 200)))


def many(file: Any, name: str, random: Random) -> None:
    for number in range(300):
        file.create_group(f"{name}-{number}")


def described(file: Any, name: str, random: Random) -> None:
    values = (
        np.arange(7000, dtype=np.float64),
        "bfloat16",
        b"\xff",
        "x" * 60000,
        3,
        np.array(["a", "b"], dtype="S"),
        np.float64("nan"),
    )
    file[name].attrs[random.choice(("dtype", "name", "weight_names", "layer_names", "é"))] = random.choice(
        values
    )


ACTS = (deleted, renamed, put_again, linked, made_anew, made_anew, made_anew, nested, many, described)
