"""The folder that a checkpoint is: where its weights and its configuration lie.

And which other files are carried over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from concord.porting.containers import orbax
from concord.porting.containers.container import stays
from concord.spec.errors import SpecError, refuse
from concord.spec.files import LARGEST, parse_json, read_bytes, read_json

LABELS = "labels.json"
"""The names of classes, where no configuration says them."""

CARRIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    LABELS,
)
"""Files beside the weights that are carried over as they are."""

LENGTHS, PROMPTS = SENTENCES = ("sentence_bert_config.json", "config_sentence_transformers.json")
"""The same of a folder of sentence-transformers: how long texts may be, and what is put before them. Other
projects' folders do not have them."""

CONFIG = "config.json"
"""The configuration in the words of a source."""

CONFIGS = (CONFIG, "bert_config.json", "model_config.json")
"""What it is called in Google's folders, and was in PaddleNLP's."""

FOREIGN = ".config.json"
"""How the name of that file ends where the configuration is in the family's own words: kept for the way back,
by whose words it has."""


def folder_of(path: Path) -> Path:
    """Return the folder of a checkpoint, which may be named by what its weights lie in.

    Raises:
        SpecError: if there is nothing of that name.
    """
    if not path.exists():
        raise SpecError(f"{path}: no such file or folder")
    if is_weights(path):
        return path.absolute().parent
    return path


def name_of(path: Path) -> str:
    """Return what a checkpoint is called: as its folder is, by whatever link that was named."""
    return Path(os.path.abspath(path.parent if path.exists() and is_weights(path) else path)).name


def is_weights(path: Path) -> bool:
    """Say whether a path is what weights lie in: a file, or a folder of Orbax."""
    return not path.is_dir() or orbax.is_folder(path)


def carried(folder: Path) -> dict[str, bytes]:
    """Return the files that are carried over, by name.

    Raises:
        SpecError: if one cannot be read, is larger than any such file is, or is a link that leads out of the
            folder.
    """
    foreign = sorted(path.name for path in folder.iterdir() if path.name.endswith(FOREIGN))
    there = {name: folder / name for name in (*CARRIED, *SENTENCES, *foreign) if (folder / name).exists()}
    refuse(
        [
            f"{path}: is a link that leads out of the folder: what it leads to would be written into others"
            for path in there.values()
            if not stays(path, folder)
        ]
    )
    return {name: read_bytes(path, LARGEST) for name, path in there.items()}


def stated(folder: Path, required: str) -> tuple[Path, dict[str, Any]]:
    """Return the file of the configuration in the words of a source, and what it says.

    Args:
        required: what needs it, for the message.

    Raises:
        SpecError: if there is none, or it is no JSON object.
    """
    path = next((folder / name for name in CONFIGS if (folder / name).exists()), None)
    if path is None:
        raise SpecError(
            f"{folder / CONFIG}: no such file: {required} needs the configuration beside the weights"
        )
    return path, json_object(path)


def json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        SpecError: if it cannot be read, or is none.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise SpecError(f"{path}: holds a {type(content).__name__} but must hold a JSON object")
    return content


def labels(files: Mapping[str, bytes], stated: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the names of classes, from ``id2label`` or this project's ``labels.json``, if there are any.

    Raises:
        SpecError: if they are not numbered from 0 on.
    """
    if LABELS in files:
        content = parse_json(files[LABELS], LABELS)
        names = content.get("names") if isinstance(content, dict) else None
        return tuple(map(str, names)) if isinstance(names, list) else None
    by_number = stated.get("id2label")
    if by_number is None:
        return None
    if not isinstance(by_number, dict) or sorted(by_number) != sorted(map(str, range(len(by_number)))):
        raise SpecError(f"{CONFIG}: 'id2label' must number its labels 0, 1 and so on")
    names = tuple(str(by_number[str(number)]) for number in range(len(by_number)))
    return None if names == unnamed(len(names)) else names


def unnamed(count: int) -> tuple[str, ...]:
    """Return what Hugging Face calls classes that nobody has named."""
    return tuple(f"LABEL_{number}" for number in range(count))


def labels_file(names: tuple[str, ...]) -> bytes:
    """Return the names of classes as this project keeps them."""
    return (
        json.dumps({"format": "concord.labels/1", "names": names}, ensure_ascii=False, indent=1) + "\n"
    ).encode()
