"""The search for the cause of a wrong stretch."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations, groupby, islice, product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from concord.conformance.bugs.context import Flags
from concord.conformance.compare import module_reference as modules
from concord.conformance.compare.aten_arithmetic import computed
from concord.conformance.compare.aten_operations import (
    Make,
    Operation,
    OperationBug,
    first,
    injected,
    is_float,
    sites,
)
from concord.conformance.compare.differences import Difference
from concord.conformance.compare.mechanisms import COUNTED, FORMATS, bugs, layouts
from concord.conformance.compare.module_reference import dtype_name, numbers
from concord.conformance.compare.operation_context import rounded
from concord.conformance.compare.stretch import Recorded, Stretch
from concord.conformance.explain.computation import Computation, Prediction
from concord.conformance.explain.description import nearest
from concord.conformance.explain.hypothesis import Hypothesis
from concord.conformance.explain.search import EDGE, Effort, Search
from concord.conformance.judging.estimate import SAMPLES, Observer, estimate
from concord.conformance.judging.explanation import Explanation
from concord.conformance.wording import few, gather, instead_of
from concord.spec.arrays import Array

# Maximum number of module differences to try one by one.
MOST_DIFFERENCES = 20

# Maximum number of pairs of activations to exchange.
MOST_CROSSED = 15

# A bug of fewer operations than these has a better name than the activation that it repeats.
LONG = 50

# Each moved slice of an axis must contain at least this many distinct values.
LEAST_MOVED = 3


@dataclass(frozen=True, kw_only=True)
class Predicted(Hypothesis):
    """A hypothesis with its prediction; with ``own_sigma``, sigma is recomputed."""

    predict: Callable[[], Prediction]
    own_sigma: Callable[[], Array] | None = None


class StretchComputation(Computation):
    """The wrong end of a stretch; ``right`` is the expected one."""

    def __init__(self, tensor: str, actual: Array, dtype: str, right: Prediction) -> None:
        self.tensor, self.actual, self.dtype, self.right = tensor, actual, dtype, right

    @property
    def is_finite(self) -> Flags:
        """Where both ends are finite."""
        return np.isfinite(self.actual) & np.isfinite(self.right.value)

    def values(self, hypothesis: Hypothesis) -> Array:
        """The prediction where finite."""
        return self._prediction(hypothesis).value

    def _prediction(self, hypothesis: Hypothesis) -> Prediction:
        assert isinstance(hypothesis, Predicted)
        prediction = hypothesis.predict()
        is_finite = np.isfinite(prediction.value) & np.isfinite(self.right.value)
        return Prediction(np.where(is_finite, prediction.value, self.right.value), prediction.sigma)

    def predict(self, hypothesis: Hypothesis) -> Prediction:
        """The prediction, with its own sigma if necessary."""
        prediction = self._prediction(hypothesis)
        assert isinstance(hypothesis, Predicted)
        if hypothesis.own_sigma is None or self.judged(self.actual, prediction).ratio <= EDGE:
            return prediction
        return Prediction(prediction.value, np.maximum(prediction.sigma, hypothesis.own_sigma()))


def cause(
    stretch: Stretch,
    asked: StretchComputation,
    strange: Iterable[str],
    differing: Sequence[Difference],
    effort: Effort,
) -> Explanation | None:
    """Search for an explanation of a stretch's end.

    Args:
        strange: tensors that only the candidate has.
    """
    within = dict(stretch.module.model.named_modules())
    active = [  # inactive dropout has no activation
        Hypothesis("dropout_active", f"dropout left on in {name}")
        for name in strange
        if isinstance(within.get(name), nn.Dropout)
    ]
    layers = [difference for difference in differing if difference.is_layer]
    settings = [difference for difference in differing if not difference.is_layer]
    cached_sites = functools.cache(partial(sites, partial(replay, stretch, asked.right), bugs))
    with_bugs = partial(changed, stretch, asked.right, cached_sites)
    one_value = constant(asked)
    stages: list[Iterable[Hypothesis]] = [
        of_differences(stretch, asked.right, [[difference] for difference in settings[:MOST_DIFFERENCES]]),
        of_differences(stretch, asked.right, [settings] if len(settings) > 1 else []),
        copied(stretch, asked.right),
        chain(
            reordered(stretch, asked),
            shifted(asked),
            exchanged(stretch, asked.right),
            skipped(stretch, asked.right),
        ),
        with_bugs((EVERYWHERE, BY_OPERATION, BY_PLACE), lambda bug: bug.name in COUNTED),
        with_bugs((EVERYWHERE, BY_OPERATION), lambda bug: bug.name not in COUNTED),
        crossed(stretch, asked.right),
        with_bugs((BY_PLACE,), lambda bug: bug.name not in COUNTED),
        swapped(stretch, asked.right),
        fitted(stretch, asked),
        scaled(stretch, asked),
        with_bugs((ONCE,)),
        entering(stretch, asked.right),
        islice(substituted(stretch, asked.right), MOST_SUBSTITUTED),
        offset(stretch, asked),
        of_differences(stretch, asked.right, [[difference] for difference in layers]),
    ]
    # Other values of settings explain a constant better; the search for bugs would only waste time.
    return Search(asked, effort).explain(stages[: 2 if one_value else None], [*one_value, *active])


def constant(asked: StretchComputation) -> list[Hypothesis]:
    """The value that all elements have, if the correct ones differ."""
    values = np.unique(asked.actual)
    if not len(values) == 1 < len(np.unique(asked.right.value)):
        return []
    return [Hypothesis("constant", f"the value {values[0] + 0:.6g} throughout")]


def copied(stretch: Stretch, right: Prediction) -> Iterator[Predicted]:
    """Yield inputs and other activations, at the end of a long stretch."""
    if len(stretch.steps) > LONG:
        for name, x in {**stretch.module.inputs, **stretch.module.arrays}.items():
            text = f"the values of `{name}`"
            yield Predicted("copied", text, predict=partial(Prediction, x, right.sigma))


def of_differences(
    stretch: Stretch, right: Prediction, differing: Iterable[Sequence[Difference]]
) -> Iterator[Predicted]:
    """Yield the reference with the candidate's values."""

    def made(group: Sequence[Difference]) -> Prediction:
        reference = stretch.module
        with modules.running("the reference with the candidate's values"):
            for difference in group:
                reference = difference.applied(reference)
            return rerun(stretch, right, reference)

    for group in differing:
        text = f"differences between the modules: {few((difference.text for difference in group), 3)}"
        yield Predicted("modules_differ", text, predict=partial(made, group))


def changed(
    stretch: Stretch,
    right: Prediction,
    possible: Callable[[], Mapping[OperationBug, list[int]]],
    levels: Collection[int],
    tried: Callable[[OperationBug], bool] = lambda bug: True,
) -> Iterator[Predicted]:
    """Yield each bug in some of its operations.

    Args:
        possible: returns the operations of each bug.
        levels: which of :func:`selections`.
    """
    for level, (bug, places) in product(levels, possible().items()):
        for selection in selections(stretch, places, level) if tried(bug) else ():
            location = (
                ""
                if bug.name in COUNTED
                else place_of([stretch.steps[number] for number in selection], stretch, level == ONCE)
            )
            make = injected(bug, selection, bugs)
            yield Predicted(
                bug.name,
                bug.text + location,
                bug.clause,
                predict=partial(replay, stretch, right, make, selection),
                own_sigma=partial(sigma_of, stretch, make),
            )


EVERYWHERE, BY_OPERATION, BY_PLACE, ONCE = range(4)


def selections(stretch: Stretch, places: list[int], level: int) -> list[list[int]]:
    """All operations; those of one kind, if there are several; those of one place; or single iterations."""
    if level == EVERYWHERE:
        return [places]
    kinds = gather(places, lambda number: stretch.steps[number].operation.name).values()
    if level == BY_OPERATION:
        return [*kinds] if len(kinds) > 1 else []
    lines = gather(places, stretch.places.__getitem__).values()
    if level == BY_PLACE:
        return [group for group in lines if group not in kinds] if len(lines) > 1 else []
    return [[place] for group in lines if len(group) > 1 for place in group]


def place_of(steps: Sequence[Recorded], stretch: Stretch, once: bool) -> str:
    """Name the operations' common line or module."""
    lines = {step.line for step in steps}
    inner = {path for step in steps for path in stretch.within(step)[:1]}
    if len(lines) == 1:
        return f" ({lines.pop()}{', once' * once})"
    return f" in `{inner.pop()}`" if len(inner - {""}) == len(inner) == 1 else ""


def sigma_of(stretch: Stretch, make: Make, others: Mapping[int, Tensor] | None = None) -> Array:
    """Estimate sigma at the end with changed operations."""
    end, dtype = stretch.end, dtype_name(stretch.result.dtype.to_real())

    def compute(arithmetic: Any, observer: Observer) -> None:
        stretch.again(arithmetic, lambda name, x: observer(name, x) if name == end else None, make, others)

    truth = stretch.module.exact()
    runs = stretch.module.runs(range(SAMPLES), truth)
    _, sigmas = estimate(
        compute, {end: dtype}, truth=truth, arithmetics=runs, doing="testing a possible cause"
    )
    return sigmas[end]


def replay(
    stretch: Stretch,
    right: Prediction,
    make: Make,
    chosen: Collection[int] | None = None,
    others: Mapping[int, Tensor] | None = None,
) -> Prediction:
    """Recompute exactly with changed operations."""
    tensors: dict[str, Array] = {}
    with modules.running("the code with a bug"):
        stretch.again(stretch.module.exact(), tensors.__setitem__, make, others, chosen)
    return Prediction(tensors[stretch.end], right.sigma)


def exchanged(stretch: Stretch, right: Prediction) -> Iterator[Predicted]:
    """Yield parameters of other modules of equal shapes; for modules before the end, only of siblings."""
    within, end = dict(stretch.module.model.named_modules()), modules.submodule_of(stretch.end)
    shapes = {
        path: {name: x.shape for name, x in module.named_parameters()} for path, module in within.items()
    }
    for own, path in product(dict.fromkeys([end, *sorted(stretch.active)]), within):
        is_near = own == end or own.rpartition(".")[0] == path.rpartition(".")[0]
        if own != path and is_near and shapes.get(own) and shapes[own] == shapes[path]:
            parameters = stretch.module.parameters
            others = {id(parameters[f"{own}.{name}"]): parameters[f"{path}.{name}"] for name in shapes[own]}
            text = f"the parameters of {path} used in place of those of {own}"
            yield replaced(stretch, right, "parameters_exchanged", text, others)


def skipped(stretch: Stretch, right: Prediction) -> Iterator[Predicted]:
    """Yield modules of several operations that are left out, alone and with all of their kind."""
    within = dict(stretch.module.model.named_modules())
    by_kind = defaultdict[type, dict[str, dict[int, Tensor]]](dict)
    for path, group in groupby(stretch.steps, lambda step: next(iter(stretch.within(step)), "")):
        steps, module = [*group], within[path]
        x, result = next(iter(steps[0].operation.floats.values()), None), first(steps[-1].result)
        if len(steps) > 1 and not [*module.children()] and x is not None and x.shape == result.shape:
            by_kind[type(module)][path] = {id(result): x}
    for paths in by_kind.values():
        for names in dict.fromkeys([*((path,) for path in paths), tuple(paths)]):
            others = {key: x for path in names for key, x in paths[path].items()}
            text = f"leaving out {' and '.join(f'`{path}`' for path in names)}"
            yield replaced(stretch, right, "step_left_out", text, others)


def crossed(stretch: Stretch, right: Prediction) -> Iterator[Predicted]:
    """Yield pairs of activations, inputs or parts of a tensor, each used in place of the other."""
    parts = [step for step in stretch.steps if step.operation.name in ("select", "slice")]
    groups = gather(parts, lambda step: (id(step.operation.args[0]), *step.operation.args[1:2]))
    named_parts = [
        {f"part {step.operation.args[2]} of axis {axis} ({step.line})": step.result for step in group}
        for (_, axis), group in groups.items()
    ]
    pairs = chain.from_iterable(combinations(group.items(), 2) for group in (stretch.entering, *named_parts))
    for (one, x), (other, y) in islice(
        (pair for pair in pairs if pair[0][1].shape == pair[1][1].shape), MOST_CROSSED
    ):
        text = f"{one} and {other} used in place of each other"
        yield replaced(stretch, right, "operands_exchanged", text, {id(x): y, id(y): x})


def replaced(
    stretch: Stretch,
    right: Prediction,
    name: str,
    text: str,
    others: Mapping[int, Tensor],
    rare: bool = False,
) -> Predicted:
    """The stretch with other tensors, by the identities of the right ones."""
    make = Operation.__call__
    return Predicted(
        name,
        text,
        predict=partial(replay, stretch, right, make, (), others),
        own_sigma=partial(sigma_of, stretch, make, others),
        rare=rare,
    )


def rerun(stretch: Stretch, right: Prediction, reference: Any) -> Prediction:
    """Compute the stretch with another reference."""
    run = Stretch(reference, stretch.end, stretch.known, stretch.pin, stretch.check)
    return Prediction(numbers(run.result).astype(np.float64), right.sigma)


def swapped(stretch: Stretch, right: Prediction) -> Iterator[Predicted]:
    """Yield two successive steps in the opposite order, such as a gate before a product."""
    steps, pairs = stretch.steps, defaultdict[tuple[Any, ...], dict[int, Swap]](dict)
    paths: dict[int, tuple[tuple[int, int], ...]] = {}
    for number, step in enumerate(steps):
        for place, x in step.operation.floats.items() if step.computes else ():
            path = paths.get(id(x), ())
            for operand, y in steps[path[0][0]].operation.floats.items() if path else ():
                if y.shape == x.shape:
                    key = (stretch.places[number], stretch.places[path[0][0]], place, operand)
                    pairs[key][number] = Swap(place, operand, path)
        moved = () if step.computes else step.operation.args[:1]
        before = next((paths.get(id(x), ()) for x in moved), ())
        if step.computes or before:
            paths |= {id(x): (*before, (number, leaf)) for leaf, x in enumerate(tree_leaves(step.result))}
    for swaps in pairs.values():
        number, swap = next(iter(swaps.items()))
        text = f"{steps[number]} before {steps[swap.path[0][0]]} instead of after it"
        predict = partial(replay, stretch, right, _swapping(steps, swaps), swaps)
        own_sigma = partial(sigma_of, stretch, _swapping(steps, swaps))
        yield Predicted("steps_swapped", text, predict=predict, own_sigma=own_sigma)


class Swap(NamedTuple):
    """A step's operand, that of the earlier step which computes it, and the results from there on."""

    place: str
    operand: str
    path: Sequence[tuple[int, int]]


def _swapping(steps: Sequence[Recorded], swaps: Mapping[int, Swap]) -> Make:
    seen: dict[int, Operation] = {}

    def make(operation: Operation) -> Any:
        seen[operation.number] = operation
        if (swap := swaps.get(operation.number)) is None:
            return operation()
        # Operations that do not depend on the change are not computed again.
        path = [(seen.get(number, steps[number].operation), leaf) for number, leaf in swap.path]
        earlier, leaf = path[0]
        x = first(operation.having(**{swap.place: earlier.operands[swap.operand].clone()}))
        x = tree_leaves(earlier.having(**{swap.operand: x}))[leaf]
        for moved, leaf in path[1:]:
            x = tree_leaves(replace(moved, args=(x, *moved.args[1:]))())[leaf]
        return operation.giving(x)

    return make


# Numeric operands, and factors or summands that change results.

NumberChange = Callable[[Tensor, float], Tensor]


def fitted(stretch: Stretch, computation: StretchComputation) -> Iterator[Predicted]:
    """Yield other values of numeric operands."""
    groups = defaultdict[tuple[str, str, str, float], list[int]](list)
    for number, step in enumerate(stretch.steps):
        for place, value in step.operation.operands.items() if step.computes else ():
            kinds = (float, int) if place in ("other", "exponent", "beta") else (float,)
            if type(value) in kinds and math.isfinite(value):
                groups[step.operation.name, step.line, place, float(value)].append(number)
    for (name, line, place, value), group in groups.items():
        for other, predict in fit(stretch, computation, group, partial(_having, place), value):
            text = f"{name} with {instead_of(other, value)} ({line})"
            yield Predicted("another_number", text, predict=predict, rare=not is_plain(other))


def _having(place: str, operation: Operation, number: float) -> Any:
    return operation.having(**{place: number})


# Changes of an operation's result by a value, each with its neutral value.
CHANGES: dict[str, tuple[NumberChange, float]] = {"times": (torch.mul, 1.0), "plus": (torch.add, 0.0)}


def offset(stretch: Stretch, computation: StretchComputation) -> Iterator[Predicted]:
    """Yield operation results times or plus a value."""
    steps = stretch.steps
    numbers_of = [n for n, step in enumerate(steps) if step.computes and is_float(first(step.result))]
    groups = gather(numbers_of, lambda n: (steps[n].operation.name, stretch.places[n]))
    for ((name, (line, _)), group), (how, (change, neutral)) in product(groups.items(), CHANGES.items()):
        for other, predict in fit(stretch, computation, group, partial(_giving, change), neutral):
            text = f"the result of {name}, {how} {other:.6g} ({line})"
            yield Predicted("result_changed", text, predict=predict, rare=not is_plain(other))


def _giving(change: NumberChange, operation: Operation, number: float) -> Any:
    return operation.giving(change(first(operation()), number))


def fit(
    stretch: Stretch,
    computation: StretchComputation,
    group: Sequence[int],
    change: Callable[[Operation, float], Any],
    value: float,
) -> Iterator[tuple[float, Callable[[], Prediction]]]:
    """Yield the value with which changed operations best reproduce the result, and its prediction.

    Args:
        group: numbers of the changed operations.
    """

    def make(operation: Operation, other: float) -> Any:
        return change(operation, other) if operation.number in group else operation()

    def predict(other: float) -> Prediction:
        return replay(stretch, computation.right, partial(make, other=other), group)

    sigma, is_finite = computation.right.sigma, computation.is_finite
    weight = np.where(is_finite & np.isfinite(sigma) & (sigma > 0), 1 / sigma, 0.0)
    positive = 0 < value < 1e-2  # an epsilon may have any magnitude, but only one sign

    def weighed(first: Array, second: Array) -> Array:
        return np.where(is_finite, first - second, 0.0) * weight

    def number(u: float) -> float:
        return math.exp(u) if positive else u

    u = math.log(value) if positive else value
    error = weighed(computation.actual, computation.right.value)
    before = float(np.linalg.norm(error))
    for turn in range(9):
        step = 1e-4 * (1.0 if positive else abs(u) or 1.0)
        slope = weighed(predict(number(u + step)).value, predict(number(u - step)).value) / (2 * step)
        power, along = float((slope * slope).sum()), float((slope * error).sum())
        if not power > 0 or not np.isfinite(along) or (not turn and along**2 < 0.2 * power * before**2):
            return  # this value does not change the wrong elements
        move = float(np.clip(along / power, -3.0, 3.0)) if positive else along / power
        u += move
        error = weighed(computation.actual, predict(number(u)).value)
        if not np.isfinite(error).all() or abs(move) < 1e-9 * max(abs(u), 1e-3):
            break
    if not float(np.linalg.norm(error)) <= before / 5:
        return
    sigma = computation.right.sigma
    if computation.judged(computation.actual, predict(number(u))).ratio > EDGE:
        sigma = sigma_of(stretch, partial(make, other=number(u)))  # other values have other errors

    def prediction(other: float) -> Prediction:
        return Prediction(predict(other).value, sigma)

    best = shortest(computation, number(u), prediction)
    yield best, partial(prediction, best)


def shortest(computation: StretchComputation, number: float, predict: Callable[[float], Prediction]) -> float:
    """Round a number to the fewest digits that explain the result, if any do."""
    candidates = (float(f"{number:.{digits}g}") for digits in (2, 3, 4, 6))
    return next((other for other in candidates if computation.explains(predict(other))), number)


def is_plain(number: float) -> bool:
    """Whether a number, its square or the inverse of either has few digits."""
    # Code contains such numbers. Others follow from several: 0.999505 from the epsilons of a folded norm.
    forms = np.float64(abs(number)) ** np.array([1.0, 2.0, -1.0, -2.0])
    # A square of six digits is known to five; what is near 1 has the digits of its distance from it.
    return any(abs(float(f"{form:.3g}") - form) <= 1e-5 * abs(form - 1) for form in forms)


def scaled(stretch: Stretch, computation: StretchComputation) -> Iterator[Predicted]:
    """Yield multiples of the expected value."""
    right, is_finite = computation.right, computation.is_finite
    for under, bias in biases(stretch):
        base, actual = (np.where(is_finite, x - bias, 0.0) for x in (right.value, computation.actual))
        factor = float((base * actual).sum() / max((base * base).sum(), 1e-300))
        sigma = right.sigma * max(abs(factor), 1.0)
        predict = partial(_scaled, right, bias, sigma)
        factor = shortest(computation, factor, predict)
        text, rare = f"values multiplied by {factor:.6g}{under}", not is_plain(factor)
        text = text if factor or under != UPDATED else "a missing update"
        yield Predicted("multiplied", text, predict=partial(predict, factor), rare=rare)


def _scaled(right: Prediction, bias: Array, sigma: Array, factor: float) -> Prediction:
    return Prediction((right.value - bias) * factor + bias, sigma)


def entering(stretch: Stretch, right: Prediction) -> Iterator[Predicted]:
    """Yield centered, half-precision and moved tensors, and others in place of those at the start."""
    inputs, names = stretch.module.inputs, [*stretch.module.inputs, *stretch.module.arrays]
    results = {f"the result of {step}": step.result for step in stretch.steps if step.computes}
    tensors = {name: x for name, x in {**stretch.entering, **results}.items() if is_float(x)}
    for name, x in tensors.items():
        axes = [axis for axis, size in enumerate(x.shape) if size > 1]
        changes: dict[str, Callable[[Tensor], Tensor]] = {
            "without its mean": lambda x: x - x.mean(-1, keepdim=True),
            "in bfloat16": partial(rounded, rounding=FORMATS["bfloat16"]),
            "in float16": partial(rounded, rounding=FORMATS["float16"]),
        }
        for axis, by in product(axes, (1, -1)):
            changes[f"shifted by {by} along axis {axis}"] = partial(torch.roll, shifts=by, dims=axis)
        for axis in axes if name in stretch.entering else ():
            changes[f"with axis {axis} in reverse order"] = partial(torch.flip, dims=[axis])
        if 0 in axes and name.strip("`") not in inputs:  # an input may be cut before it is used
            changes["with its first sample repeated for all samples"] = lambda x: x[:1].expand_as(x)
        # A slice of few distinct values, such as a count of tokens, is not recognized by them.
        few_values = len(np.unique(numbers(x[:1] if 0 in axes else x))) < LEAST_MOVED
        for text, change in changes.items():
            others = {id(x): change(x)}
            yield replaced(stretch, right, "another_input", f"{name} {text}", others, rare=few_values)
    before = names[: names.index(stretch.end)][::-1]
    for (name, x), other in product(stretch.entering.items(), before[:MOST_CROSSED]):
        array = inputs.get(other, stretch.pin(other) if stretch.pin else None)
        if array is not None and array.shape == x.shape and f"`{other}`" != name:
            y = computed(torch.from_numpy(array).to(x.dtype.to_real()))
            for text, value in ((f"`{other}` in place of {name}", y), (f"{name} plus `{other}`", x + y)):
                yield replaced(stretch, right, "another_input", text, {id(x): value})


# Maximum number of other tensors to try as operands.
MOST_SUBSTITUTED = 200


TERMS = {"self": "first term", "other": "second term"}


def substituted(stretch: Stretch, right: Prediction) -> Iterator[Predicted]:
    """Yield another tensor as an operand or result."""
    tensors = {f"`{name}`": x for _, name, x in stretch.taken.values()} | stretch.entering
    for number, step in enumerate(stretch.steps):
        result = {"result": step.result} if isinstance(step.result, Tensor) else {}
        places = {**step.operation.tensors, **result} if step.computes else {}
        for place, name in product(places, tensors):
            tensor, x = tensors[name], places[place]
            if tensor is not x and (tensor.shape, tensor.dtype) == (x.shape, x.dtype):
                role = TERMS.get(place, place) if step.operation.name == "add" else place
                make = partial(_with_another, number, place, tensor)
                yield Predicted(
                    "another_operand",
                    f"{name} in place of the {role} of {step}",
                    predict=partial(replay, stretch, right, make, (number,)),
                    own_sigma=partial(sigma_of, stretch, make),
                )
        tensors |= {f"the result of {step}": output for output in result.values()}


def _with_another(number: int, place: str, tensor: Tensor, operation: Operation) -> Any:
    if operation.number != number:
        return operation()
    if place == "result":
        return operation.giving(tensor)
    several = isinstance(operation.operands[place], list)
    return operation.having(**{place: [tensor] if several else tensor})


# The order of elements.


def reordered(stretch: Stretch, computation: StretchComputation) -> Iterator[Predicted]:
    """Yield other orders along an axis."""
    is_finite = np.isfinite(computation.actual)
    for under, bias in biases(stretch):
        base, right = np.nan_to_num(computation.actual) - bias, np.nan_to_num(computation.right.value) - bias
        for axis in range(computation.actual.ndim):
            order = nearest(axis, is_finite, base, right)
            moved = np.flatnonzero(order != np.arange(len(order)))
            rows = np.moveaxis(base, axis, 0)
            if not len(moved) or sorted(order.tolist()) != list(range(len(order))):
                continue
            if min(len(np.unique(rows[place])) for place in moved) < LEAST_MOVED:
                continue
            description = few(f"{place} holds the values of {order[place]}" for place in moved)
            if len(moved) == 2:
                description = f"{moved[0]} and {moved[1]} are swapped"
            elif width := rotary_width(order.tolist()):
                description = f"each block of {width} features is in the order of the other rotary layout"
            value = np.take(computation.right.value - bias, order, axis) + bias
            sigma = np.take(np.broadcast_to(computation.right.sigma, value.shape), order, axis)
            text = f"axis {axis} in a different order{under}: {description}"
            yield Predicted("elements_reordered", text, predict=partial(Prediction, value, sigma))


def rotary_width(order: list[int]) -> int:
    """The width of heads whose features are in the order of the other rotary layout, or 0."""
    for width in range(6, len(order) + 1, 2):
        for _, features in layouts(width, halves=True):
            if order == [
                start + place for start in range(0, len(order), width) for place in features.tolist()
            ]:
                return width
    return 0


# Words for a buffer's value before the run.
UPDATED = ", measured from those before the run"


def biases(stretch: Stretch) -> Iterator[tuple[str, Array]]:
    """Yield no bias, a buffer's value before the run, and the last operation's bias, in a broadcastable shape
    and with words.
    """
    yield "", np.zeros(())
    before = modules.buffers(stretch.module.model).get(stretch.end)
    if before is not None and before.shape == stretch.result.shape:
        yield UPDATED, numbers(before).astype(np.float64)
    computing = [step for step in stretch.steps if step.computes]
    last = computing[-1].operation if computing else None
    shape = tuple(stretch.result.shape)
    if last is None:
        return
    place, axis = {"addmm": (0, -1), "convolution": (2, 1), "add": (1, -1)}.get(last.name, (0, 0))
    bias = last.args[place] if last.name in ("addmm", "convolution", "add") else None
    if isinstance(bias, Tensor) and bias.ndim == 1 and len(shape) > 1 and shape[axis] == len(bias):
        size = [1] * len(shape)
        size[axis] = len(bias)
        yield " before the bias", numbers(bias).astype(np.float64).reshape(size)


def shifted(computation: StretchComputation) -> Iterator[Predicted]:
    """Yield shifts along an axis, with the candidate's values at the edge."""
    for axis, size in enumerate(computation.actual.shape):
        if size < 3 or computation.actual.size // size < LEAST_MOVED:
            continue
        for by in (1, -1):
            value, sigma = (
                np.roll(np.broadcast_to(x, computation.actual.shape), by, axis)
                for x in (computation.right.value, computation.right.sigma)
            )
            free = [slice(None)] * computation.actual.ndim
            free[axis] = slice(0, 1) if by > 0 else slice(size - 1, size)
            value, edge = value.copy(), computation.actual[tuple(free)]
            value[tuple(free)] = np.where(np.isfinite(edge), edge, value[tuple(free)])
            first, second = (0, 1) if by > 0 else (1, 0)
            text = f"a shift by one along axis {axis}: position {second} holds the values of {first}"
            yield Predicted("shifted", text, predict=partial(Prediction, value, sigma))
