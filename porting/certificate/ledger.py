"""What became of every tensor and file of a port: hashes of both sides, and the way there and back."""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from concord.porting.certificate.certificate import (
    FAILED,
    NOT_APPLICABLE,
    OTHERS,
    PROVEN,
    UNVERIFIED,
    HashedFile,
    Item,
    LedgerParameter,
    Other,
    Placement,
    PortSide,
)
from concord.porting.checkpoint import Checkpoint
from concord.porting.comparison.checkpoints import Comparison, Others
from concord.porting.folder import CARRIED, LABELS, SENTENCES, folder_of
from concord.porting.reading import read
from concord.porting.registry import known
from concord.porting.writing import write
from concord.spec.errors import SpecError
from concord.spec.files import find, sha256_of
from concord.spec.text import first_of

MADE = ("certificate.json", "certificate.html")
"""What a certificate may be called that lies beside the weights: it cannot hold its own digest."""

MOST_FILES = 4000
"""Files below a folder that is a checkpoint and nothing else."""

NAMED = 5
"""Tensors that an item names."""


def files_of(path: Path) -> dict[str, HashedFile]:
    """Return every file of a checkpoint's folder by its name there, with size and digest.

    Raises:
        SpecError: if one cannot be read, or there are more than a checkpoint has.
    """
    folder = folder_of(path)
    every = {one.relative_to(folder).as_posix(): one for one in find(folder, "*") if one.is_file()}
    found = {name: one for name, one in every.items() if name not in MADE}
    if len(found) > MOST_FILES:
        raise SpecError(
            f"{folder}: holds {len(found)} files but a checkpoint's folder holds at most {MOST_FILES}; "
            "put the checkpoint into a folder of its own"
        )
    return {name: HashedFile(sha256_of(one), one.stat().st_size) for name, one in found.items()}


def side_of(path: Path, checkpoint: Checkpoint) -> PortSide:
    """Return what is known of one of the two checkpoints."""
    return PortSide(
        str(path),
        checkpoint.format,
        checkpoint.recognised,
        checkpoint.part,
        checkpoint.config.as_dict(),
        files_of(path),
        {
            name: digest_of(content)
            for name, content in checkpoint.files.items()
            if name in (*CARRIED, *SENTENCES)
        },
    )


def digest_of(content: bytes) -> str:
    """Return the SHA-256 of bytes."""
    return hashlib.sha256(content).hexdigest()


def placements(checkpoint: Checkpoint) -> dict[str, Placement]:
    """Return how each parameter of a checkpoint lies; one is read at a time."""
    return {
        name: Placement(tensor.foreign, tensor.transform, *tensor.held)
        for name, tensor in checkpoint.tensors.items()
    }


def parameters(
    source: Checkpoint,
    target: Checkpoint,
    mine: dict[str, Placement],
    theirs: dict[str, Placement],
    compared: Comparison,
) -> tuple[LedgerParameter, ...]:
    """Return the ledger of the parameters."""
    words = {
        pair.name: f"{pair.words}{f'; likely: {pair.cause}' if pair.cause else ''}" for pair in compared.pairs
    }
    shapes = {name: tensor.shape for one in (target, source) for name, tensor in one.tensors.items()}
    order = [*source.tensors, *(name for name in target.tensors if name not in source.tensors)]
    return tuple(
        LedgerParameter(name, shapes[name], mine.get(name), theirs.get(name), words.get(name, ""))
        for name in order
    )


def others(checkpoint: Checkpoint, side: str) -> Iterator[Other]:
    """Yield the rest of the ledger of one side."""
    for entry in checkpoint.ledger:
        if entry.status != "read":
            yield Other(
                side,
                entry.foreign,
                entry.status,
                entry.reason,
                entry.dtype,
                entry.shape,
                entry.sha256,
                entry.name or "",
            )


def _claim(name: str, wrong: str, right: str) -> Item:
    """Return a claim that is proven, unless something is wrong."""
    return Item(name, FAILED if wrong else PROVEN, wrong or right)


def items(
    source: Checkpoint,
    target: Checkpoint,
    sides: tuple[PortSide, PortSide],
    ledger: tuple[LedgerParameter, ...],
    rest: tuple[Other, ...],
    compared: Comparison,
) -> Iterator[Item]:
    """Yield what files and tensors alone prove."""
    wrong = [
        f"{one.name}: {one.difference or ('in the target alone' if one.target else 'missing in the target')}"
        for one in ledger
        if one.source is None or one.target is None or one.source.held != one.target.held
    ]
    yield _claim(
        "same bits",
        f"{len(wrong)} of {len(ledger)} parameters are not those of the source: "
        f"{first_of(wrong, NAMED, '; ')}"
        if wrong
        else "",
        f"each of {len(ledger)} parameters has the same bits in the canonical layout on both sides",
    )
    statuses = Counter((one.side, one.status) for one in rest)
    counts = [
        f"; {statuses[side, status]} {status} in the {side}"
        for side in ("source", "target")
        for status in ("ignored", "tied", "computed", "added")
        if (side, status) in statuses
    ]
    said = "each with its reason; a tensor that nobody knows would have been refused"
    counted = f"{len(ledger)} parameters{''.join(counts)}"
    yield Item("every tensor accounted for", PROVEN, f"{counted}; {said}")
    yield from _others(compared.others)
    apart = {
        **({"part": (repr(source.part), repr(target.part))} if source.part != target.part else {}),
        **compared.config,
    }
    yield _claim(
        "configuration",
        "; ".join(f"{key} is {a} in the source and {b} in the target" for key, (a, b) in apart.items()),
        f"both say the same of all {len(source.config.as_dict())} options, and have the part {source.part}",
    )
    if source.labels is None and target.labels is None:
        yield Item("labels", NOT_APPLICABLE, "no side names its classes")
    else:
        same = source.labels == target.labels
        said = f"{source.labels} in the source and {target.labels} in the target"
        right = f"{len(source.labels or ())} names, the same on both sides"
        yield _claim("labels", "" if same else said, right)
    yield _tokenizer(source, target, sides, compared)


SIDES = ("the source", "the target")


def _others(found: Others) -> Iterator[Item]:
    """Yield whether what is no parameter came along, where there is any that says more than the rest does."""
    said = [f"{pair.name}: {pair.words}" for pair in found.pairs]
    said += [f"{name}: not compared: {why}" for name, why in found.apart.items()]
    if said:
        counted = (
            f"of {found.same + len(said)}, {len(found.pairs)} differ and {len(found.apart)} could not be "
            "compared"
        )
        yield Item(OTHERS, FAILED if found.pairs else UNVERIFIED, f"{counted}: {first_of(said, NAMED, '; ')}")
    elif found.same:
        yield Item(OTHERS, PROVEN, f"each of {found.same} has the same bits on both sides")


def _tokenizer(
    source: Checkpoint, target: Checkpoint, sides: tuple[PortSide, PortSide], compared: Comparison
) -> Item:
    """Return whether what lies beside the weights came along, but for labels."""
    mine, theirs = sides
    takes, apart = known(theirs.format).carried, compared.files
    there = [name for name in source.files if name in takes and name != LABELS]
    wrong = [
        *(f"{name} is missing in the target" for name in there if name not in target.files),
        *(f"{name}: {apart[name]}" for name in there if name in apart),
    ]
    extra = [name for name in compared.alone[1] if name not in ("labels", LABELS)]
    if extra and not wrong:
        said = f"in the target alone, with nothing to compare it with: {', '.join(extra)}"
        return Item("tokenizer", UNVERIFIED, said)
    if not there:
        return Item("tokenizer", NOT_APPLICABLE, "the source has none")
    same = [name for name in there if mine.carried[name] == theirs.carried.get(name)]
    rest = [name for name in there if name not in same]
    kinds = {"the same bytes": same, "the same entries": rest}
    right = "; ".join(f"{what}: {', '.join(found)}" for what, found in kinds.items() if found)
    return _claim("tokenizer", "; ".join(wrong), right)


def round_trip(name: str, checkpoint: Checkpoint, form: str, expected: Mapping[str, Placement]) -> Item:
    """Write a checkpoint in a format, and read it again: it has to come back bit for bit."""
    with tempfile.TemporaryDirectory(prefix="concord-") as folder:
        try:
            write(checkpoint, Path(folder) / "there", form)
            found = read(Path(folder) / "there", form)
        except SpecError as error:
            return Item(name, UNVERIFIED, f"{form} was not written and read again: {error.problems[0]}")
        back = placements(found)
    held, again = ({one: placed.held for one, placed in side.items()} for side in (expected, back))
    wrong = [one for one in {**held, **again} if held.get(one) != again.get(one)]
    wrong += ["the configuration"] if found.config != checkpoint.config else []
    lost = f"through {form} {len(wrong)} did not come back as they were: {', '.join(wrong[:NAMED])}"
    return _claim(
        name,
        lost if wrong else "",
        f"written as {form} and read again, all {len(expected)} parameters have their bits, and the "
        "configuration says the same",
    )
