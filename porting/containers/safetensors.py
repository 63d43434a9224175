"""Safetensors: eight bytes with the length of a JSON header, the header, and the tensors behind it; memory-mapped.

Written by https://huggingface.co/docs/safetensors. A checkpoint may lie in several (:mod:`concord.porting.containers.shards`).
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from concord.porting.containers import shards
from concord.porting.stored import NUMPY, Slice, Stored, are_sizes, size
from concord.spec.errors import SpecError
from concord.spec.files import MOST_PROBLEMS, opened, parse_json, writing

CODES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""What the format calls dtypes."""

LONGEST_HEADER = 1 << 24
"""Bytes of a header: of some 100,000 tensors. The format's own library reads six times as many, which may take gigabytes."""

INDEX = f"model.safetensors{shards.INDEX}"
"""The index of a checkpoint in several files, beside them."""


def is_one(path: Path) -> bool:
    """Say whether a file, or the index of several, is of this kind."""
    return path.name.endswith((".safetensors", f".safetensors{shards.INDEX}")) and path.is_file()


def read(path: Path) -> dict[str, Stored]:
    """Return the tensors of a file, or of all files that an index names; nothing but headers is read.

    Args:
        path: ``*.safetensors``, or ``*.safetensors.index.json``.

    Raises:
        SpecError: if it is no such file: cut off, tensors that overlap, lie beyond its end or leave gaps, a header of unknown dtypes or
            shapes; an index whose files lie elsewhere, lack a tensor or have others.
    """
    return shards.read(path, _single) if shards.is_index(path) else _single(path)


def _single(path: Path) -> dict[str, Stored]:
    with opened(path) as file:
        total = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if total < 8 or length > min(LONGEST_HEADER, total - 8):
            raise SpecError(
                f"{path}: not a whole safetensors file: its header says {length} bytes but the file has {total}"
            )
        header = parse_json(file.read(length), f"{path}: the header")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if not isinstance(header, dict):
        raise SpecError(f"{path}: the header is no JSON object")
    header.pop("__metadata__", None)
    data, problems, found = 8 + length, [], {}
    spans = []
    for name, entry in header.items():
        place, problem = _place(entry)
        if place is None:
            problems.append(f"{path}: {name!r} {problem}")
        else:
            dtype, shape, begin, end = place
            spans.append((begin, end, name))
            found[name] = Stored(dtype, shape, Slice(mapped, data + begin, dtype, shape))
    problems += _covered(path, sorted(spans), total - data) if not problems else []
    if problems:
        raise SpecError(problems[:MOST_PROBLEMS])
    return found


def _place(entry: Any) -> tuple[tuple[str, tuple[int, ...], int, int] | None, str]:
    """Return dtype, shape, begin and end of a tensor; or what is wrong with its entry."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        return None, "must have dtype, shape and data_offsets"
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in CODES:
        return None, f"has dtype {code!r} but must have one of {', '.join(CODES)}"
    if not are_sizes(shape) or not are_sizes(offsets) or len(offsets) != 2:
        return (
            None,
            f"has shape {_brief(shape)} and offsets {_brief(offsets)} but both must be lists of whole numbers from 0",
        )
    begin, end = offsets
    if end - begin != size(CODES[code], tuple(shape)):
        return (
            None,
            f"has shape {_brief(shape)} of {code}, which takes {size(CODES[code], tuple(shape))} bytes, but offsets {_brief(offsets)}",
        )
    return (CODES[code], tuple(shape), begin, end), ""


def _brief(value: Any) -> str:
    return text if len(text := repr(value)) <= 60 else f"{text[:57]}..."


def _covered(path: Path, spans: list[tuple[int, int, str]], total: int) -> Iterator[str]:
    """Yield what is wrong with where tensors lie: each byte has to belong to one."""
    reached = 0
    for begin, end, name in spans:
        if begin != reached:
            yield f"{path}: {name!r} begins at byte {begin} but {'overlaps what ends' if begin < reached else 'must begin where another ends,'} at byte {reached}"
        reached = max(reached, end)
    if reached != total:
        yield f"{path}: its tensors end at byte {reached} but its data at byte {total}"


def write(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write tensors one by one."""
    codes = {name: code for code, name in CODES.items()}
    # As the format's own library does: wide dtypes first, so that each tensor lies at a multiple of its numbers' size.
    order = sorted(tensors, key=lambda name: (-np.dtype(NUMPY[tensors[name].dtype]).itemsize, name))
    # Hugging Face refuses a file that does not say which framework's tensors it holds.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    reached = 0
    for name in order:
        tensor = tensors[name]
        header[name] = {
            "dtype": codes[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [reached, reached := reached + tensor.size],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with writing(path) as put:
        put(len(text).to_bytes(8, "little"))
        put(text)
        for name in order:
            put(tensors[name].data())
