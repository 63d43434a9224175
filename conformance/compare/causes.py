"""The search for the cause of a wrong stretch."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, combinations, groupby, islice, product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from concord.conformance.bugs.context import Flags
from concord.conformance.compare.aten_arithmetic import Uncomputable, computed
from concord.conformance.compare.aten_operations import (
    Make,
    Operation,
    OperationBug,
    Unary,
    first,
    injected,
    is_float,
    sites,
)
from concord.conformance.compare.differences import Difference
from concord.conformance.compare.mechanisms import COUNTED, FORMATS, bugs, layouts
from concord.conformance.compare.module_reference import (
    ModelError,
    buffers,
    dtype_name,
    numbers,
    running,
    submodule_of,
)
from concord.conformance.compare.operation_context import rounded
from concord.conformance.compare.stretch import Recorded, Stretch
from concord.conformance.explain.computation import Computation, Prediction
from concord.conformance.explain.description import nearest
from concord.conformance.explain.hypothesis import Hypothesis
from concord.conformance.explain.search import EDGE, Effort, Search
from concord.conformance.judging.explanation import Explanation
from concord.conformance.wording import few, gather, instead_of
from concord.spec.arrays import Array, Arrays

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

    def __init__(self, stretch: Stretch, actual: Array, dtype: str, right: Prediction) -> None:
        self.stretch, self.tensor = stretch, stretch.end
        self.actual, self.dtype, self.right = actual, dtype, right

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

    def replay(
        self,
        make: Make = Operation.__call__,
        chosen: Collection[int] | None = None,
        others: Mapping[int, Tensor] | None = None,
    ) -> Prediction:
        """Recompute exactly with changed operations."""
        tensors, stretch = Arrays(), self.stretch
        with running("the code with a bug"):
            stretch.again(stretch.module.exact(), tensors.__setitem__, make, others, chosen)
        return Prediction(tensors[stretch.end], self.right.sigma)

    def own_sigma(self, make: Make, others: Mapping[int, Tensor] | None = None) -> Array:
        """Estimate sigma with changed operations."""
        dtypes = {self.tensor: dtype_name(self.stretch.result.dtype.to_real())}
        return self.stretch.estimate(dtypes, "testing a possible cause", make, others)[1][self.tensor]

    def edited(
        self,
        name: str,
        text: str,
        make: Make = Operation.__call__,
        chosen: Collection[int] = (),
        others: Mapping[int, Tensor] | None = None,
        **about: Any,
    ) -> Predicted:
        """The stretch with changed operations, or other tensors by the identities of the right ones."""
        predict, own_sigma = partial(self.replay, make, chosen, others), partial(self.own_sigma, make, others)
        return Predicted(name, text, predict=predict, own_sigma=own_sigma, **about)


def cause(
    asked: StretchComputation, strange: Iterable[str], differing: Sequence[Difference], effort: Effort
) -> Explanation | None:
    """Search for an explanation of a stretch's end.

    Args:
        strange: tensors that only the candidate has.
    """
    within = dict(asked.stretch.module.model.named_modules())
    active = [  # inactive dropout has no activation
        Hypothesis("dropout_active", f"dropout left on in {name}")
        for name in strange
        if isinstance(within.get(name), nn.Dropout)
    ]
    layers = [difference for difference in differing if difference.is_layer]
    settings = [difference for difference in differing if not difference.is_layer]
    with_bugs = partial(changed, asked, cache(partial(sites, asked.replay, bugs)))
    one_value = constant(asked)
    stages: list[Iterable[Hypothesis]] = [
        of_differences(asked, [[difference] for difference in settings[:MOST_DIFFERENCES]]),
        of_differences(asked, [settings] if len(settings) > 1 else []),
        copied(asked),
        chain(reordered(asked), shifted(asked), exchanged(asked), skipped(asked)),
        with_bugs((EVERYWHERE, BY_OPERATION, BY_PLACE), lambda bug: bug.name in COUNTED),
        with_bugs((EVERYWHERE, BY_OPERATION), lambda bug: bug.name not in COUNTED),
        crossed(asked),
        with_bugs((BY_PLACE,), lambda bug: bug.name not in COUNTED),
        swapped(asked),
        fitted(asked),
        scaled(asked),
        with_bugs((ONCE,)),
        entering(asked),
        islice(substituted(asked), MOST_SUBSTITUTED),
        offset(asked),
        of_differences(asked, [[difference] for difference in layers]),
    ]
    # Other values of settings explain a constant better; the search for bugs would only waste time.
    return Search(asked, effort).explain(stages[: 2 if one_value else None], [*one_value, *active])


def constant(asked: StretchComputation) -> list[Hypothesis]:
    """The value that all elements have, if the correct ones differ."""
    values = np.unique(asked.actual)
    if not len(values) == 1 < len(np.unique(asked.right.value)):
        return []
    return [Hypothesis("constant", f"the value {values[0] + 0:.6g} throughout")]


def copied(asked: StretchComputation) -> Iterator[Predicted]:
    """Yield inputs and other activations, at the end of a long stretch."""
    module = asked.stretch.module
    for name, x in {**module.inputs, **module.arrays}.items() if len(asked.stretch.steps) > LONG else ():
        text = f"the values of `{name}`"
        yield Predicted("copied", text, predict=partial(Prediction, x, asked.right.sigma))


def of_differences(
    asked: StretchComputation, differing: Iterable[Sequence[Difference]]
) -> Iterator[Predicted]:
    """Yield the reference with the candidate's values."""

    def made(group: Sequence[Difference]) -> Prediction:
        stretch = asked.stretch
        reference = stretch.module
        with running("the reference with the candidate's values"):
            for difference in group:
                reference = difference.applied(reference)
            run = Stretch(reference, stretch.end, stretch.known, stretch.pin, stretch.check)
            # Here, since with other settings the code may leave the end uncomputed.
            return Prediction(numbers(run.result).astype(np.float64), asked.right.sigma)

    for group in differing:
        text = f"differences between the modules: {few((difference.text for difference in group), 3)}"
        yield Predicted("modules_differ", text, predict=partial(made, group))


def changed(
    asked: StretchComputation,
    possible: Callable[[], Mapping[OperationBug, list[int]]],
    levels: Collection[int],
    tried: Callable[[OperationBug], bool] = lambda bug: True,
) -> Iterator[Predicted]:
    """Yield each bug in some of its operations.

    Args:
        possible: returns the operations of each bug.
        levels: which of :func:`selections`.
    """
    stretch = asked.stretch
    for level, (bug, places) in product(levels, possible().items()):
        for selection in selections(stretch, places, level) if tried(bug) else ():
            # The catalogue's sentences end with a clause.
            location = (
                ""
                if bug.clause
                else place_of([stretch.steps[number] for number in selection], stretch, level == ONCE)
            )
            make = injected(bug, selection, bugs)
            yield asked.edited(bug.name, bug.text + location, make, selection, clause=bug.clause)


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


def exchanged(asked: StretchComputation) -> Iterator[Predicted]:
    """Yield parameters of other modules of equal shapes; for modules before the end, only of siblings."""
    module, end = asked.stretch.module, submodule_of(asked.tensor)
    shapes = {
        path: {name: x.shape for name, x in inner.named_parameters()}
        for path, inner in module.model.named_modules()
    }
    for own, path in product(dict.fromkeys([end, *sorted(asked.stretch.active)]), shapes):
        is_near = own == end or own.rpartition(".")[0] == path.rpartition(".")[0]
        if own != path and is_near and shapes.get(own) and shapes[own] == shapes[path]:
            parameters = module.parameters
            others = {id(parameters[f"{own}.{name}"]): parameters[f"{path}.{name}"] for name in shapes[own]}
            text = f"the parameters of {path} used in place of those of {own}"
            yield asked.edited("parameters_exchanged", text, others=others)


def skipped(asked: StretchComputation) -> Iterator[Predicted]:
    """Yield modules of several operations that are left out, alone and with all of their kind."""
    stretch = asked.stretch
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
            yield asked.edited("step_left_out", text, others=others)


def crossed(asked: StretchComputation) -> Iterator[Predicted]:
    """Yield pairs of activations, inputs or parts of a tensor, each used in place of the other."""
    stretch = asked.stretch
    complements = [
        {"x": step.operation.args[0], f"1 - x ({step.line})": step.result}
        for step in stretch.steps
        if step.operation.func is torch.ops.aten.rsub.Scalar and step.operation.operands["other"] == 1
    ]
    used = set().union(*(step.operands for step in stretch.steps))
    parameters = {f"`{name}`": x for name, x in stretch.module.parameters.items() if id(x) in used}
    parts = [
        step
        for step in stretch.steps
        if step.operation.name in ("select", "slice") and id(step.result) not in stretch.before
    ]
    groups = gather(parts, lambda step: (id(step.operation.args[0]), *step.operation.args[1:2]))
    named_parts = [
        {f"part {step.operation.args[2]} of axis {axis} ({step.line})": step.result for step in group}
        for (_, axis), group in groups.items()
    ]
    exchangeable = (stretch.entering, *complements, parameters, *named_parts)
    pairs = chain.from_iterable(combinations(group.items(), 2) for group in exchangeable)
    alike = (pair for pair in pairs if pair[0][1].shape == pair[1][1].shape)
    for (one, x), (other, y) in islice(alike, MOST_CROSSED):
        text = f"{one} and {other} used in place of each other"
        yield asked.edited("operands_exchanged", text, others={id(x): y, id(y): x})


def swapped(asked: StretchComputation) -> Iterator[Predicted]:
    """Yield two successive steps in the opposite order, such as a gate before a product."""
    places, steps = asked.stretch.places, asked.stretch.steps
    pairs = defaultdict[tuple[Any, ...], dict[int, Swap]](dict)
    paths: dict[int, tuple[tuple[int, int], ...]] = {}
    for number, step in enumerate(steps):
        for place, x in step.operation.floats.items() if step.computes else ():
            path = paths.get(id(x), ())
            for operand, y in steps[path[0][0]].operation.floats.items() if path else ():
                if y.shape == x.shape:
                    key = (places[number], places[path[0][0]], place, operand)
                    pairs[key][number] = Swap(place, operand, path)
        moved = () if step.computes else step.operation.args[:1]
        before = next((paths.get(id(x), ()) for x in moved), ())
        if step.computes or before:
            paths |= {id(x): (*before, (number, leaf)) for leaf, x in enumerate(tree_leaves(step.result))}
    for swaps in pairs.values():
        number, swap = next(iter(swaps.items()))
        text = f"{steps[number]} before {steps[swap.path[0][0]]} instead of after it"
        predict = partial(asked.replay, _swapping(steps, swaps), swaps)
        own_sigma = partial(asked.own_sigma, _swapping(steps, swaps))
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


def fitted(asked: StretchComputation) -> Iterator[Predicted]:
    """Yield other values of numeric operands."""
    groups = defaultdict[tuple[str, str, str, float], list[int]](list)
    for number, step in enumerate(asked.stretch.steps):
        computes = step.computes or step.operation.name == "div"  # perhaps of integers
        for place, value in step.operation.operands.items() if computes else ():
            kinds = (float, int) if place in ("other", "exponent", "beta") else (float,)
            if type(value) in kinds and math.isfinite(value):
                groups[step.operation.name, step.line, place, float(value)].append(number)
    for (name, line, place, value), group in groups.items():
        for other, predicted in fit(asked, group, partial(_having, place), value):
            yield predicted("another_number", f"{name} with {instead_of(other, value)} ({line})")
    for value, rest in combinations(sorted({value for *_, value in groups if value > 0}), 2):
        if abs(value + rest - 1) > ROUNDED:
            continue
        weighed = [group for (*_, own), group in groups.items() if own in (value, rest)]
        for other, predicted in fit(asked, [*chain(*weighed)], partial(_weighing, value, rest), value):
            text = f"weights {other:.6g} and {1 - other:.6g} instead of {value:.6g} and {rest:.6g}"
            yield predicted("another_number", text)


# The sum of two weights of a mean, such as 0.99 and 0.01, is 1 up to this rounding error.
ROUNDED = 1e-12


def _weighing(value: float, rest: float, operation: Operation, number: float) -> Any:
    """Change one of two weights, and the other one with it."""
    others = {value: number, rest: 1 - number}
    weights = {place: x for place, x in operation.operands.items() if type(x) is float and x in others}
    return operation.having(**{place: others[x] for place, x in weights.items()})


def _having(place: str, operation: Operation, number: float) -> Any:
    return operation.having(**{place: number})


# Changes of an operation's result by a value, each with its neutral value.
CHANGES: dict[str, tuple[NumberChange, float]] = {"times": (torch.mul, 1.0), "plus": (torch.add, 0.0)}


def offset(asked: StretchComputation) -> Iterator[Predicted]:
    """Yield operation results times or plus a value."""
    places, steps = asked.stretch.places, asked.stretch.steps
    numbers_of = [n for n, step in enumerate(steps) if step.computes and is_float(first(step.result))]
    groups = gather(numbers_of, lambda n: (steps[n].operation.name, places[n]))
    for ((name, (line, _)), group), (how, (change, neutral)) in product(groups.items(), CHANGES.items()):
        for other, predicted in fit(asked, group, partial(_giving, change), neutral):
            yield predicted("result_changed", f"the result of {name}, {how} {other:.6g} ({line})")


def _giving(change: NumberChange, operation: Operation, number: float) -> Any:
    return operation.giving(change(first(operation()), number))


def fit(
    asked: StretchComputation,
    group: Sequence[int],
    change: Callable[[Operation, float], Any],
    value: float,
) -> Iterator[tuple[float, Callable[[str, str], Predicted]]]:
    """Yield the value with which changed operations best reproduce the result, and a maker of its hypothesis.

    Args:
        group: numbers of the changed operations.
    """

    def make(operation: Operation, other: float) -> Any:
        return change(operation, other) if operation.number in group else operation()

    def predict(other: float) -> Prediction:
        return asked.replay(partial(make, other=other), group)

    sigma, is_finite = asked.right.sigma, asked.is_finite
    weight = np.where(is_finite & np.isfinite(sigma) & (sigma > 0), 1 / sigma, 0.0)
    positive = 0 < value < 1e-2  # an epsilon may have any magnitude, but only one sign

    def weighed(first: Array, second: Array) -> Array:
        return np.where(is_finite, first - second, 0.0) * weight

    def number(u: float) -> float:
        return math.exp(u) if positive else u

    with contextlib.suppress(ModelError, Uncomputable):  # with another number, an index may be out of range
        u = math.log(value) if positive else value
        error = weighed(asked.actual, asked.right.value)
        before = float(np.linalg.norm(error))
        for turn in range(9):
            step = 1e-4 * (1.0 if positive else abs(u) or 1.0)
            slope = weighed(predict(number(u + step)).value, predict(number(u - step)).value) / (2 * step)
            power, along = float((slope * slope).sum()), float((slope * error).sum())
            if not power > 0 or not np.isfinite(along) or (not turn and along**2 < 0.2 * power * before**2):
                return  # this value does not change the wrong elements
            move = float(np.clip(along / power, -3.0, 3.0)) if positive else along / power
            u += move
            error = weighed(asked.actual, predict(number(u)).value)
            if not np.isfinite(error).all() or abs(move) < 1e-9 * max(abs(u), 1e-3):
                break
        if not float(np.linalg.norm(error)) <= before / 5:
            return
        if asked.judged(asked.actual, predict(number(u))).ratio > EDGE:
            sigma = asked.own_sigma(partial(make, other=number(u)))  # other values have other errors

        def prediction(other: float) -> Prediction:
            return Prediction(predict(other).value, sigma)

        best = shortest(asked, number(u), prediction)
        yield best, partial(Predicted, predict=partial(prediction, best), rare=not is_plain(best))


def shortest(asked: StretchComputation, number: float, predict: Callable[[float], Prediction]) -> float:
    """Round a number to the fewest digits that explain the result, if any do."""
    candidates = (float(f"{number:.{digits}g}") for digits in (2, 3, 4, 6))
    return next((other for other in candidates if asked.explains(predict(other))), number)


def is_plain(number: float) -> bool:
    """Whether a number, its square or the inverse of either has few digits."""
    # Code contains such numbers. Others follow from several: 0.999505 from the epsilons of a folded norm.
    forms = np.float64(abs(number)) ** np.array([1.0, 2.0, -1.0, -2.0])
    # A square of six digits is known to five; what is near 1 has the digits of its distance from it.
    return any(abs(float(f"{form:.3g}") - form) <= 1e-5 * min(form, abs(form - 1)) for form in forms)


def scaled(asked: StretchComputation) -> Iterator[Predicted]:
    """Yield multiples of the expected value."""
    right, is_finite = asked.right, asked.is_finite
    for under, bias in biases(asked.stretch):
        base, actual = (np.where(is_finite, x - bias, 0.0) for x in (right.value, asked.actual))
        factor = float((base * actual).sum() / max((base * base).sum(), 1e-300))
        sigma = right.sigma * max(abs(factor), 1.0)
        predict = partial(_scaled, right, bias, sigma)
        factor = shortest(asked, factor, predict)
        text, rare = f"values multiplied by {factor:.6g}{under}", not is_plain(factor)
        text = text if factor or under != UPDATED else "a missing update"
        yield Predicted("multiplied", text, predict=partial(predict, factor), rare=rare)


def _scaled(right: Prediction, bias: Array, sigma: Array, factor: float) -> Prediction:
    return Prediction((right.value - bias) * factor + bias, sigma)


def entering(asked: StretchComputation) -> Iterator[Predicted]:
    """Yield centered, half-precision and moved tensors, and others in place of those at the start."""
    stretch = asked.stretch
    inputs, names = stretch.module.inputs, [*stretch.module.inputs, *stretch.module.arrays]
    results = {f"the result of {step}": step.result for step in stretch.steps if step.computes}
    tensors = {name: x for name, x in {**stretch.entering, **results}.items() if is_float(x)}
    for name, x in tensors.items():
        axes = [axis for axis, size in enumerate(x.shape) if size > 1]
        changes: dict[str, Unary] = {
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
            yield asked.edited("another_input", f"{name} {text}", others=others, rare=few_values)
    before = names[: names.index(stretch.end)][::-1]
    for (name, x), other in product(stretch.entering.items(), before[:MOST_CROSSED]):
        array = inputs.get(other, stretch.pin(other) if stretch.pin else None)
        if array is not None and array.shape == x.shape and f"`{other}`" != name:
            y = computed(torch.from_numpy(array).to(x.dtype.to_real()))
            for text, value in ((f"`{other}` in place of {name}", y), (f"{name} plus `{other}`", x + y)):
                yield asked.edited("another_input", text, others={id(x): value})


# Maximum number of other tensors to try as operands.
MOST_SUBSTITUTED = 200


TERMS = {"self": "first term", "other": "second term"}


def substituted(asked: StretchComputation) -> Iterator[Predicted]:
    """Yield another tensor as an operand or result."""
    stretch = asked.stretch
    tensors = {f"`{name}`": x for _, name, x in stretch.taken.values()} | stretch.entering
    for number, step in enumerate(stretch.steps):
        result = {"result": step.result} if isinstance(step.result, Tensor) else {}
        places = {**step.operation.tensors, **result} if step.computes else {}
        for place, name in product(places, tensors):
            tensor, x = tensors[name], places[place]
            if tensor is not x and (tensor.shape, tensor.dtype) == (x.shape, x.dtype):
                role = TERMS.get(place, place) if step.operation.name == "add" else place
                text = f"{name} in place of the {role} of {step}"
                make = partial(_with_another, number, place, tensor)
                yield asked.edited("another_operand", text, make, (number,))
        tensors |= {f"the result of {step}": output for output in result.values()}


def _with_another(number: int, place: str, tensor: Tensor, operation: Operation) -> Any:
    if operation.number != number:
        return operation()
    if place == "result":
        return operation.giving(tensor)
    several = isinstance(operation.operands[place], list)
    return operation.having(**{place: [tensor] if several else tensor})


# The order of elements.


def reordered(asked: StretchComputation) -> Iterator[Predicted]:
    """Yield other orders along an axis."""
    is_finite = np.isfinite(asked.actual)
    for under, bias in biases(asked.stretch):
        base, right = np.nan_to_num(asked.actual) - bias, np.nan_to_num(asked.right.value) - bias
        for axis in range(asked.actual.ndim):
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
            value = np.take(asked.right.value - bias, order, axis) + bias
            sigma = np.take(np.broadcast_to(asked.right.sigma, value.shape), order, axis)
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


# Place of a bias among an operation's operands, and its axis in the result.
BIASES = {"addmm": (0, -1), "convolution": (2, 1), "add": (1, -1)}


def biases(stretch: Stretch) -> Iterator[tuple[str, Array]]:
    """Yield no bias, a buffer's value before the run, and the last operation's bias, in a broadcastable shape
    and with words.
    """
    yield "", np.zeros(())
    before = buffers(stretch.module.model).get(stretch.end)
    if before is not None and before.shape == stretch.result.shape:
        yield UPDATED, numbers(before).astype(np.float64)
    last = next((step.operation for step in reversed(stretch.steps) if step.computes), None)
    if last is None or last.name not in BIASES:
        return
    place, axis = BIASES[last.name]
    bias, sizes = last.args[place], [1] * stretch.result.ndim
    if isinstance(bias, Tensor) and bias.ndim == 1 < len(sizes) and stretch.result.shape[axis] == len(bias):
        sizes[axis] = len(bias)
        yield " before the bias", numbers(bias).astype(np.float64).reshape(sizes)


def shifted(asked: StretchComputation) -> Iterator[Predicted]:
    """Yield shifts along an axis, with the candidate's values at the edge."""
    for axis, size in enumerate(asked.actual.shape):
        if size < 3 or asked.actual.size // size < LEAST_MOVED:
            continue
        for by in (1, -1):
            value, sigma = (
                np.roll(np.broadcast_to(x, asked.actual.shape), by, axis)
                for x in (asked.right.value, asked.right.sigma)
            )
            free = [slice(None)] * asked.actual.ndim
            free[axis] = slice(0, 1) if by > 0 else slice(size - 1, size)
            value, edge = value.copy(), asked.actual[tuple(free)]
            value[tuple(free)] = np.where(np.isfinite(edge), edge, value[tuple(free)])
            first, second = (0, 1) if by > 0 else (1, 0)
            text = f"a shift by one along axis {axis}: position {second} holds the values of {first}"
            yield Predicted("shifted", text, predict=partial(Prediction, value, sigma))
