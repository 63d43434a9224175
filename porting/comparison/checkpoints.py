"""Two checkpoints, tensor by tensor: two tensors are in memory at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from concord.conformance.fields import also
from concord.porting.checkpoint import UNKNOWN, Checkpoint, LazyTensor
from concord.porting.comparison.beside import alone, differing
from concord.porting.comparison.kinds import TensorDifference, classify, digest
from concord.porting.comparison.words import cause, say
from concord.spec.config import EncoderConfig


@dataclass(frozen=True)
class Pair:
    """A tensor that both checkpoints have, and that is not the same in both.

    Attributes:
        name: the canonical one; of what is no parameter, the one in the first's file.
        difference: of the second from the first.
        words: the same in words.
        cause: what is likely to have caused it; empty: nobody can say.
        other: the parameter of the first whose bits the second has here; empty: none, or its own.
        dtypes: of the first and of the second.
    """

    name: str
    difference: TensorDifference
    words: str
    cause: str = ""
    other: str = ""
    dtypes: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Others:
    """What came of the tensors that are no parameters, such as heads that the family does not have.

    Attributes:
        same: how many have the same bits.
        pairs: those of both that have not.
        apart: those that could not be compared, by the name in the file that has it, and why.
    """

    same: int = 0
    pairs: tuple[Pair, ...] = ()
    apart: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """What a comparison of two checkpoints came to.

    Attributes:
        same: how many parameters have the same bits.
        pairs: those of both that have not, in the order of computation.
        missing: those of the first that the second lacks.
        extra: those that the second alone has.
        config: fields of the configuration that differ, and their values.
        parts: of the model that each has.
        files: those beside the weights that both have and that do not say the same, and in what, in words;
            ``labels`` too.
        alone: such files that the first alone has, and the second.
        others: see :class:`Others`.
    """

    written = also("exit_code", "summary")

    same: int
    pairs: tuple[Pair, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    config: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    parts: tuple[str, str] = ("", "")
    files: Mapping[str, str] = field(default_factory=dict)
    alone: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    others: Others = field(default_factory=Others)

    @property
    def exit_code(self) -> int:
        """0: the same bits, names and configuration, and all else that both have says the same; 1: not."""
        return (
            1
            if self.pairs or self.missing or self.extra or self.config or self.files or self.others.pairs
            else 0
        )

    @property
    def summary(self) -> str:
        """What it came to, in a sentence."""
        counts = Counter("swapped" if pair.other else pair.difference.kind for pair in self.pairs)
        said = [
            f"{self.same} of {self.same + len(self.pairs)} parameters have the same bits",
            *(f"{count} {kind}" for kind, count in counts.items()),
        ]
        for count, what in ((self.others.same, "the same bits"), (len(self.others.pairs), "other bits")):
            said += [
                f"of the tensors that are no parameters {count} {'have' if count > 1 else 'has'} {what}"
            ] * bool(count)
        said += [f"{len(self.others.apart)} not compared"] * bool(self.others.apart)
        said += [f"{len(self.missing)} missing in B"] * bool(self.missing) + [
            f"{len(self.extra)} in B alone"
        ] * bool(self.extra)
        options = f"{len(self.config)} options differ" if len(self.config) > 1 else "1 option differs"
        said.append(options if self.config else "the same configuration")
        said += [f"{', '.join(self.files)} {'differ' if len(self.files) > 1 else 'differs'}"] * bool(
            self.files
        )
        return "; ".join(said)


def compare(
    first: Checkpoint, second: Checkpoint, progress: Callable[[int], None] = lambda done: None
) -> Comparison:
    """Compare two checkpoints.

    Args:
        progress: takes how many parameters have been looked at.
    """
    common = [name for name in first.tensors if name in second.tensors]
    digests = {name: (tensor.dtype, digest(tensor.bits())) for name, tensor in first.tensors.items()}
    pairs = []
    for number, name in enumerate(common, start=1):
        found = _pair(name, first.tensors, second.tensors, first.config, digests)
        if found is not None:
            pairs.append(found)
        progress(number)
    missing, extra = (
        [name for name in one.tensors if name not in other.tensors]
        for one, other in ((first, second), (second, first))
    )
    options, parts = differences(first.config, second.config), (first.part, second.part)
    beside = differing(first, second), (alone(first, second), alone(second, first))
    return Comparison(
        len(common) - len(pairs),
        tuple(pairs),
        tuple(missing),
        tuple(extra),
        options,
        parts,
        *beside,
        compare_others(first, second),
    )


def compare_others(first: Checkpoint, second: Checkpoint, sides: tuple[str, str] = ("A", "B")) -> Others:
    """Compare what is no parameter, but for what holds nothing but what the rest says.

    Args:
        sides: what the two are called.
    """
    found: list[Pair] = []
    apart: dict[str, str] = {}
    open_ = [
        name
        for name in {**first.others, **second.others}
        if any(name in one.others and name not in one.known for one in (first, second))
    ]
    for name in open_:
        alone_in = next(
            (side for one, side in zip((second, first), sides, strict=True) if name not in one.others), ""
        )
        foreign = next(one.others[name].foreign for one in (first, second) if name in one.others)
        pair = None if alone_in else _pair(name, first.others, second.others, first.config, {})
        if alone_in:
            apart[foreign] = f"is in {alone_in} alone"
        elif (
            pair
            and first.source != second.source
            and UNKNOWN in (first.others[name].transform, second.others[name].transform)
        ):
            apart[foreign] = "no table says how it is laid out in files of both kinds"
        elif pair:
            found.append(replace(pair, name=foreign))
    return Others(len(open_) - len(found) - len(apart), tuple(found), apart)


def differences(first: EncoderConfig, second: EncoderConfig) -> dict[str, tuple[str, str]]:
    """Return the options in which two configurations differ, and their values as text."""
    mine, other = first.as_dict(), second.as_dict()
    return {
        key: (str(mine.get(key)), str(other.get(key)))
        for key in {**mine, **other}
        if mine.get(key) != other.get(key)
    }


def _pair(
    name: str,
    first: Mapping[str, LazyTensor],
    second: Mapping[str, LazyTensor],
    config: EncoderConfig,
    digests: Mapping[str, tuple[str, str]],
) -> Pair | None:
    """Return how a tensor differs; None: not at all.

    Args:
        digests: of those of the first whose place it may have taken.
    """
    mine, theirs = first[name], second[name]
    found = (theirs.dtype, digest(theirs.bits()))
    if mine.shape == theirs.shape and found == (digests.get(name) or (mine.dtype, digest(mine.bits()))):
        return None
    dtypes = (mine.dtype, theirs.dtype)
    others = [
        other
        for other, key in digests.items()
        if key == found and other != name and first[other].shape == theirs.shape
    ]
    if others:
        other = next((one for one in others if one.rpartition(".")[2] == name.rpartition(".")[2]), others[0])
        why = (
            "names were mapped to each other the wrong way"
            if _same_layer(name, other)
            else "tensors of one layer were taken for those of another"
        )
        return Pair(
            name, TensorDifference("different"), f"it is A's {other}, bit for bit", why, other, dtypes
        )
    difference = classify(mine.read(), theirs.read(), config.num_heads, head_axis(name))
    square = len(mine.shape) == 2 and mine.shape[0] == mine.shape[1]
    return Pair(
        name, difference, said(difference, mine, theirs), cause(name, difference, config, square), "", dtypes
    )


def said(difference: TensorDifference, mine: LazyTensor, theirs: LazyTensor) -> str:
    """Return how two tensors differ, in words, and their dtypes if these do."""
    dtypes = "" if mine.dtype == theirs.dtype else f" ({mine.dtype} in A, {theirs.dtype} in B)"
    return f"{say(difference, (mine.shape, theirs.shape))}{dtypes}"


def _same_layer(name: str, other: str) -> bool:
    layers = [one.split(".")[1] if one.startswith("layers.") else "" for one in (name, other)]
    return layers[0] == layers[1]


def head_axis(name: str) -> int | None:
    """Return the axis of a canonical parameter along which the blocks of attention heads stand, if any."""
    _, inside, rest = name.rpartition("attention.")
    place, _, leaf = rest.partition(".")
    if not inside or place not in ("query", "key", "value", "output"):
        return None
    if place == "output":
        return 0 if leaf == "weight" else None
    return 1 if leaf == "weight" else 0
