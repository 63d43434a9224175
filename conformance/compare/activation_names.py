"""Names of a candidate's tensors: given by the user, or proposed by what the tensors hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import reduce
from itertools import permutations
from typing import Any

import numpy as np

from concord.conformance.judging.expectation import root_mean_square
from concord.spec.arrays import Array, Arrays
from concord.spec.errors import refuse

# Largest distance of a tensor from the activation that is proposed for it, as a share of that one's size. A
# tensor with a bug lies far nearer, and another activation far off.
NEAREST = 0.5

# Sorted elements by which arrays are told apart first: sorting is cheap beside trying every layout.
OUTLINE = 257


def laid_out(array: Array, layout: str, shape: tuple[int, ...]) -> Array:
    """Return an array of the candidate in the reference's layout.

    Args:
        layout: the order of its axes, such as ``0 2 1 3``; empty: as they are.
        shape: of the result.

    Raises:
        ValueError: if it has no such axes.
    """
    return array.transpose([int(axis) for axis in layout.split()]).reshape(shape) if layout else array


def renamed(
    given: Mapping[str, Array], names: Mapping[str, str], plain: Mapping[str, Any]
) -> tuple[Arrays, dict[str, str]]:
    """Return a candidate's tensors by the reference's names, and its own name of each.

    Args:
        names: the candidate's name or pattern (``{i}``: a number) to the reference's; after a colon the
            layout.
        plain: the reference's tensors.

    Raises:
        SpecError: for patterns without a tensor, and layouts that do not fit.
    """
    arrays, owns, problems = dict(given), {name: name for name in given}, list[str]()
    for own, theirs in names.items():
        pattern = re.compile(re.escape(own).replace(r"\{i\}", r"(\d+)"))
        named, _, layout = (part.strip() for part in theirs.partition(":"))
        matches = [match for match in map(pattern.fullmatch, given) if match]
        problems += [] if matches else [f"{own!r} names no tensor of the candidate"]
        for match in matches:
            name = reduce(lambda text, number: text.replace("{i}", number, 1), match.groups(), named)
            array = given[match[0]]
            shape = tuple(plain.get(name, array).shape)
            arrays.pop(match[0], None)
            try:
                arrays[name], owns[name] = laid_out(array, layout, shape), match[0]
            except (ValueError, IndexError):
                problems.append(f"{match[0]!r} has shape {array.shape}, of which {layout!r} makes no {shape}")
    refuse(problems)
    return arrays, owns


def proposed(given: Mapping[str, Array], plain: Mapping[str, Array]) -> dict[str, str]:
    """Return the nearest activation of each tensor, as :func:`renamed` takes it.

    Args:
        given: unmatched tensors of the candidate.
        plain: activations that the candidate lacks by name.
    """
    names, left = dict[str, str](), dict(plain)
    outlines = {name: _outline(right) for name, right in plain.items()}
    for own, array in given.items():
        outline = _outline(array)
        layouts = ["", *(" ".join(map(str, order)) for order in permutations(range(array.ndim)))]
        near = (
            (distance, name, layout)
            for name, right in left.items()
            if array.size == right.size > 1 and apart(outline, outlines[name]) < NEAREST
            for layout in layouts
            if layout or array.shape == right.shape
            if (distance := apart(laid_out(array, layout, right.shape), right)) < NEAREST
        )
        if best := min(near, default=None):
            _, name, layout = best
            names[own] = f"{name} : {layout}" if layout else name
            del left[name]
    return names


def _outline(array: Array) -> Array:
    # No layout changes the sorted elements.
    places = np.linspace(0, array.size - 1, OUTLINE) if array.size else np.zeros(0)
    return np.sort(array, None)[places.astype(int)].astype(np.float64)


def apart(one: Array, other: Array) -> float:
    """Return the distance of two arrays, as a share of the second one's size."""
    return root_mean_square(one - other) / (root_mean_square(other) or 1.0)
