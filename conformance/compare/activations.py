"""What a PyTorch module computes, by name: its activations, their gradients, those of its parameters.

An activation is an output of a submodule: ``encoder.layer.0.attention``. A submodule that is called again
has another, ``norm#2``; of several tensors that one returns each has its place, ``lstm[1]`` or
``decoder[logits]``.
What a module passes on as it is, such as dropout that is switched off, has none of its own.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from concord.conformance.compare.arithmetic import Computed
from concord.spec.errors import SpecError

OUTPUT = "output"
"""The name of what the whole module returns."""


class Finished(Exception):
    """What is wanted has been computed."""


@dataclass
class Activations:
    """What one run of a module came to.

    Attributes:
        values: activations by name, in the order of computation, and the outputs.
        gradients: of the scalar, by the names of activations.
        parameters: gradients of the scalar by parameter.
        modules: of each activation, the path of its submodule.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor, by the name that a verdict gives it."""
        by_taps = {f"gradients.taps.{name}": tensor for name, tensor in self.gradients.items()}
        by_parameters = {f"gradients.{name}": tensor for name, tensor in self.parameters.items()}
        return {**self.values, **by_taps, **by_parameters}

    def arrays(self) -> dict[str, NDArray[np.floating]]:
        """Return every tensor as an array, by the name that a verdict gives it."""
        return {name: numbers(tensor) for name, tensor in self.tensors.items()}


def numbers(tensor: Tensor) -> NDArray[np.floating]:
    """Return a tensor as an array: the value that it has in an arithmetic, half precisions as float32."""
    if isinstance(tensor, Computed):
        return tensor.value.numpy()
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor).numpy()


class _Pinned(torch.autograd.Function):
    """A tensor in whose place another one is used, and so is another gradient on the way back."""

    @staticmethod
    def forward(
        context: Any,
        tensor: Tensor,
        value: Tensor | None,
        gradient: Tensor | None,
        seen: Callable[[Tensor], None],
    ) -> Tensor:
        context.gradient, context.seen = gradient, seen
        return (tensor if value is None else value).clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        context.seen(gradient)
        return gradient if context.gradient is None else context.gradient, None, None, None


def observe(
    model: nn.Module,
    inputs: Sequence[Any],
    keywords: Mapping[str, Any],
    parameters: Mapping[str, Tensor] | None = None,
    values: Mapping[str, Tensor] | None = None,
    gradients: Mapping[str, Tensor] | None = None,
    cotangents: Mapping[str, Tensor] | None = None,
    taps: bool = True,
    program: Callable[..., Any] | None = None,
    watch: Callable[[str], None] = lambda name: None,
) -> Activations:
    """Run a module and return what it computes.

    Args:
        inputs, keywords: what it is called with.
        parameters: to be used in place of its own parameters and buffers, by name.
        values: activations that what follows is computed from, in place of those that it computes.
        gradients: of activations, from which those before are computed, in place of its own.
        cotangents: of outputs: the scalar is the sum of their products. None: no gradients.
        taps: whether activations are wanted besides the outputs.
        program: what runs in the module's place, such as what a compiler made of it: it shows outputs alone.
        watch: called with the name of each activation once it is known; it may raise :class:`Finished`.

    Raises:
        SpecError: if it returns no floating-point tensor.
    """
    hooks = _Hooks(values or {}, gradients or {}, cotangents is not None, watch)
    found = hooks.found
    submodules = list(model.named_modules())[1:] if taps and program is None else []
    handles = [module.register_forward_hook(partial(hooks.called, path)) for path, module in submodules]
    try:
        with torch.set_grad_enabled(cotangents is not None):
            result = (
                (program or model)(*inputs, **keywords)
                if parameters is None
                else torch.func.functional_call(
                    model, dict(parameters), tuple(inputs), dict(keywords), tie_weights=True
                )
            )
            outputs = named(result, OUTPUT)
            if not outputs:
                raise SpecError("the module returns no floating-point tensor, which is required of a model")
            for name, tensor in outputs.items():
                found.modules.setdefault(name, "")
                found.values[name] = tensor.detach()
            if cotangents is not None:
                _differentiate(model, outputs, cotangents, parameters, found)
    except Finished:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return found


class _Hooks:
    """What submodules call with what they return."""

    def __init__(
        self,
        values: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        differentiated: bool,
        watch: Callable[[str], None],
    ) -> None:
        self.values, self.gradients, self.differentiated, self.watch = (
            values,
            gradients,
            differentiated,
            watch,
        )
        self.found, self.calls = Activations(), Counter[str]()
        self.known: dict[int, Tensor] = {}  # by identity, which nothing else has as long as they are kept

    def called(self, path: str, _module: nn.Module, _given: Any, result: Any) -> Any:
        """Take up what a submodule returns; return it with the tensors that are used in its place."""
        self.calls[path] += 1
        stem = path if self.calls[path] == 1 else f"{path}#{self.calls[path]}"
        new: dict[int, Tensor] = {}
        for name, tensor in named(result, stem).items():
            if id(tensor) not in self.known:
                made = new[id(tensor)] = self.seen(name, tensor)
                self.known |= {id(tensor): tensor, id(made): made}
                self.found.modules[name] = path
        return _replaced(result, new) if any(id(made) != old for old, made in new.items()) else None

    def seen(self, name: str, tensor: Tensor) -> Tensor:
        """Note an activation, and return the tensor that what follows goes on with."""
        self.found.values[name] = tensor.detach().clone()  # what follows may work in place
        value = self.values.get(name)
        value = None if value is None or value.shape != tensor.shape else value.clone()
        self.watch(name)
        if not self.differentiated or not tensor.requires_grad:
            return tensor if value is None else value

        def note(gradient: Tensor) -> None:
            self.found.gradients[name] = gradient.detach()

        return _Pinned.apply(tensor, value, self.gradients.get(name), note)


def _differentiate(
    model: nn.Module,
    outputs: Mapping[str, Tensor],
    cotangents: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor] | None,
    found: Activations,
) -> None:
    trained = dict(model.named_parameters() if parameters is None else parameters)
    trained = {name: tensor for name, tensor in trained.items() if tensor.requires_grad}
    used = [
        (tensor, cotangents[name])
        for name, tensor in outputs.items()
        if name in cotangents and tensor.requires_grad
    ]
    if not used or not trained:
        return
    of = torch.autograd.grad(
        [tensor for tensor, _ in used],
        list(trained.values()),
        [cotangent.to(tensor.dtype) for tensor, cotangent in used],
        allow_unused=True,
    )
    found.parameters = {
        name: gradient.detach() for name, gradient in zip(trained, of, strict=True) if gradient is not None
    }


def _parts(result: Any) -> list[tuple[str, Any]]:
    """Return what a result is made of, by key or place; nothing for what is not made of parts."""
    if isinstance(result, Mapping):
        return [(str(key), part) for key, part in result.items()]
    return (
        [(str(place), part) for place, part in enumerate(result)] if isinstance(result, (tuple, list)) else []
    )


def _floating(result: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point tensors of what a module returns, each by its place."""
    if isinstance(result, Tensor) and result.is_floating_point():
        yield place, result
    for key, part in _parts(result):
        yield from _floating(part, f"{place}.{key}" if place else key)


def named(result: Any, stem: str) -> dict[str, Tensor]:
    """Return the floating-point tensors of what a module returns, each by its name."""
    found = list(_floating(result))
    return {stem if len(found) == 1 or not place else f"{stem}[{place}]": tensor for place, tensor in found}


def _replaced(result: Any, made: Mapping[int, Tensor]) -> Any:
    """Return what a module returns with other tensors, by the identity of those that they replace."""
    if isinstance(result, Tensor):
        return made.get(id(result), result)
    parts = [(key, _replaced(part, made)) for key, part in _parts(result)]
    if isinstance(result, Mapping):
        copied: Any = copy.copy(result)
        for key, part in zip(result, (part for _, part in parts), strict=True):
            copied[key] = part
        return copied
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(part for _, part in parts))
    return type(result)(part for _, part in parts) if isinstance(result, (tuple, list)) else result
