"""The stretch in which a divergence was made: its operations, recorded once and computed again.

In other arithmetics that gives each operation's tolerance, by which the first is found that a candidate
computes otherwise; with a bug in one of them, what the bug would explain.
"""

from __future__ import annotations

import functools
import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from concord.conformance.compare import activations
from concord.conformance.compare.activations import Finished, dtype_name, named, numbers, observe
from concord.conformance.compare.arithmetic import ExactMode, computed, plainly
from concord.conformance.compare.bugs import UNFIT, Injected, Operation, OperationBug, Watched
from concord.conformance.compare.reference import ModuleReference, with_value
from concord.conformance.estimate import SAMPLES, Observer, estimate
from concord.conformance.explain import Cause
from concord.conformance.explain.computation import Computation, Prediction
from concord.conformance.explain.hypothesis import Hypothesis
from concord.conformance.explain.search import Effort, Search
from concord.conformance.scoring import judge_tensor
from concord.spec.arrays import Array
from concord.spec.errors import SpecError

LONGEST = 60.0
"""Seconds of the processor that the search for a cause may take."""

OWN, TORCH = (str(Path(file).parent) for file in (__file__, torch.__file__))


@dataclass(frozen=True)
class Recorded:
    """An operation of a stretch.

    Attributes:
        operation: with the operands that it had.
        where: the file and the line of the source that asks for it.
        made: what it gave.
        tensors: copies of it by name, since what follows may work on it in place.
    """

    operation: Operation
    where: tuple[str, int]
    made: Any
    tensors: Mapping[str, Tensor]

    def __str__(self) -> str:
        return f"{self.operation.name} ({self.line})"

    @property
    def line(self) -> str:
        """Where the source asks for it, ``file:line``."""
        return "{}:{}".format(*self.where)

    @property
    def kind(self) -> str:
        """What it has in common with the same step of another run."""
        return f"{self.operation.name} {[tensor.shape for tensor in self.tensors.values()]}"


class Stretch:
    """The operations of one run between two activations.

    Args:
        start, end: the activations; an empty start is the beginning.
    """

    def __init__(self, start: str, end: str) -> None:
        self.end, self.start = end, start
        self.on = not start
        self.steps: list[Recorded] = []
        self.result: Any = None
        self.before: dict[int, Tensor] = {}  # what operations change in place, as it was

    def take(self, name: str, made: Tensor) -> None:
        """Take an activation of the run, which ends with the last one."""
        self.on = self.on or name == self.start
        if name == self.end:
            self.result = made
            raise Finished

    def record(self, operation: Operation) -> Any:
        """Compute an operation, and note it."""
        where = source_line() if self.on else None
        if where is None:  # a hook asked for it
            return operation()
        if operation.func._schema.is_mutable:  # noqa: SLF001 – nothing else says it
            self.before.setdefault(id(operation.args[0]), operation.args[0].clone())
        made = operation()
        copies = {name: one.detach().clone() for name, one in named(made, str(len(self.steps))).items()}
        self.steps.append(Recorded(operation, where, made, copies))
        return made

    def again(
        self,
        arithmetic: ExactMode,
        observer: Observer = lambda name, array: None,
        make: Callable[[Operation], Any] = Operation.__call__,
        others: Mapping[int, Tensor] | None = None,
    ) -> Array:
        """Compute all operations again, and return the last activation.

        Args:
            observer: takes what each operation gives, by the names of its arrays.
            make: returns what an operation gives.
            others: tensors in place of those with these identities.
        """
        known = dict(others or {})

        def present(x: Any) -> Any:
            return known.get(id(x), x)

        with plainly(), torch.no_grad(), arithmetic:
            known |= {key: tensor.clone() for key, tensor in self.before.items()}
            for number, step in enumerate(self.steps):
                func, args, kwargs = step.operation.func, step.operation.args, step.operation.kwargs
                made = make(Operation(func, *tree_map(present, (tuple(args), dict(kwargs)))))
                for name, tensor in named(made, str(number)).items():
                    array = numbers(tensor)
                    observer(name, array[None] if arithmetic.samples else array.copy())
                known |= {
                    id(old): new for old, new in zip(tree_leaves(step.made), tree_leaves(made), strict=True)
                }
        return numbers(known.get(id(self.result), self.result))

    @property
    def lines(self) -> str:
        """Where its operations are written: of each file the first line and the last."""
        found: dict[str, list[int]] = {}
        for step in self.steps:
            found.setdefault(step.where[0], []).append(step.where[1])
        places = (f"{file}:{min(lines)} to {max(lines)}" for file, lines in found.items())
        return ", ".join(places)


def recorded(reference: ModuleReference, pins: Mapping[str, Array], start: str, end: str) -> Stretch:
    """Record what a reference does between two activations.

    Args:
        pins: what it uses in place of its own activations.
    """
    found, plain = Stretch(start, end), reference.plain.tensors
    args, kwargs = reference.given(computed)

    def pin(name: str) -> Tensor | None:
        return with_value(pins[name], plain[name].dtype) if name in pins else None

    with plainly(), reference.exact(), Watched(found.record):
        observe(reference.model, args, kwargs, reference.parameters, take=found.take, pin=pin)
    return found


def source_line() -> tuple[str, int] | None:
    """Return the innermost line outside PyTorch, or of one of its modules that nothing else calls."""
    inner = None
    for frame, line in traceback.walk_stack(None):
        path = frame.f_code.co_filename
        if path == activations.__file__:  # a hook, or what called the model
            break
        found = Path(path).name, line
        if not path.startswith((OWN, TORCH)):
            return found
        if path.startswith(f"{TORCH}/nn/modules"):
            inner = inner or found
    return inner


def opened(reference: ModuleReference, right: Stretch, theirs: Stretch) -> list[str]:
    """Say where the operations of both sides part, and which is the first to give something else."""

    def compute(arithmetic: Any, observer: Observer) -> None:
        right.again(arithmetic, observer)

    dtypes = {name: dtype_name(one.dtype) for step in right.steps for name, one in step.tensors.items()}
    runs = reference.runs(range(SAMPLES))
    values, sigmas = estimate(
        compute, dtypes, truth=reference.exact(), arithmetics=runs, doing="opening the stretch"
    )
    said: list[str] = []
    a, b = ([step.kind for step in side.steps] for side in (right, theirs))
    for tag, i, until, j, end in SequenceMatcher(a=a, b=b, autojunk=False).get_opcodes():
        ours, others = right.steps[i:until], theirs.steps[j:end]
        if tag != "equal":
            here, there = ([*map(str, side), "nothing"][0] for side in (ours, others))
            said = said or [f"its operations part: {here} in the reference, {there} in the candidate"]
            continue
        for own, other in zip(ours, others, strict=True):
            for name, tensor in zip(own.tensors, other.tensors.values(), strict=True):
                array = numbers(tensor).astype(np.float64)
                judged = judge_tensor(array, values[name], sigmas[name], dtypes[name])
                if judged.status == "diverges":
                    words = f"its first operation that differs is {own}, by {judged.ratio:.3g} tolerances"
                    return [*said, f"{words}; the candidate's stands at {other.line}"]
    return said


# Why: a bug in what computes the last activation, or the order of its elements.


@dataclass(frozen=True, kw_only=True)
class Made(Hypothesis):
    """A bug, with what gives the last activation then, and its sigma."""

    made: Callable[[], tuple[Array, Array]]


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
        value, sigma = hypothesis.made()
        known = np.isfinite(value) & np.isfinite(self.right.value)
        return Prediction(np.where(known, value, self.right.value), sigma)


def cause(
    stretch: Stretch, reference: ModuleReference, asked: StretchComputation, strange: Iterable[str]
) -> Cause | None:
    """Return what explains the last activation of a stretch.

    Args:
        strange: tensors that the candidate has alone.
    """
    modules = dict(reference.model.named_modules())
    active = [  # dropout that passes on what it is given has no activation
        Hypothesis("dropout_active", f"dropout that is active in {name}", "")
        for name in strange
        if isinstance(modules.get(name), nn.Dropout)
    ]
    tried = itertools.chain(reordered(asked), changed(stretch, reference, asked))
    return Search(asked, Effort(LONGEST)).cause([tried], active)


def changed(stretch: Stretch, reference: ModuleReference, asked: StretchComputation) -> Iterator[Made]:
    """Yield a stretch with the parameters of other modules, and with a bug in one operation or in all."""

    def again(
        bug: OperationBug | None, site: int | None, others: Mapping[int, Tensor]
    ) -> tuple[Array, Array]:
        try:
            array = stretch.again(reference.exact(), make=Injected(bug, site), others=others)
            return array, asked.right.sigma
        except UNFIT as error:
            raise SpecError(f"no operation can have it: {error}") from error

    for path, others in exchanged(reference, asked.tensor):
        made = functools.partial(again, None, None, others)
        yield Made("parameters_exchanged", f"the parameters of {path}", "", made=made)
    counted = Injected()
    stretch.again(reference.exact(), make=counted)
    for bug, count in counted.sites.items():
        for site in (None, *range(count if count > 1 else 0)):
            yield Made(bug.name, bug.text, "", made=functools.partial(again, bug, site, {}))


def exchanged(reference: ModuleReference, tensor: str) -> Iterator[tuple[str, dict[int, Tensor]]]:
    """Yield the parameters of each module that the one which returns a tensor may be confused with."""
    modules, parameters = dict(reference.model.named_modules()), reference.parameters
    own = reference.plain.modules.get(tensor, "")
    shapes = {name: tensor.shape for name, tensor in modules.pop(own).named_parameters()}
    for path, module in modules.items():
        if shapes and shapes == {name: tensor.shape for name, tensor in module.named_parameters()}:
            yield path, {id(parameters[f"{own}.{name}"]): parameters[f"{path}.{name}"] for name in shapes}


def reordered(asked: StretchComputation) -> Iterator[Made]:
    """Yield the right elements along an axis in the order in which they come nearest to the candidate's."""
    value, sigma = asked.right.value, asked.right.sigma
    for axis in range(value.ndim):
        right, own = (
            np.nan_to_num(np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis])) for x in (value, asked.actual)
        )
        order = (np.square(right).sum(0) - 2 * own.T @ right).argmin(1)
        moved = np.flatnonzero(order != np.arange(len(order)))
        if len(moved):
            text = f"another order of axis {axis}: {moved[0]} holds what belongs to {order[moved[0]]}"
            found = np.take(value, order, axis), np.take(sigma, order, axis)
            yield Made("elements_reordered", text, "", made=functools.partial(tuple, found))
