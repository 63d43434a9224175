"""``.keras``: an archive with the model's configuration and its weights, which are an HDF5 file in it.

The weights are mapped where they lie in the archive, if it is not compressed, which Keras' is not.
"""

from __future__ import annotations

import mmap
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from concord.porting.containers import h5
from concord.porting.located import Found, Refused, located, mapped
from concord.porting.pickles.reader import member_place
from concord.porting.stored import Stored
from concord.spec.files import opened, refusing

SUFFIX = ".keras"

WEIGHTS = "model.weights.h5"


def is_one(path: Path) -> bool:
    """Say whether a file is one, by its name and its first bytes."""
    if not path.name.endswith(SUFFIX) or not path.is_file():
        return False
    with opened(path) as file:
        return file.read(4) == b"PK\x03\x04"


def read(path: Path) -> dict[str, Stored]:
    """Return the weights of a model by their paths; its configuration, which may name code, is left alone.

    Raises:
        SpecError: as :func:`concord.porting.containers.h5.read`.
    """
    return mapped(path, located(path, look))


def look(path: Path) -> list[Found]:
    """Return the weights, and where their numbers lie; for :func:`concord.porting.located.located`.

    Raises:
        Refused: if there are none, or they cannot be mapped.
    """
    with path.open("rb") as file, zipfile.ZipFile(path) as archive:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        names = [entry for entry in archive.infolist() if entry.filename == WEIGHTS]
        if len(names) != 1:
            raise Refused(f"the archive has {len(names)} members that are called {WEIGHTS} but must have one")
        begin, length = member_place(names[0], content)
    with tempfile.TemporaryFile() as copy:  # without a name: nothing is left of it if this process is ended
        for place in range(begin, begin + length, 1 << 24):
            copy.write(content[place : min(place + (1 << 24), begin + length)])
        copy.flush()
        found = h5.look(copy)
    return [Found(**{**vars(one), "begin": one.begin + begin}) for one in found]


def write(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write the weights into an archive; what else Keras wants in it is the format's to add.

    Raises:
        SpecError: if it cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        inner = Path(folder) / WEIGHTS
        h5.write(inner, tensors)
        with refusing(path), zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            archive.write(inner, WEIGHTS)


def add(path: Path, members: Mapping[str, bytes]) -> None:
    """Add what else Keras wants in an archive, to make the model from it.

    Raises:
        SpecError: if it cannot be written.
    """
    with refusing(path), zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)
