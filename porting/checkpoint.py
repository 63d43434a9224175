"""A checkpoint of any format as a configuration and tensors by canonical name."""

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

# read: a parameter; ignored: not a parameter of this part; tied: a copy of another tensor; computed: from the
# configuration, in no file.
Status = Literal["read", "ignored", "tied", "computed"]

# The layout of a tensor that no table names.
UNKNOWN = "as it is"


@dataclass(frozen=True)
class LazyTensor(StoredTensor):
    """A tensor in canonical layout (SPEC WGT-2), read from its file on request.

    Attributes:
        foreign: name in the file; pieces of one parameter are joined by ``" + "``.
        transform: layout in the file (:data:`concord.spec.sources.layouts.WEIGHT_LAYOUTS`).
        name: canonical name of the parameter that it is or copies.
        reason: why the status is not simply ``read``.
        owner: for tied tensors, the tensor that a model uses instead.
        redundant: whether it only repeats other tensors, or numbers positions.
    """

    foreign: str
    transform: str
    name: str = ""
    status: Status = "read"
    reason: str = ""
    owner: str = ""
    redundant: bool = False

    def read(self) -> NDArray[Any]:
        """Read the file anew; return a C-ordered array in its dtype, bfloat16 as float32, exactly."""
        return contiguous(widened(self.bits(), self.dtype))


@dataclass(frozen=True)
class Checkpoint:
    """A model stored in files.

    Attributes:
        part: one of :data:`concord.spec.tensors.PARTS`; a model without a head is an ``encoder``.
        tensors: every parameter by canonical name, in the order of computation.
        found: every tensor of the file, by its name and in its layout there.
        files: files to copy unchanged: tokenizer, labels, ``config.json``.
        source: the table that names the file's tensors; empty if a backend or the specification does.
        words: the table whose terms ``config.json`` uses.
        others: tensors that are not parameters of this part, such as a pooler without a classifier.
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
        """Every tensor, including computed ones: parameters first, then the others."""
        return (*self.tensors.values(), *self.others.values())

    def weights(self) -> dict[str, NDArray[Any]]:
        """Read all parameters by canonical name, in the file's dtypes (:meth:`LazyTensor.read`).

        Raises:
            WeightsError: listing what is not finite or does not fit the configuration (SPEC WGT-1 to WGT-3).
        """
        weights = {name: tensor.read() for name, tensor in self.tensors.items()}
        validate_weights(self.config, weights, self.part)
        return weights

    def checked(self) -> None:
        """Read each parameter once, keeping one in memory at a time.

        Raises:
            WeightsError: listing parameters with NaN or infinity (SPEC WGT-3).
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
    """Wrap canonical weights in memory as a checkpoint.

    Raises:
        WeightsError: listing what does not fit the configuration (SPEC WGT-1 to WGT-3).
    """
    validate_weights(config, weights, part)
    tensors = {name: in_canonical_layout(name, array) for name, array in weights.items()}
    return Checkpoint(config, part, tensors, files=files or {})


def in_canonical_layout(name: str, array: NDArray[Any]) -> LazyTensor:
    """Wrap a parameter in memory as a checkpoint's tensor."""
    stored = in_memory(array)
    return LazyTensor(stored.dtype, stored.shape, stored.bits, name, "as canonical", name)
