"""Every bug of conversion: what it makes of a right checkpoint's folder, group by group."""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from concord.conformance.bugs.bug import with_constants
from concord.porting.bugs.bug import TOKENS, Array, Arrays, ConversionBug, Edit
from concord.porting.containers import TORCH, safetensors
from concord.porting.containers.container import INDEX
from concord.porting.folder import CONFIG, PROMPTS
from concord.porting.registry import Format
from concord.porting.stored import StoredTensor, in_memory
from concord.spec.files import parse_toml, read_text

# Kinds of edits. Each takes a folder, its format, and the constants of bugs.toml.


def tensors(change: Callable[..., Arrays]) -> Edit:
    """Make an edit of a function of the tensors of a file, by its own names and in its own layouts.

    One may become a :class:`StoredTensor`.
    """

    @functools.wraps(change)
    def edit(folder: Path, form: Format, *constants: Any) -> None:
        path = folder / form.weights[0]
        arrays = {name: np.array(stored.array()) for name, stored in form.container.read(path).items()}
        form.container.write(path, {name: _stored(one) for name, one in change(arrays, *constants).items()})

    return edit


def each(change: Callable[..., Any]) -> Edit:
    """Make an edit of a function of one tensor: of each whose name ends in a text among the constants."""

    @tensors
    def edit(found: Arrays, *constants: Any) -> Arrays:
        ends = tuple(one for one in constants if isinstance(one, str))
        numbers = [one for one in constants if one not in ends]
        return {
            name: change(array, *numbers) if name.endswith(ends) else array for name, array in found.items()
        }

    return edit


def content(change: Callable[[bytes], bytes]) -> Edit:
    """Make an edit of a function of the bytes of the file of weights."""

    def edit(folder: Path, form: Format) -> None:
        path = folder / form.weights[0]
        path.write_bytes(change(path.read_bytes()))

    return edit


def _stored(one: Any) -> StoredTensor:
    return one if isinstance(one, StoredTensor) else in_memory(np.asarray(one, order="C"))


# Names and files.


@tensors
def renamed(found: Arrays, *pairs: str) -> Arrays:
    """Change what fits regular expressions in the names of tensors, each followed by what it becomes."""
    for pattern, other in zip(pairs[::2], pairs[1::2], strict=True):
        found = {re.sub(pattern, other, name): array for name, array in found.items()}
    return found


@tensors
def exchanged(found: Arrays, one: str, other: str) -> Arrays:
    """Exchange two words in the names of tensors."""
    return {
        name.replace(one, other) if one in name else name.replace(other, one): array
        for name, array in found.items()
    }


@tensors
def without(found: Arrays, word: str) -> Arrays:
    """Leave out the tensors whose names have a word."""
    return {name: array for name, array in found.items() if word not in name}


@tensors
def filled(found: Arrays, name: str, value: float, *shape: int) -> Arrays:
    """Add a tensor of one number."""
    return {**found, name: np.full(shape, value)}


@tensors
def counted(found: Arrays, name: str, *ends: int) -> Arrays:
    """Add a row of whole numbers, by the first, the end and the step."""
    return {**found, name: np.arange(*ends)[None]}


@tensors
def copied(found: Arrays, name: str, other: str, more: float) -> Arrays:
    """Add a copy of a tensor, with a number added to each of its numbers."""
    return {**found, name: found[other] + np.float32(more)}


def gone(folder: Path, form: Format, *names: str) -> None:
    """Remove files."""
    for name in names:
        (folder / name).unlink()


def entries(folder: Path, form: Format, name: str, said: dict[str, Any]) -> None:
    """Change what a file says; None leaves an entry out."""
    path = folder / name
    found = {**json.loads(path.read_bytes()), **said}
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


def config(folder: Path, form: Format, **said: Any) -> None:
    """Change what the configuration says."""
    entries(folder, form, CONFIG, said)


def absent(folder: Path, form: Format, *keys: str) -> None:
    """Leave out what the configuration says."""
    entries(folder, form, CONFIG, dict.fromkeys(keys))


# How a checkpoint lies in files.

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 440473133\n"
)

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

MADE = "made-by-a-pickle"
"""The folder that :class:`RunsCode` would make beside the checkpoint."""


def loaded(path: Path) -> Arrays:
    """Return copies of the tensors of a file: it may be overwritten."""
    return {name: np.array(stored.array()) for name, stored in safetensors.read(path).items()}


def saved(path: Path, arrays: Arrays) -> None:
    safetensors.write(path, {name: in_memory(array) for name, array in arrays.items()})


def shards(folder: Path, form: Format) -> None:
    """Put the tensors into two files with an index."""
    another_file_beside_the_shards(folder, form)
    (folder / form.weights[0]).unlink()


def another_file_beside_the_shards(folder: Path, form: Format) -> None:
    found = loaded(folder / form.weights[0])
    places = {name: FIRST if number % 2 else SECOND for number, name in enumerate(found)}
    for shard in (FIRST, SECOND):
        saved(folder / shard, {name: found[name] for name in found if places[name] == shard})
    index = {"metadata": {}, "weight_map": places}
    (folder / f"{form.weights[0]}{INDEX}").write_text(json.dumps(index))


def tensor_in_two_files(folder: Path, form: Format) -> None:
    """Put a stale copy of a tensor into the other file too."""
    shards(folder, form)
    name, stale = next(iter(loaded(folder / FIRST).items()))
    saved(folder / SECOND, {**loaded(folder / SECOND), name: stale + 1})


def indexed(folder: Path, form: Format, pattern: str, other: str, name: str = "") -> None:
    """Change in an index what fits a regular expression in the file of one tensor, or of all.

    A tensor whose file has no name is left out.
    """
    shards(folder, form)
    path = folder / f"{form.weights[0]}{INDEX}"
    places = json.loads(path.read_bytes())["weight_map"]
    said = {one: re.sub(pattern, other, shard) if name in one else shard for one, shard in places.items()}
    said = {one: shard for one, shard in said.items() if shard}
    path.write_text(json.dumps({"metadata": {}, "weight_map": said}))


def torch_file_by_another_name(folder: Path, form: Format) -> None:
    """Write PyTorch's own file under the name of safetensors."""
    path = folder / form.weights[0]
    TORCH.write(path, {name: in_memory(array) for name, array in loaded(path).items()})


@content
def torch_file_of_another_machine(given: bytes) -> bytes:
    """Write an archive of PyTorch, of float32 numbers, as a machine with the most significant byte first."""
    found = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(given)) as before, zipfile.ZipFile(found, "w") as after:
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


def pickle_that_runs(folder: Path, form: Format) -> None:
    """Write a pickle that would have code run."""
    (folder / form.weights[0]).write_bytes(
        pickle.dumps({"bert.pooler.dense.weight": RunsCode(folder / MADE)}, 2)
    )


file_cut_off = content(lambda given: given[:-100])
pointer_instead_of_the_file = content(lambda given: POINTER)


# Which tensor is which (SPEC WGT-1).


@tensors
def layers(found: Arrays, *numbers: int) -> Arrays:
    """Give each layer another number."""

    def other(match: re.Match[str]) -> str:
        return f".layer.{numbers[int(match[1])]}."

    return {re.sub(r"\.layer\.(\d+)\.", other, name): array for name, array in found.items()}


@tensors
def slices(found: Arrays, order: str) -> Arrays:
    """Take query, key and value for others, by their first letters in order."""
    roles = dict(zip(("query", "key", "value"), order, strict=True))
    words = {word[0]: word for word in roles}

    def other(match: re.Match[str]) -> str:
        return words[roles[match[0]]]

    return {name: found[re.sub(r"(?<=self\.)[a-z]+", other, name)] for name in found}


# How tensors are laid out (SPEC WGT-2).

NAME = "bert.encoder.layer.0.attention.self"

HEADS, HEAD = 2, 7
"""How many heads the model has, and how wide each is."""


@tensors
def turned(found: Arrays, most: int) -> Arrays:
    """Transpose kernels of at most so many lengths: 1 means square ones alone."""
    return {
        name: array.T if "embeddings" not in name and len({*array.shape}) <= most else array
        for name, array in found.items()
    }


@each
def rotary(array: Array) -> Array:
    """Bring the rows of each head into the order of another layout of rotary positions.

    Which BERT has not: even ones, then odd ones.
    """
    rows = np.concatenate([np.arange(0, HEAD, 2), np.arange(1, HEAD, 2)])
    return array.reshape(HEADS, HEAD, *array.shape[1:])[:, rows].reshape(array.shape)


@each
def heads_exchanged(array: Array) -> Array:
    return array.reshape(HEADS, HEAD, *array.shape[1:])[::-1].reshape(array.shape)


@tensors
def fused_by_head_cut_in_thirds(found: Arrays) -> Arrays:
    """Cut a fused weight, which has query, key and value of each head in turn, into three parts."""
    new = dict(found)
    for leaf in ("weight", "bias"):
        names = [f"{NAME}.{role}.{leaf}" for role in ("query", "key", "value")]
        by_head = [found[name].reshape(HEADS, HEAD, *found[name].shape[1:]) for name in names]
        fused = np.concatenate(by_head, axis=1).reshape(-1, *found[names[0]].shape[1:])
        new |= dict(zip(names, np.split(fused, 3), strict=True))
    return new


transposed = each(np.transpose)
stored_by_column = each(lambda array: array.T.flatten().reshape(array.shape))


# Which tensors there are, and how many rows they have (SPEC WGT-1).


@each
def padded(array: Array, rows: int) -> Array:
    """Add rows of zeros to a table."""
    return np.pad(array, ((0, rows), (0, 0)))


@each
def shifted(array: Array, rows: int) -> Array:
    """Move the rows of a table down."""
    return np.roll(array, rows, axis=0)


@tensors
def moments_of_adam(found: Arrays) -> Arrays:
    moments = {f"{name}/adam_{moment}": np.ones_like(found[name]) for name in found for moment in "mv"}
    return {**found, **moments, "global_step": np.array(7)}


shortened = each(lambda array: array[:2])


# What is in tensors (SPEC WGT-3, WGT-4).


@tensors
def cast(found: Arrays, dtype: str) -> Arrays:
    """Cast all tensors to a dtype, which need not hold their numbers."""
    with np.errstate(over="ignore"):
        return {name: array.astype(dtype) for name, array in found.items()}


@each
def upper_half(array: Array) -> StoredTensor:
    """Return float32 cut off to bfloat16."""
    return in_memory((array.view(np.uint32) >> np.uint32(16)).astype(np.uint16), "bfloat16")


@each
def element(array: Array, value: float) -> Array:
    array[3, 5] = value
    return array


@each
def nudged(array: Array) -> Array:
    array[3, 5] *= 1.01
    return array


whole = each(lambda array: np.round(array * 100).astype(np.int8))
permuted = each(lambda array: np.random.default_rng(1).permutation(array.reshape(-1)).reshape(array.shape))
zeroed = each(np.zeros_like)
swapped = each(lambda array: array.byteswap())


# What lies beside the weights and belongs to the model: labels and the tokenizer.


def vocabulary_of_another_order(folder: Path, form: Format) -> None:
    (folder / "vocab.txt").write_text("\n".join([*TOKENS[:5], *TOKENS[6:], ""]))


def prompt_forgotten(folder: Path, form: Format) -> None:
    entries(folder, form, PROMPTS, {"default_prompt_name": None})


def tokenizer_saved_anew(folder: Path, form: Format) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()), indent=4, sort_keys=True))


def _read() -> Iterator[ConversionBug]:
    path = Path(__file__).with_name("bugs.toml")
    for group, said in parse_toml(read_text(path), path.name).items():
        clause = said.pop("clause")
        for name, one in said.items():
            edits = [with_constants(globals()[edit], given) for edit, given in one.pop("edit", {}).items()]
            about = {"clause": clause, **one, "name": name, "group": group}
            yield ConversionBug(**about, edits=edits or [globals()[name]])


CONVERSION = {bug.name: bug for bug in _read()}
"""Every bug of conversion by name, group by group."""
