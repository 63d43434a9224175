"""What the files of a port prove: hashes of both sides, what differs, and the way there and back."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from concord.conformance.wording import once
from concord.porting.certificate.certificate import (
    FAILED,
    NOT_APPLICABLE,
    OTHERS,
    PROVEN,
    UNVERIFIED,
    Claim,
    HashedFile,
    HashedTensor,
    PortSide,
)
from concord.porting.checkpoint import Checkpoint
from concord.porting.comparison.checkpoints import Comparison, Others
from concord.porting.folder import LABELS, folder_of
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
"""Tensors that a claim names."""

SIDES = ("the source", "the target")


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
    """Return what is known of one of the two checkpoints; one tensor is read at a time."""
    tensors = [
        HashedTensor(
            *(one.name, one.foreign, one.status, one.transform, one.dtype, one.shape),
            *(one.sha256(), one.reason),
        )
        for one in checkpoint.ledger
    ]
    return PortSide(
        str(path),
        checkpoint.format,
        checkpoint.recognised,
        checkpoint.part,
        checkpoint.config,
        files_of(path),
        {one.name: one for one in tensors[: len(checkpoint.tensors)]},
        tuple(tensors[len(checkpoint.tensors) :]),
    )


def _claim(name: str, wrong: str, right: str) -> Claim:
    """Return a claim that is proven, unless something is wrong."""
    return Claim(name, FAILED if wrong else PROVEN, wrong or right)


def claims(
    source: Checkpoint, target: Checkpoint, sides: tuple[PortSide, PortSide], compared: Comparison
) -> Iterator[Claim]:
    """Yield what files and tensors alone prove."""
    wrong: list[tuple[str, str, object]] = [(pair.name, pair.said, pair.reason) for pair in compared.pairs]
    wrong += [(name, "missing in the target", "missing") for name in compared.missing]
    wrong += [(name, "in the target alone", "extra") for name in compared.extra]
    count, told = compared.same + len(wrong), first_of([*map(str.strip, once(wrong))], NAMED, "; ")
    said = f"{len(wrong)} of {count} parameters are not those of the source: {told}"
    right = f"each of {count} parameters has the same bits in the canonical layout on both sides"
    right += "".join(
        f"; {number} {status} in {where}, each with its reason"
        for where, side in zip(SIDES, sides, strict=True)
        for status, number in Counter(one.status for one in side.others).items()
    )
    yield _claim("same bits", said if wrong else "", right)
    yield from _others(compared.others)
    apart = [f"{key} is {a} in the source and {b} in the target" for key, (a, b) in compared.config.items()]
    count = len(source.config.as_dict())
    right = f"both say the same of all {count} options, and have the part {source.part}"
    yield _claim("configuration", "; ".join(apart), right)
    if source.labels is None and target.labels is None:
        yield Claim("labels", NOT_APPLICABLE, "no side names its classes")
    else:
        same = source.labels == target.labels
        said = f"{source.labels} in the source and {target.labels} in the target"
        right = f"{len(source.labels or ())} names, the same on both sides"
        yield _claim("labels", "" if same else said, right)
    yield _tokenizer(source, target, sides[1].format, compared)


def _others(found: Others) -> Iterator[Claim]:
    """Yield whether what is no parameter came along, where there is any that says more than the rest does."""
    said = once((pair.name, pair.said, pair.reason) for pair in found.pairs)
    said += once((name, f"not compared: {why}", why) for name, why in found.apart.items())
    if said:
        every = found.same + len(found.pairs) + len(found.apart)
        counted = f"of {every}, {len(found.pairs)} differ and {len(found.apart)} could not be compared"
        yield Claim(
            OTHERS,
            FAILED if found.pairs else UNVERIFIED,
            f"{counted}: {first_of([*map(str.strip, said)], NAMED, '; ')}",
        )
    elif found.same:
        yield Claim(OTHERS, PROVEN, f"each of {found.same} has the same bits on both sides")


def _tokenizer(source: Checkpoint, target: Checkpoint, form: str, compared: Comparison) -> Claim:
    """Return whether what lies beside the weights came along, but for labels."""
    there = [name for name in source.files if name in known(form).carried and name != LABELS]
    wrong = [
        *(f"{name} is missing in the target" for name in there if name not in target.files),
        *(f"{name}: {compared.files[name]}" for name in there if name in compared.files),
    ]
    extra = [name for name in compared.alone[1] if name not in ("labels", LABELS)]
    if extra and not wrong:
        said = f"in the target alone, with nothing to compare it with: {', '.join(extra)}"
        return Claim("tokenizer", UNVERIFIED, said)
    if not there:
        return Claim("tokenizer", NOT_APPLICABLE, "the source has none")
    same = [name for name in there if source.files[name] == target.files.get(name)]
    kinds = {"the same bytes": same, "the same entries": [name for name in there if name not in same]}
    right = "; ".join(f"{what}: {', '.join(found)}" for what, found in kinds.items() if found)
    return _claim("tokenizer", "; ".join(wrong), right)


def round_trip(name: str, checkpoint: Checkpoint, side: PortSide, form: str) -> Claim:
    """Write a checkpoint in a format, and read it again: it has to come back bit for bit."""
    with tempfile.TemporaryDirectory(prefix="concord-") as folder:
        try:
            write(checkpoint, Path(folder) / "there", form)
            back = read(Path(folder) / "there", form)
        except SpecError as error:
            return Claim(name, UNVERIFIED, f"{form} was not written and read again: {error.problems[0]}")
        again = {one: tensor.held for one, tensor in back.tensors.items()}
    held = {one: tensor.held for one, tensor in side.parameters.items()}
    wrong = [one for one in {**held, **again} if held.get(one) != again.get(one)]
    wrong += ["the configuration"] * (back.config != checkpoint.config)
    lost = f"through {form} {len(wrong)} did not come back as they were: {', '.join(wrong[:NAMED])}"
    return _claim(
        name,
        lost if wrong else "",
        f"written as {form} and read again, all {len(held)} parameters have their bits, and the "
        "configuration says the same",
    )
