"""A checkpoint's folder: its weights, configuration and accompanying files."""

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

# Class names, if no configuration states them.
LABELS = "labels.json"

CARRIED = (  # copied unchanged
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tokenizer.model",
    "bpe.codes",
    LABELS,
)

# For sentence-transformers only: the maximum text length, and the prompt before each text.
LENGTHS, PROMPTS = SENTENCES = ("sentence_bert_config.json", "config_sentence_transformers.json")

CONFIG = "config.json"  # in the source's terms

# The other names are from Google and PaddleNLP.
CONFIGS = (CONFIG, "bert_config.json", "model_config.json")

# The source's config.json, kept next to the family's config.toml as SOURCE.config.json for conversion back.
FOREIGN = ".config.json"


def folder_of(path: Path) -> Path:
    """A checkpoint's folder, given the folder or a weight file in it."""
    if not path.exists():
        raise SpecError(f"{path}: no such file or folder")
    if is_weights(path):
        return path.absolute().parent
    return path


def name_of(path: Path) -> str:
    """Name of a checkpoint's folder or of a link to it."""
    return Path(os.path.abspath(path.parent if path.exists() and is_weights(path) else path)).name


def is_weights(path: Path) -> bool:
    """Whether a path is a weight file, or an Orbax folder of weights."""
    return not path.is_dir() or orbax.is_folder(path)


def carried(folder: Path) -> dict[str, bytes]:
    """Files to copy unchanged, by name."""
    foreign = sorted(path.name for path in folder.iterdir() if path.name.endswith(FOREIGN))
    paths = {name: folder / name for name in (*CARRIED, *SENTENCES, *foreign) if (folder / name).exists()}
    refuse(
        [
            # An untrusted checkpoint could link to a private file, which a port would then publish.
            f"{path} is a link that points outside the folder: its target would be copied into the new "
            "checkpoint"
            for path in paths.values()
            if not stays(path, folder)
        ]
    )
    return {name: read_bytes(path, LARGEST) for name, path in paths.items()}


def stated(folder: Path, required: str) -> tuple[Path, dict[str, Any]]:
    """Path and content of a source's configuration; ``required`` names, for messages, what needs it."""
    path = next((folder / name for name in CONFIGS if (folder / name).exists()), None)
    if path is None:
        raise SpecError(
            f"{folder / CONFIG}: no such file: {required} needs the configuration beside the weights"
        )
    return path, json_object(read_json(path), path)


def json_object(content: Any, where: Path | str) -> dict[str, Any]:
    """Return a JSON file's content, and refuse anything but an object."""
    if not isinstance(content, dict):
        raise SpecError(f"{where} holds a value of type {type(content).__name__} but must hold a JSON object")
    return content


def source_settings(files: Mapping[str, bytes]) -> dict[str, Any]:
    """A configuration in a source's terms, empty without one."""
    name = next((name for name in files if name in CONFIGS or name.endswith(FOREIGN)), "")
    content = parse_json(files.get(name, b"{}"), name)
    return content if isinstance(content, dict) else {}


def labels(files: Mapping[str, bytes], stated: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Class names from ``id2label`` or ``labels.json``, or None if unnamed."""
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
    """Hugging Face's names of unnamed classes."""
    return tuple(f"LABEL_{number}" for number in range(count))


def json_file(content: Any) -> bytes:
    """Bytes of a JSON file."""
    return f"{json.dumps(content, indent=2, ensure_ascii=False)}\n".encode(errors="backslashreplace")
