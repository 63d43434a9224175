"""The tensors of a file as parameters of the family: which is which by a table.

And what becomes of the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from concord.porting.checkpoint import UNKNOWN, Checkpoint, LazyTensor, LedgerEntry
from concord.porting.registry import Format
from concord.porting.stored import FLOATS, Bits, StoredTensor, in_memory, widened
from concord.spec.config import EncoderConfig
from concord.spec.errors import WeightsError
from concord.spec.parameters import parameters, shape_of
from concord.spec.positions import sinusoid
from concord.spec.sources.layouts import WEIGHT_LAYOUTS
from concord.spec.sources.table import LARGEST_TABLE, POSITIONS, Binding


def unlike(holds: str, name: str, found: Mapping[str, StoredTensor]) -> str:
    """Return what is wrong with a tensor among those of its file, in words; empty: nothing.

    Args:
        holds: what it must hold for the reason to be true for which it is left out. ``positions``: 0, 1, 2
            and so on in one row; ``zeros``; ``state``: as many numbers as the tensor has that its name begins
            with; ``number``: one; empty: whatever it likes.
    """
    shape, count = found[name].shape, math.prod(found[name].shape)
    if holds == "number":
        return "" if count == 1 else f"has shape {shape} but must be one number"
    if holds == "state":
        owner = name.rpartition("/")[0]
        if owner not in found:
            return f"there is no {owner!r} that it could be kept for"
        wanted = found[owner].shape
        return "" if shape == wanted else f"has shape {shape} but must be {wanted}, as {owner!r}"
    if holds == "positions" and count != (shape or (0,))[-1]:
        return f"has shape {shape} but must have one row"
    if holds not in WHOLE:
        return ""
    right = np.arange(count) if holds == "positions" else np.broadcast_to(0, count)
    numbers = widened(found[name].array(), found[name].dtype).reshape(-1)
    wrong = np.flatnonzero(numbers != right)
    return f"element {wrong[0]} is {numbers[wrong[0]]} but must be {right[wrong[0]]}" if len(wrong) else ""


WHOLE = frozenset({"positions", "zeros"})
"""What a tensor may have to hold that says every number: nothing is left that could be compared."""

MOST = 20
"""Lines about the tensors of a file; the first say enough."""

MOST_LAYERS, MOST_HEADS = 1 << 12, 1 << 17
"""Layers of a model, and heads of all of them together: of more the names are not even listed, which would
take all memory."""


def renamed(name: str, prefixes: Sequence[str], prefix: str) -> str:
    """Return a name of a table with another of its prefixes.

    One that does not begin with the first one stays.
    """
    return prefix + name.removeprefix(prefixes[0]) if prefixes and name.startswith(prefixes[0]) else name


def match(
    found: Mapping[str, StoredTensor], configs: Mapping[str, EncoderConfig], form: Format
) -> Checkpoint:
    """Say what the tensors of a file are; none of their numbers is read but those of copies.

    And those that a reason speaks of.

    Args:
        found: the tensors by their names in the file.
        configs: the configuration, by the part of the model that the file may hold, the most complete one
            first.

    Raises:
        WeightsError: listing every tensor that is missing, unexpected, misshapen or of no floating-point
            type, for the part that fits best.
    """
    for config in configs.values():
        if config.num_layers > MOST_LAYERS or config.num_layers * config.num_heads > MOST_HEADS:
            raise WeightsError(
                f"the configuration has {config.num_layers} layers of {config.num_heads} heads but at "
                f"most {MOST_LAYERS} layers, and {MOST_HEADS} heads in all, are looked for "
                f"[source={form.title}]"
            )
    tried = [_Matching(found, config, part, form) for part, config in configs.items()]
    best = min(tried, key=lambda one: len(one.problems))  # of equals the most complete part
    if best.problems:
        raise WeightsError(best.problems[:MOST])
    return Checkpoint(
        best.config,
        best.part,
        best.tensors,
        tuple(best.ledger()),
        others=best.others,
        known=frozenset(best.known),
    )


class _Matching:
    """One part of the model against one file."""

    def __init__(
        self, found: Mapping[str, StoredTensor], config: EncoderConfig, part: str, form: Format
    ) -> None:
        self.found, self.config, self.part, self.rules = found, config, part, form.rules(part)
        self.context = f"source={form.title}, part={part}"
        self.places = form.places(config, part)
        wanted = [name for place in self.places.values() for name in place.names]
        self.prefix = max(
            self.rules.prefixes,
            key=lambda prefix: sum(self._renamed(name, prefix) in self.found for name in wanted),
            default="",
        )
        self.tensors: dict[str, LazyTensor] = {}
        self.others: dict[str, LazyTensor] = {}
        self.owner: dict[str, str] = {}
        self.older: set[str] = set()
        self.known: set[str] = set()
        self.problems: list[str] = []
        self.made: list[LedgerEntry] = []
        self.entries: dict[str, LedgerEntry] = {}
        for name, parameter in parameters(config, part).items():
            self._take(name, shape_of(config, parameter))
        behind = self._carried()
        for native in found:
            if native not in self.owner:
                self._other(native, behind.get(native, ""))

    def _renamed(self, name: str, prefix: str) -> str:
        return renamed(name, self.rules.prefixes, prefix)

    def _spelled(self, name: str) -> str:
        """Return how the file spells a name of the table."""
        name = self._renamed(name, self.prefix)
        for end, other in self.rules.older.items():
            old = name.removesuffix(end) + other
            if name not in self.found and name.endswith(end) and old in self.found:
                self.older.add(old)
                return old
        return name

    def _problem(self, said: str) -> None:
        self.problems.append(f"{said} [{self.context}]")

    def _bind(
        self,
        name: str,
        natives: Sequence[str],
        layout: str,
        shape: tuple[int, ...],
        into: dict[str, LazyTensor],
    ) -> None:
        """Take tensors of the file as one in the canonical layout, if they can be it.

        Args:
            shape: the canonical one.
            into: by canonical name.
        """
        end = f"[parameter={name}, {self.context}]"
        wanted, before = WEIGHT_LAYOUTS[layout].shape(shape, self.config.num_heads), len(self.problems)
        for native in natives:
            stored = self.found.get(native)
            if stored is None:
                self.problems.append(f"{native!r} is missing but is required {end}")
            elif stored.dtype not in FLOATS:
                self.problems.append(
                    f"{native!r} has dtype {stored.dtype} but must be a floating-point type {end}"
                )
            elif stored.shape != wanted:
                self.problems.append(f"{native!r} has shape {stored.shape} but must be {wanted} {end}")
        if len(self.problems) == before:
            into[name] = _canonical(shape, natives, layout, [self.found[native] for native in natives])

    def _take(self, name: str, shape: tuple[int, ...]) -> None:
        """Find a parameter."""
        place, kept = self.places.get(name), self.rules.positions if name == POSITIONS else None
        natives = [self._spelled(native) for native in place.names] if place else []
        layout = place.layout if place else ""
        if not place and kept and (native := self._renamed(kept.name, self.prefix)) in self.found:
            natives, layout = [native], kept.layout
        if natives:
            self.owner |= dict.fromkeys([native for native in natives if native in self.found], name)
            self._bind(name, natives, layout, shape, self.tensors)
        elif name != POSITIONS or self.config.positions != "sinusoidal":
            self._problem(f"{name!r} is required by this configuration but the source has no weight for it")
        elif math.prod(shape) > LARGEST_TABLE:
            self._problem(
                f"the position table has {shape[0]} rows of {shape[1]} numbers but at most {LARGEST_TABLE} "
                "numbers are computed"
            )
        else:
            stored = in_memory(sinusoid(self.config))
            self.tensors[name] = LazyTensor(stored.dtype, stored.shape, stored.bits, "", "table")
            reason = "the file has no table of fixed positions: it follows from the configuration"
            self.made.append(LedgerEntry("", name, "computed", reason, stored))

    def _carried(self) -> dict[str, str]:
        """Take what the whole model or another head has and this part has not, where the file has it.

        Return which it is, by its name there.
        """
        behind, whole = {}, parameters(self.config)
        for name, kept in self.rules.carried.items():
            native, layout = self._spelled(kept.name), WEIGHT_LAYOUTS[kept.layout]
            stored = self.found.get(native)
            if stored is None or (name not in whole and len(stored.shape) != layout.rank):
                continue
            behind[native] = name
            # The shapes of a head that the family does not have are the file's own.
            shape = (
                shape_of(self.config, whole[name])
                if name in whole
                else layout.shape(stored.shape, self.config.num_heads)
            )
            self._bind(name, [native], kept.layout, shape, self.others)
        return behind

    def _other(self, native: str, name: str) -> None:
        """Say what becomes of a tensor that is no parameter's.

        Args:
            name: that kinds of file share for it; empty: none.
        """
        stored, original = self.found[native], self._original(native)
        ignored = next(
            (why for pattern, why in self.rules.ignored.items() if self._fits(native, pattern)), None
        )
        copied = bool(original) and _held(stored) == _held(self.found[original])
        if ignored is None and not name and not copied:
            self._problem(f"{native!r} is unexpected: the source has no such tensor in this configuration")
            return
        reason = ignored.reason if ignored else f"stands behind the part {self.part!r}"
        if wrong := unlike(ignored.holds if ignored else "", native, self.found):
            self._problem(f"{native!r} {wrong}: otherwise it is not what it is said to be, {reason}")
            return
        reason += f"; it is no copy of {original!r}" if original else ""
        reason += "; it is carried over to files that have a place for it" if name else ""
        name = name or self._plain(native)
        self.others.setdefault(name, _canonical(stored.shape, [native], UNKNOWN, [stored]))
        self.entries[native] = (
            LedgerEntry(
                native, self.owner.get(original), "tied", f"a copy of {original!r}, bit for bit", stored
            )
            if copied
            else LedgerEntry(native, None, "ignored", reason, stored)
        )
        if copied or (ignored and ignored.holds in WHOLE):
            self.known.add(name)

    def _original(self, native: str) -> str:
        """Return what a tensor should be a copy of; empty: of nothing, or of nothing that is there."""
        owners = [
            self._spelled(owner)
            for name, owner in self.rules.tied.items()
            if native == self._renamed(name, self.prefix)
        ]
        return next((owner for owner in owners if owner in self.found), "")

    def _fits(self, native: str, pattern: str) -> bool:
        """Say whether a name is one of a pattern. Heads stand beside the bare model.

        They have no prefix, whatever it has.
        """
        return any(fnmatchcase(native, spelled) for spelled in (self._renamed(pattern, self.prefix), pattern))

    def _plain(self, native: str) -> str:
        """Return a name without the prefix of its file, unless another tensor has that name."""
        plain = native.removeprefix(self.prefix)
        return native if plain in self.found or plain in self.others else plain

    def ledger(self) -> Iterator[LedgerEntry]:
        """Yield a line for each tensor of the file, then for what is in none."""
        for native, stored in self.found.items():
            reason = "under an older name" if native in self.older else ""
            yield self.entries.get(native) or LedgerEntry(native, self.owner[native], "read", reason, stored)
        yield from self.made


def _held(stored: StoredTensor) -> tuple[Any, ...]:
    return stored.shape, stored.dtype, stored.sha256()


def _canonical(
    shape: tuple[int, ...], foreign: Sequence[str], layout: str, pieces: Sequence[StoredTensor]
) -> LazyTensor:
    def bits() -> Bits:
        return (
            pieces[0].bits()
            if layout == UNKNOWN
            else WEIGHT_LAYOUTS[layout].canonical([piece.bits() for piece in pieces])
        )

    return LazyTensor(pieces[0].dtype, shape, bits, " + ".join(foreign), layout)


def piece(tensor: LazyTensor, place: Binding, number: int, heads: int) -> StoredTensor:
    """Return a tensor of another kind of file: a parameter, or one of the pieces that it is kept in.

    Args:
        number: of the piece.
        heads: of the model.
    """
    return StoredTensor(
        tensor.dtype,
        place.shape,
        lambda: WEIGHT_LAYOUTS[place.layout].native(tensor.bits(), heads)[number],
    )
