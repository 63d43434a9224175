"""What an agreement does not show: whatever has no effect with these weights and inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from concord.conformance.compare.aten_arithmetic import plainly
from concord.conformance.compare.aten_operations import Operation, Watched, is_mutable, snapshot
from concord.conformance.compare.decisions import source_line
from concord.conformance.compare.differences import differences
from concord.conformance.compare.mechanisms import CONDITIONS
from concord.conformance.compare.module_reference import ModuleReference
from concord.spec.text import first_of

# Maximum number of listed steps, parameters or differences.
MOST = 5

# Operations that may return one of their operands, such as a mask that hides nothing.
SELECTING = (
    "where",
    "masked_fill",
    "maximum",
    "minimum",
    "clamp",
    "clamp_min",
    "clamp_max",
    "hardtanh",
    "relu",
)

# The same of two tensors: to leave out a scale of 1 is no mistake.
OF_TENSORS = ("add", "sub", "mul", "div", *CONDITIONS)


def untested(
    reference: ModuleReference, candidate: ModuleReference | None, paths: Callable[[str], str]
) -> Iterator[str]:
    """Describe mistakes with which a candidate would agree as well.

    Args:
        paths: maps the reference's paths to the candidate's.
    """
    if steps := idle(reference):
        yield f"untested, since with these inputs they change nothing: {first_of(steps, MOST)}"
    if neutral := [name for name, x in reference.own_parameters.items() if is_neutral(x)]:
        yield f"untested, since all elements are 0, or all are 1: {first_of(neutral, MOST)}"
    others = differences(reference.model, candidate.model, paths) if candidate else ()
    if texts := [difference.text for difference in others if not difference.is_layer]:
        yield f"the modules differ, but with these inputs no result does: {first_of(texts, MOST, '; ')}"


def idle(reference: ModuleReference) -> list[str]:
    """Steps that return one of their operands each time."""
    active = dict[str, bool]()

    def note(operation: Operation) -> Any:
        tensors = [x for x in operation.args if isinstance(x, Tensor)]
        if operation.name not in SELECTING and (operation.name not in OF_TENSORS or len(tensors) < 2):
            return operation()
        before = [*map(snapshot, tensors)] if is_mutable(operation.func) else tensors
        result = operation()
        if isinstance(result, Tensor) and result.numel():
            step = f"{operation.name} ({source_line()})"
            active[step] = active.get(step, False) or not any(
                x.dtype == result.dtype and torch.equal(x, result) for x in before
            )
        return result

    with plainly():
        reference.watched(Watched(note))
    return [step for step, is_active in active.items() if not is_active]


def is_neutral(x: Tensor) -> bool:
    """Whether all elements of a parameter are 0, or all are 1."""
    return x.numel() > 1 and bool((x == 0).all() | (x == 1).all())
