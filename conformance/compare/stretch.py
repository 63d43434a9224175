"""The stretch in which a divergence was made: its operations, recorded once and computed again.

In other arithmetics that gives each operation's tolerance, by which the first is found that a candidate
computes otherwise; with a bug in one of them, what the bug would explain.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from concord.conformance.compare import reference as modules
from concord.conformance.compare.arithmetic import EXACT, plainly
from concord.conformance.compare.bugs import Injected, Operation, OperationBug, Watched
from concord.conformance.compare.reference import Finished, ModuleReference, Pin, dtype_name, named, numbers
from concord.conformance.estimate import SAMPLES, Observer, estimate
from concord.conformance.explain import Cause
from concord.conformance.explain.computation import Computation, Prediction
from concord.conformance.explain.hypothesis import Hypothesis
from concord.conformance.explain.search import Effort, Search
from concord.conformance.scoring import judge_tensor
from concord.spec.arrays import Array
from concord.spec.text import first_of

LONGEST = 60.0
"""Seconds of the processor that the search for a cause may take."""

OWN, TORCH = (str(Path(file).parent) for file in (__file__, torch.__file__))


@dataclass(frozen=True)
class Recorded:
    """An operation of a stretch.

    Attributes:
        operation: with the operands that it had.
        line: where the source asks for it, ``file:line``.
        made: what it gave.
        tensors: copies of it by name, since what follows may work on it in place.
        given: what earlier operations gave it, each by its name; None for another operand.
    """

    operation: Operation
    line: str
    made: Any
    tensors: Mapping[str, Tensor]
    given: Sequence[tuple[str, Tensor] | None]

    def __str__(self) -> str:
        return f"{self.operation.name} ({self.line})"


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
        self.latest: dict[int, tuple[str, Tensor]] = {}
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
        given = [self.latest.get(id(one)) for one in operation.tensors]
        made = operation()
        own = named(made, str(len(self.steps)))
        copies = {name: one.detach().clone() for name, one in own.items()}
        self.latest |= {id(one): (name, copies[name]) for name, one in own.items()}
        self.steps.append(Recorded(operation, line, made, copies, given))
        return made

    def again(
        self,
        arithmetic: Any,
        observer: Observer,
        make: Callable[[Operation], Any] = Operation.__call__,
        others: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Compute all operations again.

        Args:
            observer: takes what each operation gives, by the names of its arrays, and the last activation.
            make: returns what an operation gives.
            others: tensors in place of those with these identities.
        """
        known = dict(others or {})
        arithmetic.blind_rows_zero = self.module.blind_rows_zero

        def present(x: Any) -> Any:
            return known.get(id(x), x)

        def observe(name: str, tensor: Tensor) -> None:
            array = numbers(tensor)
            observer(name, array[None] if arithmetic.samples else array.copy())

        with plainly(), torch.no_grad(), arithmetic:
            known |= {key: tensor.clone() for key, tensor in self.before.items()}
            for number, step in enumerate(self.steps):
                given = (tuple(step.operation.args), dict(step.operation.kwargs))
                args, kwargs = tree_map(present, given)
                made = make(Operation(step.operation.func, args, kwargs))
                for name, tensor in named(made, str(number)).items():
                    observe(name, tensor)
                known |= zip(map(id, tree_leaves(step.made)), tree_leaves(made), strict=True)
        observe(self.end, present(self.result))

    @property
    def computing(self) -> Iterator[Recorded]:
        """The operations that round, and depend on an activation and not on parameters alone."""
        fixed, depends = set(map(id, self.module.parameters.values())), set[str]()
        for step in self.steps:
            if any(
                given[0] in depends if given else id(one) not in fixed
                for one, given in zip(step.operation.tensors, step.given, strict=True)
            ):
                depends |= {*step.tensors}
                if step.operation.name not in EXACT:
                    yield step

    @property
    def lines(self) -> str:
        """Where its operations are written."""
        return first_of(list(dict.fromkeys(step.line for step in self.steps)), 4)


def source_line() -> str | None:
    """Return the innermost line outside PyTorch, or of one of its modules that nothing else calls."""
    inner = None
    for frame, line in traceback.walk_stack(None):
        path = frame.f_code.co_filename
        if path == modules.__file__:  # a hook, or what called the model
            break
        found = f"{Path(path).name}:{line}"
        if not path.startswith((OWN, TORCH)):
            return found
        if path.startswith(f"{TORCH}/nn/modules"):
            inner = inner or found
    return inner


def opened(right: Stretch, theirs: Stretch) -> list[str]:
    """Say where the operations of both sides part, and which is the first to give something else.

    Where they have parted, operations that look alike need not be the same. So one that differs is named only
    if it was given what the reference's was; and else the last number that both sides compute.
    """
    dtypes = {name: dtype_name(one.dtype) for step in right.steps for name, one in step.tensors.items()}
    dtypes[right.end] = dtype_name(right.result.dtype)
    values, sigmas = estimate(
        right.again,
        dtypes,
        truth=right.module.exact(),
        arithmetics=right.module.runs(range(SAMPLES)),
        doing="opening the stretch",
    )

    def ratio(name: str, tensor: Tensor) -> float:
        """Return by how many tolerances a tensor lies off the reference's."""
        array = numbers(tensor).astype(np.float64)
        judged = judge_tensor(array, values[name], sigmas[name], dtypes[name])
        return judged.ratio if judged.status == "diverges" else 0.0

    said: list[str] = []
    a, b = (
        [f"{step.operation.name} {[one.shape for one in step.tensors.values()]}" for step in side.steps]
        for side in (right, theirs)
    )
    for tag, i, until, j, end in SequenceMatcher(a=a, b=b, autojunk=False).get_opcodes():
        ours, others = right.steps[i:until], theirs.steps[j:end]
        if tag != "equal":
            here, there = ([*map(str, side), "nothing"][0] for side in (ours, others))
            said = said or [f"its operations part: {here} in the reference, {there} in the candidate"]
            continue
        for own, other in zip(ours, others, strict=True):
            found = [ratio(name, one) for name, one in zip(own.tensors, other.tensors.values(), strict=True)]
            operands = zip(own.given, other.given, strict=False)
            if any(found) and not any(ratio(one[0], two[1]) for one, two in operands if one and two):
                words = f"its first operation that differs is {own}, by {max(found):.3g} tolerances"
                return [*said, f"{words}; the candidate's stands at {other.line}"]
    shared, left = list[str](), [(name, step) for step in right.computing for name in step.tensors]
    for step in theirs.steps:
        for tensor in step.tensors.values():
            alike = (
                place
                for place, (name, _) in enumerate(left)
                if values[name].shape == tensor.shape and not ratio(name, tensor)
            )
            if tensor.unique().numel() > 1 and (place := next(alike, None)) is not None:
                shared = [f"the last that both compute is {left[place][1]}; in the candidate it is {step}"]
                left = left[place:]
    return [*said, *shared]


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

    def values(self, hypothesis: Hypothesis) -> Array:
        """Return the last activation with a bug."""
        return self.predict(hypothesis).value

    def predict(self, hypothesis: Hypothesis) -> Prediction:
        """Return the same with its sigma; where either is not finite, what is right."""
        assert isinstance(hypothesis, Made)
        made = hypothesis.made()
        known = np.isfinite(made.value) & np.isfinite(self.right.value)
        return Prediction(np.where(known, made.value, self.right.value), made.sigma)


def cause(stretch: Stretch, asked: StretchComputation, strange: Iterable[str]) -> Cause | None:
    """Return what explains the last activation of a stretch.

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
    return Search(asked, Effort(LONGEST)).cause([tried], active)


def changed(stretch: Stretch, right: Prediction) -> Iterator[Made]:
    """Yield a stretch with the parameters of other modules, and with a bug in one operation or in all."""

    def again(others: Mapping[int, Tensor], make: Callable[[Operation], Any]) -> Prediction:
        found: dict[str, Array] = {}
        with modules.running("the stretch with a bug"):
            stretch.again(stretch.module.exact(), found.__setitem__, make, others)
        return Prediction(found[stretch.end], right.sigma)

    def injected(bug: OperationBug, site: int | None) -> Prediction:
        return again({}, Injected(bug, site))  # which counts operations, anew each time

    for path, others in exchanged(stretch):
        made = partial(again, others, Operation.__call__)
        yield Made("parameters_exchanged", f"the parameters of {path}", "", made=made)
    counted = Injected()
    again({}, counted)
    for bug, count in counted.sites.items():
        for site in (None, *range(count if count > 1 else 0)):
            yield Made(bug.name, bug.text, "", made=partial(injected, bug, site))


def exchanged(stretch: Stretch) -> Iterator[tuple[str, dict[int, Tensor]]]:
    """Yield the parameters of each module that the one which the stretch ends in may be confused with."""
    within, parameters = dict(stretch.module.model.named_modules()), stretch.module.parameters
    own = re.split(r"[#\[]", stretch.end)[0]
    module = within.pop(own, None)
    shapes = {name: tensor.shape for name, tensor in module.named_parameters()} if module else {}
    for path, other in within.items():
        if shapes and shapes == {name: tensor.shape for name, tensor in other.named_parameters()}:
            yield path, {id(parameters[f"{own}.{name}"]): parameters[f"{path}.{name}"] for name in shapes}


def reordered(actual: Array, right: Prediction) -> Iterator[Made]:
    """Yield the right elements along an axis in the order in which they come nearest to the candidate's."""
    for axis in range(actual.ndim):
        value, own = (
            np.nan_to_num(np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis])) for x in (right.value, actual)
        )
        order = (np.square(value).sum(0) - 2 * own.T @ value).argmin(1)
        moved = np.flatnonzero(order != np.arange(len(order)))
        if len(moved):
            text = f"another order of axis {axis}: {moved[0]} holds what belongs to {order[moved[0]]}"
            taken = [np.take(x, order, axis) for x in (right.value, right.sigma)]
            yield Made("elements_reordered", text, "", made=partial(Prediction, *taken))
