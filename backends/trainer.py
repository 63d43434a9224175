"""Training in a session, without framework calls."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from concord.backends.interface import Trace, Unsupported
from concord.backends.taps import DROPOUT
from concord.backends.update_rules import Optimizer, clip
from concord.spec.arrays import Array, Arrays
from concord.spec.batch import Batch
from concord.spec.parameters import parameters
from concord.spec.precision import precision
from concord.spec.training.reference_optimizer import moments
from concord.spec.training.trajectory import Course, rows_of

if TYPE_CHECKING:
    from concord.backends.session import FrameworkSession

Tensor = Any
# The tap with the rows looked up in each table.
LOOKUPS = {
    "embeddings.token.weight": "embeddings.token",
    "embeddings.position.weight": "embeddings.position",
    "embeddings.segment.weight": "embeddings.segment",
}

# Compiled programs to keep, one for each tuple of batch shapes.
MOST = 24


class StepInputs(NamedTuple):
    """Operands of a step from one batch."""

    inputs: dict[str, Tensor]  # inputs of the model, its loss and dropout
    zeros: dict[str, Tensor]  # zeros added to taps, to receive their gradients
    real: dict[str, Tensor]  # by tap, the looked-up rows that have a gradient


class Prepared(NamedTuple):
    """Operands of a step from all its batches."""

    batches: list[StepInputs]
    weights: dict[str, float]  # batch_weight.<number> of each batch's gradient, where it is not 1
    rows: dict[str, Tensor]  # the rows of each table that a lazy step updates


class Trainer(Course):
    """A :class:`concord.backends.interface.TrainingSession` (SPEC, section 10)."""

    def __init__(self, session: FrameworkSession) -> None:
        request = session.request
        assert request.training is not None
        super().__init__(request.config, request.training, request.part)
        self.session, self.request, self.adapter = session, request, session.adapter
        table = parameters(self.config, self.part)
        self.entries = {name: entry for name, entry in table.items() if entry.trainable}
        self.native = {
            name: self.adapter.naming.native_name(name, entry.kind) for name, entry in self.entries.items()
        }
        self.canonical = {native: name for name, native in self.native.items()}
        self.kinds = {native: table[name].kind for name, native in self.native.items()}
        self.refuse()
        self.optimizer = self.updating()
        self.operations = self.optimizer.operations
        self.plain = session.trace
        self.trace = self.dropping(session.trace) if self.sites else session.trace
        self.programs: OrderedDict[Any, Callable[..., Any]] = OrderedDict()
        self.load({f"parameters.{name}": request.weights[name] for name in self.native}, 0)

    def variables(self, model: Any) -> dict[str, Any]:
        """Trained parameters by native name."""
        variables = self.adapter.training.named(model)
        return {native: variables[native] for native in self.native.values()}

    def updating(self) -> Optimizer:
        """The recipe's optimizer."""
        variables = self.variables(self.session.model)
        optimizer: Optimizer = self.adapter.optimizers.optimizer(self.recipe, variables, self.kinds)
        return optimizer

    def refuse(self) -> None:
        """Refuse dropout at hidden taps."""
        hidden = [
            site
            for tap, site in self.sites.items()
            if any(fnmatchcase(tap, pattern) for pattern in self.session.implementation.not_exposed)
        ]
        if hidden:
            raise Unsupported(
                f"{self.adapter.name} cannot apply dropout to {', '.join(hidden)} in its implementation "
                f"{self.request.implementation!r}, which does not expose them [clause=DRP-2]"
            )

    # The protocol.

    def load(self, state: Mapping[str, Array], step: int) -> None:
        """See :meth:`concord.backends.interface.TrainingSession.load`."""
        self.session.fill(
            {
                name: state.get(f"parameters.{name}", self.request.weights[name])
                for name in parameters(self.config, self.part)
            }
        )
        native_state = {}
        with self.session.context():
            for name, entry in self.entries.items():
                for moment in moments(self.recipe):
                    array = state.get(
                        f"{moment}.{name}", np.zeros(self.request.weights[name].shape, np.float32)
                    )
                    native = np.ascontiguousarray(self.adapter.relaid(array, entry.kind))
                    native_state[f"{moment}.{self.native[name]}"] = self.session.tensor(native)
            self.resume(native_state, step)
        self.steps = step

    def resume(self, kept: Mapping[str, Tensor], step: int) -> None:
        """Restore moments by native name."""
        self.optimizer.resume(kept, step)

    def step(self, batches: Sequence[Batch], report: bool = False) -> Arrays:
        """See :meth:`concord.backends.interface.TrainingSession.step`."""
        session = self.session
        with session.context():
            results = self.start(self.prepared(batches), report)
        session.confirm()
        return self.reported(results)

    def predict(self, batch: Batch) -> Array:
        """See :meth:`concord.backends.interface.TrainingSession.predict`."""
        session = self.session
        with session.context():
            session.trace = self.plain
            session.inputs = session.fed(batch)
            program = self.program(("predict", shapes_of(session.inputs)), session.infer, session.operands)
            output = program(*session.operands)
        return np.array(self.adapter.to_numpy(output))

    def state(self) -> Arrays:
        """See :meth:`concord.backends.interface.TrainingSession.state`."""
        parameters = self.adapter.parameters(self.session.model, self.request)
        optimizer_state = self.reported(self.optimizer.kept())
        return {f"parameters.{name}": array for name, array in parameters.items()} | optimizer_state

    def info(self) -> dict[str, Any]:
        """See :meth:`concord.backends.interface.TrainingSession.info`."""
        info = self.session.info()
        return info | {"deviations": [*info["deviations"], *self.optimizer.known_deviations]}

    # One step.

    def prepared(self, batches: Sequence[Batch]) -> Prepared:
        """The next step's operands, reusable without dropout."""
        inputs = [self.inputs_of(batch, number) for number, batch in enumerate(batches)]
        weights = {
            f"batch_weight.{number}": weight
            for number, weight in enumerate(self.batch_weights(batches))
            # A single batch of weight 1 needs neither a multiplication nor an operand.
            if len(batches) > 1 or weight != 1.0
        }
        return Prepared(inputs, weights, self.rows(batches))

    def start(self, prepared: Prepared, report: bool = False) -> dict[str, Any]:
        """Start the next step; return framework tensors."""
        program, operands = self.ready(prepared, report)
        results, state, self.optimizer.state = program(*operands)
        self.session.hold(state)
        self.steps += 1
        return cast("dict[str, Any]", results)

    def ready(self, prepared: Prepared, report: bool = False) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The next step's program, compiled if requested, and operands."""
        session, optimizer, (inputs, parts, rows) = self.session, self.optimizer, prepared
        session.trace, variables, state = self.trace, optimizer.variables, optimizer.state
        numbers = {**self.numbers(), **parts}
        operands = (
            *session.held,
            state,
            inputs,
            {name: session.number(number) for name, number in numbers.items()},
            rows,
        )
        key = (report, tuple(numbers), tuple(shapes_of(batch.inputs) for batch in inputs))
        program = self.program(key, partial(self.make_step, report), operands, (0, 2))
        optimizer.variables, optimizer.state = variables, state  # tracing replaced them
        return program, operands

    def numbers(self) -> dict[str, float]:
        """Step-dependent operands of an update."""
        return self.optimizer.numbers(self.steps, self.rate())

    def program(
        self, key: Any, function: Callable[..., Any], operands: Sequence[Any], replaced: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        """The program for these shapes; the :data:`MOST` most recent ones are cached."""
        if key not in self.programs:
            # Text batches have many lengths, and frameworks keep every program unless told otherwise.
            if len(self.programs) >= MOST:
                self.programs.popitem(last=False)
                self.session.forget()
            self.programs[key] = self.session.traced(function, *operands, replaced=replaced)
        self.programs.move_to_end(key)
        return self.programs[key]

    def make_step(
        self,
        report: bool,
        weights: Any,
        fixed: Any,
        state: Any,
        batches: Sequence[StepInputs],
        numbers: Mapping[str, Tensor],
        rows: Mapping[str, Tensor],
    ) -> tuple[dict[str, Any], Any, Any]:
        """Compute a step; compilers trace this.

        Returns:
            Results by ``<section>.<native name>``; parameters; optimizer state.
        """
        session, optimizer = self.session, self.optimizer
        model = session.model_of(weights, fixed)
        optimizer.variables, optimizer.state = self.variables(model), state
        total, squares, results = self.accumulated(model, batches, numbers)
        limited, norm = self.limited(
            total,
            lambda name: (
                squares[name] if name in squares else self.operations.total(total[name] * total[name])
            ),
        )
        results |= {} if norm is None else {"norm": norm}
        if report:
            # Copies, since some optimizers change gradients in place.
            results |= {f"gradients.{name}": 1 * tensor for name, tensor in total.items()}
            if self.recipe.clipping != "none":
                results |= {f"clipped.{name}": 1 * tensor for name, tensor in limited.items()}
        self.update(limited, numbers, rows)
        if report:
            results |= {"rate": numbers["rate"]} | self.optimizer.kept()
            results |= {
                f"parameters.{name}": self.operations.value(variable)
                for name, variable in optimizer.variables.items()
            }
        return results, session.held_by(model), optimizer.state

    def accumulated(
        self, model: Any, batches: Sequence[StepInputs], numbers: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """A step's gradients, squares of looked-up rows, and losses."""
        total: dict[str, Tensor] = {}
        squares_seen: dict[str, Tensor] = {}
        losses: dict[str, Tensor] = {}
        for number, inputs in enumerate(batches):
            observation = self.adapter.training.differentiate(
                self.session.evaluating, model, self.part, inputs.inputs, inputs.zeros, bool(inputs.zeros)
            )
            losses[f"losses.{number}"] = observation.loss
            weight = numbers.get(f"batch_weight.{number}")
            gradients = observation.gradients
            if weight is not None:
                gradients = {name: weight * gradient for name, gradient in gradients.items()}
            total = self.added(total, {name: gradients[name] for name in self.native.values()}, weight)
            for name, squares in self.slices(inputs.real, gradients).items():
                squares_seen[name] = squares_seen[name] + squares if name in squares_seen else squares
        return total, squares_seen, losses

    def added(
        self, total: Mapping[str, Tensor], piece: Mapping[str, Tensor], weight: Tensor | None
    ) -> dict[str, Tensor]:
        """Add another batch's weighted gradients."""
        return {
            name: total[name] + gradient if name in total else gradient for name, gradient in piece.items()
        }

    def limited(
        self, gradients: Mapping[str, Tensor], squares: Callable[[str], Tensor]
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Clipped gradients, and the global norm, if any."""
        return clip(self.operations, self.recipe, gradients, self.kinds, squares)

    def update(
        self, gradients: Mapping[str, Tensor], numbers: Mapping[str, Tensor], rows: Mapping[str, Tensor]
    ) -> None:
        """Update every parameter with its clipped gradient."""
        self.optimizer.step(gradients, numbers, rows)

    def inputs_of(self, batch: Batch, number: int) -> StepInputs:
        """Operands of one batch."""
        inputs = self.session.fed(batch) | self.masks(batch, number)
        if self.recipe.embedding_gradients != "slices" or self.recipe.clipping == "none":
            return StepInputs(inputs, {}, {})
        arrays = replace(self.request, batch=batch, gradients=True, tap_gradients=True).zeros()
        zeros = {tap: self.session.tensor(arrays[tap]) for tap in LOOKUPS.values() if tap in arrays}
        padding = {
            "embeddings.token": (self.config.token_padding_row, batch.input_ids),
            "embeddings.segment": (self.config.segment_padding_row, batch.segment_ids),
        }
        real = {
            tap: self.session.tensor((ids != row)[..., None].astype(np.float64))
            for tap, (row, ids) in padding.items()
            if row is not None and ids is not None
        }
        return StepInputs(inputs, zeros, real)

    def slices(self, real: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums of squared gradients of looked-up rows, if the norm uses them (SPEC OPT-7)."""
        sums = {}
        for table, tap in LOOKUPS.items():
            if f"taps.{tap}" not in gradients or table not in self.native:
                continue
            gradient = gradients[f"taps.{tap}"]
            # The tap comes after scaling, the row before it.
            if table == "embeddings.token.weight" and self.config.embedding_scale == "sqrt_d_model":
                gradient = math.sqrt(self.config.d_model) * gradient
            gradient = gradient * real[tap] if tap in real else gradient
            sums[self.native[table]] = self.operations.total(gradient * gradient)
        return sums

    def rows(self, batches: Sequence[Batch]) -> dict[str, Tensor]:
        """Table rows that a lazy step updates, by native name (SPEC OPT-8)."""
        looked_up: dict[str, Tensor] = {}
        lazy = self.recipe.embedding_updates == "lazy"
        for name, rows in rows_of(self.config, batches, self.part).items() if lazy else ():
            if name in self.native:
                touched = np.zeros((len(self.request.weights[name]), 1), bool)
                touched[rows] = True
                looked_up[self.native[name]] = self.session.tensor(touched)
        return looked_up

    # Dropout.

    def dropping(self, trace: Trace) -> Trace:
        """Return a trace that multiplies taps by dropout masks (SPEC DRP-2)."""

        def dropping(
            model: Any, inputs: Mapping[str, Tensor], record: Callable[[str, Tensor], Tensor]
        ) -> Callable[[str, Tensor], Tensor]:
            # Each site directly follows a tap, so the models need no separate dropout (decision 0023).
            tap = trace(model, inputs, record)

            def dropped(name: str, tensor: Tensor) -> Tensor:
                result = tap(name, tensor)
                return result * inputs[f"{DROPOUT}{name}"] if name in self.sites else result

            return dropped

        return dropping

    def masks(self, batch: Batch, number: int) -> dict[str, Tensor]:
        """Factors of each site, 0 or 1 / (1 - rate) (SPEC DRP-3)."""
        if not self.sites:
            return {}
        return {
            f"{DROPOUT}{tap}": self.session.tensor(keep / (1 - rate))
            for tap, (keep, rate) in self.masked(batch, number).items()
        }

    def reported(self, results: Mapping[str, Tensor | float]) -> Arrays:
        """Convert tensors to arrays with canonical names and layouts."""
        arrays: Arrays = {}
        for key, value in results.items():
            section, _, native = key.partition(".")
            # Some frameworks take operands as Python floats and round them once.
            array = (
                precision(self.request.dtype).round(value)
                if isinstance(value, float)
                else self.adapter.to_numpy(value)
            )
            name = f"{section}.{self.canonical[native]}" if native in self.canonical else key
            arrays[name] = np.array(self.adapter.relaid(array, self.kinds.get(native, "")), order="C")
        return arrays


def shapes_of(tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """Names and shapes of tensors."""
    return tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items())
