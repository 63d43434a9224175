"""Assignment of a file's tensors to the family's parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np

from concord.conformance.wording import FEW, gather
from concord.porting.checkpoint import UNKNOWN, Checkpoint, LazyTensor
from concord.porting.file_tensors import FLOATS, Bits, StoredTensor, in_memory, widened
from concord.porting.registry import Format
from concord.spec.config import EncoderConfig
from concord.spec.errors import WeightsError
from concord.spec.parameters import parameters, shape_of
from concord.spec.positions import sinusoid
from concord.spec.sources.layouts import WEIGHT_LAYOUTS
from concord.spec.sources.schema import Ignored
from concord.spec.sources.source_tables import POSITIONS, Binding
from concord.spec.text import first_of


def contradiction(holds: str, tensor: StoredTensor) -> str:
    """Describe how a buffer differs from ``positions`` or ``zeros``, if it does."""
    if not holds:
        return ""
    count = math.prod(tensor.shape)
    if holds == "positions" and count != (tensor.shape or (0,))[-1]:
        return f"has shape {tensor.shape} but must have one row"
    expected = np.arange(count) * (holds == "positions")
    actual = widened(tensor.array(), tensor.dtype).reshape(-1)
    wrong = np.flatnonzero(actual != expected)[:1].tolist()
    return "".join(f"is {actual[i]} at element {i} but must be {expected[i]}" for i in wrong)


# Maximum lines about a file's tensors: a wrong table misnames all of them, but a few lines suffice.
MOST = 20


def renamed(name: str, prefixes: Sequence[str], prefix: str) -> str:
    """Replace a table's first prefix; names without it are unchanged."""
    return prefix + name.removeprefix(prefixes[0]) if prefixes and name.startswith(prefixes[0]) else name


def match(
    file_tensors: Mapping[str, StoredTensor], configs: Mapping[str, EncoderConfig], form: Format
) -> Checkpoint:
    """Assign a file's tensors to parameters, reading values only to verify copies and buffers.

    Args:
        configs: configurations by candidate part, the most complete part first.

    Raises:
        WeightsError: listing the best fitting part's missing, unexpected, misshapen and non-float tensors.
    """
    candidates = [_Matching(file_tensors, config, part, form) for part, config in configs.items()]
    best = min(candidates, key=lambda candidate: len(candidate.problems))  # on a tie, the most complete part
    if best.problems:
        raise WeightsError([*_lines(best.problems)][:MOST])
    return Checkpoint(best.config, best.part, best.tensors, file_tensors, others=best.others)


def _lines(problems: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    for group in gather(problems, lambda problem: problem[1]).values():
        # One line for many tensors with the same problem.
        few = len(group) <= FEW
        more = (
            ""
            if few
            else f", likewise {len(group) - 1} more: {first_of([problem[0] for problem in group[1:]], FEW)}"
        )
        yield from (
            f"{name} {message}{more} [{context}]" for name, message, context in group[: FEW if few else 1]
        )


class _Matching:
    def __init__(
        self, file_tensors: Mapping[str, StoredTensor], config: EncoderConfig, part: str, form: Format
    ) -> None:
        self.file_tensors, self.config, self.part, self.rules = file_tensors, config, part, form.rules(part)
        self.context = f"source={form.title}, part={part}"
        self.places = form.places(config, part)
        names = [name for place in self.places.values() for name in place.names]
        # A model may be bare or inside another model; use the prefix that fits most names.
        self.prefix = max(
            self.rules.prefixes,
            key=lambda prefix: sum(
                renamed(name, self.rules.prefixes, prefix) in file_tensors for name in names
            ),
            default="",
        )
        self.tensors: dict[str, LazyTensor] = {}
        self.others: dict[str, LazyTensor] = {}
        self.owner: dict[str, str] = {}
        self.older: set[str] = set()
        self.problems: list[tuple[str, str, str]] = []
        for name, parameter in parameters(config, part).items():
            self._take(name, shape_of(config, parameter))
        carried = {self._spelled(entry.name): name for name, entry in self.rules.carried.items()}
        for native in file_tensors:
            if native not in self.owner:
                self._leave(native, carried.get(native, ""))

    def _named(self, name: str) -> str:
        return renamed(name, self.rules.prefixes, self.prefix)

    def _spelled(self, name: str) -> str:
        name = self._named(name)
        # As in TensorFlow 1's LayerNorm.gamma, which older Hugging Face files kept.
        for end, other in self.rules.older.items():
            old = name.removesuffix(end) + other
            if name not in self.file_tensors and name.endswith(end) and old in self.file_tensors:
                self.older.add(old)
                return old
        return name

    def _problem(self, name: str, message: str, context: str = "") -> None:
        self.problems.append((repr(name), message, context + self.context))

    def _bind(
        self, name: str, natives: Sequence[str], layout: str, shape: tuple[int, ...]
    ) -> dict[str, LazyTensor]:
        """Join tensors into one of canonical shape; empty if they do not fit."""
        expected, count = WEIGHT_LAYOUTS[layout].shape(shape, self.config.num_heads), len(self.problems)
        for native in natives:
            stored, context = self.file_tensors.get(native), f"parameter={name}, "
            if stored is None:
                self._problem(native, "is missing but is required", context)
            elif stored.dtype not in FLOATS:
                self._problem(native, f"has dtype {stored.dtype} but must be a floating-point type", context)
            elif stored.shape != expected:
                self._problem(native, f"has shape {stored.shape} but must be {expected}", context)
        if len(self.problems) > count:
            return {}
        pieces = [self.file_tensors[native] for native in natives]

        def bits() -> Bits:
            return WEIGHT_LAYOUTS[layout].canonical([piece.bits() for piece in pieces])

        reason = "under an older name" if self.older.intersection(natives) else ""
        foreign = " + ".join(natives)
        return {name: LazyTensor(pieces[0].dtype, shape, bits, foreign, layout, name, reason=reason)}

    def _take(self, name: str, shape: tuple[int, ...]) -> None:
        place, buffer = self.places.get(name), self.rules.positions if name == POSITIONS else None
        natives = [self._spelled(native) for native in place.names] if place else []
        layout = place.layout if place else ""
        # Fixed positions are not weights of the source, but some files contain them as a buffer.
        if not place and buffer and (native := self._named(buffer.name)) in self.file_tensors:
            natives, layout = [native], buffer.layout
        if natives:
            self.owner |= dict.fromkeys([native for native in natives if native in self.file_tensors], name)
            self.tensors |= self._bind(name, natives, layout, shape)
        elif name != POSITIONS or self.config.positions != "sinusoidal":
            self._problem(name, "is required by this configuration but the source has no weight for it")
        else:
            stored = in_memory(sinusoid(self.config))
            reason = "the file has no table of fixed positions: it follows from the configuration"
            table = LazyTensor(stored.dtype, stored.shape, stored.bits, "", "table", name)
            self.tensors[name] = replace(table, status="computed", reason=reason)

    def _original(self, native: str) -> str:
        owners = (
            self._spelled(owner) for copy, owner in self.rules.tied.items() if native == self._named(copy)
        )
        return next((owner for owner in owners if owner in self.file_tensors), "")

    def _ignored(self, native: str) -> Ignored | None:
        # Heads are outside the bare model, so they never have its prefix.
        return next(
            (
                rule
                for pattern, rule in self.rules.ignored.items()
                if any(fnmatchcase(native, glob) for glob in (self._named(pattern), pattern))
            ),
            None,
        )

    def _leave(self, native: str, name: str) -> None:
        stored, all_parameters = self.file_tensors[native], parameters(self.config)
        layout = self.rules.carried[name].layout if name else UNKNOWN
        if name and name not in all_parameters and len(stored.shape) != WEIGHT_LAYOUTS[layout].rank:
            name = ""
        original, ignored = self._original(native), self._ignored(native)
        owner = self.file_tensors.get(original, stored)
        copied = bool(original) and (stored.shape, stored.held) == (owner.shape, owner.held)
        if ignored is None and not name and not copied:
            # Nothing is skipped silently: a tensor without an entry in the ledger is refused (decision 0027).
            self._problem(native, "is unexpected: the source has no such tensor in this configuration")
            return
        reason = ignored.reason if ignored else f"comes after the part {self.part!r}"
        if wrong := contradiction(ignored.holds if ignored else "", stored):
            self._problem(native, f"{wrong}, because it is described as {reason!r}")
            return
        # A tied head may have been trained separately; only the bits show whether it is a copy.
        reason += f"; it is not a copy of {original!r}" if original else ""
        if name:
            reason += "; it is carried over to files that have a place for it"
            # Heads unknown to the family keep the file's shapes.
            shape = WEIGHT_LAYOUTS[layout].shape(stored.shape, self.config.num_heads)
            shape = shape_of(self.config, all_parameters[name]) if name in all_parameters else shape
            tensors = self._bind(name, [native], layout, shape)
        else:
            plain = native.removeprefix(self.prefix)
            plain = native if plain in self.file_tensors or plain in self.others else plain
            tensors = {plain: LazyTensor(stored.dtype, stored.shape, stored.bits, native, UNKNOWN)}
        for shared, tensor in tensors.items():
            self.others[shared] = replace(
                tensor,
                name=self.owner.get(original, "") if copied else "",
                status="tied" if copied else "ignored",
                reason=f"a copy of {original!r}, bit for bit" if copied else reason,
                owner=original,
                redundant=copied or bool(ignored and ignored.holds),
            )


def piece(tensor: LazyTensor, place: Binding, number: int, heads: int) -> StoredTensor:
    """A parameter or a piece in another format's form."""
    return StoredTensor(
        tensor.dtype,
        place.shape,
        lambda: WEIGHT_LAYOUTS[place.layout].native(tensor.bits(), heads)[number],
    )
