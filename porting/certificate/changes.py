"""What is done to tensors to see whether a certificate notices: each a mistake of a port.

And when it is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.porting.checkpoint import LazyTensor
from concord.porting.comparison.difference import head_axis
from concord.porting.stored import NUMPY, Bits, widened
from concord.spec.batch import Batch
from concord.spec.config import EncoderConfig
from concord.spec.precision import precision
from concord.spec.reference import used_rows

TRANSPOSED, SWAPPED, PERMUTED, NUDGED, UNUSED, ROUNDED, TOGETHER = (
    "transposed",
    "swapped with one of its shape",
    "its heads permuted",
    "one element nudged",
    "one element nudged where no input looks",
    "rounded to bfloat16",
    "all heads of a layer permuted alike",
)

CHANGES = (TRANSPOSED, SWAPPED, PERMUTED, NUDGED, UNUSED, ROUNDED, TOGETHER)

SOFTMAX = "a bias of keys adds the same to all scores of a query, which softmax does not see"
NOT_READ = "no input looks this row up"
ALL_HEADS = "queries, keys, values and output projection have their heads in the same new order"
ULP = "one unit in the last place of float64 is what rounding itself may do"

WITHIN = ("query", "key", "value")


@dataclass(frozen=True)
class Alteration:
    """A change of one tensor or more.

    Attributes:
        kind: one of :data:`CHANGES`.
        tensors: the parameters that it changes, the first is what it is called by.
        reason: why the model computes the same all the same; empty: it does not.
        bits: makes the changed parameters, by name, in the dtype of the file.
    """

    kind: str
    tensors: tuple[str, ...]
    reason: str
    bits: Callable[[], Mapping[str, Bits]] = field(repr=False, compare=False)


def changes(
    config: EncoderConfig,
    part: str,
    tensors: Mapping[str, LazyTensor],
    batch: Batch,
    gradients: Mapping[str, NDArray[np.floating]],
) -> Iterator[Alteration]:
    """Yield every change that can be made to a model.

    Args:
        batch: on which the outputs are going to be computed.
        gradients: of the loss on it, by parameter: a nudge is where it matters most, and not behind a ReLU
            that is closed.
    """
    yield from _Changes(config, part, tensors, batch, gradients).all()


class _Changes:
    """The changes of one model."""

    def __init__(
        self,
        config: EncoderConfig,
        part: str,
        tensors: Mapping[str, LazyTensor],
        batch: Batch,
        gradients: Mapping[str, NDArray[np.floating]],
    ) -> None:
        self.config, self.tensors, self.gradients = config, tensors, gradients
        self.used: Mapping[str, NDArray[np.int64]] = used_rows(config, batch, part)

    def all(self) -> Iterator[Alteration]:
        """Yield the changes, tensor after tensor."""
        partners = self.partners()
        for name, tensor in self.tensors.items():
            if len(tensor.shape) == 2 and tensor.shape[0] == tensor.shape[1] > 1:
                yield self.alone(TRANSPOSED, name, lambda bits: bits.T)
            if name in partners:
                yield self.swapped(name, partners[name])
            if head_axis(name) is not None and self.config.num_heads > 1:
                yield self.alone(PERMUTED, name, partial(self.rolled, name))
            yield self.nudged(name)
            unused = self.unused(name)
            if unused is not None:
                yield self.alone(UNUSED, name, partial(_nudge, tensor.dtype, rows=[unused]), NOT_READ)
            yield self.alone(ROUNDED, name, partial(_rounded, tensor.dtype))
        yield from self.together()

    def alone(self, kind: str, name: str, make: Callable[[Bits], Bits], reason: str = "") -> Alteration:
        """Return a change of one tensor."""
        return Alteration(
            kind, (name,), reason or self.reason(name), lambda: {name: make(self.tensors[name].bits())}
        )

    def reason(self, *names: str) -> str:
        """Return why it does not matter what stands in some tensors; empty: it does."""
        keys = all(name.endswith("attention.key.bias") for name in names)
        return SOFTMAX if keys and self.config.qkv_activation == "none" else ""

    def partners(self) -> dict[str, str]:
        """Return for each tensor the next one of its shape and dtype, the last of them with the first."""
        alike: dict[tuple[Any, ...], list[str]] = {}
        for name, tensor in self.tensors.items():
            alike.setdefault((tensor.shape, tensor.dtype), []).append(name)
        return {
            name: names[(place + 1) % len(names)]
            for names in alike.values()
            if len(names) > 1
            for place, name in enumerate(names)
        }

    def swapped(self, name: str, other: str) -> Alteration:
        """Return the change that puts each of two tensors in the place of the other."""
        return Alteration(
            SWAPPED,
            (name, other),
            self.reason(name, other),
            lambda: {name: self.tensors[other].bits(), other: self.tensors[name].bits()},
        )

    def rolled(self, name: str, bits: Bits) -> Bits:
        """Return a tensor whose heads stand one place further on."""
        axis = head_axis(name)
        assert axis is not None
        return np.roll(bits, bits.shape[axis] // self.config.num_heads, axis)

    def nudged(self, name: str) -> Alteration:
        """Return the change of one element by one unit in the last place.

        Where the loss depends on it most, or the largest that real tokens look up.
        """
        tensor, gradient = self.tensors[name], self.gradients.get(name)
        reason = ULP if tensor.dtype == "float64" else ""
        return self.alone(
            NUDGED,
            name,
            partial(
                _nudge, tensor.dtype, rows=self.read(name) if name in self.used else None, gradient=gradient
            ),
            reason,
        )

    def read(self, name: str) -> Sequence[int]:
        """Return the rows of a table that real tokens look up.

        What padding looks up need not reach the output.
        """
        config = self.config
        hidden = (config.pad_id, config.token_padding_row) if name == "embeddings.token.weight" else ()
        return [int(row) for row in self.used[name] if row not in hidden]

    def unused(self, name: str) -> int | None:
        """Return a row of a table that no input looks up; None: there is none."""
        if name not in self.used:
            return None
        rows = np.setdiff1d(np.arange(self.tensors[name].shape[0]), self.used[name])
        return int(rows[0]) if len(rows) else None

    def together(self) -> Iterator[Alteration]:
        """Yield the changes that are none: the heads of a whole layer in another order."""
        config = self.config
        if config.num_heads < 2 or not config.output_projection or config.mask_assignment != "per_sample":
            return
        for name in self.tensors:
            if name.endswith("attention.output.weight"):
                inside = name.removesuffix("output.weight")
                moved = tuple(
                    other
                    for other in self.tensors
                    if other.startswith(inside) and head_axis(other) is not None
                )
                yield Alteration(TOGETHER, moved, ALL_HEADS, partial(self.all_rolled, moved))

    def all_rolled(self, names: Sequence[str]) -> dict[str, Bits]:
        """Return several tensors whose heads stand one place further on."""
        return {name: self.rolled(name, self.tensors[name].bits()) for name in names}


def _nudge(
    dtype: str, bits: Bits, rows: Sequence[int] | None = None, gradient: NDArray[np.floating] | None = None
) -> Bits:
    """Return bits with one number moved away from zero by one unit in the last place.

    Args:
        rows: of which it is one; by default of all.
        gradient: of the loss; by default the largest number is taken.
    """
    found = np.array(bits, NUMPY[dtype], order="C")
    where = np.arange(len(found)) if rows is None or not len(rows) else np.asarray(rows)
    sizes = abs(widened(found[where], dtype))
    place = np.unravel_index(
        int((sizes if gradient is None else sizes * abs(gradient[where])).argmax()), sizes.shape
    )
    at = (int(where[place[0]]), *(int(axis) for axis in place[1:]))
    whole = found.view({8: np.uint64, 4: np.uint32, 2: np.uint16}[found.dtype.itemsize])
    # Of the largest finite number the next one is none: it goes down.
    largest = float(sizes[place]) >= precision(dtype).largest
    whole[at] = whole[at] - 1 if largest else whole[at] + 1
    return found


def _rounded(dtype: str, bits: Bits) -> Bits:
    """Return numbers rounded to bfloat16, in the dtype that they have."""
    if dtype == "bfloat16":
        return bits
    target = precision("bfloat16")
    return np.asarray(target.round(np.asarray(bits))).astype(NUMPY[dtype])
