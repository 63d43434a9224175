"""What two modules differ in before they compute anything: parameters, buffers and settings, by their paths.

Each difference can be put into a copy of the reference. What that computes says whether it explains a
divergence.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from concord.conformance.compare.arithmetic import computed
from concord.conformance.compare.reference import ModuleReference, dtype_name, numbers, without_wrappers
from concord.conformance.explain.description import relation
from concord.conformance.wording import counted, distinct, few, instead
from concord.spec.arrays import Array
from concord.spec.precision import precision

FEW = 3
"""So many elements of a tensor are told one by one."""

SCALARS = (bool, int, float, str, type(None), torch.dtype)

FORMATS = ("bfloat16", "float16", "tf32")


@dataclass(frozen=True)
class Difference:
    """A tensor or a setting that has another value in the candidate.

    Attributes:
        path: of its owner in the reference.
        name: of the tensor or setting there.
        text: what it is, in words that follow "is explained by".
        note: the same as a sentence.
        tensors: parameters and buffers of the candidate, by the reference's names.
        put: puts a setting of the candidate into a copy of the reference's module.
    """

    path: str
    name: str
    text: str
    note: str
    tensors: Mapping[str, Tensor]
    put: Callable[[nn.Module], None]

    def applied(self, reference: ModuleReference) -> ModuleReference:
        """Return the reference with the candidate's value in this place. It shares all other tensors."""
        own = reference.model
        tensors = itertools.chain(own.parameters(), own.buffers())
        model = copy.deepcopy(own, {id(tensor): tensor for tensor in tensors})
        self.put(model)
        made = replace(reference, model=model)
        # Buffers are copied: a norm in training mode would write into those of the reference.
        buffers = {name: computed(tensor.clone()) for name, tensor in own.named_buffers()}
        others = {
            name: computed(tensor.detach().to(own_dtype(own, name))) for name, tensor in self.tensors.items()
        }
        vars(made)["parameters"] = {**reference.parameters, **buffers, **others}
        return made


def own_dtype(model: nn.Module, name: str) -> torch.dtype:
    """Return the dtype of a parameter or buffer."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}[name].dtype


def differences(right: nn.Module, theirs: nn.Module, paths: Callable[[str], str]) -> Iterator[Difference]:
    """Yield what differs by tensors and settings that both modules have under corresponding names.

    Layouts that differ give none: what has no counterpart of the same shape is left out.

    Args:
        paths: gives the candidate's path of a submodule of the reference.
    """
    # The later of two names is that of the module itself, not of its compiled wrapper.
    others = {without_wrappers(name): one for name, one in theirs.named_modules(remove_duplicate=False)}
    told = set[tuple[int, int]]()  # what has several names is told once
    for path, module in right.named_modules(remove_duplicate=False):
        if path != without_wrappers(path):
            continue
        other = others.get(paths(path))
        if other is not None:
            yield from _of_tensors(right, path, module, other, told)
            if (id(module), id(other)) not in told:
                told.add((id(module), id(other)))
                yield from _of_settings(path, module, other)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    kept = {name: x for name, x in vars(module).items() if isinstance(x, Tensor)}
    return {
        **dict(module.named_parameters(recurse=False)),
        **dict(module.named_buffers(recurse=False)),
        **kept,
    }


def _of_tensors(
    model: nn.Module, path: str, module: nn.Module, other: nn.Module, told: set[tuple[int, int]]
) -> Iterator[Difference]:
    """Yield tensors of one module that hold other numbers in the candidate."""
    theirs = _own_tensors(other)
    for name, right in _own_tensors(module).items():
        actual = theirs.get(name)
        if actual is None or actual.shape != right.shape or (id(right), id(actual)) in told:
            continue
        if "meta" in (right.device.type, actual.device.type) or type(actual.detach()) is not Tensor:
            continue
        told.add((id(right), id(actual)))
        expected, made = (numbers(x).astype(np.float64) for x in (right, actual.to(right.dtype)))
        if np.array_equal(expected, made, equal_nan=True):
            continue
        full = _joined(path, name)
        words = _told(model, full, right, expected, made)
        registered = name not in vars(module)

        def put(copied: nn.Module, name: str = name, actual: Tensor = actual, path: str = path) -> None:
            setattr(copied.get_submodule(path), name, actual)

        yield Difference(
            path,
            name,
            f"the candidate's `{full}`, which {words}",
            f"`{full}` {words}",
            {full: actual} if registered else {},
            (lambda copied: None) if registered else put,
        )


def _told(model: nn.Module, full: str, right: Tensor, expected: Array, actual: Array) -> str:
    """Say how a tensor differs, in words that follow its name."""
    wrong = ~((expected == actual) | (np.isnan(expected) & np.isnan(actual)))
    names = [
        name for name, x in model.named_parameters(remove_duplicate=False) if x is right and name != full
    ]
    tied = f" (in the reference it is `{names[0]}`)" if names else ""
    if wrong.sum() <= FEW and actual.size > 1:
        places = (
            f"[{', '.join(map(str, place))}] {_pair(actual, expected, place)}"
            for place in np.argwhere(wrong).tolist()
        )
        return f"differs in {counted(int(wrong.sum()), 'element')}: {'; '.join(places)}{tied}"
    for place, lines in enumerate(("rows", "columns")[: actual.ndim] if actual.ndim > 1 else ("elements",)):
        source = _order(np.moveaxis(expected, place, 0), np.moveaxis(actual, place, 0))
        if source is not None:
            moved = np.flatnonzero(source != np.arange(len(source)))
            if len(moved) == 2:
                return f"has {lines} {moved[0]} and {moved[1]} in each other's place{tied}"
            return f"has its {lines} in another order: {few(f'{i} is {source[i]}' for i in moved)}{tied}"
    if actual.ndim == 2 and actual.shape[0] == actual.shape[1] and np.array_equal(actual, expected.T):
        return f"is transposed{tied}"
    for name, x in model.named_parameters():
        if x is not right and x.shape == right.shape and np.array_equal(numbers(x), actual):
            return f"is the reference's `{name}`{tied}"
    for form in FORMATS:
        if np.array_equal(precision(form).round(expected), actual):
            return f"is rounded to {form}{tied}"
    axes = tuple(f"axis {place}" for place in range(actual.ndim))
    dtype = dtype_name(right.dtype)
    rounding = precision(dtype).unit_roundoff * abs(expected)
    _, what = relation(axes, actual, expected, rounding, np.ones_like(wrong), dtype)
    if what:
        return f"{what}{tied}"
    worst = abs(actual - expected)[np.isfinite(actual) & np.isfinite(expected)].max(initial=0.0)
    return f"differs in {int(wrong.sum()):,} of {counted(actual.size, 'element')}, by up to {worst:.3g}{tied}"


def _pair(actual: Array, expected: Array, place: list[int]) -> str:
    made, right = distinct(*(float(array[tuple(place)]) for array in (actual, expected)))
    return f"is {made} instead of {right}"


def _order(expected: Array, actual: Array) -> Array | None:
    """Return which line of a tensor stands in each place; None if others do, or several are the same."""
    lines = {line.tobytes(): place for place, line in enumerate(np.ascontiguousarray(expected))}
    source = [lines.get(line.tobytes(), -1) for line in np.ascontiguousarray(actual)]
    if len(lines) < len(expected) or sorted(source) != list(range(len(source))):
        return None
    return np.array(source)


def _plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_plain, value))
    return isinstance(value, SCALARS)


def _settings(owner: Any) -> dict[str, Any]:
    """Return the settings of a module or of its configuration: numbers, words, and functions with a name."""
    return {
        name: value
        for name, value in vars(owner).items()
        if not name.startswith("_") and (_plain(value) or _function(value))
    }


def _function(value: Any) -> str:
    """Return the name of a function that a setting may be; a lambda has none."""
    name = getattr(value, "__name__", "") if callable(value) and not isinstance(value, type) else ""
    return name if name != "<lambda>" else ""


def _of_settings(path: str, module: nn.Module, other: nn.Module) -> Iterator[Difference]:
    """Yield settings of one module, and of its configuration, that have other values in the candidate."""
    owners = [("", module, other)]
    for name, held in vars(module).items():
        theirs = vars(other).get(name)
        told = name.startswith("_") or callable(held) or isinstance(held, (nn.Module, Tensor))
        if not told and hasattr(held, "__dict__") and hasattr(theirs, "__dict__"):
            owners.append((name, held, theirs))
    for inner, own, theirs in owners:
        mine, made = _settings(own), _settings(theirs)
        for name in mine.keys() & made.keys():
            right, actual = mine[name], made[name]
            if _same(right, actual) or (name == "training" and not list(module.buffers(recurse=False))):
                continue
            full = ".".join(filter(None, (path, inner, name)))
            values = instead(*(_function(x) or x for x in (actual, right)))
            hidden = {
                key: value
                for key, value in vars(theirs).items()
                if key.startswith("_") and type(own) is type(theirs) and _plain(value)
            }

            def put(
                copied: nn.Module,
                inner: str = inner,
                name: str = name,
                actual: Any = actual,
                more: Any = hidden,
            ) -> None:
                owner = copied.get_submodule(path)
                owner = getattr(owner, inner) if inner else owner
                # What a module has worked out of its settings goes with them, as a convolution's padding.
                for key, value in {**more, name: actual}.items():
                    object.__setattr__(owner, key, value)

            yield Difference(path, name, f"`{full}` being {values}", f"`{full}` is {values}", {}, put)
    kinds = [type(x).__name__ for x in (other, module)]
    bare = not any(
        next(itertools.chain(x.parameters(), x.buffers(), x.children()), None) is not None
        for x in (module, other)
    )
    if kinds[0] != kinds[1] and path and bare:
        words = " instead of ".join(kinds)

        def exchange(copied: nn.Module) -> None:
            copied.set_submodule(path, other)

        yield Difference(path, "", f"`{path}` being {words}", f"`{path}` is {words}", {}, exchange)


def _same(right: Any, actual: Any) -> bool:
    if _function(right) or _function(actual):
        return _function(right) == _function(actual)
    with contextlib.suppress(TypeError, ValueError):
        if isinstance(right, (tuple, list)) or isinstance(actual, (tuple, list)):
            # A kernel of (3, 3) is one of 3.
            first, second = (list(x) if isinstance(x, (tuple, list)) else [x] for x in (right, actual))
            size = max(len(first), len(second))
            first, second = (x * size if len(x) == 1 else x for x in (first, second))
            return first == second
    return bool(right == actual)


def within(difference: Difference, active: Collection[str]) -> bool:
    """Return whether a difference lies in one of some modules, or in what one of them holds."""
    parent = difference.path.rpartition(".")[0]
    return difference.path in active or parent in active
