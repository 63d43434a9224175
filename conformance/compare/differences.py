"""Differences between two modules."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from concord.conformance.compare.aten_arithmetic import computed
from concord.conformance.compare.aten_operations import Tensors
from concord.conformance.compare.mechanisms import FORMATS, quantized
from concord.conformance.compare.module_reference import (
    ModuleReference,
    dtype_name,
    numbers,
    without_wrappers,
)
from concord.conformance.compare.state import copy_of
from concord.conformance.explain.description import relation
from concord.conformance.wording import counted, few, instead_of
from concord.spec.arrays import Array
from concord.spec.precision import precision

# Maximum number of listed elements.
FEW = 3

SCALARS = (bool, int, float, str, type(None), torch.dtype)


@dataclass(frozen=True)
class Difference:
    """A tensor, setting or kind of layer that differs."""

    text: str
    # Keys: the module's path, the object in it with the setting (such as config) or an empty string, and the
    # name.
    values: Mapping[tuple[str, str, str], Any]

    @property
    def is_layer(self) -> bool:
        """Whether the kind of layer differs."""
        return any(isinstance(value, nn.Module) for value in self.values.values())

    def within(self, active: Collection[str]) -> bool:
        """Whether it is in these modules or their children."""
        return any({path, path.rpartition(".")[0]} & {*active} for path, _, _ in self.values)

    def applied(self, reference: ModuleReference) -> ModuleReference:
        """Copy the reference with the candidate's values."""
        parameters = {id(tensor): tensor for tensor in reference.model.parameters()}
        model = copy_of(reference.model, parameters)
        for (path, inner, name), value in self.values.items():
            owner = model.get_submodule(path)
            assign = setattr if isinstance(value, (Tensor, nn.Module)) else object.__setattr__
            assign(getattr(owner, inner) if inner else owner, name, there(value, reference.device))
        changed = replace(reference, model=model)
        vars(changed)["parameters"] = {
            name: reference.parameters[name] if id(tensor) in parameters else computed(tensor.detach())
            for name, tensor in itertools.chain(
                model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
            )
        }
        return changed


def there(value: Any, device: torch.device) -> Any:
    """Move tensors and modules to a device."""
    if isinstance(value, nn.Module):
        here = all(tensor.device == device for tensor in value.parameters())
        return value if here else copy_of(value).to(device)
    if not isinstance(value, Tensor) or value.device == device:
        return value
    moved = value.detach().to(device)
    return nn.Parameter(moved) if isinstance(value, nn.Parameter) else moved


def differences(right: nn.Module, theirs: nn.Module, paths: Callable[[str], str]) -> Iterator[Difference]:
    """Yield differences; ``paths`` maps the reference's paths to the candidate's."""
    # Of a compiled module's two names, the later one belongs to the module itself instead of its wrapper.
    # Tensors without a counterpart of the same shape are skipped: a layout is not a difference.
    others = {
        without_wrappers(name): submodule for name, submodule in theirs.named_modules(remove_duplicate=False)
    }
    tensors = defaultdict[tuple[int, int], list[tuple[str, str, Tensor, Tensor]]](list)
    reported_pairs = set[tuple[int, int]]()  # modules with several names are reported once
    for path, module in right.named_modules(remove_duplicate=False):
        if (other := others.get(paths(path))) is None:
            continue
        here, beside = _tensors(module), _tensors(other)
        for name, tensor in here.items():
            if name in beside and beside[name].shape == tensor.shape:
                tensors[id(tensor), id(beside[name])].append((path, name, tensor, beside[name]))
        sizes = all(name not in beside or beside[name].shape == x.shape for name, x in here.items())
        if sizes and (id(module), id(other)) not in reported_pairs:
            reported_pairs.add((id(module), id(other)))
            yield from _of_settings(path, module, other)
            kinds = [type(submodule).__name__ for submodule in (other, module)]
            if kinds[0] != kinds[1] and path and not any(_parts(submodule) for submodule in (module, other)):
                parent, _, name = path.rpartition(".")
                yield Difference(f"`{path}` is {' instead of '.join(kinds)}", {(parent, "", name): other})
    for places in tensors.values():
        yield from _of_tensor(right, places)


def _parts(module: nn.Module) -> list[Any]:
    return [*module.parameters(), *module.buffers(), *module.children()]


def _tensors(module: nn.Module) -> Tensors:
    registered = itertools.chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    return {**dict(registered), **{name: x for name, x in vars(module).items() if isinstance(x, Tensor)}}


def _of_tensor(model: nn.Module, places: Sequence[tuple[str, str, Tensor, Tensor]]) -> Iterator[Difference]:
    path, name, right, actual = places[0]
    if type(actual.detach()) is not Tensor or "meta" in (right.device.type, actual.device.type):
        return
    cast = actual.detach().to(right.dtype)
    arrays = [numbers(x).astype(np.float64) for x in (right, cast)]
    if not np.array_equal(arrays[0], arrays[1], equal_nan=True):
        full, here = ".".join(filter(None, (path, name))), {(path, name) for path, name, _, _ in places}
        parameters = model.named_parameters(remove_duplicate=False)
        others = (own for own, x in parameters if x is right and tuple(own.rpartition(".")[::2]) not in here)
        tied = next((f" (in the reference, the same tensor as `{own}`)" for own in others), "")
        value = nn.Parameter(cast, requires_grad=False) if isinstance(right, nn.Parameter) else cast
        text = f"`{full}` {_told(model, right, *arrays)}{tied}"
        yield Difference(text, {(path, "", name): value for path, name in here})


def _told(model: nn.Module, right: Tensor, expected: Array, actual: Array) -> str:
    wrong = ~((expected == actual) | (np.isnan(expected) & np.isnan(actual)))
    if wrong.sum() <= FEW and actual.size > 1:
        numbered = (
            f"{place} is {instead_of(float(actual[tuple(place)]), float(expected[tuple(place)]))}"
            for place in np.argwhere(wrong).tolist()
        )
        return f"differs in {counted(int(wrong.sum()), 'element')}: {'; '.join(numbered)}"
    for axis, line in enumerate(("row", "column")[: actual.ndim]):
        moved = _moved(np.moveaxis(expected, axis, 0), np.moveaxis(actual, axis, 0))
        if len(moved) == 2:
            return f"has {line}s {min(moved)} and {max(moved)} swapped"
        if moved:
            order = few(f"{line} {i} is the reference's {line} {j}" for i, j in moved.items())
            return f"has its {line}s in a different order: {order}"
    if actual.ndim == 2 and np.array_equal(actual, expected.T):
        return "is transposed"
    for name, x in model.named_parameters():
        if x is not right and x.shape == right.shape and np.array_equal(numbers(x), actual):
            return f"is the reference's `{name}`"
    for form in ("bfloat16", "float16", "tf32"):
        if np.array_equal(FORMATS[form](expected), actual):
            return f"is rounded to {form}"
    dtype, axes = dtype_name(right.dtype), [f"axis {place}" for place in range(actual.ndim)]
    rounding = precision(dtype).unit_roundoff * abs(expected)
    for axis in range(actual.ndim):
        if (abs(actual - quantized(expected, axis)) <= 2 * rounding).all():
            return "is rounded to 8 bits"
    _, description = relation(axes, actual, expected, rounding, np.ones_like(wrong), dtype)
    worst = np.nan_to_num(abs(actual - expected), posinf=0.0).max()
    share = f"{int(wrong.sum()):,} of {counted(actual.size, 'element')}"
    return description or f"differs in {share}, by up to {worst:.3g}"


def _moved(expected: Array, actual: Array) -> dict[int, int]:
    lines = {line.tobytes(): place for place, line in enumerate(np.ascontiguousarray(expected))}
    source = [lines.get(line.tobytes(), -1) for line in np.ascontiguousarray(actual)]
    if len(lines) < len(expected) or sorted(source) != list(range(len(source))):
        return {}
    return {place: source_place for place, source_place in enumerate(source) if place != source_place}


def _of_settings(path: str, module: nn.Module, other: nn.Module) -> Iterator[Difference]:
    configurations = {name: value for name, value in vars(module).items() if _is_configuration(name, value)}
    for inner, holder in {"": module, **configurations}.items():
        counterpart = vars(other).get(inner) if inner else other
        expected, actual = (_settings(owner) for owner in (holder, counterpart))
        # Values derived from settings belong to them, such as a convolution's padding.
        same = type(holder) is type(counterpart)
        derived = {key: value for key, value in actual.items() if same and key.startswith("_")}
        for name in expected:
            if name not in actual or name in derived:
                continue
            trained = name == "training" and not [*module.buffers(recurse=False)]
            if name.startswith("_") or trained or _spread(expected[name]) == _spread(actual[name]):
                continue
            full = ".".join(filter(None, (path, inner, name)))
            words = instead_of(_word(actual[name]), _word(expected[name]))
            values = {**derived, name: actual[name]}
            yield Difference(f"`{full}` is {words}", {(path, inner, key): x for key, x in values.items()})


def _is_configuration(name: str, value: Any) -> bool:
    kept = isinstance(value, (Tensor, nn.Module)) or callable(value) or name.startswith("_")
    return hasattr(value, "__dict__") and not kept


def _settings(owner: Any) -> dict[str, Any]:
    attributes = getattr(owner, "__dict__", {})
    fixed = {name: tuple(value) if isinstance(value, list) else value for name, value in attributes.items()}
    return {name: value for name, value in fixed.items() if _name(value) or _plain(value)}


def _plain(value: Any) -> bool:
    return all(isinstance(x, SCALARS) for x in (value if isinstance(value, tuple) else [value]))


def _name(value: Any) -> str:
    name = getattr(value, "__name__", "") if callable(value) and not isinstance(value, type) else ""
    return name if name != "<lambda>" else ""


def _word(value: Any) -> Any:
    return "None" if value is None else _name(value) or value


def _spread(value: Any) -> Any:
    # A kernel of (3, 3) equals one of 3.
    if isinstance(value, tuple) and len({*value}) == 1:
        return value[0]
    return _name(value) or value
