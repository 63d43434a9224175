"""Detection of runs that differ, and of activations independent of inputs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from concord.conformance.compare.aten_operations import Operation, Watched, is_mutable
from concord.conformance.compare.decisions import rng_state, source_line
from concord.conformance.compare.module_reference import ModelReference, ModuleReference, nothing
from concord.spec.arrays import Arrays
from concord.spec.errors import SpecError
from concord.spec.precision import precision
from concord.spec.text import first_of

# Exact tensors may differ between runs by this share of their largest value: sums may change their order.
REPEATED = 2.0**-30


def states(*generators: torch.Generator | None) -> list[bytes]:
    """States of all global and the given generators."""
    tensors = rng_state()
    tensors += [generator.get_state() for generator in generators if generator is not None]
    shared = repr(random.getstate()), repr(np.random.get_state())
    return [*(bytes(state.numpy()) for state in tensors), *map(str.encode, shared)]


def drawn(model: ModuleReference) -> list[str]:
    """Operations that draw without a seed, with source lines."""
    operations = dict[str, None]()

    def watch(operation: Operation) -> Any:
        generator = operation.kwargs.get("generator")
        before, line = states(generator), source_line()
        result = operation()
        if states(generator) != before and (generator is not None or model.seed is None):
            operations[f"{operation.name} ({line})"] = None
        return result

    model.watched(Watched(watch))
    return [*operations]


def constants(model: ModelReference) -> set[str]:
    """Activations that do not depend on the inputs."""
    if not isinstance(model, ModuleReference):
        return set()
    free, names = WeakIdKeyDictionary(), set[str]()

    def watch(operation: Operation) -> Any:
        result = operation()
        operands = (x for x in tree_leaves((operation.args, operation.kwargs)) if isinstance(x, Tensor))
        if all(isinstance(x, nn.Parameter) or x in free for x in operands):
            free.update((x, True) for x in tree_leaves(result) if isinstance(x, Tensor))
        elif is_mutable(operation.func):
            free.pop(operation.args[0], None)
        return result

    def take(name: str, tensor: Tensor) -> None:
        if tensor in free or isinstance(tensor, nn.Parameter):
            names.add(name)

    replace(model, cotangents=None).observe(take, Watched(watch))
    return names


def change(arrays: Arrays, others: Arrays, sizes: Arrays | None = None) -> tuple[str, float]:
    """The first tensor with different bits, and the largest difference relative to ``sizes``."""
    first, largest, sizes = "", 0.0, sizes or arrays
    for name, array in arrays.items():
        other = others.get(name)
        if other is None or other.shape != array.shape:
            return first or name, np.inf
        if np.array_equal(array, other, equal_nan=True):
            continue
        with np.errstate(invalid="ignore"):  # a value that is finite in only one run differs infinitely
            off = np.asarray(np.nan_to_num(abs(array.astype(np.float64) - other), nan=np.inf))
        off[np.isnan(array) & np.isnan(other) | (array == other)] = 0.0
        size = float(np.max(abs(sizes[name]), initial=0.0, where=np.isfinite(sizes[name]))) or 1.0
        first, largest = first or name, max(largest, float(off.max()) / size)
    return first, largest


def refuse_changes(reference: ModelReference) -> str:
    """Refuse a nonrepeatable reference; return a note if only rounding differs."""
    plain, before = reference.arrays, states()
    name, share = change(plain, replace(reference).arrays)
    if states() == before and not name:
        return ""
    seed = " or give a seed (seed=0, --seed 0)" if reference.seed is None else ""
    if isinstance(reference, ModuleReference) and (operations := drawn(reference)):
        raise SpecError(
            f"the reference draws random numbers, so there is no correct answer: {first_of(operations, 3)}; "
            f"switch the draws off{seed}"
        )
    if not name:  # random draws had no effect
        return ""
    runs = [reference.compute_exactly(nothing) for _ in range(2)]
    # An exact gradient of zero is only float64 rounding, which is small compared with the plain run's.
    sizes = {
        name: np.maximum(abs(array), 2.0**10 * abs(plain[name] - array)) for name, array in runs[0].items()
    }
    changed, off = change(runs[0], runs[1], sizes)
    if off > REPEATED:
        raise SpecError(
            f"the reference gives a different result when it runs again, first at {changed}: it keeps state, "
            f"or draws random numbers outside PyTorch; make its result reproducible{seed}"
        )
    return (
        f"two runs are not bitwise identical, first at {name}; the largest difference, {share:.1g} of a "
        "tensor's largest value, is rounding, as when sums are reordered"
    )


def again(run: Callable[[], Arrays], first: Arrays, dtype: str) -> str:
    """Run again; return a note if more than rounding differs."""
    name, share = change(first, run())
    if share <= np.sqrt(precision(dtype).unit_roundoff):
        return ""
    return (
        f"the candidate gives a different result each time, first at {name}; the largest difference is "
        f"{share:.1g} of a tensor's largest value"
    )
