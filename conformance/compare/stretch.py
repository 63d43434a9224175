"""The stretch in which a divergence was made: its operations, recorded once and computed again.

In other arithmetics that gives each operation's tolerance, by which the first is found that a candidate
computes otherwise; with a bug in one of them, what the bug would explain.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from concord.conformance.compare import reference as modules
from concord.conformance.compare.arithmetic import plainly
from concord.conformance.compare.bugs import Make, Operation, Watched, injected, sites
from concord.conformance.compare.decisions import source_line
from concord.conformance.compare.reference import Finished, ModuleReference, Pin, dtype_name, named, numbers
from concord.conformance.estimate import SAMPLES, Observer, Z, estimate
from concord.conformance.explain import Cause
from concord.conformance.explain.computation import Computation, Prediction
from concord.conformance.explain.description import nearest
from concord.conformance.explain.hypothesis import Hypothesis
from concord.conformance.explain.search import Effort, Search
from concord.conformance.scoring import judge_tensor
from concord.spec.arrays import Array
from concord.spec.text import first_of

LONGEST = 20.0
"""Seconds of the processor that the search for a cause may take."""

MOVING = ("_unsafe_view", "clone", "copy", "repeat", "unsafe_split", "_reshape_copy", "roll", "flip")
"""Operations that hand on their first operand in another layout, and are no views of it."""


@dataclass(frozen=True)
class Recorded:
    """An operation of a stretch.

    Attributes:
        operation: with the operands that it had.
        line: where the source asks for it, ``file:line``.
        made: what it gave.
        tensors: copies of it by name, since what follows may work on it in place.
    """

    operation: Operation
    line: str
    made: Any
    tensors: Mapping[str, Tensor]

    def __str__(self) -> str:
        return f"{self.operation.name} ({self.line})"

    @property
    def computes(self) -> bool:
        """Whether it makes other numbers of those that it is given, and does not only move them."""
        moves = self.operation.func.is_view or self.operation.name in MOVING
        return not moves and self.operation.floats(1)


class Stretch:
    """The operations of one run of a module between two activations.

    Args:
        module: in evaluation mode.
        start, end: the activations; an empty start is the beginning.
        pin: returns what an exact run uses in place of activations up to the first; None: a run as it is.
    """

    def __init__(self, module: ModuleReference, start: str, end: str, pin: Pin | None = None) -> None:
        self.module, self.start, self.end, self.on = module, start, end, not start
        self.steps: list[Recorded] = []
        self.result: Any = None
        self.before: dict[int, Tensor] = {}  # what operations change in place, as it was

        def known(name: str) -> Array | None:
            return pin(name) if pin and (name == start or not self.on) else None

        module.observe(self.take, *([module.exact()] if pin else []), Watched(self.record), pin=known)

    def take(self, name: str, made: Tensor) -> None:
        """Take an activation of the run, which ends with the last one."""
        self.on = self.on or name == self.start
        if name == self.end:
            self.result = made
            raise Finished

    def record(self, operation: Operation) -> Any:
        """Compute an operation, and note it."""
        line = source_line() if self.on else None
        if line is None:  # a hook asked for it
            return operation()
        if operation.func._schema.is_mutable:  # noqa: SLF001 – nothing else says it
            self.before.setdefault(id(operation.args[0]), operation.args[0].clone())
        made = operation()
        own = named(made, str(len(self.steps)))
        copies = {name: one.detach().clone() for name, one in own.items()}
        self.steps.append(Recorded(operation, line, made, copies))
        return made

    def again(
        self,
        arithmetic: Any,
        observer: Observer,
        make: Make = Operation.__call__,
        others: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Compute all operations again.

        Args:
            observer: takes what each operation gives, by the names of its arrays, and the last activation.
            make: returns what an operation gives.
            others: tensors in place of those with these identities.
        """
        known = dict(others or {})
        observe = modules.handing(observer, arithmetic, self.tensors)
        arithmetic.blind_rows_zero = self.module.blind_rows_zero

        def present(x: Any) -> Any:
            return known.get(id(x), x)

        with plainly(), torch.no_grad(), arithmetic:
            known |= {key: tensor.clone() for key, tensor in self.before.items()}
            for number, step in enumerate(self.steps):
                given = (tuple(step.operation.args), dict(step.operation.kwargs))
                args, kwargs = tree_map(present, given)
                made = make(Operation(step.operation.func, args, kwargs, number))
                for name, tensor in named(made, str(number)).items():
                    observe(name, tensor)
                known |= zip(map(id, tree_leaves(step.made)), tree_leaves(made), strict=True)
        observe(self.end, present(self.result))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What its operations give, and the last activation, by name."""
        made = {name: one for step in self.steps for name, one in step.tensors.items()}
        return {**made, self.end: self.result}

    @property
    def telling(self) -> list[tuple[Recorded, str, Array]]:
        """What its operations give that is no constant, by name."""
        return [
            (step, name, numbers(tensor).astype(np.float64))
            for step in self.steps
            for name, tensor in step.tensors.items()
            if tensor.unique().numel() > 1
        ]

    @property
    def lines(self) -> str:
        """Where its operations are written."""
        return first_of(list(dict.fromkeys(step.line for step in self.steps)), 4)


def opened(right: Stretch, theirs: Stretch) -> list[str]:
    """Say which operation is the first whose result the candidate lacks, and what stands in its place there.

    A candidate may compute some numbers otherwise and be right. So the last that both compute is said too.
    """
    dtypes = {name: dtype_name(one.dtype) for name, one in right.tensors.items()}
    truth = right.module.exact()
    values, sigmas = estimate(
        right.again,
        dtypes,
        truth=truth,
        arithmetics=right.module.runs(range(SAMPLES), truth),
        doing="opening the stretch",
    )
    ours = [one for one in right.telling if one[0].computes]
    others = theirs.telling

    def ratio(own: int, other: int) -> float:
        """Return by how many tolerances a number of the candidate lies off one of the reference's."""
        name, array = ours[own][1], others[other][2]
        if array.shape != values[name].shape:
            return math.inf
        judged = judge_tensor(array, values[name], sigmas[name], dtypes[name])
        return judged.ratio if judged.status == "diverges" else 0.0

    def near(own: int, other: int) -> bool:
        """Return whether a number may be one of the reference's, by its first element: it takes no time."""
        name, array = ours[own][1], others[other][2]
        return not abs(array.flat[0] - values[name].flat[0]) > Z * sigmas[name].flat[0]

    same, latest = dict[int, int](), -1  # which number of the candidate is which of the reference
    for own in range(len(ours)):
        for other in chain(range(latest + 1, len(others)), range(latest + 1)):
            if near(own, other) and not ratio(own, other):
                same[own] = latest = other
                break
    said, last = list[str](), max(same, default=-1)
    first = next((own for own in range(len(ours)) if own not in same), None)
    if first is not None:
        here, around = ours[first][0], range(same.get(first - 1, -1) + 1, len(others))
        free = [other for other in around if others[other][0].computes and other not in same.values()]
        there = others[free[0]][0] if free else None
        if there and there.operation.name == here.operation.name:
            off = f"by {ratio(first, free[0]):.3g} tolerances; the candidate's stands at {there.line}"
            said.append(f"its first operation that differs is {here}, {off}")
            last = last if last > first and ours[last][0] is not here else -1
        else:
            said.append(
                f"its operations part: {here} in the reference, {there or 'nothing'} in the candidate"
            )
    if last >= 0:
        beside = others[same[last]][0]
        said.append(f"the last that both compute is {ours[last][0]}; in the candidate it is {beside}")
    return said


# Why: a bug in what computes the last activation, or the order of its elements.


@dataclass(frozen=True, kw_only=True)
class Made(Hypothesis):
    """A bug, with what gives the last activation then, and its sigma."""

    made: Callable[[], Prediction]


class StretchComputation(Computation):
    """A stretch that went wrong.

    Args:
        actual: what the candidate gave.
        right: what it should be.
    """

    def __init__(self, tensor: str, actual: Array, dtype: str, right: Prediction) -> None:
        self.tensor, self.actual, self.dtype, self.right = tensor, actual, dtype, right

    def predict(self, hypothesis: Hypothesis) -> Prediction:
        """Return the last activation with a bug, and its sigma; where either is not finite, what is right."""
        assert isinstance(hypothesis, Made)
        made = hypothesis.made()
        known = np.isfinite(made.value) & np.isfinite(self.right.value)
        return Prediction(np.where(known, made.value, self.right.value), made.sigma)


def cause(
    stretch: Stretch, asked: StretchComputation, strange: Iterable[str]
) -> tuple[Cause | None, list[str]]:
    """Return what explains the last activation of a stretch, and what is to be said of the search.

    Args:
        strange: tensors that the candidate has alone.
    """
    within = dict(stretch.module.model.named_modules())
    active = [  # dropout that passes on what it is given has no activation
        Hypothesis("dropout_active", f"dropout that is active in {name}", "")
        for name in strange
        if isinstance(within.get(name), nn.Dropout)
    ]
    tried = chain(reordered(asked.actual, asked.right), changed(stretch, asked.right))
    effort = Effort(LONGEST)
    return Search(asked, effort).cause([tried], active), effort.notes


def changed(stretch: Stretch, right: Prediction) -> Iterator[Made]:
    """Yield a stretch with the parameters of other modules, and with a bug in one operation or in all."""

    def again(others: Mapping[int, Tensor], make: Make) -> Prediction:
        found: dict[str, Array] = {}
        with modules.running("the stretch with a bug"):
            stretch.again(stretch.module.exact(), found.__setitem__, make, others)
        return Prediction(found[stretch.end], right.sigma)

    for path, others in exchanged(stretch):
        made = partial(again, others, Operation.__call__)
        yield Made("parameters_exchanged", f"the parameters of {path}", "", made=made)
    found = sites(partial(again, {}))
    each = [(bug, [one]) for bug, places in found.items() if len(places) > 1 for one in places]
    for bug, chosen in [*found.items(), *each]:
        yield Made(bug.name, bug.text, "", made=partial(again, {}, injected(bug, chosen)))


def exchanged(stretch: Stretch) -> Iterator[tuple[str, dict[int, Tensor]]]:
    """Yield the parameters of each module that the one which the stretch ends in may be confused with."""
    within, parameters = dict(stretch.module.model.named_modules()), stretch.module.parameters
    own = re.split(r"[#\[]", stretch.end)[0]
    module = within.pop(own, nn.Module())
    shapes = {name: tensor.shape for name, tensor in module.named_parameters()}
    for path, other in within.items():
        if shapes and shapes == {name: tensor.shape for name, tensor in other.named_parameters()}:
            yield path, {id(parameters[f"{own}.{name}"]): parameters[f"{path}.{name}"] for name in shapes}


def reordered(actual: Array, right: Prediction) -> Iterator[Made]:
    """Yield the right elements along an axis in the order in which they come nearest to the candidate's."""
    known = np.isfinite(actual)
    for axis in range(actual.ndim):
        order = nearest(axis, known, *map(np.nan_to_num, (actual, right.value)))
        moved = np.flatnonzero(order != np.arange(len(order)))
        if len(moved):
            text = f"another order of axis {axis}: {moved[0]} holds what belongs to {order[moved[0]]}"
            value, sigma = (np.take(x, order, axis) for x in (right.value, right.sigma))
            yield Made("elements_reordered", text, "", made=partial(Prediction, value, sigma))
