"""ONNX graphs, which are written alone (:mod:`concord.porting.onnx`): they hold a program, and weights under names that nobody chose."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from concord.porting.stored import Stored
from concord.spec.errors import SpecError


def is_one(path: Path) -> bool:
    """Say no: none is read."""
    del path
    return False


def read(path: Path) -> dict[str, Stored]:
    """Refuse: it is written alone.

    Raises:
        SpecError: always.
    """
    raise SpecError(f"{path}: ONNX is written alone; read the checkpoint that the graph was made of")


def write(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Refuse: a graph is more than its tensors (:func:`concord.porting.onnx.graph.write`).

    Raises:
        SpecError: always.
    """
    raise SpecError(f"{path}: a graph is more than {len(tensors)} tensors")
