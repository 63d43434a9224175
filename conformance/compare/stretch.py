"""The operations that lead to a divergence."""

from __future__ import annotations

import itertools
import operator
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from concord.conformance.compare.aten_arithmetic import plainly
from concord.conformance.compare.aten_operations import (
    Make,
    Operation,
    Tensors,
    Watched,
    is_float,
    is_mutable,
)
from concord.conformance.compare.decisions import TORCH, source_line
from concord.conformance.compare.module_reference import (
    Finished,
    ModuleReference,
    dtype_name,
    handing,
    named,
    nothing,
    numbers,
    submodule_of,
)
from concord.conformance.judging.estimate import SAMPLES, Observer, Z, estimate
from concord.conformance.judging.expectation import is_buffer
from concord.conformance.judging.protocol import Pin
from concord.conformance.judging.scoring import judge_tensor
from concord.spec.arrays import Array, Arrays

# A function that raises an exception once the time for a search is up.
Check = Callable[[], None]

# Limit on the recorded results.
MOST_BYTES = 2**30

# Fewest and most operations in an iteration of a loop that is recognized, such as a step of an LSTM.
SHORTEST_LOOP, LONGEST_LOOP = 4, 64

# Operations that rearrange their first operand without being views.
MOVING = ("_unsafe_view", "clone", "copy", "repeat", "unsafe_split", "_reshape_copy", "roll", "flip")


@dataclass(frozen=True, eq=False)
class Recorded:
    """An operation of a stretch.

    Attributes:
        line: ``file:line``.
        tensors: copies, because later operations may be in-place.
        owners: the file and line that each calling module has reached, by identity, innermost first.
        written: identities of the tensors that an in-place operation changes, with all views of one memory.
    """

    operation: Operation
    line: str
    result: Any
    tensors: Tensors
    owners: Mapping[int, tuple[str, int]]
    written: frozenset[int] = frozenset()

    def __str__(self) -> str:
        return f"{self.operation.name} ({self.line})"

    @cached_property
    def operands(self) -> frozenset[int]:
        """Identities of operand tensors."""
        leaves = tree_leaves((self.operation.args, self.operation.kwargs))
        return frozenset(id(x) for x in leaves if isinstance(x, Tensor))

    @cached_property
    def results(self) -> frozenset[int]:
        """Identities of computed tensors."""
        return self.written | frozenset(map(id, tree_leaves(self.result)))

    @property
    def computes(self) -> bool:
        """Whether it does more than move values."""
        moves = self.operation.func.is_view or self.operation.name in MOVING
        return not moves and any(map(is_float, self.operation.args[:1]))


class Stretch:
    """The operations between an activation and preceding ones.

    Args:
        known: activations at which the stretch may start.
        pin: replacements in an exact run; None for an ordinary run.

    Attributes:
        starts: activations where it starts; empty for the inputs.
        active: paths of calling modules.
    """

    def __init__(
        self,
        module: ModuleReference,
        end: str,
        known: Collection[str],
        pin: Pin | None = None,
        check: Check = lambda: None,
    ) -> None:
        self.module, self.end, self.known, self.pin, self.check = module, end, known, pin, check
        self.steps: list[Recorded] = []
        self.result: Any = None
        self.before: dict[int, Tensor] = {}  # tensors before an in-place change
        self.taken: dict[
            int, tuple[int, str, Tensor]
        ] = {}  # activations, with the number of operations before each
        self.starts: list[str] = []
        self.views = defaultdict[int, dict[int, Tensor]](dict)  # known tensors by memory and identity
        self.size = 0
        modes = [*([module.exact()] if pin else []), Watched(self.record)]
        module.observe(self.take, *modes, pin=pin or nothing)
        self.steps = [
            replace(step, tensors={f"{place}{name}": tensor for name, tensor in step.tensors.items()})
            for place, step in enumerate(self.between())
        ]
        if not any(is_mutable(step.operation.func) for step in self.steps):
            self.before = {}
        self.paths = {id(inner): path for path, inner in module.model.named_modules()}
        self.active = {path for step in self.steps for path in self.within(step)}
        self.active |= {submodule_of(end)} if is_buffer(end) else set()

    def within(self, step: Recorded) -> list[str]:
        """Paths of an operation's modules, innermost first."""
        return [self.paths[owner] for owner in step.owners if owner in self.paths]

    def take(self, name: str, tensor: Tensor) -> None:
        """Record an activation; stop at the last one."""
        self.know(tensor)
        if name == self.end:
            self.result = tensor
            raise Finished
        if name in self.known:
            self.taken[id(tensor)] = len(self.steps), name, tensor

    def record(self, operation: Operation) -> Any:
        """Compute and record an operation."""
        self.check()
        line = source_line()
        if line is None:  # called by a hook
            return operation()
        self.know(operation.args, operation.kwargs)
        written = dict[int, Tensor]()
        if is_mutable(operation.func):
            written = dict(self.views[memory(operation.args[0])])
            new = written.keys() - self.before.keys()
            self.before |= {key: written[key].clone() for key in new}
        result = operation()
        self.know(result)
        copies = {name: tensor.detach().clone() for name, tensor in named(result, "").items()}
        self.steps.append(Recorded(operation, line, result, copies, callers(), frozenset(written)))
        self.size += sum(tensor.nbytes for tensor in copies.values())
        if self.size > MOST_BYTES:  # drops the earlier half of a large model
            far = len(self.steps) // 2
            del self.steps[:far]
            self.taken = {
                key: (max(n - far, 0), name, tensor) for key, (n, name, tensor) in self.taken.items()
            }
            self.size //= 2
            self.views.clear()
            self.know([(x.operation.args, x.operation.kwargs, x.result) for x in self.steps], self.taken)
        return result

    def know(self, *tensors: Any) -> None:
        """Remember tensors by their memory."""
        for x in tree_leaves(tensors):
            if isinstance(x, Tensor):
                self.views[memory(x)][id(x)] = x

    def between(self) -> list[Recorded]:
        """Operations since the preceding activations."""
        steps, sources = list[Recorded](), {id(self.result)}
        for place, step in reversed([*enumerate(self.steps)]):
            hit = sources & step.results
            activations = {key for key in hit if self.taken.get(key, (-1,))[0] > place}
            self.starts += [self.taken[key][1] for key in activations]
            sources -= activations | (hit - step.written)  # only a part may have been written
            if hit - activations:
                steps.append(step)
                sources |= step.operands
        self.starts += [self.taken[key][1] for key in sources if key in self.taken]
        return steps[::-1]

    def again(
        self,
        arithmetic: Any,
        observer: Observer,
        make: Make = Operation.__call__,
        others: Mapping[int, Tensor] | None = None,
        changed: Collection[int] | None = None,
    ) -> None:
        """Rerun all operations.

        Args:
            others: replacements of tensors, by identity.
            changed: compute only results that depend on these operations, exactly, and observe only the end.
        """
        replacements = dict[int, Tensor]()
        named_here = self.tensors if changed is None else {self.end: self.result}
        observe = handing(observer, arithmetic, named_here)
        arithmetic.blind_rows = self.module.blind_rows

        def present(x: Any) -> Any:
            return replacements.get(id(x), x)

        def own(x: Any) -> Any:
            # A bug may return another tensor, which no later in-place operation may change for good: all
            # other bugs would start from wrong values.
            return x.clone() if self.before and isinstance(x, Tensor) else x

        with plainly(), torch.no_grad(), arithmetic:
            others = {key: own(tensor) for key, tensor in (others or {}).items()}
            replacements |= others | {key: tensor.clone() for key, tensor in self.before.items()}
            for number, step in enumerate(self.steps):
                self.check()
                # An in-place operation may change a tensor with a different identity.
                is_unchanged = changed is not None and not self.before and number not in changed
                if is_unchanged and step.operands.isdisjoint(replacements):
                    continue
                arguments = (tuple(step.operation.args), dict(step.operation.kwargs))
                args, kwargs = tree_map(present, arguments)
                result = make(Operation(step.operation.func, args, kwargs, number))
                if step.written and isinstance(result, Tensor) and result is not args[0]:
                    result = args[0].copy_(result)  # otherwise no other view would see a bug
                else:
                    if not (step.written or step.operation.func.is_view):
                        result = tree_map(own, result)
                    result = tree_map(laid_out, result, step.result)
                for name, tensor in named(result, str(number)).items() if changed is None else ():
                    observe(name, tensor)
                replacements |= zip(map(id, tree_leaves(step.result)), tree_leaves(result), strict=True)
                replacements |= others  # also of results that are computed again
        observe(self.end, present(self.result))

    def estimate(self, dtypes: Mapping[str, str], doing: str, *changes: Any) -> tuple[Arrays, Arrays]:
        """Exact values and sigmas of some results; ``changes`` are those of :meth:`again`."""

        def compute(arithmetic: Any, observer: Observer) -> None:
            self.again(arithmetic, lambda name, x: observer(name, x) if name in dtypes else None, *changes)

        truth = self.module.exact()
        runs = self.module.runs(range(SAMPLES), truth)
        return estimate(compute, dtypes, truth=truth, arithmetics=runs, doing=doing)

    @cached_property
    def entering(self) -> Tensors:
        """Activations and inputs from which it starts, by quoted name."""
        operands = [x for step in self.steps for x in step.operation.floats.values()]
        inputs = {
            f"`{name}`": x
            for name, array in self.module.inputs.items()
            for x in operands
            if np.array_equal(numbers(x), array)
        }
        return inputs | {f"`{name}`": x for _, name, x in self.taken.values() if name in self.starts}

    @cached_property
    def places(self) -> list[tuple[str, int]]:
        """Each operation's line and its position there, which is the same in each iteration of a loop."""
        lines = itertools.groupby(self.steps, lambda step: step.line)
        return [
            (line, position)
            for line, steps in lines
            for position in loop_positions([step.operation.name for step in steps])
        ]

    @cached_property
    def last(self) -> Recorded | None:
        """The operation that returns the last activation."""
        candidates = [step for step in self.steps if id(self.result) in step.results]
        return candidates[-1] if candidates else None

    def before_end(self, ends: Callable[[Recorded], bool]) -> list[Recorded]:
        """Operations before the end, back to those for which ``ends`` is true."""
        if self.last is None:
            return []
        steps, sources = list[Recorded](), set(self.last.operands)
        steps.append(self.last)
        for step in reversed(self.steps[: self.steps.index(self.last)]):
            if step.results & sources:
                sources -= step.results - step.written
                if not ends(step):
                    steps.append(step)
                    sources |= step.operands
        return steps[::-1]

    @property
    def tensors(self) -> Tensors:
        """All results by name."""
        tensors = {name: tensor for step in self.steps for name, tensor in step.tensors.items()}
        return {**tensors, self.end: self.result}

    @property
    def lines(self) -> str:
        """Source lines of its operations, in the ``forward`` that computes the last one."""
        # Functions that this forward calls belong to a library as often as to the model. Steps outside it,
        # such as the construction of a mask, say nothing about this activation.
        owners = self.steps[-1].owners if self.steps and not self.module.graph else {}
        for owner, (file, _) in owners.items():
            if not file.startswith(TORCH):
                lines = sorted({step.owners[owner][1] for step in self.steps if owner in step.owners})
                return f"{Path(file).name}:{lines[0]}" + (f"-{lines[-1]}" if len(lines) > 1 else "")
        return ""


def laid_out(x: Any, right: Any) -> Any:
    """Make a wrong result contiguous if the right one is: a view may follow."""
    dense = isinstance(x, Tensor) and x.layout == right.layout == torch.strided
    return x.contiguous() if dense and right.is_contiguous() else x


def memory(x: Tensor) -> int:
    """Identity of the memory that a tensor shares with its views."""
    return x.untyped_storage()._cdata if x.layout == torch.strided else id(x)  # noqa: SLF001 – as above


def loop_positions(names: Sequence[str]) -> list[int]:
    """Number operations, but those of a later iteration like those of the first."""
    repeats = list[tuple[int, int, int]]()  # length, period and start of each stretch of repetitions
    for period in range(SHORTEST_LOOP, min(LONGEST_LOOP, len(names) // 2) + 1):
        start = 0
        for repeated, run in itertools.groupby(map(operator.eq, names, names[period:])):
            length = len([*run])
            if repeated and length >= period and len({*names[start : start + period]}) > 1:
                repeats.append((length, period, start))
            start += length
    positions = [*range(len(names))]
    _, longest, _ = max(repeats, default=(0, 0, 0))
    for length, period, start in repeats:
        for place in range(start + period, start + period + length) if period == longest else ():
            positions[place] = positions[place - period]
    return positions


def callers() -> dict[int, tuple[str, int]]:
    """The file and line of each ``forward`` that is running, by its module's identity."""
    return {
        id(frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))): (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_stack(None)
        if frame.f_code.co_name == "forward"
    }


def opened(right: Stretch, theirs: Stretch) -> list[str]:
    """Describe where the candidate's operations first go wrong on correct inputs."""
    dtypes = {name: dtype_name(tensor.dtype.to_real()) for name, tensor in right.tensors.items()}
    values, sigmas = right.estimate(dtypes, "locating the first wrong operation")
    outlines = {name: outline(value) for name, value in values.items()}

    def matching(tensor: Tensor) -> list[str]:
        right.check()
        array = numbers(tensor).astype(np.float64)
        own = outline(array)
        return [
            name
            for name, value in values.items()
            if value.size == array.size
            and (abs(own - outlines[name]) <= Z * sigmas[name].max()).all()
            and any(
                judge_tensor(*these, dtypes[name]).status == "agrees"
                for these in layouts(array, value, sigmas[name])
            )
        ]

    steps_by_name: dict[str, Recorded] = {}

    def same(step: Recorded) -> bool:
        names = [matching(tensor) for tensor in telling(step).values()]
        steps_by_name.update(dict.fromkeys(itertools.chain(*names), step))
        return all(names)

    def known(step: Recorded) -> bool:
        # A norm's second and third results may be correct where its first is not.
        return all(name in steps_by_name for name in [*telling(step)][:1])

    wrong = theirs.before_end(lambda step: step is not theirs.last and same(step))
    if not wrong:
        return []
    first, last, end = wrong[0], wrong[-1], right.end
    if early := matching(theirs.result):
        if end in early:
            return []
        ending = next(step for step in right.steps if early[0] in step.tensors)
        rest = [
            step for step in right.steps if step.operation.number > ending.operation.number and step.computes
        ]
        return [f"the candidate ends with {ending}; in the reference {rest[0]} follows"] if rest else []
    if right.last is None:  # the reference returns it unchanged
        return [f"the reference computes nothing there; the candidate computes {first}"]
    if done := steps_by_name.get(end) or next(
        (steps_by_name[name] for name in right.last.tensors if name in steps_by_name), None
    ):
        return [f"the candidate has the correct values after {done}, and continues with {first}"]
    # Correct values that lead to no wrong ones are no less known: their operations do not differ.
    for step in theirs.steps:
        same(step)
    lacking = right.before_end(lambda step: step is not right.last and known(step))
    ours, computing = ([step for step in steps if step.computes] or steps for steps in (lacking, wrong))
    there = ours[0]
    if len(ours) == len(computing) == 1 and computing[0].operation.name == there.operation.name:
        return [
            f"the first operation that differs is {there}; the candidate computes it at {computing[0].line}"
        ]
    steps = f"{first}" if first is last else f"{first} to {last}"
    return [f"given the same values, the reference computes {there}, and the candidate {steps}"]


def telling(step: Recorded) -> Tensors:
    """An operation's results, except tensors of equal elements."""
    sizes = {name: np.unique(numbers(tensor)).size for name, tensor in step.tensors.items()}
    return {name: tensor for name, tensor in step.tensors.items() if sizes[name] > 1 or tensor.numel() == 1}


def outline(array: Array) -> Array:
    """Sorted elements, which are equal in every layout."""
    flat = np.sort(np.nan_to_num(array), None)  # a mask holds infinities
    return flat[[0, len(flat) // 3, 2 * len(flat) // 3, -1]] if len(flat) else np.zeros(4)


def layouts(array: Array, value: Array, sigma: Array) -> Iterator[tuple[Array, Array, Array]]:
    """Yield each fitting layout, with value and sigma."""
    if array.shape == value.shape:
        yield array, value, sigma
        return
    for order in itertools.permutations(range(array.ndim)):
        yield array.transpose(order).reshape(value.shape), value, sigma
    for order in itertools.permutations(range(value.ndim)) if value.ndim > array.ndim else ():
        yield array, value.transpose(order).reshape(array.shape), sigma.transpose(order).reshape(array.shape)
