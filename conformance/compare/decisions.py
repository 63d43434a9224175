"""Discrete operations whose results rounding may change.

Samples follow the exact run's decisions, and record where rounding could change them. Branches are exact runs
with changed decisions (docs/decisions/0036-what-rounding-decides.md).
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from concord.conformance.compare.aten_operations import Operation, bare_name, is_continuous, snapshot
from concord.conformance.compare.solutions import LEFT, SOLVING, UNORDERED_VALUES, Solution
from concord.conformance.judging.estimate import Z
from concord.conformance.judging.exemptions import DECISION, NO_DIGIT
from concord.conformance.judging.scoring import WHOLE
from concord.spec.arrays import Array, Mask
from concord.spec.text import first_of

# Folders with a slash at the end, since torchvision's files are not PyTorch's.
OWN, TORCH = (f"{Path(file).parent}/" for file in (__file__, torch.__file__))

# Operands may differ by this many times a sample's error. The largest of 16 errors is about two sigma, so
# this covers the 16 sigma of a tolerance.
REACH = 8

# Maximum number of alternative results per element.
KEPT = 4

# Up to this many turns are tried one by one, each in an exact run.
FEW = 6

# Pairs of branches for more turns; each turn occurs in one branch of a pair.
PAIRS = 4

# Maximum number of branches of each of two kinds, for up to 28 additional exact runs.
MOST = 14

# A change by fewer sigma is judged as usual, because the tolerance covers it.
SMALL = Z / 4

# Discrete operations that may return floating-point values, so that the result does not reveal them.
DISCRETE = (
    *("floor", "ceil", "round", "trunc", "sign", "sgn", "histc"),
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not"),
)

SELECTING = ("sort", "topk", "max", "min", "kthvalue", "median", "nanmedian", "mode", "cummax", "cummin")

# Operations that decide once for a whole axis, since a single index of an order cannot change.
BY_ROW = ("sort", "topk", *UNORDERED_VALUES)

# Operations that may return any of several equal elements.
UNORDERED = ("sort", "topk", "kthvalue", "median", "nanmedian")

# Each run makes these decisions itself. Values that Python reads control the program. Maxima of pooling are
# continuous in the forward pass; in the backward pass their turns are many and small, and samples show their
# sum.
UNFORCED = (
    *("_local_scalar_dense", "max_pool2d_with_indices", "max_pool3d_with_indices"),
    *("adaptive_max_pool2d", "adaptive_max_pool3d"),
)


def mapped(function: Callable[[Any], Any], x: Any) -> Any:
    """Map a function over nested values, faster than PyTorch's trees."""
    if isinstance(x, (tuple, list)):
        return type(x)([mapped(function, entry) for entry in x])
    if isinstance(x, dict):
        return {name: mapped(function, entry) for name, entry in x.items()}
    return function(x)


def leaves(x: Any) -> list[Any]:
    """Entries of nested values."""
    if isinstance(x, (tuple, list)):
        return [leaf for entry in x for leaf in leaves(entry)]
    return [leaf for entry in x.values() for leaf in leaves(entry)] if isinstance(x, dict) else [x]


def source_line() -> str | None:
    """The innermost line outside PyTorch, or in its modules."""
    inner = None
    for frame, line in traceback.walk_stack(None):
        path = frame.f_code.co_filename
        if path == f"{OWN}module_reference.py":  # a hook, or the caller of the model
            break
        place = f"{Path(path).name}:{line}"
        if not path.startswith((OWN, TORCH)):
            return place
        if path.startswith(f"{TORCH}nn/modules"):
            inner = inner or place
    return inner


Run = Callable[..., Any]

# Positional and keyword operands.
Operands = tuple[Sequence[Any], Mapping[str, Any]]

# Kinds of discrete operations.


class Kind(NamedTuple):
    """The decision of a discrete operation, and its result given a decision."""

    decide: Callable[..., Tensor]  # returns the decision
    follow: Callable[..., Any]  # returns the result for a given decision and inexact operands


def _all(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    return torch.as_tensor(Operation(func, args, kwargs, 0).result)


def _as_decided(decided: Tensor, func: Any, *_: Any, **__: Any) -> Any:
    gives_tensor = func._schema.returns[0].type.kind() == "TensorType"  # noqa: SLF001 – no public API has it
    return decided.clone() if gives_tensor else decided.item()


def _gathered(places: Tensor, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    dim = _axis(func, (x, *args), kwargs)
    if places.ndim < x.ndim:
        return x.gather(dim, places.unsqueeze(dim)).squeeze(dim), places.clone()
    return x.gather(dim, places), places.clone()


def _axis(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return Operation(func, args, kwargs, 0).operands["dim"]


def _quotient(func: Any, x: Any, y: Any) -> Tensor:
    return torch.round((x - func(x, y)) / y)


def _remaining(quotient: Tensor, _: Any, x: Any, y: Any) -> Any:
    return x - quotient * y


def _classes(_: Any, x: Tensor, *__: Any) -> Tensor:
    return torch.unique(x, return_inverse=True)[1]


def _distinct(classes: Tensor, _: Any, x: Tensor, *__: Any) -> Any:
    counts = torch.bincount(classes.flatten())
    values = x.new_empty(len(counts)).scatter(0, classes.flatten(), x.flatten())
    return values, classes.clone(), counts


WHOLLY = Kind(_all, _as_decided)
SELECTION = Kind(lambda func, *args, **kwargs: func(*args, **kwargs)[1], _gathered)
REMAINDER = Kind(_quotient, _remaining)
CLASSES = Kind(_classes, _distinct)


def kind_of(func: Any, args: Sequence[Any], floats: Sequence[Tensor]) -> Kind | None:
    """A discrete operation's kind, if known beforehand."""
    name, schema = bare_name(func), func._schema  # noqa: SLF001 – no public API has it
    if not floats or name in UNFORCED:
        return None
    if name in SELECTING and len(schema.returns) > 1:
        return SELECTION
    if name in ("fmod", "remainder") and not schema.is_mutable:
        return REMAINDER
    if name == "_unique2":
        return CLASSES
    cast = schema.is_mutable and is_discrete(args[0])
    return WHOLLY if name in DISCRETE or "_mode" in func._overloadname or cast else None  # noqa: SLF001


def is_discrete(y: Any) -> bool:
    """Whether a result is discrete."""
    return isinstance(y, bool) or (isinstance(y, Tensor) and not is_continuous(y))


# Decisions and the runs that follow them.


class Decision:
    """The exact run's decision in an operation, and its alternatives.

    Attributes:
        others: alternatives, each different from the previous ones or equal to the decision.
        rounded: the low-precision run's decision, if different.
        reshaped: an alternative with a different shape.
    """

    def __init__(
        self, func: Any, kind: Kind, operands: Operands, rounded_operands: Operands, dtype: torch.dtype
    ) -> None:
        self.func, self.kind, self.line = func, kind, source_line()
        self.operands = mapped(snapshot, rounded_operands)
        self.state = rng_state() if torch.Tag.nondeterministic_seeded in func.tags else None
        self.decided = self.decide_again(*rounded_operands)
        self.others: list[Tensor] = []
        self.rounded: Tensor | None = None
        self.reshaped: Tensor | None = None
        if _numbers(operands) != _numbers(rounded_operands):  # the dtype may round a constant
            self._add(self.decide_again(*operands))
        if kind is REMAINDER:
            x, y = rounded_operands[0]
            self._divide(x, y, dtype)
        # A kernel may select any of several equal elements; the flipped operand selects from the other end.
        if bare_name(func) in UNORDERED and not rounded_operands[1].get("stable"):
            x, *rest = rounded_operands[0]
            if x.ndim:
                flipped = self.decide_again((x.flip(self.axis), *rest), rounded_operands[1])
                self._add(x.shape[self.axis] - 1 - flipped)

    @property
    def name(self) -> str:
        """The operation with its source line."""
        bare = bare_name(self.func).lstrip("_").removeprefix("linalg_").removesuffix("_ex")
        return described(bare, self.line)

    @property
    def turned(self) -> Tensor | None:
        """Places where rounding could change it."""
        if self.reshaped is not None:
            return torch.ones_like(self.decided, dtype=torch.bool)
        return self.differing(self.others[0]) if self.others else None

    @property
    def wholly(self) -> bool:
        """Whether rounding determines most of it."""
        return self.turned is not None and float(self.turned.double().mean()) >= WHOLE

    @property
    def groups(self) -> tuple[Tensor, int]:
        """Groups of elements that change together (0: fixed), and their count."""
        # Equal operands have equal errors if one operation computed them.
        turned = self.turned
        assert turned is not None
        if self.reshaped is not None or not self.decided.ndim:
            return torch.ones_like(self.decided, dtype=torch.long), 1
        if self.by_row:
            rows, count = _numbered(turned.any(self.axis, keepdim=True))
            return rows * turned, count
        keys = [x for x in leaves(self.operands) if isinstance(x, Tensor) and x.is_floating_point()]
        with contextlib.suppress(RuntimeError):  # different shapes, such as a maximum's index
            values = torch.stack([x.expand(self.decided.shape)[turned] for x in keys])
            number = torch.unique(values, dim=1, return_inverse=True)[1] + 1
            return torch.zeros_like(turned, dtype=torch.long).masked_scatter(turned, number), int(
                number.max()
            )
        return _numbered(turned)

    @property
    def by_row(self) -> bool:
        """Whether it decides once for the whole axis."""
        return bare_name(self.func) in BY_ROW and self.decided.ndim > 0

    @property
    def axis(self) -> int:
        """The axis of the decision."""
        return -1 if isinstance(self, Solving) else _axis(self.func, *self.operands)

    def differing(self, other: Tensor) -> Tensor:
        """Places where another result differs."""
        # NaN equals NaN here.
        differs = (other != self.decided) & ~((other != other) & (self.decided != self.decided))
        if self.by_row:
            return differs.any(self.axis, keepdim=True).expand(differs.shape)
        return differs.any().expand(differs.shape) if self.kind is CLASSES else differs

    def decide_again(self, args: Any, kwargs: Any) -> Tensor:
        """Decide for other operands, with the same random numbers."""
        if self.state is None:
            return self.kind.decide(self.func, *args, **kwargs)
        with torch.random.fork_rng():
            torch.set_rng_state(self.state[0])
            torch.cuda.set_rng_state_all(self.state[1:])
            return self.kind.decide(self.func, *args, **kwargs)

    def doubt(self, operands: Operands, reach: float, rounded: bool) -> None:
        """Record where operands that are ``reach`` errors away change the decision."""
        exact, form = tree_flatten(self.operands)
        errors = [_error(x, y) for x, y in zip(leaves(operands), exact, strict=True)]
        if not any(isinstance(error, Tensor) and bool(error.any()) for error in errors):
            return
        for by in (reach, -reach):
            moved = [
                x + by * error if isinstance(error, Tensor) else x
                for x, error in zip(exact, errors, strict=True)
            ]
            self._add(self.decide_again(*tree_unflatten(moved, form)))
        if rounded:
            low = self.decide_again(*operands)
            if low.shape == self.decided.shape and bool(self.differing(low).any()):
                self.rounded = low
                self._add(low)

    def _divide(self, x: Any, y: Any, dtype: torch.dtype) -> None:
        # The quotient and its multiple may be rounded. A multiple that the dtype represents leaves no
        # alternative.
        multiple = self.decided * y
        lost = multiple.to(dtype).to(multiple.dtype) != multiple
        for by in (1 + torch.finfo(dtype).eps, 1 - torch.finfo(dtype).eps):
            self._add(torch.where(lost, self.decide_again((x * by, y), {}), self.decided))

    def _add(self, other: Tensor) -> None:
        if other.shape != self.decided.shape:
            self.reshaped = other
            return
        new = self.differing(other)
        for place in range(KEPT):
            if not bool(new.any()):
                return
            if place == len(self.others):
                self.others.append(self.decided.clone())
            kept = self.others[place]
            occupied = self.differing(kept)
            self.others[place] = torch.where(new & ~occupied, other, kept)
            new = new & occupied & (other != kept)


class Solving(Decision):
    """A linear algebra operation, whose signs and orders are never determined."""

    def __init__(self, func: Any, results: Any) -> None:
        self.func, self.line, self.solution = func, source_line(), Solution(func, results)
        self.kind, self.state = WHOLLY, None
        self.operands: Operands = ((), {})
        self.decided, self.rounded, self.reshaped = self.solution.choice, None, None
        self.others = self.solution.others


def rng_state() -> list[Tensor]:
    """States of generators, the CPU's first."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def _numbered(where: Tensor) -> tuple[Tensor, int]:
    return where.flatten().cumsum(0).view(where.shape) * where, int(where.sum())


def _error(x: Any, exact: Any) -> Any:
    if not is_continuous(x) or x.shape != exact.shape:
        return None
    return torch.where(x == exact, 0, x - exact).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(frozen=True)
class ExactStep:
    """An operation of the exact run."""

    func: Any
    whole: list[int]
    decision: Decision | None

    def fits(self, func: Any, operands: Operands) -> bool:
        """Whether another run computes the same operation."""
        if self.func is not func or self.whole != _whole(operands):
            return False
        if self.decision is None or isinstance(self.decision, Solving):
            return True
        exact, others = leaves(self.decision.operands), leaves(operands)
        return [_shape(x) for x in exact] == [_shape(x) for x in others]


def _whole(operands: Operands) -> list[int]:
    return [x for x in leaves(operands) if isinstance(x, int)]


def _numbers(operands: Operands) -> list[float]:
    return [x for x in leaves(operands) if isinstance(x, float) and not math.isnan(x)]


def _shape(x: Any) -> Any:
    return x.shape if isinstance(x, Tensor) else None


@dataclass
class Decisions:
    """The exact run's decisions."""

    steps: list[ExactStep] = field(default_factory=list)  # in order
    # The last operation that returned a Python number before another run left the sequence.
    handed: str = ""
    # Why another run lacks a tensor, or has it in a different shape.
    lost: dict[str, str] = field(default_factory=dict)
    # The deviation of each sum, by operation number and result index.
    deviations: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    parted = False

    def lose(self, name: str) -> None:
        """Record a missing or reshaped tensor."""
        self.lost[name] = f"{DECISION} {self.handed or 'its shape'}"

    def compute(
        self, func: Any, floats: Sequence[Tensor], operands: Operands, held: Operands, run: Run
    ) -> Any:
        """Compute and record an operation; in ``held`` operands, constants are rounded to the dtype."""
        args, kwargs = operands
        decision: Decision | None = None
        kind, integers = kind_of(func, args, floats), _whole(operands)
        try:
            y = None if kind else run(*args, **kwargs)
        except RuntimeError:  # which a module may catch
            self.steps.append(ExactStep(func, integers, None))
            raise
        if kind is None and floats and is_discrete(y):
            kind = WHOLLY
        if kind:
            decision = Decision(func, kind, operands, held, floats[0].dtype)
            y = kind.follow(decision.decided, func, *args, **kwargs)
        elif bare_name(func) in SOLVING:
            decision = Solving(func, y)
        self.steps.append(ExactStep(func, integers, decision))
        return y

    def branches(self) -> list[Branch]:
        """Exact runs with changed decisions."""
        turnable = {
            place: step.decision
            for place, step in enumerate(self.steps)
            if step.decision and step.decision.turned is not None
        }
        branches = list[Branch]()
        for wholly in (False, True):
            decisions = {place: decision for place, decision in turnable.items() if decision.wholly == wholly}
            branches += _branches(self, decisions, wholly) if decisions else []
        solving = [step.decision.name for step in self.steps if isinstance(step.decision, Solving)]
        if solving:
            branches.append(
                Branch(self, {}, 1.0, False, first_of(list(dict.fromkeys(solving)), 2), spoils=True)
            )
        return branches


@dataclass
class Beside:
    """A run that follows the exact run's sequence."""

    record: Decisions  # the exact run's
    place: int = field(default=-1, init=False)  # the last operation's number
    another: bool = field(default=False, init=False)  # whether it has left the sequence

    def decision(self, func: Any, operands: Operands) -> Decision | None:
        """The exact run's decision, if any."""
        steps = self.record.steps
        self.place += 1
        self.another = self.another or self.place >= len(steps) or not steps[self.place].fits(func, operands)
        return None if self.another else steps[self.place].decision


@dataclass
class Followed(Beside):
    """A sample or low-precision run with the exact run's decisions."""

    rounded: bool = False
    handed: str = ""

    @property
    def parted(self) -> bool:
        """Whether it has left the sequence."""
        return self.another

    def lose(self, name: str) -> None:
        """Record a missing tensor."""
        self.record.lose(name)

    def share(self, place: int, shape: torch.Size, make: Callable[[], Tensor]) -> Tensor:
        """Return a standard deviation that one sample computes for all."""
        deviation = None if self.another else self.record.deviations.get((self.place, place))
        if deviation is None or deviation.shape != shape:
            sample_deviation = make()
            if self.another:
                return sample_deviation
            self.record.deviations[self.place, place] = deviation = sample_deviation.expand(shape).float()
        return deviation.double()

    def compute(
        self, func: Any, floats: Sequence[Tensor], operands: Operands, held: Operands, run: Run
    ) -> Any:
        """Follow the exact decision, and record possible changes by rounding."""
        (args, kwargs), before = operands, self.another
        decision = self.decision(func, operands)
        if self.another and not before:
            self.record.handed = self.handed
        if floats and bare_name(func) == "_local_scalar_dense":
            self.handed = described("item", source_line())
        if decision is None:
            return run(*args, **kwargs)
        if isinstance(decision, Solving):
            try:
                return decision.solution.turned(run(*args, **kwargs), decision.decided)
            except RuntimeError:  # rounding made the matrix singular, or it is NaN
                return decision.solution.undefined
        decision.doubt(held, REACH, self.rounded)
        if decision.state is not None:  # advances the generator as in the exact run
            func(*args, **kwargs)
        return decision.kind.follow(decision.decided, func, *args, **kwargs)


# By operation number: the places where the decision changes, and the alternative.
Turns = Mapping[int, tuple[Tensor, Tensor]]


@dataclass
class Branch(Beside):
    """An exact run with changed decisions."""

    turns: Turns
    share: float  # largest effect of all turns together, relative to this branch's effect
    wholly: bool  # whether rounding determines nearly all elements
    because: str  # describes the decisions
    spoils: bool = False  # whether it replaces linear algebra results with NaN
    parted = False  # leaving the sequence, as when an expert gets no tokens, is still correct

    def lose(self, name: str) -> None:
        """Ignore the loss, since branches may lack tensors."""

    def compute(
        self,
        func: Any,
        floats: Sequence[Tensor],  # noqa: ARG002
        operands: Operands,
        held: Operands,
        run: Run,
    ) -> Any:
        """Compute an operation, with the alternative if any."""
        (args, kwargs), decision = operands, self.decision(func, operands)
        if decision is None:
            return run(*args, **kwargs)
        if isinstance(decision, Solving):
            return self._solve(decision, run, operands)
        result = decision.decide_again(*held)
        if self.place in self.turns:
            where, other = self.turns[self.place]
            result = torch.where(where, other, result) if result.shape == other.shape else other
        return decision.kind.follow(result, func, *args, **kwargs)

    def _solve(self, decision: Solving, run: Run, operands: Operands) -> Any:
        if self.spoils:
            return decision.solution.undefined
        try:
            results = run(*operands[0], **operands[1])
        except RuntimeError:
            return decision.solution.undefined
        nowhere = torch.zeros_like(decision.decided, dtype=torch.bool)
        where, other = self.turns.get(self.place, (nowhere, decision.decided))
        return decision.solution.turned(results, torch.where(where, other, decision.decided))


def _branches(record: Decisions, decisions: Mapping[int, Decision], wholly: bool) -> list[Branch]:
    # A few turns are tried one by one, more turns in random halves; then all together.
    groups = {place: decision.groups for place, decision in decisions.items()}
    count = sum(number for _, number in groups.values())
    because = first_of(list(dict.fromkeys(decision.name for decision in decisions.values())), 2)
    plans = list[tuple[Turns, float, str]]()
    if count <= FEW:
        for place, decision in decisions.items():
            numbers, number = groups[place]
            for group in range(1, number + 1):
                where = numbers == group
                plans += [({place: (where, other)}, 1.0, decision.name) for other in _others(decision, where)]
    else:
        generator = torch.Generator().manual_seed(count)
        for _ in range(PAIRS):
            halves = dict[int, tuple[Tensor, Tensor]](), dict[int, tuple[Tensor, Tensor]]()
            for place, decision in decisions.items():
                numbers, number = groups[place]
                first = (torch.rand(number + 1, generator=generator, device="cpu") < 0.5).to(numbers.device)[
                    numbers
                ]
                first_other, *more = others = _others(decision, numbers > 0)
                other = others[int(torch.randint(len(others), (), generator=generator, device="cpu"))]
                if more:  # elements without this alternative use the first
                    other = torch.where(decision.differing(other), other, first_other)
                for half, where in zip(halves, (first, ~first), strict=True):
                    half[place] = where & (numbers > 0), other
            # Half of n effects with random signs add up to sqrt(n / 2) effects. All n with equal signs add up
            # to n: sqrt(2 n) times as much.
            plans += [(half, math.sqrt(2 * count), because) for half in halves]
    joint = [
        {
            place: (decision.differing(decision.rounded), decision.rounded)
            for place, decision in decisions.items()
            if decision.rounded is not None
        }
    ]
    if len(plans) > 1:
        open_at = {place: numbers > 0 for place, (numbers, _) in groups.items()}
        joint.append(
            {
                place: (open_at[place], _others(decision, open_at[place])[0])
                for place, decision in decisions.items()
            }
        )
    plans = [(turns, 1.0, because) for turns in joint if turns] + plans
    return [Branch(record, turns, share, wholly, text) for turns, share, text in plans[:MOST]]


def _others(decision: Decision, where: Tensor) -> list[Tensor]:
    if decision.reshaped is not None:
        return [decision.reshaped]
    return [other for other in decision.others if bool((decision.differing(other) & where).any())]


def described(name: str, line: str | None) -> str:
    """An operation's name with its source line."""
    return f"`{name}`" + (f" ({line})" if line else "")


# Tensors in which some elements have allowed alternatives.


class Ties:
    """The allowed alternatives of a tensor."""

    def __init__(self, value: Array, sigma: Array) -> None:
        self.value, self.sigma = value, sigma
        self.allowed = list[Array]()
        # Full-size only once a branch differs: nearly all tensors of a large model have no alternative.
        self.together, self.halves = np.zeros(()), np.zeros(())
        self.wholly: Mask = np.zeros((), bool)
        self.affected, self.spoilt = self.wholly, self.wholly
        self.because = dict[str, None]()
        self.lost = ""  # why it cannot be judged
        self.nothing_of = ""

    def take(self, branch: Branch, array: Array) -> None:
        """Add a branch, with NaN where it has no value."""
        if branch.spoils:
            # For an ill-conditioned matrix, sigma exceeds the result that it should judge.
            size = abs(self.value)
            if size.ndim > 1:
                size = np.sqrt(np.square(size).mean(-1, keepdims=True))
            self.spoilt = ~np.isfinite(array) & np.isfinite(self.value) & ~(self.sigma <= LEFT * size)
            self.nothing_of = branch.because if self.spoilt.any() else ""
            return
        distance = abs(array - self.value).astype(np.float64)
        other = ~(distance <= SMALL * self.sigma) & np.isfinite(self.value)
        if not other.any():
            return
        distance = np.where(other, np.nan_to_num(distance, nan=np.inf), 0)
        self.allowed.append(array)
        self.affected = self.affected | other
        self.wholly = self.wholly | other & branch.wholly
        self.because[branch.because] = None
        if branch.share > 1:
            self.halves = np.maximum(self.halves, branch.share * distance)
        else:  # if a gradient overflows, any value is allowed
            self.together = self.together + distance

    def settle(self, actual: Array) -> tuple[Array, Array]:
        """The nearest allowed value, and sigma (NaN: undetermined)."""
        if self.lost:
            return self.value, np.full(self.value.shape, np.nan)
        value, least = self.value, abs(actual - self.value)
        for other in self.allowed:
            nearer = self.affected & (abs(actual - other) < least)
            value, least = np.where(nearer, other, value), np.where(nearer, abs(actual - other), least)
        # An element agrees with any allowed value, unless rounding determines nearly all of an operation:
        # then a wrong operation would also agree. It diverges beyond the reach of all turns together.
        near = (least <= Z * self.sigma) & ~self.wholly
        beyond = abs(actual - self.value) > 2 * (self.together + self.halves) + Z * self.sigma
        unsure = (self.affected & ~near & ~beyond & np.isfinite(actual)) | self.spoilt
        return np.where(near, value, self.value), np.where(unsure, np.nan, self.sigma)

    @property
    def why(self) -> str:
        """Why elements are undetermined."""
        words = [f"{DECISION} {first_of([*self.because], 2)}"] if self.because else []
        words += [f"{NO_DIGIT} of {self.nothing_of}"] if self.nothing_of else []
        return self.lost or "; ".join(words)
