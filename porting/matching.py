"""The tensors of a file as parameters of the family: which is which by a table.

And what becomes of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from concord.porting.checkpoint import UNKNOWN, Checkpoint, LazyTensor, LedgerEntry
from concord.porting.holds import HOLDS, WHOLE
from concord.porting.stored import FLOATS, Bits, StoredTensor, in_memory
from concord.spec.config import EncoderConfig
from concord.spec.errors import WeightsError
from concord.spec.parameters import parameters, shape_of
from concord.spec.positions import sinusoid
from concord.spec.sources.layouts import WEIGHT_LAYOUTS
from concord.spec.sources.schema import CheckpointTable
from concord.spec.sources.table import LARGEST_TABLE, POSITIONS, Binding

MOST = 20
"""Lines about the tensors of a file; the first say enough."""

MOST_LAYERS, MOST_HEADS = 1 << 12, 1 << 17
"""Layers of a model, and heads of all of them together: of more the names are not even listed, which would
take all memory."""


@dataclass(frozen=True)
class Names:
    """How a kind of file names and lays out parameters.

    Attributes:
        title: for messages.
        parts: of the model that such files hold, the most complete one first.
        places: where each parameter is kept, by canonical name, for a configuration and a part.
        rules: what such files have besides, by part.
    """

    title: str
    parts: tuple[str, ...]
    places: Callable[[EncoderConfig, str], Mapping[str, Binding]]
    rules: Mapping[str, CheckpointTable] = field(default_factory=dict)

    def of(self, part: str) -> CheckpointTable:
        """Return what such files have besides for a part."""
        return self.rules.get(part, CheckpointTable())


def renamed(name: str, prefixes: Sequence[str], prefix: str) -> str:
    """Return a name of a table with another of its prefixes.

    One that does not begin with the first one stays.
    """
    return prefix + name.removeprefix(prefixes[0]) if prefixes and name.startswith(prefixes[0]) else name


def match(
    found: Mapping[str, StoredTensor], configs: Mapping[str, EncoderConfig], names: Names
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
                f"[source={names.title}]"
            )
    tried = [_Matching(found, config, part, names) for part, config in configs.items()]
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
        self, found: Mapping[str, StoredTensor], config: EncoderConfig, part: str, names: Names
    ) -> None:
        self.found, self.config, self.part, self.rules = found, config, part, names.of(part)
        self.context = f"source={names.title}, part={part}"
        self.places = names.places(config, part)
        self.prefix = self._prefix()
        self.tensors: dict[str, LazyTensor] = {}
        self.owner: dict[str, str] = {}
        self.older: set[str] = set()
        self.problems: list[str] = []
        self.made: dict[str, LedgerEntry] = {}
        for name, parameter in parameters(config, part).items():
            self._take(name, shape_of(config, parameter))
        self.others, self.behind = self._carried()
        self.known: set[str] = set()
        self.entries: dict[str, LedgerEntry] = {}
        for native in found:
            if native not in self.owner:
                self._other(native)

    def _prefix(self) -> str:
        """Return the prefix with which most names are there."""
        wanted = [name for place in self.places.values() for name in place.names]
        return max(
            self.rules.prefixes,
            key=lambda prefix: sum(self._renamed(name, prefix) in self.found for name in wanted),
            default="",
        )

    def _renamed(self, name: str, prefix: str) -> str:
        return renamed(name, self.rules.prefixes, prefix)

    def _spelled(self, name: str) -> str:
        """Return how the file spells a name of the table."""
        name = self._renamed(name, self.prefix)
        for end, other in self.rules.older.items():
            if (
                name not in self.found
                and name.endswith(end)
                and (old := name.removesuffix(end) + other) in self.found
            ):
                self.older.add(old)
                return old
        return name

    def _take(self, name: str, shape: tuple[int, ...]) -> None:
        place = self.places.get(name)
        if name == POSITIONS and place is None:
            self._positions(shape)
            return
        if place is None:
            self.problems.append(
                f"{name!r} is required by this configuration but the source has no weight for it "
                f"[{self.context}]"
            )
            return
        spelled = [self._spelled(native) for native in place.names]
        wrong = [problem for native in spelled for problem in self._wrong(native, name, place.shape)]
        self.owner.update(dict.fromkeys((native for native in spelled if native in self.found), name))
        self.problems += wrong
        if not wrong:
            self.tensors[name] = _canonical(
                shape, spelled, place.layout, [self.found[native] for native in spelled]
            )

    def _wrong(self, native: str, name: str, shape: tuple[int, ...]) -> Iterator[str]:
        end = f"[parameter={name}, {self.context}]"
        if native not in self.found:
            yield f"{native!r} is missing but is required {end}"
        elif self.found[native].dtype not in FLOATS:
            yield f"{native!r} has dtype {self.found[native].dtype} but must be a floating-point type {end}"
        elif self.found[native].shape != shape:
            yield f"{native!r} has shape {self.found[native].shape} but must be {shape} {end}"

    def _positions(self, shape: tuple[int, ...]) -> None:
        """Take the table of fixed positions from where a file may keep it, or compute it."""
        place = self.rules.positions
        if place and (native := self._renamed(place.name, self.prefix)) in self.found:
            wrong = list(
                self._wrong(
                    native, POSITIONS, WEIGHT_LAYOUTS[place.layout].shape(shape, self.config.num_heads)
                )
            )
            self.problems += wrong
            self.owner[native] = POSITIONS
            if not wrong:
                self.tensors[POSITIONS] = _canonical(shape, [native], place.layout, [self.found[native]])
        elif self.config.positions != "sinusoidal":
            self.problems.append(
                f"{POSITIONS!r} is required by this configuration but the source has no weight for it "
                f"[{self.context}]"
            )
        elif self.config.max_positions * self.config.d_model > LARGEST_TABLE:
            self.problems.append(
                f"the position table has {self.config.max_positions} rows of {self.config.d_model} "
                f"numbers but at most {LARGEST_TABLE} numbers are computed [{self.context}]"
            )
        else:
            stored = in_memory(sinusoid(self.config))
            self.tensors[POSITIONS] = LazyTensor(stored.dtype, stored.shape, stored.bits, "", "table")
            self.made[POSITIONS] = LedgerEntry(
                "",
                POSITIONS,
                "computed",
                "the file has no table of fixed positions: it follows from the configuration",
                stored.dtype,
                stored.shape,
                stored,
            )

    def _carried(self) -> tuple[dict[str, LazyTensor], dict[str, str]]:
        """Return what the whole model or another head has and this part has not, where the file has it.

        And what it is called there.
        """
        found: dict[str, LazyTensor] = {}
        spelled = {}
        whole = parameters(self.config)
        for name, place in self.rules.carried.items():
            native = self._spelled(place.name)
            if native not in self.found or (
                name not in whole and len(self.found[native].shape) != WEIGHT_LAYOUTS[place.layout].rank
            ):
                continue
            spelled[native] = name
            # The shapes of a head that the family does not have are the file's own.
            layout = WEIGHT_LAYOUTS[place.layout]
            shape = (
                shape_of(self.config, whole[name])
                if name in whole
                else layout.shape(self.found[native].shape, self.config.num_heads)
            )
            wrong = list(self._wrong(native, name, layout.shape(shape, self.config.num_heads)))
            self.problems += wrong
            found |= {} if wrong else {name: _canonical(shape, [native], place.layout, [self.found[native]])}
        return found, spelled

    def _other(self, native: str) -> None:
        """Say what becomes of a tensor that is no parameter's."""
        stored, name = self.found[native], self.behind.get(native, "")
        original = self._original(native)
        copied = (
            bool(original)
            and stored.shape == self.found[original].shape
            and stored.dtype == self.found[original].dtype
            and stored.sha256() == self.found[original].sha256()
        )
        ignored = next(
            (why for pattern, why in self.rules.ignored.items() if self._fits(native, pattern)), None
        )
        if ignored is None and not name and not copied:
            self.problems.append(
                f"{native!r} is unexpected: the source has no such tensor in this configuration "
                f"[{self.context}]"
            )
            return
        reason = ignored.reason if ignored else f"stands behind the part {self.part!r}"
        if ignored and ignored.holds and (wrong := HOLDS[ignored.holds](native, self.found)):
            self.problems.append(
                f"{native!r} {wrong}: otherwise it is not what it is said to be, {reason} [{self.context}]"
            )
            return
        reason += f"; it is no copy of {original!r}" if original else ""
        reason += "; it is carried over to files that have a place for it" if name else ""
        name = name or self._plain(native)
        self.others.setdefault(name, _canonical(stored.shape, [native], UNKNOWN, [stored]))
        if copied:
            self.entries[native] = LedgerEntry(
                native,
                self.owner.get(original),
                "tied",
                f"a copy of {original!r}, bit for bit",
                stored.dtype,
                stored.shape,
                stored,
            )
        else:
            self.entries[native] = LedgerEntry(
                native, None, "ignored", reason, stored.dtype, stored.shape, stored
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
            other = self.entries.get(native)
            reason = "under an older name" if native in self.older else ""
            yield other or LedgerEntry(
                native, self.owner[native], "read", reason, stored.dtype, stored.shape, stored
            )
        yield from self.made.values()


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
