"""Whether a candidate computes what a PyTorch module computes: the module itself is the specification.

The reference runs in float64 values and in Monte Carlo arithmetic (:mod:`~.arithmetic`), which gives the
truth of every tensor and how far a correct run may lie from it, with the constants of the family
(:mod:`concord.conformance.estimate`). Each activation is judged end to end, and locally: computed from the
candidate's own activations before it, so that an error is charged to the stretch in which it was made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from concord.conformance.compare.activations import OUTPUT, Activations, Finished, Pin, numbers, observe
from concord.conformance.compare.arithmetic import (
    FOREIGN,
    Computed,
    ExactMode,
    Perturbed,
    Rounded,
    computed,
    plainly,
)
from concord.conformance.compare.edits import BUGS, Injected, Sites
from concord.conformance.diagnosis import Diagnosis
from concord.conformance.estimate import SAMPLES, Estimate
from concord.conformance.expectation import Expectation, is_gradient, is_tap_gradient
from concord.conformance.explain import Cause
from concord.conformance.judging import GROWN, NEAR, PADDING
from concord.conformance.scoring import OUT_OF_RANGE, judge_tensor
from concord.conformance.verdict import NOT_EXPOSED, Judgement, Row, Verdict
from concord.spec.deviations import BLIND_ROWS_ZERO, UNCOMPUTED_PADDING
from concord.spec.errors import SpecError, refuse
from concord.spec.text import first_of

Array = NDArray[np.floating]

FEW = 6
"""Samples of a first look, which may only say that all is well."""

SEED = 0xC0
"""Of cotangents."""

LONGEST = 60.0
"""Seconds of the processor that the search for a cause may take."""

UNFIT = (RuntimeError, ValueError, IndexError, TypeError)
"""What an operation raises that a bug does not fit."""

SAME_BITS = "the same bits as the reference's own run"


@dataclass(frozen=True)
class Reference:
    """A module, what it is called with, and what it is asked for.

    Attributes:
        model: in evaluation mode.
        args, kwargs: its inputs, as tensors.
        gradients: whether gradients are wanted.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    gradients: bool = False

    def __post_init__(self) -> None:
        active = [
            name or "the module"
            for name, module in self.model.named_modules()
            if module.training and (not name or getattr(module, "p", 0) or getattr(module, "dropout", 0))
        ]
        if active:
            raise SpecError(
                f"{active[0]} is in training mode but must be in evaluation mode: call eval() first"
            )

    def given(self, function: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what a function makes of each input, those by place and those by name."""
        return tuple(map(function, self.args)), {name: function(entry) for name, entry in self.kwargs.items()}

    @functools.cached_property
    def cotangents(self) -> dict[str, Tensor] | None:
        """What outputs are multiplied with in the scalar that is differentiated; None: none is."""
        if not self.gradients:
            return None
        outputs = observe(self.model, self.args, self.kwargs, taps=False).values
        generator = torch.Generator().manual_seed(SEED)
        return {
            name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
            for name, tensor in outputs.items()
        }

    @functools.cached_property
    def plain(self) -> Activations:
        """What the module computes as it is."""
        return observe(self.model, self.args, self.kwargs, cotangents=self.cotangents)

    @property
    def real(self) -> Tensor:
        """Which tokens are no padding, (B, T).

        Raises:
            SpecError: if no input says so.
        """
        mask = self.kwargs.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            raise SpecError(
                "an input 'attention_mask' (B, T) is missing but required: it says where padding is"
            )
        return mask != 0


class ModelComparison:
    """One candidate's run before its reference.

    Args:
        reference: what is right.
        given: what a candidate computed: activations by the reference's names, ``gradients.<name>`` of
            parameters and ``gradients.taps.<name>`` of activations.
        declared: what the candidate declares (:data:`concord.spec.deviations.KNOWN_DEVIATIONS`):
            ``blind_rows_zero`` or ``uncomputed_padding``.
        progress: called with what is being done.
        again: whether a run with the same bits as the reference's own is right without more ado.
        whole: whether outputs come from a run of their own, so that they do not follow from activations here.

    Raises:
        SpecError: for tensors of other shapes than the reference's.
    """

    def __init__(
        self,
        reference: Reference,
        given: Mapping[str, Array],
        declared: Collection[str] = (),
        progress: Callable[[str], None] = lambda text: None,
        again: bool = True,
        whole: bool = False,
    ) -> None:
        self.reference, self.progress, self.again = reference, progress, again
        self.declared = frozenset(declared)
        self.plain, self.modules = reference.plain.tensors, reference.plain.modules
        self.dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self.plain.items()}
        refuse(
            [
                f"{name!r} has shape {array.shape} but must be {tuple(self.plain[name].shape)}"
                for name, array in given.items()
                if name in self.plain and array.shape != tuple(self.plain[name].shape)
            ]
        )
        self.given = {name: array for name, array in given.items() if name in self.plain}
        self.strange = [name for name in given if name not in self.plain]
        self.whole = whole and not all(name.startswith(OUTPUT) for name in self.given)
        if all(map(is_gradient, self.given)):
            raise SpecError(
                "the candidate has no activation by a name of the reference's; give names by a mapping"
            )
        self.foreign: dict[str, int] = {}
        self.wrong: dict[str, tuple[Array, Array]] = {}  # value and sigma of what diverges locally
        self.padding = ~reference.real.numpy() if UNCOMPUTED_PADDING in self.declared else None

    def in_padding(self, shape: tuple[int, ...]) -> NDArray[np.bool_] | None:
        """Return which elements of an activation stand in rows of padding that are not computed."""
        if self.padding is None or shape[:2] != self.padding.shape:
            return None
        return np.broadcast_to(self.padding.reshape(*shape[:2], *[1] * (len(shape) - 2)), shape)

    @functools.cached_property
    def order(self) -> list[str]:
        """Every tensor that is judged: activations as they are computed, gradients on the way back."""
        forward = [name for name in self.plain if not is_gradient(name)]
        parameters = [name for name in self.plain if is_gradient(name) and not is_tap_gradient(name)]
        back: list[str] = []
        for name in reversed(forward):
            prefix = f"gradients.{self.modules.get(name, name)}."
            back += [f"gradients.taps.{name}"] if f"gradients.taps.{name}" in self.plain else []
            back += [one for one in parameters if one.startswith(prefix) and one not in back]
        return [*forward, *back, *(one for one in parameters if one not in back)]

    @functools.cached_property
    def parameters(self) -> dict[str, Tensor]:
        """Parameters and buffers with float64 values, those that are shared once."""
        model, seen = self.reference.model, dict[int, Tensor]()
        named = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        found = {}
        for name, tensor in named:
            if id(tensor) not in seen:
                made = computed(tensor)
                wanted = self.reference.gradients and tensor.requires_grad
                seen[id(tensor)] = made.requires_grad_(True) if wanted else made
            found[name] = seen[id(tensor)]
        return found

    def expected(self, pinned: bool) -> Iterator[Expectation]:
        """Yield what a correct run yields, and how far it may lie from it: at a first look, then for good.

        Args:
            pinned: whether each stretch starts from the candidate's own activations.
        """
        reference, blind = self.reference, BLIND_ROWS_ZERO in self.declared
        # Made here: what is made within an arithmetic is computed in it.
        (args, kwargs), parameters = reference.given(computed), self.parameters

        def compute(arithmetic: Any, observer: Callable[[str, Array], None]) -> None:
            def take(name: str, tensor: Tensor) -> None:
                if name in self.plain:
                    array = numbers(tensor)
                    observer(name, array[None] if arithmetic.samples else array.copy())

            def pin(name: str) -> Tensor | None:
                with _disable_current_modes():
                    made = self.pin(name) if pinned else None
                    half = made is not None and made.dtype in (torch.bfloat16, torch.float16)
                    return arithmetic.unrounded(made) if half and not is_gradient(name) else made

            with plainly(), arithmetic:
                observe(reference.model, args, kwargs, parameters, reference.cotangents, take, pin)
            for name, count in arithmetic.foreign.items():
                self.foreign[name] = max(count, self.foreign.get(name, 0))

        where = "each stretch" if pinned else "end to end"
        self.progress(f"{where}: exact values")
        found = Estimate(compute, self.dtypes, truth=ExactMode(blind))
        for seeds in (range(FEW), range(FEW, SAMPLES)):
            self.progress(f"{where}: {seeds.stop} samples of Monte Carlo arithmetic")
            low = [] if seeds.start else [Rounded(blind)]
            found.take_up(
                [*(Perturbed(seed, blind) for seed in seeds), *low], f"deriving tolerances, {where}"
            )
            sigmas = found.sigmas(last=seeds.stop == SAMPLES)
            yield Expectation(self.dtype, found.values, sigmas, dict.fromkeys(sigmas, ""))

    def pin(self, name: str) -> Tensor | None:
        """Return a tensor of the candidate as the reference goes on with it; None if it has none."""
        array = self.given.get(name)
        if array is None:
            return None
        if (padding := self.in_padding(array.shape)) is not None:
            array = np.where(padding, numbers(self.plain[name]), array)
        return Computed(torch.from_numpy(array.astype(np.float64)), self.plain[name].dtype)

    @property
    def dtype(self) -> str:
        """The precision of the outputs."""
        return next((dtype for name, dtype in self.dtypes.items() if name.startswith(OUTPUT)), "float32")

    @property
    def notes(self) -> dict[str, str]:
        """What is to be said besides the verdict, by what it is about."""
        found = {}
        if self.strange:
            found["not compared"] = (
                f"{first_of(self.strange, 3)}: the reference has no activation of that name"
            )
        if self.foreign:
            found["operations without a rule"] = (
                f"{', '.join(sorted(self.foreign))}: {FOREIGN} unit roundoffs of each result are allowed for"
            )
        return found

    def verdict(self) -> Verdict:
        """Judge every tensor, locally and end to end."""
        if self.again and self.same_bits():
            rows = [
                Row(name, "", "agrees", Judgement("agrees", size=self.given[name].size), note=SAME_BITS)
                for name in self.order
                if name in self.given
            ]
            return Verdict(rows)
        local = self.judged(True)
        end = self.judged(False)
        table = [self.row(name, local.get(name), end.get(name)) for name in self.order]
        found = Verdict(table)
        if found.status != "diverges":
            return found
        return dataclasses.replace(found, search=lambda: self.searched(found))

    def undeclared(self, verdict: Verdict) -> str:
        """Return the declaration with which the forward pass would agree; empty if there is none."""
        first = verdict.first_divergence
        if self.declared or first is None or is_gradient(first.tensor):
            return ""
        forward = dataclasses.replace(self.reference, gradients=False)
        given = {name: array for name, array in self.given.items() if not is_gradient(name)}
        for name in (BLIND_ROWS_ZERO, UNCOMPUTED_PADDING):
            with contextlib.suppress(SpecError):
                other = ModelComparison(forward, given, [name])
                if all(one.status != "diverges" for one in other.judged(True).values()):
                    return name
        return ""

    def same_bits(self, names: Iterable[str] | None = None) -> bool:
        """Whether the candidate is the reference's own run, bit for bit, in all tensors or in some."""
        return all(
            name in self.given and np.array_equal(numbers(self.plain[name]), self.given[name], equal_nan=True)
            for name in (self.plain if names is None else names)
        )

    def row(self, name: str, step: Judgement | None, end: Judgement | None) -> Row:
        """Return the row of a tensor, by what came of judging its step and all steps up to it."""
        deciding = step or end
        size = self.plain[name].numel()
        if deciding is None:
            return Row(name, "", "not exposed", note=NOT_EXPOSED, size=size)
        return Row(name, "", deciding.status, step, end, deciding.note, size)

    def judged(self, pinned: bool) -> dict[str, Judgement]:
        """Judge in one way: by a first look if that is enough."""
        for expected in self.expected(pinned):
            found = {
                name: self.judgement(name, expected, pinned)
                for name in self.given
                if name in expected.values and not (pinned and self.whole and name.startswith(OUTPUT))
            }
            if all(one.ratio <= NEAR and one.status == "agrees" for one in found.values()):
                break
        if pinned:
            self.wrong = {
                name: (expected.values[name], expected.sigmas[name])
                for name, one in found.items()
                if one.status == "diverges"
            }
        return found

    def judgement(self, name: str, expected: Expectation, pinned: bool) -> Judgement:
        """Judge one tensor."""
        value, sigma = expected.values[name], expected.sigmas[name]
        if not pinned and name in expected.undecided:
            return Judgement("undetermined", size=value.size, note=GROWN)
        padding, why = self.in_padding(value.shape), OUT_OF_RANGE
        if padding is not None:
            sigma, why = np.where(padding, np.nan, sigma), PADDING
        lenient = is_gradient(name) and name in expected.singular
        return judge_tensor(
            self.given[name].astype(np.float64), value, sigma, self.dtypes[name], not lenient, lenient, why
        )

    # What is said of the first divergence.

    def searched(self, verdict: Verdict) -> tuple[Diagnosis, str]:
        """Say in which stretch of the module the first divergence was made, and where that is written.

        Say why too, or which declaration is missing.
        """
        first, undeclared = verdict.first_divergence, self.undeclared(verdict)
        assert first is not None
        place = self.order.index(first.tensor)
        before = next(
            (
                row.tensor
                for row in reversed(verdict.table[:place])
                if row.status == "agrees" and is_gradient(row.tensor) == is_gradient(first.tensor)
            ),
            "the inputs" if not is_gradient(first.tensor) else "the outputs",
        )
        sought = not undeclared and first.tensor in self.wrong and not is_gradient(first.tensor)
        cause = self.cause(first.tensor, before) if sought else None
        notes = [f"made between {before} and {first.tensor}"]
        if not is_gradient(first.tensor):
            notes += [f"computed by {line}" for line in self.lines_between(before, first.tensor)]
        return Diagnosis(first.tensor, ("",), cause, notes=tuple(notes)), undeclared

    def cause(self, tensor: str, before: str) -> Cause | None:
        """Return what explains a tensor: a bug of the stretch that computes it, or its elements' order."""
        (value, sigma), dtype = self.wrong[tensor], self.dtypes[tensor]
        started, given = time.process_time(), self.given[tensor].astype(np.float64)
        modules, where = dict(self.reference.model.named_modules()), self.around(before, tensor)
        for name in self.strange:  # what is passed on as it is has no activation
            if isinstance(modules.get(name), nn.Dropout) and name.startswith(where):
                return self.told({"dropout_active": f"dropout that is active in {name}"})
        explained: dict[str, str] = {}
        stretch = ((*found, sigma) for found in Stretch(self, tensor, before).made())
        for name, text, made, allowed in itertools.chain(reordered(given, value, sigma), stretch):
            moved = np.where(np.isfinite(made) & np.isfinite(value), made, value)
            if name not in explained and judge_tensor(given, moved, allowed, dtype).status == "agrees":
                explained[name] = text
            if time.process_time() - started > LONGEST:
                break
        return self.told(explained)

    @staticmethod
    def told(explained: Mapping[str, str]) -> Cause | None:
        """Return explanations as a cause; it is sure where there is one alone."""
        if not explained:
            return None
        text = f"it is explained by {' or by '.join(explained.values())}"
        return Cause(" or ".join(explained), text, len(explained) == 1)

    def lines_between(self, before: str, tensor: str) -> list[str]:
        """Return the modules that compute a tensor, and where their forward passes are written."""
        lines = []
        for path in dict.fromkeys((self.modules.get(tensor, ""), self.around(before, tensor))):
            module = self.reference.model.get_submodule(path)
            lines.append(f"{path or 'the module'}: {type(module).__name__}{source_of(module)}")
        return lines

    def around(self, before: str, tensor: str) -> str:
        """Return the path of the innermost module that computes a tensor from one before it."""
        path, listed = self.modules.get(tensor, ""), (nn.ModuleList, nn.ModuleDict)  # which nobody calls
        while path and (
            not before.startswith(f"{path}.") or isinstance(self.reference.model.get_submodule(path), listed)
        ):
            path = path.rpartition(".")[0]
        return path


class Stretch:
    """The part of a reference that computes one tensor from those before it, to be computed again with bugs.

    Args:
        tensor, before: its last activation, and the one after which it begins.
    """

    def __init__(self, comparison: ModelComparison, tensor: str, before: str) -> None:
        reference, order, path = comparison.reference, comparison.order, comparison.around(before, tensor)
        self.tensor, self.start, self.call = tensor, before, tensor.partition("#")[2].partition("[")[0]
        self.blind = BLIND_ROWS_ZERO in comparison.declared
        self.model, self.module = reference.model, reference.model.get_submodule(path)
        self.returns = comparison.modules.get(tensor, "")
        self.prefix = f"{path}." if path else ""
        parameters, until = comparison.parameters, order.index(before) + 1 if before in order else 0
        pins = {name: pin for name in order[:until] if (pin := comparison.pin(name)) is not None}
        self.args, self.kwargs = reference.given(computed)
        if path:
            self.args, self.kwargs = self.entered(reference.model, parameters, pins)
        self.parameters = {
            name.removeprefix(self.prefix): tensor
            for name, tensor in parameters.items()
            if name.startswith(self.prefix)
        }
        self.pins = {self.inside(name): value for name, value in pins.items() if name.startswith(self.prefix)}

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
        self, model: nn.Module, parameters: Mapping[str, Tensor], pins: Mapping[str, Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the module is called with when it computes the tensor."""
        given: list[Any] = []

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given[:] = [args, kwargs]

        def take(name: str, _: Tensor) -> None:
            if name == self.tensor:
                raise Finished

        handle = self.module.register_forward_pre_hook(enter, with_kwargs=True)
        try:
            with plainly(), ExactMode(self.blind):
                observe(model, self.args, self.kwargs, parameters, take=take, pin=pinned_to(pins))
        finally:
            handle.remove()
        return given[0], given[1]

    def run(self, edited: Any, parameters: Mapping[str, Tensor] | None = None) -> Array | None:
        """Compute the tensor, with a bug in what follows the start of the stretch, or of other parameters."""
        tensor, start = self.inside(self.tensor), self.inside(self.start)
        edited.busy, found = start in self.pins, []

        def take(name: str, made: Tensor) -> None:
            if name == start:
                edited.busy = False
            if name == tensor:
                found.append(numbers(made))
                raise Finished

        try:
            with plainly(), ExactMode(self.blind, edited):
                observe(
                    self.module,
                    self.args,
                    self.kwargs,
                    {**self.parameters, **(parameters or {})},
                    take=take,
                    pin=pinned_to(self.pins),
                )
        except UNFIT:
            return None
        return found[0] if found else None

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
