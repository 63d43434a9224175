"""Matching of a candidate's tensors to activations by name or content."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import reduce
from itertools import permutations
from typing import Any

import numpy as np

from concord.conformance.compare.module_reference import OUTPUT
from concord.conformance.judging.expectation import root_mean_square
from concord.spec.arrays import Array, Arrays, Shape
from concord.spec.errors import refuse

# Largest relative distance at which an activation is proposed for a tensor. A tensor with a bug is far
# nearer; a different activation is far away.
NEAREST = 0.5

# Number of sorted elements to compare first, since sorting is much cheaper than trying every layout.
OUTLINE = 257


class PlacedName(str):
    """A name in a file, with its line."""

    place = ""


def laid_out(array: Array, layout: str, shape: Shape) -> Array:
    """Permute axes to an order such as ``0 2 1 3``."""
    return array.transpose([int(axis) for axis in layout.split()]).reshape(shape) if layout else array


def renamed(
    given: Arrays, names: Mapping[str, str], plain: Mapping[str, Any]
) -> tuple[Arrays, dict[str, str]]:
    """A candidate's tensors by the reference's names, and each tensor's own name.

    Args:
        names: maps the candidate's names to the reference's, with ``{i}`` for numbers and an optional
            ``:layout``.

    Raises:
        SpecError: if a pattern matches no tensor, or a layout does not fit.
    """
    arrays, own_names, problems = dict(given), {name: name for name in given}, list[str]()
    for own, theirs in names.items():
        name = re.escape(own).replace(r"\{i\}", r"(\d+)")
        pattern = re.compile(rf"{name}|{OUTPUT}\[{name}\]")  # a function's outputs have their keys as names
        template, _, layout = (part.strip() for part in theirs.partition(":"))
        matches = [match for match in map(pattern.fullmatch, given) if match]
        where = getattr(own, "place", "")
        problems += [] if matches else [f"{where}no tensor of the candidate matches {own!r}"]
        for match in matches:
            numbers = filter(None, match.groups())
            name = reduce(lambda text, number: text.replace("{i}", number, 1), numbers, template)
            array = given[match[0]]
            shape = tuple(plain.get(name, array).shape)
            if arrays.get(match[0]) is array:  # another name may have been mapped to this one
                del arrays[match[0]]
            try:
                arrays[name], own_names[name] = laid_out(array, layout, shape), match[0]
            except (ValueError, IndexError):
                problems.append(
                    f"{where}{match[0]!r} has shape {array.shape}, which axis order {layout!r} "
                    f"does not turn into {shape}"
                )
    refuse(problems)
    for own in [name for name in given if name in arrays and name not in plain]:
        # A module that returns (x, None) has `name` where one that returns (x, weights) has `name[0]`.
        name = own.removesuffix("[0]") if own.endswith("[0]") else f"{own}[0]"
        if name not in arrays and name in plain and plain[name].shape == arrays[own].shape:
            arrays[name], own_names[name] = arrays.pop(own), own
    return arrays, own_names


def proposed(given: Arrays, plain: Arrays) -> dict[str, str]:
    """Propose an activation for each tensor, as input for :func:`renamed`."""
    names, rest = dict[str, tuple[str, str]](), dict(plain)
    outlines = {name: _outline(right) for name, right in plain.items()}
    for own, array in given.items():
        outline = _outline(array)
        layouts = ["", *(" ".join(map(str, order)) for order in permutations(range(array.ndim)))]
        matches = (
            (distance, name, layout)
            for name, right in rest.items()
            if array.size == right.size > 1 and apart(outline, outlines[name]) < NEAREST
            for layout in layouts
            if layout or array.shape == right.shape
            if (distance := apart(laid_out(array, layout, right.shape), right)) < NEAREST
        )
        if best := min(matches, default=None):
            _, name, layout = best
            names[name] = own, f"{name} : {layout}" if layout else name
            del rest[name]
    return dict(names[name] for name in plain if name in names)


def _outline(array: Array) -> Array:
    # Sorted elements are the same in every layout.
    places = np.linspace(0, array.size - 1, OUTLINE) if array.size else np.zeros(0)
    return np.sort(array, None)[places.astype(int)].astype(np.float64)


def apart(one: Array, other: Array) -> float:
    """Relative distance of two arrays."""
    return root_mean_square(one - other) / (root_mean_square(other) or 1.0)
