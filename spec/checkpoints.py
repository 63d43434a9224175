"""Checkpoint folders: their files, and the check that these are unchanged."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from concord.spec.errors import SpecError, collecting
from concord.spec.files import MOST_PROBLEMS, read_as, sha256_of
from concord.spec.tensors import PARTS

CONTENTS, CONFIG, WEIGHTS = "contents.json", "config.toml", "weights.safetensors"
"""Files of a checkpoint: the index, the configuration, and the parameters by canonical name."""

FORMAT: Literal["concord.checkpoint/1"] = "concord.checkpoint/1"

# This file names the part of the model next to a backend's weight file: some parts have parameters with the
# same names.
PART = "part.json"

PART_FORMAT: Literal["concord.part/1"] = "concord.part/1"


@dataclass(frozen=True)
class Contents:
    """The index of a checkpoint."""

    format: Literal["concord.checkpoint/1"]
    sha256: dict[str, str]  # digest of each other file by name
    part: str = "model"  # one of tensors.PARTS


@dataclass(frozen=True)
class Part:
    """A weight file's part of the model."""

    format: Literal["concord.part/1"]
    part: str


def part_of(folder: Path) -> str | None:
    """The part that a folder states for its weights, if any.

    Raises:
        SpecError: if that file is unreadable or names an unknown part.
    """
    if not (folder / PART).exists():
        return None
    part = read_as(folder / PART, Part, written_by="'concord port'").part
    if part not in PARTS:
        raise SpecError(f"{folder / PART}: 'part' is {part[:80]!r} but must be one of {', '.join(PARTS)}")
    return part


def read_contents(folder: Path) -> Contents:
    """Read the index of a checkpoint.

    Raises:
        SpecError: if it is unreadable, has a different format, or names an unknown part or a file elsewhere.
    """
    contents = read_as(folder / CONTENTS, Contents, written_by="'concord port'")
    problems = [
        f"{folder / CONTENTS} names the file {name[:80]!r} but all files must be beside it"
        for name in contents.sha256
        # An untrusted checkpoint must not cause files outside its folder to be read.
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
    """One line for each changed file."""
    problems: list[str] = []
    for name, digest in contents.sha256.items():
        with collecting(problems):
            if sha256_of(folder / name) != digest:
                problems.append(
                    f"{folder / name} was changed after it was written: its SHA-256 differs from the one in "
                    f"{folder / CONTENTS}"
                )
    return problems
