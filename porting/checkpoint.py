"""A checkpoint in any format: configuration, and tensors by canonical name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from concord.porting.file_tensors import StoredTensor, in_memory, widened
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError, WeightsError
from concord.spec.parameters import validate_weights
from concord.spec.sources.layouts import contiguous
from concord.spec.text import shown

# read: a parameter; ignored: not a parameter of this part; tied: a copy of another tensor; computed: derived
# from the configuration, and in no file.
Status = Literal["read", "ignored", "tied", "computed"]

# Layout of a tensor that no table names.
UNKNOWN = "as it is"


@dataclass(frozen=True)
class LazyTensor(StoredTensor):
    """A tensor in canonical layout (SPEC WGT-2), read on request.

    Attributes:
        foreign: name in the file; pieces of one parameter are joined by ``" + "``.
        transform: layout in the file (:data:`concord.spec.sources.layouts.WEIGHT_LAYOUTS`).
        name: the parameter that it contains or copies.
        reason: explanation of a status other than plain ``read``.
        owner: for tied tensors, the tensor that a model uses instead.
        redundant: whether it only repeats other tensors or position numbers.
    """

    foreign: str
    transform: str
    name: str = ""
    status: Status = "read"
    reason: str = ""
    owner: str = ""
    redundant: bool = False

    def read(self) -> NDArray[Any]:
        """Read the file again as a C-ordered array, with bfloat16 widened to float32."""
        return contiguous(widened(self.bits(), self.dtype))


@dataclass(frozen=True)
class Checkpoint:
    """A model stored in files.

    Attributes:
        part: one of :data:`concord.spec.tensors.PARTS`; ``encoder`` without a head.
        tensors: parameters by canonical name, in the order of computation.
        found: every tensor of the file, with its name and layout there.
        files: files to copy unchanged: tokenizer, labels, ``config.json``.
        source: table of the file's names; empty for a backend's or canonical names.
        words: table of the terms in ``config.json``.
        others: tensors outside this part, such as a pooler without a classifier.
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
        """Every tensor, including computed ones, parameters first."""
        return (*self.tensors.values(), *self.others.values())

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, by default their numbers.

        Raises:
            SpecError: if two classes have the same name.
        """
        count = max(self.config.num_classes, 2)
        # A single logit distinguishes two classes, and cannot give its one name to both.
        names = self.labels if len(self.labels or ()) == count else None
        if names and len({*names}) < count:
            raise SpecError(f"two classes have the same name: {shown(', '.join(names))}")
        return names or tuple(map(str, range(count)))

    def weights(self) -> dict[str, NDArray[Any]]:
        """Read all parameters in the file's dtypes (:meth:`LazyTensor.read`).

        Raises:
            WeightsError: listing parameters that are not finite or do not fit the configuration (SPEC WGT-1
                to WGT-3).
        """
        weights = {name: tensor.read() for name, tensor in self.tensors.items()}
        validate_weights(self.config, weights, self.part)
        return weights

    def checked(self) -> None:
        """Check parameters for NaN and infinity, one at a time.

        Raises:
            WeightsError: listing all such parameters (SPEC WGT-3).
        """
        names = [name for name, tensor in self.tensors.items() if not np.isfinite(tensor.read()).all()]
        if names:
            raise WeightsError(
                [
                    (
                        f"{self.tensors[name].foreign!r} holds NaN or infinity but must be finite "
                        f"[parameter={name}, clause=WGT-3]"
                    )
                    for name in names
                ]
            )


def from_weights(
    config: EncoderConfig,
    weights: Mapping[str, NDArray[Any]],
    part: str = "model",
    files: Mapping[str, bytes] | None = None,
) -> Checkpoint:
    """Wrap canonical in-memory weights as a checkpoint.

    Raises:
        WeightsError: listing weights that do not fit the configuration (SPEC WGT-1 to WGT-3).
    """
    validate_weights(config, weights, part)
    tensors = {name: in_canonical_layout(name, array) for name, array in weights.items()}
    return Checkpoint(config, part, tensors, files=files or {})


def in_canonical_layout(name: str, array: NDArray[Any]) -> LazyTensor:
    """Wrap an in-memory parameter as a tensor."""
    stored = in_memory(array)
    return LazyTensor(stored.dtype, stored.shape, stored.bits, name, "as canonical", name)
