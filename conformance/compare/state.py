"""Copies of a module's state for each run."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

REGISTERED = ("_parameters", "_buffers", "_modules")

# Attributes of every module, including its hooks.
OWN = frozenset(vars(nn.Module()))

# Containers whose entries are restored after a run, and their maximum size: a larger one holds data.
CONTAINERS, LONGEST = (dict, list, set, OrderedDict, defaultdict), 1000

FIXED = (nn.Module, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)


class Copies:
    """Copies of objects; a shared object is copied once.

    Args:
        wrap: converts copied tensors.
        known: replacements by identity.
    """

    def __init__(self, wrap: Callable[[Tensor], Tensor], known: Mapping[int, Any]) -> None:
        self.wrap, self.known = wrap, dict(known)

    def __call__(self, value: Any) -> Any:
        """Copy a value, except locks and the like."""
        return tree_map(self._copied, value)

    def _copied(self, x: Any) -> Any:
        # PyTorch's own objects, such as a compiler's, are not part of a model's state.
        if isinstance(x, FIXED) or (type(x).__module__.startswith("torch") and not isinstance(x, Tensor)):
            return x
        if id(x) not in self.known:
            self.known[id(x)] = self._tensor(x) if isinstance(x, Tensor) else self._object(x)
        return self.known[id(x)]

    def _tensor(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            copied = self.wrap(x.detach().clone())
        return copied.requires_grad_() if x.requires_grad else copied

    def _object(self, x: Any) -> Any:
        with contextlib.suppress(Exception):
            return copy.deepcopy(x, self.known)
        return x


def copy_of(model: nn.Module, known: Mapping[int, Any] = types.MappingProxyType({})) -> Any:
    """Copy a module deeply; ``known`` holds replacements by identity."""
    # PyTorch cannot copy tensors with a history, such as the weight that `weight_norm` computes before each
    # call, or a loss or attention map that a training step left.
    attributes = tree_leaves([_attributes(module) for module in modules_of(model).values()])
    results = [x for x in attributes if isinstance(x, Tensor) and not x.is_leaf]
    return copy.deepcopy(model, {**known, **{id(x): x.detach().clone() for x in results}})


@contextlib.contextmanager
def kept(model: nn.Module, copied: Copies) -> Iterator[None]:
    """Make a module use copies within a block, and undo its changes of what its code shares."""
    modules = modules_of(model)
    before = {path: _attributes(module) for path, module in modules.items()}
    restore_shared = _shared(model)
    try:
        for path, module in modules.items():
            _replace(module, {key: copied(value) for key, value in before[path].items()})
        yield
    finally:
        for path, module in modules.items():
            _replace(module, before[path])
        restore_shared()


@contextlib.contextmanager
def untouched(model: nn.Module, copied: Copies, fixed: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Like :func:`kept`, and undo changes of ``fixed`` tensors.

    Yields:
        A list of changed names, complete after the block.
    """
    values = {name: tensor.detach().clone() for name, tensor in fixed.items()}
    before = {path: _attributes(module) for path, module in modules_of(model).items()}
    changed = list[str]()

    def compare() -> None:
        for path, module in modules_of(model).items():
            # A run may add modules.
            attributes, after = before.get(path, {}), _attributes(module)
            keys = attributes.keys() ^ after.keys() | {
                key for key in attributes.keys() & after if not _same(attributes[key], after[key])
            }
            changed.extend(sorted(".".join(filter(None, (path, name))) for *_, name in keys))
        for name, tensor in fixed.items():
            if not equal(tensor, values[name]):
                changed.append(name)
                tensor.detach().copy_(values[name])

    with kept(model, copied):
        try:
            yield changed
        finally:
            compare()


def _shared(model: nn.Module) -> Callable[[], None]:
    """Return a function that restores global values and containers of a module's code.

    Otherwise a candidate of the same code would read results that the reference left in a global cache.
    """
    bases = {base for module in model.modules() for base in type(module).__mro__}
    classes = [base for base in bases if base.__module__.split(".")[0] not in ("torch", "builtins")]
    modules = {base.__module__: sys.modules.get(base.__module__) for base in classes}
    spaces: list[Any] = [vars(module) for module in modules.values() if module]
    values = [dict(space) for space in spaces]
    containers = [
        x
        for space in (*values, *map(vars, classes))
        for name, x in space.items()
        if type(x) in CONTAINERS and len(x) <= LONGEST and not name.startswith("__")
    ]
    copies = [*map(copy.copy, containers)]

    def restore() -> None:
        for space, before in zip(spaces, values, strict=True):  # PyTorch's compiler may have added names
            space.update(before)
        for x, before in zip(containers, copies, strict=True):
            if not _holds(x, before):
                x.clear()
                (x.extend if isinstance(x, list) else x.update)(before)

    return restore


def _holds(container: Any, entries: Any) -> bool:
    one, other = ([*x, *(x.values() if isinstance(x, dict) else ())] for x in (container, entries))
    return len(one) == len(other) and all(map(operator.is_, one, other))


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Modules with replaceable state, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)
    }


def _attributes(module: nn.Module) -> dict[tuple[str, ...], Any]:
    attributes = vars(module)
    plain = {(key,): value for key, value in attributes.items() if key not in OWN}
    # PyTorch keeps registered objects in separate dictionaries.
    return plain | {(key, name): value for key in REGISTERED for name, value in attributes[key].items()}


def _replace(module: nn.Module, attributes: Mapping[tuple[str, ...], Any]) -> None:
    namespace = vars(module)
    for key in namespace.keys() - OWN:
        del namespace[key]
    for key in REGISTERED:
        namespace[key].clear()
    for (*where, name), value in attributes.items():
        (namespace[where[0]] if where else namespace)[name] = value


def _same(value: Any, other: Any) -> bool:
    (leaves, form), (others, its) = tree_flatten(value), tree_flatten(other)
    with contextlib.suppress(RecursionError):  # reference cycles count as unchanged
        return form == its and all(map(equal, leaves, others))
    return True


def equal(value: Any, other: Any) -> bool:
    """Whether two values have the same content; NaN equals itself."""
    if value is other:
        return True
    if type(value) is not type(other) and not isinstance(value, Tensor):
        return False
    if isinstance(value, Tensor):
        if not isinstance(other, Tensor) or (value.shape, value.dtype) != (other.shape, other.dtype):
            return False
        with contextlib.suppress(RuntimeError, TypeError):  # meta tensors cannot be compared
            value, other = value.detach(), other.detach()
            return torch.equal(value, other) or torch.equal(value.nan_to_num(), other.nan_to_num())
        return True
    compares: Any = type(value).__eq__
    if compares is object.__eq__:
        return not hasattr(value, "__dict__") or _same(vars(value), vars(other))
    with contextlib.suppress(Exception):
        return bool(value == other)
    return True
