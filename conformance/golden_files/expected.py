"""What a golden file expects of a run.

The source's outputs and gradients under canonical names, in canonical layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance.golden_files.container import Container
from concord.spec.batch import Batch
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError
from concord.spec.sources.layouts import TENSOR_LAYOUTS, contiguous
from concord.spec.sources.names import fill, variables
from concord.spec.sources.schema import InputGradient, Output, PartTable
from concord.spec.sources.table import Binding, gather
from concord.spec.tensors import resolve, sizes_of, taps


def input_array(name: str, array: NDArray[Any], layout: str) -> NDArray[Any]:
    """Return an input in the canonical layout.

    Raises:
        SpecError: if it does not have the layout.
    """
    meaning, function = TENSOR_LAYOUTS[layout]
    try:
        return contiguous(function(array, {}))
    except (ValueError, IndexError):
        raise SpecError(f"{name!r} has shape {array.shape} but must be {meaning}") from None


class Expectations:
    """Collects the expected tensors of one run, and everything that is wrong with them.

    Attributes:
        arrays: what is expected, by the names of ``GoldenRun.expected``.
        native: the same names to the source's own.
        notes: tensors of the source that hold the same numbers as another.
    """

    def __init__(
        self, file: Container, part: PartTable, config: EncoderConfig, batch: Batch, label: str
    ) -> None:
        self.file, self.part, self.config, self.label = file, part, config, label
        self.arrays: dict[str, NDArray[Any]] = {}
        self.native: dict[str, str] = {}
        self.notes: list[str] = []
        self._problems: list[str] = []
        given = batch.arrays()
        self._taps = taps(config, part.name, given)
        self._sizes = sizes_of(config, given)
        self._inputs = {name: array.shape for name, array in given.items()}

    def add_outputs(self, outputs: Mapping[str, Output]) -> None:
        """Expect the outputs that the file has; those that the table requires must be there."""
        for pattern, output in outputs.items():
            for i in range(self.config.num_layers if "i" in variables(pattern) else 1):
                values: dict[str, int | str] = {"i": i, "n": self.config.num_layers, "run": self.label}
                name, tap = f"outputs/{fill(pattern, values)}", fill(output.tap, values)
                if tap == "predictions":
                    self._add(name, tap, output.layout, (self._sizes["batch"],), output.required)
                elif tap in self._taps:
                    self._add(
                        name, tap, output.layout, resolve(self._taps[tap].shape, self._sizes), output.required
                    )

    def add_gradients(self, places: Mapping[str, Binding]) -> None:
        """Expect the gradient of every trainable weight, and those of float inputs that the file has.

        A file without any gradient, of a forward pass alone, is accepted.
        """
        prefix = f"grads/{fill(self.part.gradients.under, {'run': self.label})}"
        arrays = {f"{prefix}{name}": array for name, array in self.file.section(prefix).items()}
        if not arrays:
            self.notes.append("the file holds no gradients")
            return
        full = {
            name: Binding(tuple(f"{prefix}{n}" for n in place.names), place.layout, place.shape)
            for name, place in places.items()
        }
        found, problems = gather(full, arrays, f"source={self.file.source}")
        self._problems += problems
        for name, array in found.items():
            self.file.used.update(full[name].names)
            self._put(f"gradients.{name}", ", ".join(full[name].names), array)
        for name, gradient in self.part.gradients.inputs.items():
            self._add_input_gradient(f"{prefix}{name}", gradient)

    def finish(self) -> None:
        """Raise what was found to be wrong.

        Raises:
            SpecError: listing every missing or misshapen tensor, at once.
        """
        if self._problems:
            raise SpecError(self._problems)

    def _add_input_gradient(self, name: str, gradient: InputGradient) -> None:
        key = " + ".join(f"gradients.inputs.{one}" for one in gradient.sum_of)
        self._add(name, key, gradient.layout, self._inputs[gradient.sum_of[0]], required=False)

    def _add(self, name: str, key: str, layout: str, shape: tuple[int, ...], required: bool) -> None:
        """Expect a tensor of the file, if it is there, in a canonical shape."""
        array = self.file.take(name)
        if array is None:
            if required:
                self._problems.append(f"{name!r} is missing but is required: it is {key!r}")
            return
        kind, wanted = (
            (np.integer, "an integer") if key == "predictions" else (np.floating, "a floating-point")
        )
        if not np.issubdtype(array.dtype, kind):
            self._problems.append(
                f"{name!r} has dtype {array.dtype} but must be {wanted} type: it is {key!r}"
            )
            return
        meaning, function = TENSOR_LAYOUTS[layout]
        try:
            laid_out = function(array, self._sizes)
            fits = laid_out.shape == shape
        except (ValueError, IndexError):
            fits = False
        if fits:
            self._put(key, name, contiguous(laid_out))
        else:
            wanted = f"must be {meaning}, which makes {shape} of it for {key!r}"
            self._problems.append(f"{name!r} has shape {array.shape} but {wanted}")

    def _put(self, key: str, name: str, array: NDArray[Any]) -> None:
        """Note an expected tensor.

        Two of the source's tensors may be one tap: the same numbers are expected once.
        """
        if key in self.arrays and np.array_equal(self.arrays[key], array, equal_nan=array.dtype.kind == "f"):
            self.notes.append(f"{name!r} holds the same numbers as {self.native[key]!r}")
            return
        if key in self.arrays:
            key = f"{key} as {name}"
        self.arrays[key] = array
        self.native[key] = name
