"""The part of a module in which a divergence was made: where it is written, and which bug explains it."""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from concord.conformance.compare.activations import OUTPUT, Finished, Pin, Take, dtype_name, numbers, observe
from concord.conformance.compare.arithmetic import ExactMode, computed, plainly
from concord.conformance.compare.edits import BUGS, UNFIT, Edit, Injected, Sites
from concord.conformance.compare.reference import ModuleReference, with_value
from concord.conformance.explain import Cause
from concord.conformance.scoring import judge_tensor
from concord.spec.arrays import Array

LONGEST = 60.0
"""Seconds of the processor that the search for a cause may take."""


class Stretch:
    """The part of a reference that computes one tensor from those before it, to be computed again with bugs.

    Args:
        given: what the candidate computed, up to the tensor and with it.
        tensor, start: its last activation, and the one after which it begins.
        blind: whether a row of a softmax that sees no key is zero.
    """

    def __init__(
        self, reference: ModuleReference, given: Mapping[str, Array], tensor: str, start: str, blind: bool
    ) -> None:
        self.reference, self.model = reference, reference.model
        self.tensor, self.start, self.blind = tensor, start, blind
        self.call = tensor.partition("#")[2].partition("[")[0]
        plain = reference.plain
        self.returns, self.dtype = plain.modules.get(tensor, ""), dtype_name(plain.tensors[tensor].dtype)
        self.path, listed = self.returns, (nn.ModuleList, nn.ModuleDict)  # which nobody calls
        while self.path and (
            not start.startswith(f"{self.path}.") or isinstance(self.model.get_submodule(self.path), listed)
        ):
            self.path = self.path.rpartition(".")[0]
        self.module, self.prefix = self.model.get_submodule(self.path), f"{self.path}." if self.path else ""
        pins = {name: with_value(array, plain.tensors[name].dtype) for name, array in given.items()}
        self.given = pins.pop(tensor).value.numpy()
        self.args, self.kwargs = reference.given(computed)
        if self.path:
            self.args, self.kwargs = self.entered(reference.parameters, pins)
        self.parameters = {
            name.removeprefix(self.prefix): tensor
            for name, tensor in reference.parameters.items()
            if name.startswith(self.prefix)
        }
        self.pins = {self.inside(name): value for name, value in pins.items() if name.startswith(self.prefix)}

    def lines(self) -> list[str]:
        """Return the modules that compute the tensor, and where their forward passes are written."""
        modules = {path: self.model.get_submodule(path) for path in (self.returns, self.path)}
        return [
            f"{path or 'the module'}: {type(module).__name__}{source_of(module)}"
            for path, module in modules.items()
        ]

    def cause(self, value: Array, sigma: Array, strange: Collection[str]) -> Cause | None:
        """Return what explains the tensor: a bug in what computes it, or the order of its elements.

        Args:
            value, sigma: what it is to be.
            strange: tensors that the candidate has alone.
        """
        started, modules = time.process_time(), dict(self.model.named_modules())
        for name in strange:  # what is passed on as it is has no activation
            if isinstance(modules.get(name), nn.Dropout) and name.startswith(self.path):
                return told({"dropout_active": f"dropout that is active in {name}"})
        explained: dict[str, str] = {}
        made = ((*found, sigma) for found in self.made())
        for name, text, array, allowed in itertools.chain(reordered(self.given, value, sigma), made):
            moved = np.where(np.isfinite(array) & np.isfinite(value), array, value)
            judged = judge_tensor(self.given, moved, allowed, self.dtype)
            if name not in explained and judged.status == "agrees":
                explained[name] = text
            if time.process_time() - started > LONGEST:
                break
        return told(explained)

    def inside(self, name: str) -> str:
        """Return the name of an activation within the module that computes the stretch."""
        own = self.prefix.removesuffix(".")  # it returns one tensor, or several by place
        local = (
            name.removeprefix(self.prefix)
            if name.startswith(self.prefix)
            else OUTPUT + name.removeprefix(own)
        )
        return local.replace(f"#{self.call}", "") if self.call and self.prefix else local

    def entered(
        self, parameters: Mapping[str, Tensor], pins: Mapping[str, Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the module is called with when it computes the tensor."""
        given: list[Any] = []

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given[:] = [args, kwargs]

        handle = self.module.register_forward_pre_hook(enter, with_kwargs=True)
        try:
            with plainly(), ExactMode(self.blind):
                take = until(Edit(), "", self.tensor, [])
                observe(self.model, self.args, self.kwargs, parameters, take=take, pin=pinned_to(pins))
        finally:
            handle.remove()
        return given[0], given[1]

    def run(
        self,
        edited: Edit,
        parameters: Mapping[str, Tensor] | None = None,
        arithmetic: ExactMode | None = None,
    ) -> Array | None:
        """Compute the tensor, with an edit of what follows the start, or of other parameters."""
        arithmetic, start = arithmetic or ExactMode(self.blind), self.inside(self.start)
        found: list[Tensor] = []
        arithmetic.edited, edited.busy = edited, start in self.pins
        take = until(edited, start, self.inside(self.tensor), found)
        parameters = {**self.parameters, **(parameters or {})}
        try:
            with plainly(), arithmetic:
                observe(self.module, self.args, self.kwargs, parameters, take=take, pin=pinned_to(self.pins))
        except UNFIT:
            return None
        return numbers(found[0]) if found else None

    def made(self) -> Iterator[tuple[str, str, Array]]:
        """Yield bugs, each with the tensor that it makes: in all operations that can have it, and in each."""
        for path, parameters in self.exchanged():
            array = self.run(Sites(), parameters)
            if array is not None:
                yield "parameters_exchanged", f"the parameters of {path}", array
        sites = Sites()
        self.run(sites)
        for bug in BUGS:
            count = sites.found[bug]
            for site in [None, *(range(count) if count > 1 else [])] if count else []:
                array = self.run(Injected(bug, site))
                if array is not None and np.isfinite(array).any():
                    yield bug.name, bug.text, array

    def exchanged(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield the parameters of each module that the one which returns the tensor may be confused with."""
        modules = dict(self.model.named_modules())
        own = modules.pop(self.returns)
        shapes = [(name, tensor.shape) for name, tensor in own.named_parameters()]
        for path, module in modules.items():
            others = dict(module.named_parameters())
            if shapes and shapes == [(name, tensor.shape) for name, tensor in others.items()]:
                names = (f"{self.returns}.{name}".removeprefix(self.prefix) for name in others)
                yield path, dict(zip(names, map(computed, others.values()), strict=True))


def until(edited: Edit, start: str, end: str, found: list[Tensor]) -> Take:
    """Return what lets operations be edited from one tensor on, and ends at another, which it keeps."""

    def take(name: str, made: Tensor) -> None:
        if name == start:
            edited.busy = False
        if name == end:
            found.append(made)
            raise Finished

    return take


def told(explained: Mapping[str, str]) -> Cause | None:
    """Return explanations as a cause; it is sure where there is one alone."""
    if not explained:
        return None
    text = f"it is explained by {' or by '.join(explained.values())}"
    return Cause(" or ".join(explained), text, len(explained) == 1)


def reordered(given: Array, value: Array, sigma: Array) -> Iterator[tuple[str, str, Array, Array]]:
    """Yield what a tensor would be, and its sigma, whose elements along an axis stand in another order."""
    for axis in range(value.ndim):
        right, own = (
            np.nan_to_num(np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis])) for x in (value, given)
        )
        order = (np.square(right).sum(0) - 2 * own.T @ right).argmin(1)  # which of the right ones is nearest
        moved = np.flatnonzero(order != np.arange(len(order)))
        if len(moved):
            text = f"another order of axis {axis}: {moved[0]} holds what belongs to {order[moved[0]]}"
            yield "elements_reordered", text, np.take(value, order, axis), np.take(sigma, order, axis)


def pinned_to(pins: Mapping[str, Tensor]) -> Pin:
    """Return what has the tensors of a mapping used."""

    def pin(name: str) -> Tensor | None:
        value = pins.get(name)
        return None if value is None else value.clone()

    return pin


def source_of(module: nn.Module) -> str:
    """Return where the forward pass of a module is written: `` (file:line)``; nothing if unknown."""
    try:
        function = inspect.unwrap(type(module).forward)
        lines, first = inspect.getsourcelines(function)
        return f" ({Path(inspect.getsourcefile(function) or '').name}:{first}-{first + len(lines) - 1})"
    except (OSError, TypeError):
        return ""
