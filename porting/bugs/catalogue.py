"""Every bug of conversion, group by group."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from concord.conformance.bugs.bug import called
from concord.porting.bugs.bug import TOKENS, Array, Arrays, ConversionBug, Edit
from concord.porting.containers import TORCH, safetensors
from concord.porting.containers.container import INDEX
from concord.porting.folder import CONFIG, PROMPTS
from concord.porting.registry import Format
from concord.porting.stored import StoredTensor, in_memory
from concord.spec.files import parse_toml, read_text

# Edits.


def tensors(change: Callable[[Arrays], Arrays]) -> Edit:
    """Return the edit of the tensors of a file, by its own names and in its own layouts.

    One may become a :class:`StoredTensor`.
    """

    def edit(folder: Path, form: Format) -> None:
        path = folder / form.weights[0]
        arrays = {name: np.array(stored.array()) for name, stored in form.container.read(path).items()}
        new = {
            name: one if isinstance(one, StoredTensor) else in_memory(np.asarray(one, order="C"))
            for name, one in change(arrays).items()
        }
        form.container.write(path, new)

    return edit


def each(change: Callable[[Array], Any]) -> Callable[..., Edit]:
    """Return what makes the edit of each tensor whose name ends so, given some ends."""
    return lambda *ends: tensors(
        lambda found: {name: change(array) if name.endswith(ends) else array for name, array in found.items()}
    )


def named(rename: Callable[[str], str]) -> Edit:
    """Return the edit of the names of tensors."""
    return tensors(lambda found: {rename(name): array for name, array in found.items()})


def renamed(pattern: str, other: str) -> Edit:
    """Return the edit of what fits a regular expression in the names of tensors."""
    return named(lambda name: re.sub(pattern, other, name))


def exchanged(one: str, other: str) -> Edit:
    """Return the edit that exchanges two words in the names of tensors."""
    return named(lambda name: name.replace(one, other) if one in name else name.replace(other, one))


def without(*words: str) -> Edit:
    """Return the edit that leaves out the tensors whose names have one of some words."""
    return tensors(
        lambda found: {
            name: array for name, array in found.items() if not any(word in name for word in words)
        }
    )


def added(name: str, make: Callable[[Arrays], Array]) -> Edit:
    """Return the edit that adds a tensor, made of those that are there."""
    return tensors(lambda found: {**found, name: make(found)})


def filled(name: str, value: float, *shape: int) -> Edit:
    """Return the edit that adds a tensor of one number."""
    return added(name, lambda found: np.full(shape, value, np.float32))


def rewritten(name: str, change: Callable[[bytes], bytes]) -> Edit:
    """Return the edit of the bytes of a file; of no name: of the weights."""

    def edit(folder: Path, form: Format) -> None:
        path = folder / (name or form.weights[0])
        path.write_bytes(change(path.read_bytes()))

    return edit


def entries(name: str, said: Mapping[str, Any]) -> Edit:
    """Return the edit of what a file says; None leaves an entry out."""

    def change(content: bytes) -> bytes:
        found = {**json.loads(content), **said}
        return json.dumps({key: value for key, value in found.items() if value is not None}).encode()

    return rewritten(name, change)


def config(**said: Any) -> Edit:
    """Return the edit of what the configuration says."""
    return entries(CONFIG, said)


def absent(*keys: str) -> Edit:
    """Return the edit that leaves out what the configuration says."""
    return entries(CONFIG, dict.fromkeys(keys))


damaged = partial(rewritten, "")
"""The edit of the file of weights."""


def both(*edits: Edit) -> Edit:
    """Return several edits, one after the other."""

    def edit(folder: Path, form: Format) -> None:
        for one in edits:
            one(folder, form)

    return edit


# How a checkpoint lies in files.

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 440473133\n"
)

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

BIAS_OF_CLASSES = "classifier.bias"

MADE = "made-by-a-pickle"
"""The folder that :class:`RunsCode` would make beside the checkpoint."""


def loaded(path: Path) -> Arrays:
    """Return copies of the tensors of a file: it may be overwritten."""
    return {name: np.array(stored.array()) for name, stored in safetensors.read(path).items()}


def saved(path: Path, arrays: Arrays) -> None:
    safetensors.write(path, {name: in_memory(array) for name, array in arrays.items()})


def sharded(change: Callable[[Path, dict[str, str]], dict[str, str]], kept: bool = False) -> Edit:
    """Return the edit that puts the tensors into two files with an index.

    Args:
        change: of what the index says, with the folder at hand.
        kept: whether the one file with all tensors stays.
    """

    def edit(folder: Path, form: Format) -> None:
        whole = folder / form.weights[0]
        found = loaded(whole)
        shards = {name: FIRST if number % 2 else SECOND for number, name in enumerate(found)}
        for shard in (FIRST, SECOND):
            saved(folder / shard, {name: found[name] for name in found if shards[name] == shard})
        if not kept:
            whole.unlink()
        index = {"metadata": {}, "weight_map": change(folder, shards)}
        (folder / f"{form.weights[0]}{INDEX}").write_text(json.dumps(index))

    return edit


def right_index(folder: Path, shards: dict[str, str]) -> dict[str, str]:
    return shards


def without_a_shard(folder: Path, shards: dict[str, str]) -> dict[str, str]:
    (folder / SECOND).unlink()
    return shards


def other_file(folder: Path, shards: dict[str, str]) -> dict[str, str]:
    """Have the index say of a tensor that it is in the other file."""
    return {**shards, BIAS_OF_CLASSES: FIRST if shards[BIAS_OF_CLASSES] == SECOND else SECOND}


def twice(folder: Path, shards: dict[str, str]) -> dict[str, str]:
    """Put a stale copy of a tensor into the other file too."""
    name = next(name for name, shard in shards.items() if shard == FIRST)
    stale = loaded(folder / FIRST)[name] + 1
    saved(folder / SECOND, {**loaded(folder / SECOND), name: stale})
    return shards


def torch_file_by_another_name(folder: Path, form: Format) -> None:
    """Write PyTorch's own file under the name of safetensors."""
    path = folder / form.weights[0]
    TORCH.write(path, {name: in_memory(array) for name, array in loaded(path).items()})


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


def pickle_that_runs(folder: Path, form: Format) -> None:
    """Write a pickle that would have code run."""
    (folder / form.weights[0]).write_bytes(
        pickle.dumps({"bert.pooler.dense.weight": RunsCode(folder / MADE)}, 2)
    )


shards = sharded(right_index)
shard_left_out = sharded(without_a_shard)
index_of_other_files = sharded(
    lambda _, shards: {name: shard.replace("of-00002", "of-00004") for name, shard in shards.items()}
)
index_names_the_other_file = sharded(other_file)
tensor_not_in_the_index = sharded(
    lambda _, shards: {name: shard for name, shard in shards.items() if name != BIAS_OF_CLASSES}
)
tensor_in_two_files = sharded(twice)
index_leads_outside = sharded(
    lambda folder, shards: {name: f"../{folder.name}/{shard}" for name, shard in shards.items()}
)
another_file_beside_the_shards = sharded(right_index, kept=True)
file_cut_off = damaged(lambda content: content[:-100])
pointer_instead_of_the_file = damaged(lambda content: POINTER)
torch_file_of_another_machine = damaged(big_endian)


# Which tensor is which (SPEC WGT-1).


def layers(number: Callable[[int, int], int]) -> Edit:
    """Return the edit that gives each layer another number, by its own and that of layers."""

    def change(found: Arrays) -> Arrays:
        numbers = {int(match[1]) for name in found if (match := re.search(r"\.layer\.(\d+)\.", name))}
        return {
            re.sub(
                r"\.layer\.(\d+)\.", lambda match: f".layer.{number(int(match[1]), len(numbers))}.", name
            ): array
            for name, array in found.items()
        }

    return tensors(change)


def slices(order: str) -> Edit:
    """Return the edit that takes query, key and value for others, by their first letters in order."""
    roles = dict(zip("qkv", order, strict=True))
    words = {word[0]: word for word in ("query", "key", "value")}

    def other(match: re.Match[str]) -> str:
        return words[roles[match[0][0]]]

    return tensors(lambda found: {name: found[re.sub(r"(?<=self\.)[a-z]+", other, name)] for name in found})


gamma_and_beta_of_norms = both(
    renamed(r"LayerNorm\.weight", "LayerNorm.gamma"), renamed(r"LayerNorm\.bias", "LayerNorm.beta")
)
layers_counted_from_one = layers(lambda place, count: place + 1)
layers_sorted_as_text = layers(lambda place, count: sorted(map(str, range(count))).index(str(place)))
layers_reversed = layers(lambda place, count: count - 1 - place)


# How tensors are laid out (SPEC WGT-2).

NAME = "bert.encoder.layer.0.attention.self"

HEADS, HEAD = 2, 7
"""How many heads the model has, and how wide each is."""


def turned(most: int) -> Edit:
    """Return the edit that transposes kernels of at most so many lengths: 1 means square ones alone."""
    return tensors(
        lambda found: {
            name: array.T if "embeddings" not in name and len({*array.shape}) <= most else array
            for name, array in found.items()
        }
    )


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
        parts = [found[f"{NAME}.{role}.{leaf}"] for role in ("query", "key", "value")]
        fused = np.concatenate(
            [part.reshape(HEADS, HEAD, *part.shape[1:]) for part in parts], axis=1
        ).reshape(-1, *parts[0].shape[1:])
        new |= {
            f"{NAME}.{role}.{leaf}": third
            for role, third in zip(("query", "key", "value"), np.split(fused, 3), strict=True)
        }
    return new


transposed = each(np.transpose)
stored_by_column = each(lambda array: array.T.flatten().reshape(array.shape))


# Which tensors there are, and how many rows they have (SPEC WGT-1).

TOKEN, DECODER = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
POSITIONS, SEGMENTS = "bert.embeddings.position_ids", "bert.embeddings.token_type_ids"


def padded(rows: int, table: str) -> Edit:
    """Return the edit that adds rows of zeros to a table."""
    return each(lambda array: np.concatenate([array, np.zeros((rows, array.shape[1]), array.dtype)]))(table)


def shifted(rows: int, table: str) -> Edit:
    """Return the edit that moves the rows of a table down."""
    return each(lambda array: np.roll(array, rows, axis=0))(table)


shortened = each(lambda array: array[:2])
table_left_out_as_shared = both(added(DECODER, lambda found: found[TOKEN]), without("word_embeddings"))
decoder_tied = added(DECODER, lambda found: found[TOKEN].copy())
decoder_not_tied = added(DECODER, lambda found: found[TOKEN] + 1)
buffer_of_positions = added(POSITIONS, lambda found: np.arange(13)[None])
buffer_of_positions_backwards = added(POSITIONS, lambda found: np.arange(13)[None, ::-1].copy())
buffer_of_segments = added(SEGMENTS, lambda found: np.zeros((1, 13), np.int64))
buffer_of_segments_of_ones = added(SEGMENTS, lambda found: np.ones((1, 13), np.int64))
slots_of_adam = tensors(
    lambda found: {
        **found,
        **{f"{name}/adam_{moment}": np.ones_like(array) for name, array in found.items() for moment in "mv"},
        "global_step": np.array(7),
    }
)


# What is in tensors (SPEC WGT-3, WGT-4).


def cast(dtype: str) -> Any:
    """Return the change of all tensors to a dtype, which need not hold their numbers."""

    def change(found: Arrays) -> Arrays:
        with np.errstate(over="ignore"):
            return {name: array.astype(dtype) for name, array in found.items()}

    return tensors(change)


@each
def upper_half(array: Array) -> StoredTensor:
    """Return float32 cut off to bfloat16."""
    return in_memory((array.view(np.uint32) >> np.uint32(16)).astype(np.uint16), "bfloat16")


def with_element(made: Callable[[float], float], end: str) -> Edit:
    """Return the edit of one element."""

    def change(array: Array) -> Array:
        array[3, 5] = made(float(array[3, 5]))
        return array

    return each(change)(end)


def element(value: float, end: str) -> Edit:
    return with_element(lambda _: value, end)


whole = each(lambda array: np.round(array * 100).astype(np.int8))
nudged = partial(with_element, lambda number: number * 1.01)
permuted = each(lambda array: np.random.default_rng(1).permutation(array.reshape(-1)).reshape(array.shape))
zeroed = each(np.zeros_like)
swapped = each(lambda array: array.byteswap())


# What lies beside the weights and belongs to the model: labels and the tokenizer.


def tokenizer_left_out(folder: Path, form: Format) -> None:
    for name in ("tokenizer.json", "vocab.txt"):
        (folder / name).unlink()


WITHOUT_A_LINE = "\n".join([*TOKENS[:5], *TOKENS[6:], ""]).encode()

vocabulary_of_another_order = rewritten("vocab.txt", lambda _: WITHOUT_A_LINE)
prompt_forgotten = entries(PROMPTS, {"default_prompt_name": None})
tokenizer_saved_anew = rewritten(
    "tokenizer.json", lambda content: json.dumps(json.loads(content), indent=4, sort_keys=True).encode()
)


def _read() -> Iterator[ConversionBug]:
    path = Path(__file__).with_name("bugs.toml")
    for group, said in parse_toml(read_text(path), path.name).items():
        clause = said.pop("clause")
        for name, one in said.items():
            made = [called(globals()[maker], given) for maker, given in one.pop("edit", {}).items()]
            edit = both(*made) if made else globals()[name]
            yield ConversionBug(**{"clause": clause, **one, "name": name, "group": group, "edit": edit})


CONVERSION = {bug.name: bug for bug in _read()}
"""Every bug of conversion by name, group by group."""
