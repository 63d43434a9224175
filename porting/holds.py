"""What a tensor that is no parameter must hold for the reason to be true for which it is left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from concord.porting.stored import Bits, StoredTensor, elements, widened


def _wrong_positions(name: str, found: Mapping[str, StoredTensor]) -> str:
    shape = found[name].shape
    numbers = elements(shape)
    if not shape or numbers != shape[-1]:
        return f"has shape {shape} but must have one row"
    return _unlike(found[name], np.arange(numbers))


def _wrong_zeros(name: str, found: Mapping[str, StoredTensor]) -> str:
    return _unlike(found[name], np.broadcast_to(np.int64(0), (elements(found[name].shape),)))


def _unlike(stored: StoredTensor, wanted: Bits) -> str:
    """Return the first element that is not as it must be, in words; empty: all are."""
    numbers = widened(stored.array(), stored.dtype).reshape(-1)
    wrong = np.flatnonzero(numbers != wanted)
    return f"element {wrong[0]} is {numbers[wrong[0]]} but must be {wanted[wrong[0]]}" if len(wrong) else ""


def _wrong_state(name: str, found: Mapping[str, StoredTensor]) -> str:
    owner = name.rpartition("/")[0]
    if owner not in found:
        return f"there is no {owner!r} that it could be kept for"
    wanted, shape = found[owner].shape, found[name].shape
    return "" if shape == wanted else f"has shape {shape} but must be {wanted}, as {owner!r}"


def _wrong_number(name: str, found: Mapping[str, StoredTensor]) -> str:
    return "" if elements(found[name].shape) == 1 else f"has shape {found[name].shape} but must be one number"


HOLDS: Mapping[str, Callable[[str, Mapping[str, StoredTensor]], str]] = {
    "positions": _wrong_positions,
    "zeros": _wrong_zeros,
    "state": _wrong_state,
    "number": _wrong_number,
}
"""What says in words what is wrong with a tensor among those of its file, by what it must hold; empty:
nothing.

``positions``: 0, 1, 2 and so on in one row; ``zeros``; ``state``: as many numbers as the tensor has that its
name begins with; ``number``: one.
"""

WHOLE = frozenset({"positions", "zeros"})
"""Those that say every number: nothing is left that could be compared."""
