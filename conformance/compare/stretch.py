"""The operations that lead to a divergence, recorded once and run again."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from concord.conformance.compare import module_reference as modules
from concord.conformance.compare.aten_arithmetic import plainly
from concord.conformance.compare.aten_operations import Make, Operation, Watched, is_float
from concord.conformance.compare.decisions import source_line
from concord.conformance.compare.module_reference import Finished, ModuleReference, dtype_name, named, numbers
from concord.conformance.judging.estimate import SAMPLES, Observer, Z, estimate
from concord.conformance.judging.protocol import Pin
from concord.conformance.judging.scoring import judge_tensor
from concord.spec.arrays import Array
from concord.spec.text import first_of

# Limit on the recorded results.
MOST_BYTES = 2**30

# Operations that rearrange their first operand without being views.
MOVING = ("_unsafe_view", "clone", "copy", "repeat", "unsafe_split", "_reshape_copy", "roll", "flip")


@dataclass(frozen=True, eq=False)
class Recorded:
    """An operation of a stretch.

    Attributes:
        line: ``file:line``.
        made: its result.
        tensors: copies, because later operations may work in place.
        owners: identities of calling modules.
    """

    operation: Operation
    line: str
    made: Any
    tensors: Mapping[str, Tensor]
    owners: Sequence[int] = ()

    def __str__(self) -> str:
        return f"{self.operation.name} ({self.line})"

    @functools.cached_property
    def operands(self) -> frozenset[int]:
        """Identities of its operand tensors."""
        given = tree_leaves((self.operation.args, self.operation.kwargs))
        return frozenset(id(x) for x in given if isinstance(x, Tensor))

    @property
    def computes(self) -> bool:
        """Whether it does more than move numbers."""
        moves = self.operation.func.is_view or self.operation.name in MOVING
        return not moves and any(map(is_float, self.operation.args[:1]))


class Stretch:
    """The operations between an activation and those before it.

    Args:
        known: activations at which the stretch may start.
        pin: for an exact run; None: an ordinary one.
        check: called for each operation; may raise to stop.

    Attributes:
        starts: where it starts; empty: at the inputs.
        active: paths of calling modules.
    """

    def __init__(
        self,
        module: ModuleReference,
        end: str,
        known: Collection[str],
        pin: Pin | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.module, self.end, self.known, self.pin, self.check = module, end, known, pin, check
        self.steps: list[Recorded] = []
        self.result: Any = None
        self.before: dict[int, Tensor] = {}  # tensors before an in-place change
        self.taken: dict[
            int, tuple[int, str, Tensor]
        ] = {}  # activations, with the number of operations before each
        self.starts: list[str] = []
        self.size = 0
        modes = [*([module.exact()] if pin else []), Watched(self.record)]
        module.observe(self.take, *modes, pin=pin or modules.nothing)
        self.steps = [
            replace(step, tensors={f"{place}{name}": one for name, one in step.tensors.items()})
            for place, step in enumerate(self.between())
        ]
        if not any(step.operation.func._schema.is_mutable for step in self.steps):  # noqa: SLF001
            self.before = {}
        self.paths = {id(inner): path for path, inner in module.model.named_modules()}
        self.active = {path for step in self.steps for path in self.within(step)}

    def within(self, step: Recorded) -> list[str]:
        """Return the paths of an operation's modules, innermost first."""
        return [self.paths[owner] for owner in step.owners if owner in self.paths]

    def take(self, name: str, made: Tensor) -> None:
        """Note an activation; stop at the last one."""
        if name == self.end:
            self.result = made
            raise Finished
        if name in self.known:
            self.taken[id(made)] = len(self.steps), name, made

    def record(self, operation: Operation) -> Any:
        """Compute and record an operation."""
        self.check()
        line = source_line()
        if line is None:  # called by a hook
            return operation()
        if operation.func._schema.is_mutable:  # noqa: SLF001 – nothing else says it
            self.before.setdefault(id(operation.args[0]), operation.args[0].clone())
        made = operation()
        copies = {name: one.detach().clone() for name, one in named(made, "").items()}
        self.steps.append(Recorded(operation, line, made, copies, callers()))
        self.size += sum(one.nbytes for one in copies.values())
        if self.size > MOST_BYTES:  # forgets the earlier half of a large model
            far = len(self.steps) // 2
            del self.steps[:far]
            self.taken = {key: (max(n - far, 0), name, one) for key, (n, name, one) in self.taken.items()}
            self.size //= 2
        return made

    def between(self) -> list[Recorded]:
        """Return the operations back to earlier activations."""
        found, wanted = list[Recorded](), {id(self.result)}
        for place, step in reversed([*enumerate(self.steps)]):
            hit = wanted & set(map(id, tree_leaves(step.made)))
            known = {key for key in hit if self.taken.get(key, (-1,))[0] > place}
            self.starts += [self.taken[key][1] for key in known]
            wanted -= hit
            if hit - known:
                found.append(step)
                wanted |= step.operands
        self.starts += [self.taken[key][1] for key in wanted if key in self.taken]
        return found[::-1]

    def again(
        self,
        arithmetic: Any,
        observer: Observer,
        make: Make = Operation.__call__,
        others: Mapping[int, Tensor] | None = None,
        changed: Collection[int] | None = None,
    ) -> None:
        """Run all operations again.

        Args:
            others: replacements of tensors, by identity.
            changed: compute exactly what follows from these operations, and observe only the end.
        """
        known = dict(others or {})
        named_here = self.tensors if changed is None else {self.end: self.result}
        observe = modules.handing(observer, arithmetic, named_here)
        arithmetic.blind_rows = self.module.blind_rows

        def present(x: Any) -> Any:
            return known.get(id(x), x)

        with plainly(), torch.no_grad(), arithmetic:
            known |= {key: tensor.clone() for key, tensor in self.before.items()}
            for number, step in enumerate(self.steps):
                self.check()
                # An in-place operation may change a tensor under another identity.
                kept = changed is not None and not self.before and number not in changed
                if kept and step.operands.isdisjoint(known):
                    continue
                given = (tuple(step.operation.args), dict(step.operation.kwargs))
                args, kwargs = tree_map(present, given)
                made = make(Operation(step.operation.func, args, kwargs, number))
                for name, tensor in named(made, str(number)).items() if changed is None else ():
                    observe(name, tensor)
                known |= zip(map(id, tree_leaves(step.made)), tree_leaves(made), strict=True)
        observe(self.end, present(self.result))

    @functools.cached_property
    def places(self) -> list[tuple[str, int]]:
        """Each operation's line, and position within consecutive ones of that line."""
        found = list[tuple[str, int]]()
        for step in self.steps:
            line, place = found[-1] if found else ("", 0)
            found.append((step.line, place + 1 if step.line == line else 0))
        return found

    @functools.cached_property
    def last(self) -> Recorded | None:
        """The operation that returns the last activation."""
        made = [step for step in self.steps if id(self.result) in map(id, tree_leaves(step.made))]
        return made[-1] if made else None

    def before_end(self, ends: Callable[[Recorded], bool]) -> list[Recorded]:
        """Return operations before the end, back to those where ``ends`` holds."""
        if self.last is None:
            return []
        found, wanted = list[Recorded](), set(self.last.operands)
        found.append(self.last)
        for step in reversed(self.steps[: self.steps.index(self.last)]):
            own = set(map(id, tree_leaves(step.made)))
            if own & wanted:
                wanted -= own
                if not ends(step):
                    found.append(step)
                    wanted |= step.operands
        return found[::-1]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All results by name."""
        made = {name: one for step in self.steps for name, one in step.tensors.items()}
        return {**made, self.end: self.result}

    @property
    def lines(self) -> str:
        """Source lines of its operations."""
        return first_of(list(dict.fromkeys(step.line for step in self.steps)), 4)


def callers() -> list[int]:
    """Return the modules whose ``forward`` is running, by identity."""
    frames = (frame for frame, _ in traceback.walk_stack(None) if frame.f_code.co_name == "forward")
    return [id(frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))) for frame in frames]


def opened(right: Stretch, theirs: Stretch) -> list[str]:
    """Describe where the candidate's operations go wrong on right inputs.

    Only operations that lead to the wrong end count, because others may correctly differ.
    """
    dtypes = {name: dtype_name(one.dtype) for name, one in right.tensors.items()}
    truth = right.module.exact()
    runs = right.module.runs(range(SAMPLES), truth)
    values, sigmas = estimate(right.again, dtypes, truth=truth, arithmetics=runs, doing="opening the stretch")
    outlines = {name: outline(value) for name, value in values.items()}

    def matching(tensor: Tensor) -> str:
        right.check()
        array = numbers(tensor).astype(np.float64)
        own = outline(array)
        for name, value in values.items():
            near = value.size == array.size and not (abs(own - outlines[name]) > Z * sigmas[name].max()).any()
            if near and any(
                judge_tensor(*these, dtypes[name]).status == "agrees"
                for these in layouts(array, value, sigmas[name])
            ):
                return name
        return ""

    met: dict[str, Recorded] = {}

    def same(step: Recorded) -> bool:
        # Constant tensors say nothing.
        telling = [tensor for tensor in step.tensors.values() if tensor.unique().numel() > 1]
        names = [matching(tensor) for tensor in telling]
        met.update(dict.fromkeys(names, step))
        return all(names)

    wrong = theirs.before_end(lambda step: step is not theirs.last and same(step))
    if not wrong:
        return []
    first, last, end = wrong[0], wrong[-1], right.end
    if early := matching(theirs.result):
        if early == end:
            return []
        ending = next(step for step in right.steps if early in step.tensors)
        left = [
            step for step in right.steps if step.operation.number > ending.operation.number and step.computes
        ]
        return [f"the candidate ends with {ending}; in the reference {left[0]} follows"] if left else []
    if right.last is None:  # the reference returns it unchanged
        return [f"nothing is computed there in the reference, {first} in the candidate"]
    if done := met.get(end) or next((met[name] for name in right.last.tensors if name in met), None):
        return [f"the candidate has the right numbers after {done}, and goes on with {first}"]
    lacking = right.before_end(lambda step: step is not right.last and bool(met.keys() & step.tensors.keys()))
    there = next((step for step in lacking if step.computes), right.last)
    computing = [step for step in wrong if step.computes] or wrong
    if len(computing) == 1 and computing[0].operation.name == there.operation.name:
        return [f"its first operation that differs is {there}; the candidate's stands at {computing[0].line}"]
    what = f"{first}" if first is last else f"{first} to {last}"
    return [f"its operations part: {there} in the reference, {what} in the candidate, given the same numbers"]


def outline(array: Array) -> Array:
    """Return sorted elements, equal in every layout."""
    flat = np.sort(array, None)
    return flat[[0, len(flat) // 3, 2 * len(flat) // 3, -1]] if len(flat) else np.zeros(4)


def layouts(array: Array, value: Array, sigma: Array) -> Iterator[tuple[Array, Array, Array]]:
    """Yield an array with value and sigma in each fitting layout."""
    if array.shape == value.shape:
        yield array, value, sigma
        return
    for order in permutations(range(array.ndim)):
        yield array.transpose(order).reshape(value.shape), value, sigma
    for order in permutations(range(value.ndim)) if value.ndim > array.ndim else ():
        yield array, value.transpose(order).reshape(array.shape), sigma.transpose(order).reshape(array.shape)
