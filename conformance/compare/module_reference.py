"""A PyTorch module as the reference, with activations by name, in any arithmetic.

An activation's name is its submodule's path, ``encoder.layer.0.attention``. A second call is ``norm#2``;
several results have keys: ``lstm[1]``, ``decoder[logits]``. A tensor returned unchanged keeps its first name.
Tensors of a returned object, such as a cache, are ``returned[past_key_values.layers.0.keys]``.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import random
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from concord.conformance.compare.aten_arithmetic import (
    ROUNDOFF,
    Computed,
    ExactMode,
    Perturbed,
    Rounded,
    Weight,
    WholeFunctions,
    computed,
    plainly,
    value_of,
    without_fast_paths,
)
from concord.conformance.compare.aten_operations import Tensors, choosing, is_continuous
from concord.conformance.compare.coherent import Coherent
from concord.conformance.compare.decisions import OWN, TORCH, Branch, Decisions, Followed, Ties
from concord.conformance.compare.kernels import KERNELS
from concord.conformance.compare.state import FIXED, Copies, copy_of, equal, kept, untouched
from concord.conformance.judging.estimate import SAMPLES, Estimate, Observer, namespace_of, on_host
from concord.conformance.judging.exemptions import ABSENT, NOT_EXPOSED
from concord.conformance.judging.expectation import BUFFERS, Expectation, is_buffer, is_gradient
from concord.conformance.judging.protocol import Activation, Pin, Reference
from concord.conformance.progress import say
from concord.spec.arrays import Array, Arrays, Mask, Shape
from concord.spec.deviations import BLIND_ROWS_UNIFORM, BLIND_ROWS_ZERO, UNCOMPUTED_PADDING
from concord.spec.errors import SpecError
from concord.spec.text import first_line, shown

# A function that receives each tensor once computed; later operations may change it in place.
Take = Callable[[str, Tensor], None]

# Name of the whole module's result.
OUTPUT = "output"

# Logits of a decoder, (B, T, vocabulary), and log probabilities of its next tokens, (B, T - 1).
LOGITS, LOG_PROBABILITIES = f"{OUTPUT}[logits]", f"{OUTPUT}[log_probabilities]"

# Seed of the cotangents, so that every run differentiates the same sum.
SEED = 0xC0

HALF = (torch.bfloat16, torch.float16)

# Counts of samples after which a look may confirm agreement; only the last may find a divergence. One of
# 589,824 gradients erred by 0.52 of its tolerance with six samples: three more samples decide such a case.
LOOKS = (6, 9, SAMPLES)


# Maximum characters of an error message.
LONGEST_LINE = 400

# Maximum characters of a result's key in its name.
LONGEST_KEY = 80


def is_output(name: str) -> bool:
    """Whether the whole module returns the tensor."""
    return name == OUTPUT or name.startswith(f"{OUTPUT}[")


def submodule_of(name: str) -> str:
    """Path of an activation's or buffer's submodule; empty for the whole module."""
    if is_buffer(name):
        return name.removeprefix(BUFFERS).rpartition(".")[0]
    return "" if is_output(name) else re.split(r"[#\[]", name)[0]


def nothing(name: str) -> None:
    """Pin nothing."""


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed every global generator, unless the seed is None."""
    if seed is None:
        yield
        return
    state, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(numpy)


class ModelError(SpecError):
    """An exception that a model's own code raised."""


class Finished(Exception):
    """An observer needs no further tensors of a run."""


class ConvertedGraph:
    """A converted module's knowledge of its ONNX graph.

    Attributes:
        path: the graph's file.
        activations: the graph's own names of its tensors, by activation.
        input_names: the names of its inputs.
    """

    path: Path
    activations: Mapping[str, str]
    input_names: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class ModelReference(Reference):
    """A reference with its inputs."""

    args: tuple[Any, ...] = ()  # input tensors and other arguments
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    # Gradients are those of the sum of all outputs times these tensors. None: no gradients.
    cotangents: Tensors | None = None
    declared: Collection[str] = ()  # names from DECLARATIONS, and absent outputs
    role: str = "the reference"  # name in errors
    seed: int | None = None  # seeds each run; None: no random draws allowed
    keeps: bool = False  # whether to keep expectations from the inputs for the next candidate
    log_probabilities: bool = False  # whether logits give one more output, LOG_PROBABILITIES

    @cached_property
    def plain(self) -> Tensors:
        """One correct run in the candidate's dtypes."""
        raise NotImplementedError

    @property
    def blind_rows(self) -> str:
        """Declared weights of rows that see no key, if any."""
        kinds = {BLIND_ROWS_ZERO: "zero", BLIND_ROWS_UNIFORM: "uniform"}
        return next((kind for name, kind in kinds.items() if name in self.declared), "")

    def exact(self) -> Any:
        """Exact arithmetic."""
        raise NotImplementedError

    def runs(self, seeds: range, truth: Any) -> list[Any]:
        """Samples and low-precision runs."""
        raise NotImplementedError

    def others(self, truth: Any) -> list[Any]:  # noqa: ARG002
        """Low-precision runs that reveal shared errors."""
        return []

    def compute(self, arithmetic: Any, observer: Observer, pin: Pin) -> None:
        """Compute every tensor on its device."""
        raise NotImplementedError

    @property
    def graph(self) -> ConvertedGraph | None:
        """The ONNX graph that the reference is, if any."""
        return None

    # The protocol of the judge (:class:`concord.conformance.judging.protocol.Reference`).

    @cached_property
    def activations(self) -> dict[str, Activation]:
        """Every tensor of a run, in order."""
        return {
            name: Activation(
                tuple(tensor.shape),
                dtype_name(tensor.dtype),
                axes=tuple(f"axis {place}" for place in range(tensor.ndim)),
                absent=ABSENT if name in self.absent else NOT_EXPOSED,
                wider=True,
                pinned=not is_buffer(name),
            )
            for name, tensor in self.plain.items()
        }

    @property
    def precision(self) -> str:
        """The dtype of the outputs."""
        return next((dtype_name(x.dtype) for name, x in self.plain.items() if is_output(name)), "float32")

    @property
    def absent(self) -> list[str]:
        """Outputs declared absent."""
        outputs = [name for name in self.plain if is_output(name)]
        return [name for name in outputs if {name, OUTPUT} & {*self.declared}]

    def expect(self, pin: Pin | None) -> Iterable[Expectation]:
        """Yield expectations from growing numbers of samples; the last uses all of them."""
        return copy.copy(self._from_inputs) if self.keeps and pin is None else self._expect(pin)

    @cached_property
    def _from_inputs(self) -> Iterator[Expectation]:
        # This iterator is never advanced; only its copies are, so it keeps every expectation for them.
        return itertools.tee(self._expect(None), 1)[0]

    def _expect(self, pin: Pin | None) -> Iterator[Expectation]:
        truth, where = self.exact(), "end to end" if pin is None else "step by step"
        compute = partial(self.compute, pin=pin or nothing)
        dtypes = {name: activation.dtype for name, activation in self.activations.items()}
        say(f"computing exact values, {where}")
        coherent = Coherent(dtypes if pin else {})

        def observed(arithmetic: Any, observer: Observer) -> None:
            def take(name: str, array: Array) -> None:
                observer(name, array)
                coherent.take(arithmetic, name, array)

            compute(arithmetic, take)

        estimate = Estimate(observed, dtypes, truth=truth)
        for seeds in itertools.starmap(range, itertools.pairwise((0, *LOOKS))):
            say(f"deriving tolerances, {where}: {seeds.stop} random roundings")
            estimate.add_runs(self.runs(seeds, truth), f"deriving tolerances, {where}")
            for arithmetic in [] if seeds.start or not coherent.halves else self.others(truth):
                compute(arithmetic, partial(coherent.take, arithmetic))
            independent, last = estimate.independent(), seeds.stop == SAMPLES
            sigmas, branches = estimate.sigmas(last=last), truth.recorded.branches()
            if branches and not last:
                continue  # more samples may reveal more open decisions
            ties = {name: Ties(value, sigmas[name]) for name, value in estimate.values.items()}
            for place, branch in enumerate(branches):
                say(f"trying each result that rounding allows, {where}: {place + 1} of {len(branches)}")
                _take(ties, compute, branch)
            for name, why in truth.recorded.lost.items():
                ties[name].lost = why
            yield Expectation(
                self.precision,
                estimate.values,
                sigmas,
                independent=independent,
                ties={name: tie for name, tie in ties.items() if tie.why},
                coherent=coherent,
                few=not last,
                occurred=truth.occurred,
                without_rule=truth.without_rule,
            )

    def compute_exactly(self, pin: Pin) -> Arrays:
        """Every exact tensor."""
        values: Arrays = {}
        self.compute(self.exact(), lambda name, array: values.__setitem__(name, on_host(array)), pin)
        return values

    def excused(self, name: str) -> Mask | bool:
        """Elements that are uncomputed padding."""
        if UNCOMPUTED_PADDING not in self.declared:
            return False
        uncomputed = spread(~self.real.cpu().numpy(), self.activations[name].shape)
        return False if uncomputed is None else uncomputed

    def untouched(self) -> contextlib.AbstractContextManager[list[str]]:
        """Undo a block's state changes; yield their names."""
        return contextlib.nullcontext([])

    def cast(self, dtype: torch.dtype) -> Any:
        """The reference in another dtype."""
        raise NotImplementedError

    def map_inputs(self, function: Callable[[Tensor], Any]) -> dict[str, Any]:
        """Map a function over input tensors."""
        arguments = {"args": self.args, "kwargs": dict(self.kwargs)}
        return tree_map(lambda x: function(x) if isinstance(x, Tensor) else x, arguments)

    def inputs_in(self, dtype: torch.dtype) -> dict[str, Any]:
        """Inputs in a dtype."""
        return self.map_inputs(lambda x: x.to(dtype) if x.is_floating_point() else x)

    @property
    def values(self) -> Tensors:
        """Activations and outputs of a correct run."""
        return {name: x for name, x in self.plain.items() if not (is_gradient(name) or is_buffer(name))}

    @property
    def arrays(self) -> Arrays:
        """A correct run as arrays."""
        return {name: numbers(tensor) for name, tensor in self.plain.items()}

    @property
    def inputs(self) -> Arrays:
        """Copies of input tensors; positional inputs by number."""
        entries = {**{str(place): entry for place, entry in enumerate(self.args)}, **self.kwargs}
        return {name: numbers(entry).copy() for name, entry in entries.items() if isinstance(entry, Tensor)}

    def differentiated(self) -> Any:
        """The reference with gradients."""
        generator = torch.Generator().manual_seed(SEED)
        cotangents = {
            name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64, device="cpu").to(
                tensor.dtype
            )
            for name, tensor in self.plain.items()
            if is_output(name)
        }
        return replace(self, cotangents=cotangents)

    @property
    def real(self) -> Tensor:
        """Tokens that are not padding, (B, T)."""
        mask = self.kwargs.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            raise SpecError(
                "an input 'attention_mask' (B, T) is missing but required: it says where padding is"
            )
        return mask != 0


@dataclass(frozen=True)
class ModuleReference(ModelReference):
    """A PyTorch module as the reference."""

    model: nn.Module
    compiled: bool = False  # whether compiled parts stay compiled; exact runs are always eager
    # Relative distance of quantized weights from the original weights.
    quantized: Mapping[str, float] = field(default_factory=dict)

    def cast(self, dtype: torch.dtype) -> ModuleReference:
        """The reference in another dtype, except float64."""
        if dtype in (dtype_of(self.model), torch.float64):
            return self
        role = f"{self.role} (in {dtype_name(dtype)}, like the candidate)"
        with running(role, "cannot be copied"):
            return replace(self, model=copy_of(self.model).to(dtype), role=role, **self.inputs_in(dtype))

    @property
    def device(self) -> torch.device:
        """Device of its parameters, or else of its inputs."""
        arguments = tree_leaves((self.args, dict(self.kwargs)))
        tensors = itertools.chain(self.model.parameters(), self.model.buffers(), arguments)
        return next((x.device for x in tensors if isinstance(x, Tensor)), torch.device("cpu"))

    @property
    def in_host_memory(self) -> bool:
        """Whether it is on the CPU."""
        return self.device.type == "cpu"

    def on_host(self) -> ModuleReference:
        """A copy on the CPU."""
        if self.in_host_memory:
            return self
        moved = replace(self, model=copy_of(self.model).cpu(), **self.map_inputs(Tensor.cpu))
        plain = {name: tensor.cpu() for name, tensor in self.plain.items()}
        vars(moved)["_as_it_is"] = plain, self.state
        return moved

    @cached_property
    def _as_it_is(self) -> tuple[Tensors, list[str]]:
        was_loaded = DYNAMO in sys.modules
        try:
            return self._watched()
        except ModelError:
            if self.compiled or was_loaded or DYNAMO not in sys.modules:
                raise
            return self._watched()  # a loop that PyTorch could not compile with hooks now runs eagerly

    @property
    def plain(self) -> Tensors:
        """The tensors of an ordinary run."""
        return self._as_it_is[0]

    @cached_property
    def state(self) -> list[str]:
        """State that a run changes."""
        try:
            changed = self._as_it_is[1]
        except SpecError:  # a candidate may run only without hooks
            changed = self._watched(hooked=False)[1]
        return [*map(without_wrappers, changed)]

    def watched(self, *modes: TorchDispatchMode, hooked: bool = True) -> Tensors:
        """Tensors computed in dispatch modes."""
        return self._watched(*modes, hooked=hooked)[0]

    def _watched(self, *modes: TorchDispatchMode, hooked: bool = True) -> tuple[Tensors, list[str]]:
        tensors: Tensors = {}

        def keep(name: str, tensor: Tensor) -> None:
            tensors[name] = parts(tensor.detach()).clone()

        return tensors, self.observe(keep, *modes, hooked=hooked)

    @property
    def own_parameters(self) -> Tensors:
        """The module's parameters, also by further names of shared ones."""
        return dict(self.model.named_parameters(remove_duplicate=False))

    @cached_property
    def parameters(self) -> Tensors:
        """Parameters with float64 values; shared parameters appear once."""
        parameters = self.own_parameters
        by_identity = {
            id(x): Weight(x) if x.layout == torch.strided else computed(x) for x in parameters.values()
        }
        for tensor in parameters.values():  # the model may differentiate with respect to them
            by_identity[id(tensor)].requires_grad_(tensor.requires_grad)
        return {name: by_identity[id(tensor)] for name, tensor in parameters.items()}

    @property
    def graph(self) -> ConvertedGraph | None:
        """The ONNX graph that the module was converted from, if any."""
        return self.model if isinstance(self.model, ConvertedGraph) else None

    def _copies(self, exactly: bool) -> Copies:
        modules = {id(module): module for module in self.model.modules()}
        own = self.own_parameters
        used = self.parameters if exactly else own
        known = modules | {id(tensor): used[name] for name, tensor in own.items()}
        return Copies(computed if exactly else lambda x: x, known)

    def untouched(self, copied: Copies | None = None) -> contextlib.AbstractContextManager[list[str]]:
        """Undo a block's state changes; yield their names."""
        fixed = self.own_parameters | dict(self.model.named_buffers())
        return untouched(self.model, copied or self._copies(False), fixed)

    def exact(self) -> ExactMode:
        """Exact arithmetic."""
        return ExactMode(Decisions())

    def runs(self, seeds: range, truth: ExactMode) -> list[ExactMode]:
        """Samples, initially with a low-precision run."""
        samples = [Perturbed(seed, Followed(truth.recorded)) for seed in seeds]
        return [*samples, *([] if seeds.start else [Rounded(Followed(truth.recorded, rounded=True))])]

    def others(self, truth: ExactMode) -> list[ExactMode]:
        """A run with rounded constants."""
        return [Rounded(Followed(truth.recorded, rounded=True), constants=True)]

    def compute(self, arithmetic: ExactMode, observer: Observer, pin: Pin) -> None:
        """Compute every tensor on its device."""
        take = handing(observer, arithmetic, self.plain, wide)
        self.observe(take, arithmetic, pin=pin)
        for name in self.plain:  # tensors of operations that this arithmetic did not reach
            take(name, None)

    def observe(
        self, take: Take, *modes: TorchDispatchMode, pin: Pin = nothing, hooked: bool = True
    ) -> list[str]:
        """Run the module on copies of its inputs and state; return the changed state.

        Args:
            take: receives each tensor; may raise :class:`Finished`.
            modes: dispatch modes, an arithmetic first.
            pin: replaces activations and, in the backward pass, their gradients.
            hooked: whether to observe activations, which disables fast paths.

        Raises:
            SpecError: if the module cannot run, or returns no floating-point tensor.
        """
        arithmetic = modes[0] if modes and isinstance(modes[0], ExactMode) else None
        device = self.device
        used = self.parameters if arithmetic else self.own_parameters
        trained = {name: used[name] for name, _ in self.model.named_parameters() if used[name].requires_grad}
        # Copied outside the modes, since an arithmetic would also compute the copies.
        copied = self._copies(arithmetic is not None)
        written = self.state if arithmetic else []
        for name, weight in used.items() if arithmetic else ():
            if isinstance(weight, Weight):
                weight.restore(name in written)
        why = ["runs, but cannot be computed in exact arithmetic"] if arithmetic else []
        before = buffers(self.model)
        outputs = Tensors()
        with running(self.role, *why), contextlib.ExitStack() as stack:
            state = kept(self.model, copied) if arithmetic else self.untouched(copied)
            changed = stack.enter_context(state)
            inputs = copied({"args": self.args, "kwargs": dict(self.kwargs)})
            inputs = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, inputs)
            trained |= differentiated(inputs)
            stack.enter_context(contextlib.suppress(Finished))
            # Hooks hold the outputs, and their graph holds the hooks: a cycle that Python cannot collect.
            stack.callback(outputs.clear)
            if hooked:
                stack.enter_context(self._hooked(self._hook(take, pin, arithmetic, outputs)))
            stack.enter_context(torch.set_grad_enabled(self.cotangents is not None))
            if not self.compiled:
                stack.enter_context(self._eagerly())
            if arithmetic:
                stack.callback(arithmetic.finish)
                arithmetic.blind_rows = self.blind_rows
                arithmetic.kernels = [name for name in KERNELS if name in self.declared]
                stack.enter_context(plainly())
                stack.enter_context(WholeFunctions(arithmetic))
            for mode in modes:
                stack.enter_context(mode)
            stack.enter_context(seeded(self.seed))
            result = self.model(*inputs["args"], **inputs["kwargs"])
            if self.log_probabilities:
                result = with_log_probabilities(result, inputs["kwargs"])
            outputs |= named(result, OUTPUT)
            if not outputs:
                what = "tensor" if isinstance(result, Tensor) else "value"
                kind = result.dtype if isinstance(result, Tensor) else f"type {type(result).__name__}"
                raise SpecError(
                    f"{self.role} returns a {what} of {kind} but must return a floating-point tensor, alone "
                    "or in tuples, lists, mappings or dataclasses"
                )
            inner = named(dict(objects(result, set())), "returned")
            for name, tensor in {**outputs, **discrete(result), **inner}.items():
                take(name, tensor)
            if arithmetic:
                arithmetic.backward = self.cotangents is not None
            self._differentiate(outputs, trained, take)
            for name, tensor in self._changed(before, arithmetic is not None).items():
                take(name, tensor)
        return changed or []

    def _changed(self, before: Tensors, known: bool) -> Tensors:
        # Integers are compared in float64, like other discrete results.
        with _disable_current_modes():
            return {
                name: x if is_continuous(x) else x.double()
                for name, x in buffers(self.model).items()
                if (name in self.plain if known else not equal(x, before.get(name)))
            }

    @contextlib.contextmanager
    def _hooked(self, hook: Callable[..., None]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_fast_paths())  # hooks disable most of them, but not all
            if self.compiled and DYNAMO in sys.modules:
                stack.enter_context(recompiling())
                hook = torch.compiler.disable(hook)  # otherwise it is recompiled for each name
            for path, module in submodules(self.model).items():
                stack.callback(module.register_forward_hook(partial(hook, path)).remove)
            yield

    @contextlib.contextmanager
    def _eagerly(self) -> Iterator[None]:
        with choosing(), contextlib.ExitStack() as stack:
            if DYNAMO in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if self.cotangents is not None:
                # cuDNN's recurrent kernels have no backward pass in evaluation mode.
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            yield

    def _hook(
        self, take: Take, pin: Pin, arithmetic: ExactMode | None, outputs: Tensors
    ) -> Callable[..., None]:
        # Outputs exist once the forward pass ends: an earlier gradient belongs to a backward pass within the
        # model.
        calls, visited = Counter[str](), WeakIdKeyDictionary()

        def pinned(name: str, tensor: Computed) -> Tensor:
            array = pin(name)
            with _disable_current_modes():
                if array is None or array.shape != parts(tensor.value).shape:
                    return tensor.value
                value = torch.empty_like(tensor.value)
                parts(value).copy_(torch.from_numpy(array))
                if arithmetic and tensor.dtype in HALF and not is_gradient(name):
                    # The candidate may have used its unrounded value.
                    value = arithmetic.varied(value, lambda value: ROUNDOFF[tensor.dtype] * value.abs())
                return value

        def back(name: str, gradient: Tensor | None) -> Tensor | None:
            # None: it is unused, although another result of its operation is used.
            if gradient is None or not outputs:
                return None
            take(name, gradient)
            if not isinstance(gradient, Computed):
                return None
            return Computed(pinned(name, gradient), gradient.dtype)

        def called(path: str, _module: nn.Module, _arguments: Any, result: Any) -> None:
            calls[path] += 1
            stem = path if calls[path] == 1 else f"{path}#{calls[path]}"
            for name, tensor in named(result, stem).items():
                # Tensors cannot be extracted from a transformation such as vmap.
                if tensor in visited or is_functorch_wrapped_tensor(tensor):
                    continue
                visited[tensor] = True
                take(name, tensor)
                if isinstance(tensor, Computed):
                    tensor.value = pinned(name, tensor)
                if self.cotangents is not None and tensor.requires_grad:
                    tensor.register_hook(partial(back, f"gradients.taps.{name}"))

        return called

    def _differentiate(self, outputs: Tensors, trained: Tensors, take: Take) -> None:
        cotangents_by_name = self.cotangents or {}
        used = {name: x for name, x in outputs.items() if name in cotangents_by_name and x.requires_grad}
        if not used or not trained:
            return

        def back(name: str, gradient: Tensor | None) -> None:
            if gradient is not None:  # a custom operator may return None
                take(name, gradient)

        with contextlib.ExitStack() as stack:
            for name, tensor in trained.items():
                given_name = f"gradients.{without_wrappers(name)}"
                stack.callback(tensor.register_hook(partial(back, given_name)).remove)
            cotangents = [
                joined(cotangents_by_name[name], x.dtype).to(x.device, x.dtype) for name, x in used.items()
            ]
            gradients = torch.autograd.grad(
                [*used.values()], [*trained.values()], cotangents, allow_unused=True
            )
        for (name, tensor), gradient in zip(trained.items(), gradients, strict=True):
            if gradient is None:  # an unused branch has a zero gradient
                take(f"gradients.{without_wrappers(name)}", torch.zeros_like(tensor))


def differentiated(inputs: Mapping[str, Any]) -> Tensors:
    """Input tensors that require gradients."""
    entries = {**dict(enumerate(inputs["args"])), **inputs["kwargs"]}
    tensors = {f"inputs.{name}": x for name, x in entries.items() if isinstance(x, Tensor)}
    return {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}


def spread(rows: Mask, shape: Shape) -> Mask | None:
    """Expand tokens (B, T) to elements (B, T, ...), (B, H, T, ...) or (B * T, ...)."""
    samples, tokens = rows.shape
    if shape[:2] == rows.shape:
        laid = rows.reshape(samples, tokens, *[1] * (len(shape) - 2))
    elif len(shape) == 4 and (shape[0], shape[2]) == rows.shape:
        laid = rows[:, None, :, None]
    elif shape[:1] == (samples * tokens,):
        laid = rows.reshape(-1, *[1] * (len(shape) - 1))
    else:
        return None
    return np.broadcast_to(laid, shape)


def _take(ties: Mapping[str, Ties], compute: Callable[..., None], branch: Branch) -> None:
    rest = {**ties}

    def take(name: str, array: Array) -> None:
        rest.pop(name, None)
        ties[name].take(branch, on_host(array))

    try:
        compute(ExactMode(branch), take)
    except Exception:  # noqa: BLE001 – the model may refuse a branch's values, such as NaN
        for tie in rest.values():
            tie.take(branch, np.full(tie.value.shape, np.nan))


def parts(tensor: Tensor) -> Tensor:
    """View complex numbers as real pairs."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def joined(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """View pairs as complex numbers, if needed."""
    return torch.view_as_complex(tensor) if dtype.is_complex else tensor


# PyTorch's compiler. Nothing is compiled before its import, which takes seconds, so it is never imported
# here.
DYNAMO = "torch._dynamo"

# The attribute of a compiled wrapper that holds the module.
WRAPPER = "_orig_mod"


def without_wrappers(path: str) -> str:
    """Remove compilers' wrappers from a path."""
    return ".".join(part for part in path.split(".") if part != WRAPPER)


def submodules(model: nn.Module) -> dict[str, nn.Module]:
    """Submodules that accept hooks, by path."""
    modules: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            modules.setdefault(without_wrappers(path), module)
    modules.pop("", None)
    modules.pop(OUTPUT, None)  # otherwise its activation would be mistaken for the model's output
    return modules


def unwrapped(model: nn.Module) -> nn.Module:
    """Remove compilers' wrappers."""
    if WRAPPER in dict(model.named_children()):
        return unwrapped(model.get_submodule(WRAPPER))
    paths = [path for path, _ in model.named_modules()]
    wrappers = [path.removesuffix(f".{WRAPPER}") for path in paths if path.endswith(f".{WRAPPER}")]
    bare = copy_of(model) if wrappers else model
    for path in reversed(wrappers):  # wrappers may be nested
        bare.set_submodule(path, bare.get_submodule(f"{path}.{WRAPPER}"))
    return bare


@contextlib.contextmanager
def recompiling() -> Iterator[None]:
    """Recompile before and after a block."""
    torch.compiler.reset()  # compiled code ignores added or removed hooks
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            yield
    finally:
        torch.compiler.reset()


def numbers(tensor: Tensor) -> NDArray[np.floating]:
    """An array; half precisions become float32."""
    with _disable_current_modes():  # else an arithmetic would intercept this
        tensor = parts(value_of(tensor) if isinstance(tensor, Computed) else tensor.detach()).cpu()
        return (tensor.float() if tensor.dtype in HALF else tensor).resolve_neg().numpy()


def wide(tensor: Tensor) -> Tensor:
    """The float64 value on its device."""
    with _disable_current_modes():
        return parts(value_of(tensor)).resolve_neg()


def handing(
    observer: Observer,
    arithmetic: ExactMode,
    plain: Tensors,
    read: Callable[[Tensor], Any] = numbers,
) -> Callable[[str, Tensor | None], None]:
    """A function that passes arrays to an observer, with NaN for tensors whose shapes differ from
    ``plain``.
    """
    names = set[str]()

    def take(name: str, tensor: Tensor | None) -> None:
        if name not in plain or (tensor is None and name in names):
            return
        names.add(name)
        decisions, right = arithmetic.decisions, plain[name]
        with _disable_current_modes():  # otherwise an arithmetic would intercept the observer
            array = None if tensor is None else read(tensor)
            if array is None or array.shape != right.shape or (decisions and decisions.parted):
                array = read(torch.full_like(right, math.nan, dtype=torch.float64))
                if decisions:
                    decisions.lose(name)
            if not arithmetic.samples:  # it may be kept during later in-place operations
                array = namespace_of(array).asarray(array, copy=True)
            observer(name, array[None] if arithmetic.samples else array)

    return take


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a precision."""
    return str(dtype).removeprefix("torch.")


def dtype_of(model: nn.Module) -> torch.dtype:
    """Floating-point dtype of most parameters: norms or routers of a half-precision model may be float32."""
    sizes = Counter[torch.dtype]()
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype in ROUNDOFF:
            sizes[parameter.dtype] += parameter.numel()
    return max(sizes, key=sizes.__getitem__, default=torch.float32)


def named(result: Any, stem: str) -> Tensors:
    """Floating-point results by name."""
    tensors = [(place, leaf) for place, leaf in _leaves(result) if is_continuous(leaf)]
    tensors_by_name = Tensors()
    for place, tensor in tensors:
        name = stem if len(tensors) == 1 or not place else f"{stem}[{place}]"
        while name in tensors_by_name:  # keys may look alike: 1 and "1"
            name += "'"
        if tensor.is_nested or tensor.dtype not in ROUNDOFF:
            kind = "a nested tensor" if tensor.is_nested else f"of {tensor.dtype}"
            raise SpecError(f"{name} is {kind} but must be a regular tensor in float32 or a half precision")
        tensors_by_name[name] = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return tensors_by_name


def with_log_probabilities(result: Any, inputs: Mapping[str, Any]) -> Any:
    """Add the log probability of each next token, (B, T - 1), to a result with logits, (B, T, vocabulary).

    Logits in half precision first become float32, as in trainers. The value is 0 where the next token, or the
    one before it, is padding. A result without logits of ``input_ids`` (B, T) stays as it is.
    """
    results, ids, mask = dict(_leaves(result)), inputs.get("input_ids"), inputs.get("attention_mask")
    logits = results.get("logits")
    if not are_tokens(ids) or not isinstance(logits, Tensor) or logits.shape[:-1] != ids.shape:
        return result
    logits = logits.float() if logits.dtype in HALF else logits
    chosen = logits.log_softmax(-1).gather(-1, ids.long().roll(-1, 1)[..., None])[..., 0]
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        chosen = chosen.masked_fill(mask * mask.roll(-1, 1) == 0, 0)
    return {**results, "log_probabilities": results.get("log_probabilities", chosen[:, :-1])}


def are_tokens(ids: Any) -> TypeGuard[Tensor]:
    """Whether an input holds integers (B, T)."""
    return isinstance(ids, Tensor) and ids.ndim == 2 and not is_continuous(ids)


def discrete(result: Any) -> Tensors:
    """Integer and Boolean results as float64."""
    with _disable_current_modes():  # they are not rounded to the model's dtype
        return {
            f"{OUTPUT}[{place}]": torch.as_tensor(leaf).double()
            for place, leaf in _leaves(result)
            if place and isinstance(leaf, (Tensor, bool, int, float)) and not is_continuous(leaf)
        }


def buffers(model: nn.Module) -> Tensors:
    """Buffers that can be compared, by name."""
    return {
        f"{BUFFERS}{without_wrappers(path)}": x
        for path, x in model.named_buffers(remove_duplicate=False)
        if type(x.detach()) in (Tensor, Computed) and x.layout == torch.strided
        if x.dtype in ROUNDOFF or not (x.is_floating_point() or x.is_quantized or x.is_nested)
    }


def objects(result: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Public attributes of returned objects, such as caches and distributions, by place.

    They are not outputs, because an engine or a port cannot return them.
    """
    for place, leaf in _leaves(result):
        if hasattr(leaf, "__dict__") and id(leaf) not in seen and not isinstance(leaf, (Tensor, *FIXED)):
            seen.add(id(leaf))
            attributes = {name: entry for name, entry in vars(leaf).items() if not name.startswith("_")}
            yield place, {**attributes, **dict(objects(attributes, seen))}


def _leaves(result: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if is_dataclass(result) and not isinstance(result, type):
        yield from _leaves({part.name: getattr(result, part.name) for part in fields(result)}, place)
    elif isinstance(result, (Mapping, tuple, list)):
        for key, part in result.items() if isinstance(result, Mapping) else enumerate(result):
            yield from _leaves(part, f"{place}.{shown(str(key), LONGEST_KEY)}".lstrip("."))
    else:
        is_array = isinstance(result, (np.ndarray, np.generic)) and result.dtype.kind in "fiub"
        yield place, torch.as_tensor(result) if is_array else result


@contextlib.contextmanager
def running(what: str, why: str = "cannot be run with these inputs") -> Iterator[None]:
    """Convert errors and exits of a block to a one-line :class:`ModelError`."""
    try:
        with contextlib.chdir("."):  # otherwise Concord's files would follow a model to another folder
            yield
    except (SpecError, KeyboardInterrupt):
        raise
    except BaseException as error:  # an exit would end the command silently
        raise ModelError(f"{what} {why}: {described(error)}") from error


def described(error: BaseException) -> str:
    """An error's type, first line and source."""
    lines = [
        f" ({Path(frame.f_code.co_filename).name}:{line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith((OWN, TORCH, "<"))
    ]
    words = f": {shown(first_line(error), LONGEST_LINE)}" if str(error) else ""
    return f"{type(error).__name__}{words}{lines[-1] if lines else ''}"
