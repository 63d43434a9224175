"""The base classes of the plugins: a backend with a bug on request, its edited runs, and its trainer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from concord.backends.interface import IMPLEMENTATIONS, Request, Run, Trace, TrainingSession, Unsupported
from concord.backends.trainer import Tensor, Trainer
from concord.backends.update_rules import Optimizer
from concord.conformance.bugs.bug import Change
from concord.conformance.bugs.catalogue import BUGS, TRAINING
from concord.conformance.bugs.context import SIGNIFICANT_BITS, Array, Context
from concord.conformance.bugs.rounding import EMULATIONS
from concord.conformance.bugs.training.edited_step import Bugged, TrainingStep
from concord.spec.arrays import Arrays
from concord.spec.batch import Batch
from concord.spec.errors import unknown
from concord.spec.parameters import parameters
from concord.spec.precision import round_to_bits
from concord.spec.tensors import taps
from concord.spec.training.reference_optimizer import moments

if TYPE_CHECKING:
    from concord.backends.session import FrameworkSession

Tap = Callable[[str, Array], Array]

# Changes by the parts of an implementation's name before and after the colon.
CHANGES: dict[str, dict[str, Change]] = {
    "mutant": {name: mutant.change for name, mutant in BUGS.items()},
    "emulate": EMULATIONS,
}


class Injection(Context):
    """A run of a model with edits.

    Attributes:
        libraries: namespaces of the framework, searched in order.
    """

    libraries: tuple[Any, ...] = ()
    now: dict[str, Array]

    def __init__(self, change: Change, request: Request, memory: dict[str, Any]) -> None:
        super().__init__(request.config, request.batch, request.part, request.dtype, {}, memory)
        self.request, self.seen = request, set[str]()
        self.edits = {name: edit for name in taps(request.config, request.part) if (edit := change.at(name))}
        # A compiler that traces Python would absorb an edit's NumPy code, and lose the edit's state. It
        # therefore sees only these two calls, with all their tensors.
        self.step, self.keep = self.opaque(self._step), self.opaque(self._keep)

    def __getattr__(self, name: str) -> Any:
        for library in self.libraries:
            if hasattr(library, name):
                return getattr(library, name)
        raise AttributeError(name)

    def opaque(self, function: Callable[..., Array]) -> Callable[..., Array]:
        """Hide a function's code from compilers."""
        return function

    @abstractmethod
    def held(self, layer: Any, kind: str) -> Array:
        """A layer's parameter in canonical layout, if any."""

    def submodule(self, owner: Any, name: str) -> Any:
        """Return a submodule by part of its canonical name."""
        return getattr(owner, name)

    def given(self, model: Any, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Available inputs and parameters by canonical name."""
        tensors = {f"inputs.{name}": tensor for name, tensor in inputs.items()}
        for name, parameter in parameters(self.config, self.part).items():
            owner = model
            try:
                for word in name.split(".")[:-1]:
                    owner = owner[int(word)] if word.isdigit() else self.submodule(owner, word)
                tensors[name] = self.held(owner, parameter.kind)
            except AttributeError:
                continue
        return tensors

    def trace(self, model: Any, inputs: Mapping[str, Array], record: Tap) -> Tap:
        """A tap that edits before recording."""
        return lambda name, tensor: self.keep(
            name,
            record(name, self.step(name, tensor, self.given(model, inputs) if name in self.edits else {})),
        )

    def _step(self, name: str, tensor: Array, tensors: dict[str, Array]) -> Array:
        if name in self.now:  # a new evaluation begins
            self.now.clear()
        if name not in self.edits:
            return tensor
        self.now.update(tensors)
        self.tap, self.y = name, tensor
        self.seen.add(name)
        return self.with_zero_gradient_to(self.edits[name](self), tensor)

    def _keep(self, name: str, tensor: Array) -> Array:
        self.now[name] = tensor
        return tensor

    @contextmanager
    def confirmed(self) -> Iterator[None]:
        """Check that the block's run was edited.

        Raises:
            Unsupported: if the model lacks a tap that the edit changes or needs.
        """
        try:
            yield
        except KeyError as error:
            raise Unsupported(
                f"{self.request.implementation!r} does not compute {error}, which the bug needs"
            ) from error
        if self.edits and not self.seen:
            raise Unsupported(f"{self.request.implementation!r} computes none of {', '.join(self.edits)}")


class Mutating:
    """A mixin that precedes a backend's adapter and changes its runs.

    ``mutant:NAME`` injects a bug into the explicit implementation, ``mutant:NAME@library`` into another.
    ``emulate:tf32`` and ``emulate:tf32_cut_off`` compute products like tensor cores.
    """

    context: type[Injection]
    injection: Injection | None = None
    running: str = ""
    memory: dict[str, Any]

    def run(self, request: Request) -> Run:
        """Run a request with the change named by its implementation.

        Raises:
            Unsupported: if the model lacks a tap that the change needs.
        """
        kind, colon, name = request.implementation.partition(":")
        name, _, implementation = name.partition("@")
        if not colon or kind in IMPLEMENTATIONS:
            return self._untouched(request)
        if kind not in CHANGES:
            raise unknown("kind of implementation", kind, list(CHANGES))
        if name not in CHANGES[kind]:
            raise unknown(kind, name, list(CHANGES[kind]))
        change = CHANGES[kind][name]
        mutated = replace(request, implementation=implementation or "explicit")
        if request.implementation != self.running:
            self.running, self.memory = request.implementation, {}
        self.injection = self.context(change, mutated, self.memory)
        try:
            with self.injection.confirmed():
                return self._untouched(mutated)
        finally:
            self.injection = None

    def train(self, request: Request) -> TrainingSession:
        """Open a training session, possibly with a bug."""
        _, colon, name = request.implementation.partition(":")
        if colon and name not in TRAINING:
            raise unknown("bug of training", name, list(TRAINING))
        if colon:
            change = TRAINING[name].change
            request = replace(request, implementation="explicit")
            self.trainer = partial(MutatedTrainer, change=change, rounding=self.context(change, request, {}))
        try:
            # Defined by the adapter, the next base class.
            session: TrainingSession = super().train(request)  # type: ignore[misc]
        finally:
            self.__dict__.pop("trainer", None)
        return session

    def trace(self, request: Request) -> Trace:
        """The injection's trace, if any."""
        traced: Trace = super().trace(request)  # type: ignore[misc]  # defined by the adapter
        return self.injection.trace if self.injection else traced

    def _untouched(self, request: Request) -> Run:
        run: Run = super().run(request)  # type: ignore[misc]  # defined by the adapter
        return run


class MutatedTrainer(Bugged, Trainer):
    """A trainer whose steps consist of methods that a bug may change.

    Args:
        session: a session for a request with the bug's recipe.
        rounding: the framework's operations.
    """

    optimizer: Optimizer

    def __init__(self, session: FrameworkSession, change: Change, rounding: Context) -> None:
        self.change, self.rounding, self.behind = change, rounding, 0
        super().__init__(session)

    @cached_property
    def place(self) -> TrainingStep:
        """The step that the bug changes."""
        return TrainingStep(self.operations, self.shortened, self.recipe, self.kinds)

    def shortened(self, tensor: Any, number_format: str) -> Any:
        """Round to a shorter format."""
        if not isinstance(tensor, np.ndarray):
            return self.rounding.rounded(tensor, number_format)
        exact = tensor.astype(np.float64)
        return round_to_bits(exact, SIGNIFICANT_BITS[number_format]).astype(tensor.dtype)

    def updating(self) -> Optimizer:
        """The optimizer, with a bug if it may have one."""
        right = super().updating()
        if not self.change.places & {"optimizer", "keeps"}:
            return right
        # The framework's own optimizer cannot have the bug, so this optimizer consists of its operations.
        variables = self.variables(self.session.model)
        return self.change.optimizer(right.operations, self.recipe, variables, self.kinds)

    def load(self, state: Mapping[str, NDArray[np.floating]], step: int) -> None:
        """Load a checkpoint, possibly wrongly."""
        sections = ("parameters", *moments(self.recipe))
        state = {name: array for name, array in state.items() if name.partition(".")[0] in sections}
        self.place.resumed = step
        state, count = self.change.load(self.place, (state, step)) if step else (state, step)
        self.behind = step - count
        super().load(state, step)

    def resume(self, kept: Mapping[str, Tensor], step: int) -> None:
        """Continue from a state with its own number of steps."""
        super().resume(kept, step - self.behind)

    def numbers(self) -> dict[str, float]:
        """The optimizer's numbers of a step."""
        return self.optimizer.numbers(self.steps - self.behind, self.rate())

    def step(self, batches: Sequence[Batch], report: bool = False) -> Arrays:
        """Run a step on the batches that the bug leaves."""
        return super().step(self.begun(batches), report)
