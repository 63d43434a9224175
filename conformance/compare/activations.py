"""What a PyTorch module computes, by name: its activations, their gradients, those of its parameters.

An activation is an output of a submodule: ``encoder.layer.0.attention``. A submodule that is called again
has another, ``norm#2``; of several tensors that one returns each has its place, ``lstm[1]`` or
``decoder[logits]``.
What a module passes on as it is, such as dropout that is switched off, has none of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from concord.conformance.compare.arithmetic import Computed, ExactMode, value_of
from concord.conformance.expectation import is_gradient
from concord.spec.errors import SpecError

OUTPUT = "output"
"""The name of what the whole module returns."""


class Finished(Exception):
    """What is wanted has been computed."""


@dataclass
class Activations:
    """What one run of a module came to.

    Attributes:
        tensors: activations by name, in the order of computation, the outputs, and ``gradients.<name>`` of
            parameters and ``gradients.taps.<name>`` of activations.
        modules: of each activation, the path of its submodule.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Tensor]:
        """Activations and outputs alone."""
        return {name: tensor for name, tensor in self.tensors.items() if not is_gradient(name)}

    def arrays(self) -> dict[str, NDArray[np.floating]]:
        """Return every tensor as an array, by the name that a verdict gives it."""
        return {name: numbers(tensor) for name, tensor in self.tensors.items()}


def numbers(tensor: Tensor) -> NDArray[np.floating]:
    """Return a tensor as an array: the value that it has in an arithmetic, half precisions as float32."""
    with _disable_current_modes():  # an arithmetic would take it for an operand
        tensor = value_of(tensor) if isinstance(tensor, Computed) else tensor.detach().cpu()
        return (tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor).numpy()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as a precision has it."""
    return str(dtype).removeprefix("torch.")


class _Pinned(torch.autograd.Function):
    """A tensor in whose place another one is used, and so is another gradient on the way back."""

    @staticmethod
    def forward(
        context: Any, tensor: Tensor, value: Tensor | None, back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        context.back = back
        return (tensor if value is None else value).clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        return context.back(gradient), None, None


Take = Callable[[str, Tensor], None]
"""Takes each tensor by name as soon as it is computed; what follows may work on it in place."""

Pin = Callable[[str], Tensor | None]
"""Returns what is used in place of a tensor, by name, if anything is."""


def observe(
    model: nn.Module,
    inputs: Sequence[Any],
    keywords: Mapping[str, Any],
    parameters: Mapping[str, Tensor] | None = None,
    cotangents: Mapping[str, Tensor] | None = None,
    take: Take | None = None,
    pin: Pin = lambda name: None,
    program: nn.Module | None = None,
) -> Activations:
    """Run a module and return what it computes.

    Args:
        inputs, keywords: what it is called with.
        parameters: to be used in place of its own parameters and buffers, by name.
        cotangents: of outputs: the scalar is the sum of their products. None: no gradients.
        take: called with each tensor, which is not kept then; it may raise :class:`Finished`.
        pin: says what is used in place of an activation, and of its gradient on the way back.
        program: what runs in the module's place, such as what a compiler made of it: it shows outputs alone.

    Raises:
        SpecError: if it returns no floating-point tensor.
    """
    found, calls, known = Activations(), Counter[str](), WeakIdKeyDictionary()

    def keep(name: str, tensor: Tensor) -> None:
        found.tensors[name] = tensor.detach().clone()

    hand_out: Take = take or keep

    def called(path: str, _module: nn.Module, _given: Any, result: Any) -> Any:
        """Take up what a submodule returns; return it with the tensors that are used in its place."""
        calls[path] += 1
        stem = path if calls[path] == 1 else f"{path}#{calls[path]}"
        new: dict[int, Tensor] = {}
        for name, tensor in named(result, stem).items():
            if tensor not in known:
                hand_out(name, tensor)
                made = new[id(tensor)] = _used(name, tensor, hand_out, pin, cotangents is not None)
                known[tensor] = known[made] = True
                found.modules[name] = path
        changed = any(id(made) != old for old, made in new.items())
        return tree_map(lambda part: new.get(id(part), part), result) if changed else None

    submodules = list(model.named_modules())[1:] if program is None else []
    handles = [module.register_forward_hook(partial(called, path)) for path, module in submodules]
    try:
        with torch.set_grad_enabled(cotangents is not None):
            result = torch.func.functional_call(
                program or model, dict(parameters or {}), tuple(inputs), dict(keywords)
            )
            outputs = named(result, OUTPUT)
            if not outputs:
                raise SpecError("the module returns no floating-point tensor, which is required of a model")
            for name, tensor in outputs.items():
                found.modules.setdefault(name, "")
                hand_out(name, tensor)
            if cotangents is not None:
                own = dict(model.named_parameters() if parameters is None else parameters)
                for name, gradient in _differentiated(outputs, cotangents, own).items():
                    hand_out(f"gradients.{name}", gradient)
    except Finished:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return found


def _used(name: str, tensor: Tensor, take: Take, pin: Pin, differentiated: bool) -> Tensor:
    """Return the tensor that what follows an activation goes on with."""
    value, of = pin(name), f"gradients.taps.{name}"
    value = None if value is None or value.shape != tensor.shape else value
    if not differentiated or not tensor.requires_grad:
        return tensor if value is None else value

    def back(gradient: Tensor) -> Tensor:
        take(of, gradient)
        pinned = pin(of)
        return gradient if pinned is None else pinned

    return _Pinned.apply(tensor, value, back)


def _differentiated(
    outputs: Mapping[str, Tensor], cotangents: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the gradient of each parameter that has one."""
    trained = {name: tensor for name, tensor in parameters.items() if tensor.requires_grad}
    used = {name: tensor for name, tensor in outputs.items() if name in cotangents and tensor.requires_grad}
    if not used or not trained:
        return {}
    if ExactMode.active is not None:
        ExactMode.active.backward = True
    given = [cotangents[name].to(tensor.dtype) for name, tensor in used.items()]
    of = torch.autograd.grad([*used.values()], [*trained.values()], given, allow_unused=True)
    return {name: gradient for name, gradient in zip(trained, of, strict=True) if gradient is not None}


def _floating(result: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point tensors of what a module returns, each by its place."""
    if isinstance(result, Tensor) and result.is_floating_point():
        yield place, result
    elif isinstance(result, (Mapping, tuple, list)):
        for key, part in result.items() if isinstance(result, Mapping) else enumerate(result):
            yield from _floating(part, f"{place}.{key}" if place else str(key))


def named(result: Any, stem: str) -> dict[str, Tensor]:
    """Return the floating-point tensors of what a module returns, each by its name."""
    found = list(_floating(result))
    return {stem if len(found) == 1 or not place else f"{stem}[{place}]": tensor for place, tensor in found}
