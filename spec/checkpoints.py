"""The folder of a checkpoint of this project: which files it has, and that they are what was written."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from concord.spec.errors import SpecError, collecting
from concord.spec.files import MOST_PROBLEMS, read_as, sha256_of
from concord.spec.tensors import PARTS

CONTENTS, CONFIG, WEIGHTS = "contents.json", "config.toml", "weights.safetensors"
"""The file that is read first, the configuration, and the parameters by canonical name."""

FORMAT: Literal["concord.checkpoint/1"] = "concord.checkpoint/1"

PART = "part.json"
"""The file that says which part of the model the weights beside it are, where they are a backend's own."""

PART_FORMAT: Literal["concord.part/1"] = "concord.part/1"


@dataclass(frozen=True)
class Contents:
    """The first file that is read: which format it is, and what the others hold.

    Attributes:
        sha256: of each of the other files, by name.
        part: of the model that the weights are (:data:`concord.spec.tensors.PARTS`).
    """

    format: Literal["concord.checkpoint/1"]
    sha256: dict[str, str]
    part: str = "model"


@dataclass(frozen=True)
class Part:
    """Which part of the model weights are: those of some have the same names.

    Attributes:
        part: one of :data:`concord.spec.tensors.PARTS`.
    """

    format: Literal["concord.part/1"]
    part: str


def part_of(folder: Path) -> str | None:
    """Return which part of the model the weights in a folder are; None: nobody says.

    Raises:
        SpecError: if the file that says so cannot be read, or names a part that no model has.
    """
    if not (folder / PART).exists():
        return None
    part = read_as(folder / PART, Part, written_by="'concord port'").part
    if part not in PARTS:
        raise SpecError(f"{folder / PART}: 'part' is {part[:80]!r} but must be one of {', '.join(PARTS)}")
    return part


def read_contents(folder: Path) -> Contents:
    """Read the first file of a checkpoint.

    Raises:
        SpecError: if it cannot be read, is of another format, or names a part that no model has, or files
            elsewhere.
    """
    contents = read_as(folder / CONTENTS, Contents, written_by="'concord port'")
    problems = [
        f"{folder / CONTENTS}: names the file {name[:80]!r} but all must lie beside it"
        for name in contents.sha256
        if os.sep in name or not name.isprintable()
    ]
    if contents.part not in PARTS:
        problems.append(
            f"{folder / CONTENTS}: 'part' is {contents.part[:80]!r} but must be one of {', '.join(PARTS)}"
        )
    if problems:
        raise SpecError(problems[:MOST_PROBLEMS])
    return contents


def corrupt(folder: Path, contents: Contents) -> list[str]:
    """Return which files of a checkpoint are not those that were written."""
    problems: list[str] = []
    for name, digest in contents.sha256.items():
        with collecting(problems):
            if sha256_of(folder / name) != digest:
                problems.append(
                    f"{folder / name}: is not what was written: its SHA-256 is another than "
                    f"{folder / CONTENTS} says"
                )
    return problems
