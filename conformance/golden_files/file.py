"""A file of golden tensors as it lies on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from concord.spec.errors import SpecError
from concord.spec.files import parse_json, read_described, section
from concord.spec.sources.layouts import TENSOR_LAYOUTS, contiguous
from concord.spec.sources.table import Binding, gather

DTYPES = ("float64", "float32")


@dataclass
class SourceFile:
    """The content of a file.

    Attributes:
        source, case, dtype: as the metadata says.
        config: the source's own configuration.
        tensors: every tensor by its full name, ``weights/…``, ``inputs/…``, ``outputs/…``, ``grads/…``.
        used: full names of the tensors that something was made of.
    """

    source: str
    case: str
    dtype: str
    config: Mapping[str, Any]
    tensors: Mapping[str, NDArray[Any]]
    used: set[str] = field(default_factory=set)

    def section(self, prefix: str) -> dict[str, NDArray[Any]]:
        """Return the tensors below a prefix, by the rest of their names."""
        return section(self.tensors, prefix)

    def take(self, name: str) -> NDArray[Any] | None:
        """Return a tensor by its full name and note that it is used; None if it is not there."""
        if name in self.tensors:
            self.used.add(name)
        return self.tensors.get(name)

    def gather(self, prefix: str, places: Mapping[str, Binding]) -> tuple[dict[str, NDArray[Any]], list[str]]:
        """Return the tensors of parameters below a prefix, by canonical name, and what is wrong with them."""
        full = {
            name: Binding(tuple(f"{prefix}{own}" for own in place.names), place.layout, place.shape)
            for name, place in places.items()
        }
        found, problems = gather(full, self.tensors, f"source={self.source}")
        self.used.update(own for name in found for own in full[name].names)
        return found, problems


def read_file(path: Path) -> SourceFile:
    """Read a file.

    Raises:
        SpecError: if it is missing, truncated or corrupt, or its metadata do not say what it is: one line
            with the file, what is wrong, and what is required.
    """
    metadata, tensors = read_described(path)
    missing = [key for key in ("source", "case", "dtype", "config") if key not in metadata]
    if missing:
        raise SpecError(
            f"{path}: the metadata lack {', '.join(map(repr, missing))}, which a golden file must have"
        )
    if metadata["dtype"] not in DTYPES:
        raise SpecError(
            f"{path}: the metadata's 'dtype' is {metadata['dtype']!r} but must be "
            f"{' or '.join(map(repr, DTYPES))}"
        )
    config = parse_json(metadata["config"], f"{path}: the metadata's 'config'")
    if not isinstance(config, dict):
        raise SpecError(
            f"{path}: the metadata's 'config' is a JSON {type(config).__name__} but must be an object"
        )
    return SourceFile(metadata["source"], metadata["case"], metadata["dtype"], config, tensors)


def laid_out(
    name: str,
    array: NDArray[Any],
    layout: str,
    sizes: Mapping[str, int] = {},
    shape: tuple[int, ...] | None = None,
    key: str = "",
) -> NDArray[Any]:
    """Return a tensor of a source in the canonical layout.

    Args:
        layout: that it has in the source.
        sizes: of axes.
        shape: that it must have then, as ``key``; any by default.

    Raises:
        SpecError: if it does not have the layout.
    """
    meaning, function = TENSOR_LAYOUTS[layout]
    with contextlib.suppress(ValueError, IndexError):
        found = contiguous(function(array, sizes))
        if shape in (None, found.shape):
            return found
    made = f", which makes {shape} of it for {key!r}" if shape is not None else ""
    raise SpecError(f"{name!r} has shape {array.shape} but must be {meaning}{made}")
