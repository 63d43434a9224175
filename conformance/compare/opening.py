"""The operations of a stretch that diverges, on both sides, and the first that computes something else."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np
import torch

from concord.conformance.compare import activations
from concord.conformance.compare.activations import dtype_name, named, numbers
from concord.conformance.compare.arithmetic import Operation
from concord.conformance.compare.edits import Edit
from concord.conformance.compare.stretch import Stretch
from concord.conformance.estimate import SAMPLES, Estimate, Observer
from concord.conformance.scoring import judge_tensor
from concord.spec.arrays import Array

OWN, TORCH = (str(Path(file).parent) for file in (__file__, torch.__file__))


@dataclass(frozen=True)
class Dispatched:
    """An operation of a stretch, and what it gave.

    Attributes:
        name: of the operation.
        line: of the source that asked for it, ``file:line``.
        array: its result.
        dtype: of the result.
    """

    name: str
    line: str
    array: Array
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} ({self.line})"


class Recording(Edit):
    """Hands on what each operation gives, and changes none."""

    def __init__(self, take: Callable[[Dispatched], Any]) -> None:
        self.take = take

    def change(self, operation: Operation) -> Any:
        """Compute an operation that the model asked for, and hand on each of its results."""
        if not (line := line_of_source()):
            return NotImplemented
        made = operation.of(*operation.args)
        for tensor in named(made, "").values():
            self.take(Dispatched(operation.name, line, numbers(tensor).copy(), dtype_name(tensor.dtype)))
        return made


def line_of_source() -> str:
    """Return the innermost line outside PyTorch, or of one of its modules that nothing else calls."""
    inner = ""
    for frame, line in traceback.walk_stack(None):
        path = frame.f_code.co_filename
        if path == activations.__file__:  # a hook, or what called the model
            break
        found = f"{Path(path).name}:{line}"
        if not path.startswith((OWN, TORCH)):
            return found
        if path.startswith(f"{TORCH}/nn/modules"):
            inner = inner or found
    return inner


def opened(stretch: Stretch, candidate: Callable[[Edit, str, str], Any]) -> list[str]:
    """Say where the operations of both sides part, and which is the first to give something else.

    Args:
        candidate: runs the candidate with an edit of what it does between two activations.
    """
    ours: dict[str, Dispatched] = {}
    theirs: list[Dispatched] = []
    dtypes: dict[str, str] = {}

    def compute(arithmetic: Any, observer: Observer) -> None:
        place = itertools.count()

        def take(one: Dispatched) -> None:
            name = str(next(place))
            ours.setdefault(name, one)
            dtypes.setdefault(name, one.dtype)
            observer(name, one.array[None] if arithmetic.samples else one.array)

        stretch.run(Recording(take), arithmetic=arithmetic)

    found = Estimate(compute, dtypes, truth=stretch.reference.exact(stretch.blind))
    found.take_up(stretch.reference.runs(range(SAMPLES), stretch.blind), "opening the stretch")
    sigmas = found.sigmas(last=True)
    candidate(Recording(theirs.append), stretch.start, stretch.tensor)
    said: list[str] = []
    right = [*ours.values()]
    a, b = ([(one.name.rstrip("_"), one.array.shape) for one in side] for side in (right, theirs))
    for tag, i, until, j, end in SequenceMatcher(a=a, b=b, autojunk=False).get_opcodes():
        if tag != "equal":
            here, there = ([*map(str, side), "nothing"][0] for side in (right[i:until], theirs[j:end]))
            said = said or [f"its operations part: {here} in the reference, {there} in the candidate"]
            continue
        for place, one in enumerate(theirs[j:end], i):
            own = right[place]
            judged = judge_tensor(one.array.astype(np.float64), own.array, sigmas[str(place)], own.dtype)
            if judged.status == "diverges":
                words = f"its first operation that differs is {own}, by {judged.ratio:.3g} tolerances"
                return [*said, f"{words}; the candidate's stands at {one.line}"]
    return said
