"""What became of every tensor and file of a port: hashes of both sides, and the way there and back."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
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
from concord.porting.checkpoint import Checkpoint, LazyTensor
from concord.porting.comparison.beside import alone, differing
from concord.porting.comparison.checkpoints import Comparison, Others, compare_others, differences
from concord.porting.folder import CARRIED, LABELS, SENTENCES, folder_of
from concord.porting.reading import AUTO, read, recognise
from concord.porting.registry import known
from concord.porting.writing import write
from concord.spec.errors import SpecError
from concord.spec.files import find, sha256_of

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
    found = [
        one for one in find(folder, "*") if one.is_file() and one.relative_to(folder).as_posix() not in MADE
    ]
    if len(found) > MOST_FILES:
        raise SpecError(
            f"{folder}: holds {len(found)} files but a checkpoint's folder holds at most {MOST_FILES}; "
            "put the checkpoint into a folder of its own"
        )
    return {
        one.relative_to(folder).as_posix(): HashedFile(sha256_of(one), one.stat().st_size) for one in found
    }


def side_of(path: Path, format: str, table: Path | None, checkpoint: Checkpoint) -> PortSide:
    """Return what is known of one of the two checkpoints."""
    seen = recognise(path, table) if format == AUTO else None
    why = seen.why if seen else "it was said with --from"
    carried = {
        name: digest_of(content)
        for name, content in checkpoint.files.items()
        if name in (*CARRIED, *SENTENCES)
    }
    return PortSide(
        str(path),
        seen.format if seen else format,
        why,
        checkpoint.part,
        checkpoint.config.as_dict(),
        files_of(path),
        carried,
    )


def digest_of(content: bytes) -> str:
    """Return the SHA-256 of bytes."""
    return hashlib.sha256(content).hexdigest()


def placements(checkpoint: Checkpoint) -> dict[str, Placement]:
    """Return how each parameter of a checkpoint lies; one is read at a time."""
    return {name: _placed(tensor) for name, tensor in checkpoint.tensors.items()}


def _placed(tensor: LazyTensor) -> Placement:
    return Placement(tensor.foreign, tensor.transform, *tensor.held)


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


def items(
    source: Checkpoint,
    target: Checkpoint,
    sides: tuple[PortSide, PortSide],
    ledger: tuple[LedgerParameter, ...],
    rest: tuple[Other, ...],
) -> Iterator[Item]:
    """Yield what files and tensors alone prove."""
    wrong = [
        one
        for one in ledger
        if one.source is None or one.target is None or _bits(one.source) != _bits(one.target)
    ]
    if wrong:
        yield Item(
            "same bits",
            FAILED,
            f"{len(wrong)} of {len(ledger)} parameters are not those of the source: {_named(wrong)}",
        )
    else:
        yield Item(
            "same bits",
            PROVEN,
            f"each of {len(ledger)} parameters has the same bits in the canonical layout on both sides",
        )
    yield _accounted(ledger, rest)
    yield from _others(compare_others(source, target, ("the source", "the target")))
    apart = differences(source.config, target.config)
    parts = (
        [f"part is {source.part!r} in the source and {target.part!r} in the target"]
        if source.part != target.part
        else []
    )
    said = [
        *parts,
        *(f"{key} is {mine} in the source and {other} in the target" for key, (mine, other) in apart.items()),
    ]
    yield Item(
        "configuration",
        FAILED if said else PROVEN,
        "; ".join(said)
        or (
            f"both say the same of all {len(source.config.as_dict())} options, and have the part "
            f"{source.part}"
        ),
    )
    yield from _carried(source, target, *sides)


def _bits(placed: Placement) -> tuple[str, str]:
    return placed.dtype, placed.sha256


def _named(wrong: list[LedgerParameter]) -> str:
    said = []
    for one in wrong[:NAMED]:
        alone = "missing in the target" if one.target is None else "in the target alone"
        said.append(f"{one.name}: {one.difference or alone}")
    return "; ".join(said) + (f"; and {len(wrong) - NAMED} more" if len(wrong) > NAMED else "")


def _others(found: Others) -> Iterator[Item]:
    """Yield whether what is no parameter came along, where there is any that says more than the rest does."""
    said = [f"{pair.name}: {pair.words}" for pair in found.pairs]
    said += [f"{name}: not compared: {why}" for name, why in found.apart.items()]
    words = "; ".join(said[:NAMED]) + (f"; and {len(said) - NAMED} more" if len(said) > NAMED else "")
    if said:
        yield Item(
            OTHERS,
            FAILED if found.pairs else UNVERIFIED,
            (
                f"of {found.same + len(said)}, {len(found.pairs)} differ and {len(found.apart)} could not be "
                f"compared: {words}"
            ),
        )
    elif found.same:
        yield Item(OTHERS, PROVEN, f"each of {found.same} has the same bits on both sides")


def _accounted(ledger: tuple[LedgerParameter, ...], rest: tuple[Other, ...]) -> Item:
    counts = [
        f"{len([one for one in rest if (one.side, one.status) == (side, status)])} {status} in the {side}"
        for side in ("source", "target")
        for status in ("ignored", "tied", "computed", "added")
        if any((one.side, one.status) == (side, status) for one in rest)
    ]
    return Item(
        "every tensor accounted for",
        PROVEN,
        (
            f"{len(ledger)} parameters{'; ' if counts else ''}{', '.join(counts)}; each with its reason; a "
            "tensor that nobody knows would have been refused"
        ),
    )


def _carried(source: Checkpoint, target: Checkpoint, mine: PortSide, theirs: PortSide) -> Iterator[Item]:
    """Yield whether labels and tokenizer came along."""
    if source.labels is None and target.labels is None:
        yield Item("labels", NOT_APPLICABLE, "no side names its classes")
    else:
        same = source.labels == target.labels
        yield Item(
            "labels",
            PROVEN if same else FAILED,
            f"{len(source.labels or ())} names, the same on both sides"
            if same
            else f"{source.labels} in the source and {target.labels} in the target",
        )
    takes = known(theirs.format).carried
    there = [name for name in source.files if name in takes and name != LABELS]
    apart = differing(source, target, ("the source", "the target"))
    wrong = [
        *(f"{name} is missing in the target" for name in there if name not in target.files),
        *(f"{name}: {apart[name]}" for name in there if name in apart),
    ]
    extra = [name for name in alone(target, source) if name not in ("labels", LABELS)]
    beside = f"in the target alone, with nothing to compare it with: {', '.join(extra)}" if extra else ""
    if wrong:
        yield Item("tokenizer", FAILED, "; ".join(wrong))
    elif beside:
        yield Item("tokenizer", UNVERIFIED, beside)
    elif not there:
        yield Item("tokenizer", NOT_APPLICABLE, "the source has none")
    else:
        yield Item("tokenizer", PROVEN, _alike(there, mine, theirs))


def _alike(names: list[str], mine: PortSide, theirs: PortSide) -> str:
    """Return which files have the same bytes, and which say the same otherwise."""
    same = [name for name in names if mine.carried[name] == theirs.carried[name]]
    rest = [name for name in names if name not in same]
    return "; ".join(
        f"{what}: {', '.join(found)}"
        for what, found in (("the same bytes", same), ("the same entries", rest))
        if found
    )


def round_trips(
    source: Checkpoint,
    target: Checkpoint,
    sides: tuple[PortSide, PortSide],
    mine: dict[str, Placement],
    theirs: dict[str, Placement],
    tell: Callable[[str], None],
) -> Iterator[Item]:
    """Yield whether the source comes back from the target's format.

    And the target from the source's, bit for bit.
    """
    for name, checkpoint, form, expected in (
        ("round trip", source, sides[1].format, mine),
        ("round trip back", target, sides[0].format, theirs),
    ):
        tell(f"{name} through {form}")
        yield _round_trip(name, checkpoint, form, expected)


def _round_trip(name: str, checkpoint: Checkpoint, form: str, expected: dict[str, Placement]) -> Item:
    """Write a checkpoint in a format, and read it again."""
    with tempfile.TemporaryDirectory(prefix="concord-") as folder:
        try:
            write(checkpoint, Path(folder) / "there", form)
            found = read(Path(folder) / "there", form)
        except SpecError as error:
            return Item(name, UNVERIFIED, f"{form} was not written and read again: {error.problems[0]}")
        back = placements(found)
    wrong = [
        one
        for one in {**expected, **back}
        if one not in expected or one not in back or _bits(expected[one]) != _bits(back[one])
    ]
    wrong += ["the configuration"] if found.config != checkpoint.config else []
    if wrong:
        return Item(
            name,
            FAILED,
            f"through {form} {len(wrong)} did not come back as they were: {', '.join(wrong[:NAMED])}",
        )
    return Item(
        name,
        PROVEN,
        (
            f"written as {form} and read again, all {len(expected)} parameters have their bits, and the "
            "configuration says the same"
        ),
    )
