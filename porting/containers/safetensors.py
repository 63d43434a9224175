"""Memory-mapped safetensors (https://huggingface.co/docs/safetensors), validated by its library."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from concord.porting.file_tensors import NUMPY, StoredTensor, shape_of, sliced
from concord.spec.errors import SpecError
from concord.spec.files import opened, writing

CODES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    **{
        f"{sign}{bits}": f"{kind}{bits}"
        for sign, kind in (("I", "int"), ("U", "uint"))
        for bits in (64, 32, 16, 8)
    },
    "BOOL": "bool",
}

# Bytes, enough for about 100,000 tensors. The library accepts six times as many, but their JSON may take
# gigabytes.
LONGEST_HEADER = 1 << 24


def read(path: Path) -> dict[str, StoredTensor]:
    """Tensors of a file, reading only its header."""
    with opened(path) as file:
        total, length = file.seek(0, 2), 0
        file.seek(0)
        try:
            length = int.from_bytes(file.read(8), "little")
            if total < 8 or length > min(LONGEST_HEADER, total - 8):
                raise SafetensorError(f"it gives its header's length as {length} bytes")
            with safe_open(path, "numpy"):  # validates every offset, on which the views below rely
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            shapes = {name: shape_of(entry["shape"]) for name, entry in header.items()}
        except (SafetensorError, ValueError, RecursionError, OSError) as error:
            reason = " ".join(str(error).split())[:300]
            raise SpecError(
                f"{path}: not a complete safetensors file: {reason}; the file has {total} bytes"
            ) from None
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    tensors = {}
    for name, entry in header.items():
        dtype, shape = CODES.get(entry["dtype"]), shapes[name]
        if dtype is None:
            raise SpecError(
                f"{path}: {name[:200]!r} has dtype {entry['dtype']!r} but must have one of {', '.join(CODES)}"
            )
        tensors[name] = sliced(mapped, 8 + length + entry["data_offsets"][0], dtype, shape)
    return tensors


def write(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write tensors one by one; the library would keep all in memory."""
    codes = {name: code for code, name in CODES.items()}
    # As in the library, wide dtypes come first, so that each tensor starts at a multiple of its dtype's size.
    order = sorted(tensors, key=lambda name: (-np.dtype(NUMPY[tensors[name].dtype]).itemsize, name))
    # Hugging Face refuses files that do not name their framework.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    reached = 0
    for name in order:
        begin, reached = reached, reached + tensors[name].size
        dtype, shape = codes[tensors[name].dtype], list(tensors[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, reached]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # Tensors begin at a multiple of 8 bytes, so that a mapped view is aligned.
    text += b" " * (-len(text) % 8)
    with writing(path) as put:
        put(len(text).to_bytes(8, "little") + text)
        for name in order:
            put(tensors[name].data())
