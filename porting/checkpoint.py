"""A checkpoint of any format in the family's words: configuration, tensors by canonical name.

And where each came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from concord.porting.file_tensors import StoredTensor, in_memory, widened
from concord.spec.config import EncoderConfig
from concord.spec.errors import WeightsError
from concord.spec.parameters import validate_weights
from concord.spec.sources.layouts import contiguous

Status = Literal["read", "ignored", "tied", "computed"]
"""What became of a tensor: it is a parameter; it is none; it is another one's copy; it was in no file, and
follows from the configuration."""

UNKNOWN = "as it is"
"""The layout of a tensor that no table names."""


@dataclass(frozen=True)
class LazyTensor(StoredTensor):
    """A tensor in the canonical layout (SPEC WGT-2), read when it is asked for.

    Attributes:
        foreign: its name in the file; where each head has one of its own, they are joined by ``" + "``;
            empty: it is in none.
        transform: one of :data:`concord.spec.sources.layouts.WEIGHT_LAYOUTS`: how the file lays it out;
            :data:`UNKNOWN`: nobody knows.
        name: the canonical name of the parameter that it is, or is a copy of; empty: of none.
        status: see :data:`Status`.
        reason: why, where it was not simply read.
        owner: the tensor of the file that a model takes in its place where it is tied, as an output is to
            embeddings; empty: there is none.
        redundant: whether it is no parameter and holds nothing but what the rest says: a copy of another,
            the numbers of positions.
    """

    foreign: str
    transform: str
    name: str = ""
    status: Status = "read"
    reason: str = ""
    owner: str = ""
    redundant: bool = False

    def read(self) -> NDArray[Any]:
        """Return its numbers, in C order.

        Float64, float32 or float16 as they are, bfloat16 as float32, exactly.

        Nothing is kept: whoever needs them twice keeps them, or reads twice.
        """
        return contiguous(widened(self.bits(), self.dtype))


@dataclass(frozen=True)
class Checkpoint:
    """A model that lies in files.

    Attributes:
        config: the member of the family.
        part: one of :data:`concord.spec.tensors.PARTS`: a model without a head is an ``encoder``.
        tensors: every parameter of that part by canonical name, in the order of computation.
        found: every tensor of the file, by its name and in its layout there.
        files: what is carried over as it is, by name: the tokenizer's files, labels, ``config.json``.
        labels: the names of the classes, if somebody gave them any.
        source: the name of the table that its own names come from; empty: they are those of a backend or of
            the specification.
        others: tensors of the file that are no parameters of this part, such as a pooler without a
            classifier, by the name that kinds of file
            share, in its layout; where none is known, by the name and in the layout of the file.
        words: the name of the table in whose words ``config.json`` is; empty: there is none.
        format: that it was read from (:func:`concord.porting.formats`).
    """

    config: EncoderConfig
    part: str
    tensors: Mapping[str, LazyTensor]
    found: Mapping[str, StoredTensor] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    labels: tuple[str, ...] | None = None
    source: str = ""
    words: str = ""
    others: Mapping[str, LazyTensor] = field(default_factory=dict)
    format: str = ""

    @property
    def ledger(self) -> tuple[LazyTensor, ...]:
        """Every tensor of the file, and those that are in none: first the parameters, then the others."""
        return (*self.tensors.values(), *self.others.values())

    def weights(self) -> dict[str, NDArray[Any]]:
        """Read all parameters, by canonical name; the dtypes are the file's (:meth:`LazyTensor.read`).

        Raises:
            WeightsError: listing what is not finite, or does not fit the configuration (SPEC WGT-1 to WGT-3).
        """
        found = {name: tensor.read() for name, tensor in self.tensors.items()}
        validate_weights(self.config, found, self.part)
        return found

    def checked(self) -> None:
        """Read every parameter once, one at a time.

        Raises:
            WeightsError: listing what holds NaN or infinity (SPEC WGT-3).
        """
        wrong = [name for name, tensor in self.tensors.items() if not np.isfinite(tensor.read()).all()]
        if wrong:
            raise WeightsError(
                [
                    (
                        f"{self.tensors[name].foreign!r} holds NaN or infinity but must be finite "
                        f"[parameter={name}, clause=WGT-3]"
                    )
                    for name in wrong
                ]
            )


def from_weights(
    config: EncoderConfig,
    weights: Mapping[str, NDArray[Any]],
    part: str = "model",
    files: Mapping[str, bytes] | None = None,
) -> Checkpoint:
    """Return weights in memory as a checkpoint, ready to be written.

    Args:
        weights: by canonical name, in canonical layouts.

    Raises:
        WeightsError: listing what does not fit the configuration (SPEC WGT-1 to WGT-3).
    """
    validate_weights(config, weights, part)
    tensors = {name: in_canonical_layout(name, array) for name, array in weights.items()}
    return Checkpoint(config, part, tensors, files=files or {})


def in_canonical_layout(name: str, array: NDArray[Any]) -> LazyTensor:
    """Return a parameter in memory as a tensor of a checkpoint."""
    stored = in_memory(array)
    return LazyTensor(stored.dtype, stored.shape, stored.bits, name, "as canonical", name)
