"""How a checkpoint lies in files."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from concord.porting.bugs.bug import Edit, damaged, harmless, refused, section
from concord.porting.containers import TORCH, safetensors
from concord.porting.containers.container import INDEX
from concord.porting.registry import Format
from concord.porting.stored import in_memory

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 440473133\n"
)

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

MADE = "made-by-a-pickle"
"""The folder that :class:`RunsCode` would make beside the checkpoint."""


def sharded(change: Callable[[Path, dict[str, str]], dict[str, str]], kept: bool = False) -> Edit:
    """Return the edit that puts the tensors into two files with an index.

    Args:
        change: of what the index says, with the folder at hand.
        kept: whether the one file with all tensors stays.
    """

    def edit(folder: Path, form: Format) -> None:
        whole = folder / form.weights[0]
        found = {name: _copied(stored.array()) for name, stored in safetensors.read(whole).items()}
        shards = {name: FIRST if number % 2 else SECOND for number, name in enumerate(found)}
        for shard in (FIRST, SECOND):
            safetensors.write(
                folder / shard,
                {name: in_memory(array) for name, array in found.items() if shards[name] == shard},
            )
        if not kept:
            whole.unlink()
        (folder / f"{form.weights[0]}{INDEX}").write_text(
            json.dumps({"metadata": {}, "weight_map": change(folder, shards)})
        )

    return edit


def _copied(array: Any) -> Any:
    return np.array(array)


def left_out(folder: Path, shards: dict[str, str]) -> dict[str, str]:
    (folder / SECOND).unlink()
    return shards


def elsewhere(folder: Path, shards: dict[str, str]) -> dict[str, str]:
    """Have the index name files as they were called before."""
    return {name: shard.replace("of-00002", "of-00004") for name, shard in shards.items()}


def other_file(folder: Path, shards: dict[str, str]) -> dict[str, str]:
    """Have the index say of a tensor that it is in the other file."""
    return {
        name: SECOND
        if shard == FIRST and name.endswith("classifier.bias")
        else FIRST
        if name.endswith("classifier.bias")
        else shard
        for name, shard in shards.items()
    }


def not_in_the_index(folder: Path, shards: dict[str, str]) -> dict[str, str]:
    return {name: shard for name, shard in shards.items() if name != "classifier.bias"}


def twice(folder: Path, shards: dict[str, str]) -> dict[str, str]:
    """Put a stale copy of a tensor into the other file too."""
    name = next(name for name, shard in shards.items() if shard == FIRST)
    other = {
        key: in_memory(_copied(stored.array())) for key, stored in safetensors.read(folder / SECOND).items()
    }
    stale = _copied(safetensors.read(folder / FIRST)[name].array()) + 1
    safetensors.write(folder / SECOND, {**other, name: in_memory(stale)})
    return shards


def outside(folder: Path, shards: dict[str, str]) -> dict[str, str]:
    return {name: f"../{folder.name}/{shard}" for name, shard in shards.items()}


def as_torch(folder: Path, form: Format) -> None:
    """Write PyTorch's own file under the name of safetensors."""
    path = folder / form.weights[0]
    found = {name: in_memory(_copied(stored.array())) for name, stored in safetensors.read(path).items()}
    TORCH.write(path, found)


def big_endian(content: bytes) -> bytes:
    """Write an archive of PyTorch, of float32 numbers, as a machine with the most significant byte first."""
    found = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as before, zipfile.ZipFile(found, "w") as after:
        for entry in before.infolist():
            inner = before.read(entry)
            if "/data/" in entry.filename:
                inner = np.frombuffer(inner, np.uint32).byteswap().tobytes()
            after.writestr(entry.filename, b"big" if entry.filename.endswith("byteorder") else inner)
    return found.getvalue()


class RunsCode:
    """Would make a folder if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def running(folder: Path, form: Format) -> None:
    """Write a pickle that would have code run."""
    (folder / form.weights[0]).write_bytes(
        pickle.dumps({"bert.pooler.dense.weight": RunsCode(folder / MADE)}, 2)
    )


NO_SAFETENSORS = "not a whole safetensors file"


FILES = section(
    "files",
    "WGT-1",
    harmless(
        "shards", "The tensors lie in two files, as the index says.", sharded(lambda folder, shards: shards)
    ),
    refused(
        "shard_left_out",
        "One of the files was not copied.",
        sharded(left_out),
        "no such file",
        "sgl-project/sglang/pull/32279",
    ),
    refused(
        "index_of_other_files",
        "The index names files as they were called before.",
        sharded(elsewhere),
        "no such file",
        "Neph0s/CoSER/issues/3",
    ),
    refused(
        "index_names_the_other_file",
        "The index says of a tensor that it is in the other file.",
        sharded(other_file),
        "but it is not",
        "pytorch/torchtitan/pull/3764",
    ),
    refused(
        "tensor_not_in_the_index",
        "The index does not have a tensor that a file has.",
        sharded(not_in_the_index),
        "but the index does not say so",
        "Blaizzy/mlx-vlm/pull/1827",
    ),
    refused(
        "tensor_in_two_files",
        "A stale copy of a tensor lies in the other file.",
        sharded(twice),
        "but the index does not say so",
        "vllm-project/vllm/pull/54230",
    ),
    refused(
        "index_leads_outside",
        "The index names files by a way out of the folder.",
        sharded(outside),
        "must lie beside it",
    ),
    refused(
        "another_file_beside_the_shards",
        "A file with all tensors, of another time, lies beside the files of the index.",
        sharded(lambda folder, shards: shards, kept=True),
        "name the one to read",
        "Blaizzy/mlx-vlm/pull/1464",
    ),
    refused(
        "file_cut_off",
        "The file ends before its tensors do.",
        damaged(lambda content: content[:-100]),
        "file not fully covered",
        "osaurus-ai/vmlx-swift/pull/217",
    ),
    refused(
        "pointer_instead_of_the_file",
        "The file is what Git keeps instead of it.",
        damaged(lambda content: POINTER),
        NO_SAFETENSORS,
        "huggingface/diffusers/pull/13559",
    ),
    refused(
        "torch_file_by_another_name",
        "The file is PyTorch's own, and called as safetensors are.",
        as_torch,
        NO_SAFETENSORS,
        "safetensors/safetensors/issues/414",
    ),
    harmless(
        "torch_file_of_another_machine",
        "The file was written by a machine that has the most significant byte first.",
        damaged(big_endian),
        "",
        "pytorch/pytorch/issues/65300",
        format="hugging-face-bin",
    ),
    refused(
        "pickle_that_runs",
        "The file is a pickle that would have code run.",
        running,
        "nothing of it was run",
        "voicepaw/so-vits-svc-fork/issues/193",
        format="hugging-face-bin",
    ),
)
