"""A session: a model on a device, to be loaded, run, stepped and read.

Shapes: B batch, T tokens, C classes, M rows, N columns.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from numpy.typing import NDArray

from concord.backends.bench import mean_seconds
from concord.backends.interface import Steps
from concord.backends.jax.training import ClassificationLoss, CotangentLoss, differentiate
from concord.backends.session import FrameworkSession
from concord.backends.taps import Observation

OPTIONS: dict[str, str | bool] = {"xla_allow_excess_precision": False}
"""Of the compiler: allowed, XLA leaves out roundings to bfloat16 where it fuses steps."""


def synchronize(computed: Any) -> None:
    """Wait until tensors are computed."""
    jax.block_until_ready(computed)


def timed(steps: Steps, count: int) -> list[float]:
    """Return the mean seconds of steps that are started one after another, by the clock of the host: JAX does not give the device's away."""
    return mean_seconds(steps, count)


def multiply(left: Array, right: Array) -> Array:
    """Start a matrix product: (M, K) and (K, N) to (M, N)."""
    return jnp.matmul(left, right)


class Session(FrameworkSession):
    """A model and its inputs on a device (:class:`concord.backends.interface.Session`)."""

    losses = (ClassificationLoss, CotangentLoss)
    graph: nnx.GraphDef[Any]
    state: nnx.State[Any, Any]
    fixed: nnx.State[Any, Any]

    @property
    def model(self) -> nnx.Module:
        """The model as it is now."""
        return nnx.merge(self.graph, self.state, self.fixed)

    @model.setter
    def model(self, model: nnx.Module) -> None:
        self.graph, self.state, self.fixed = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]

    @property
    def operands(self) -> tuple[Any, ...]:
        """What a step is given."""
        return self.state, self.fixed, self.inputs

    @property
    def held(self) -> tuple[Any, Any]:
        """What a step of training is given of the model."""
        return self.state, self.fixed

    def model_of(self, state: nnx.State, fixed: nnx.State) -> nnx.Module:
        """Return the model of what a step is given."""
        return nnx.merge(self.graph, state, fixed)

    def held_by(self, model: nnx.Module) -> nnx.State:
        """Return what a step leaves of the model."""
        return nnx.state(model, nnx.Param)

    def hold(self, state: nnx.State) -> None:
        """Take what a step left of the model."""
        self.state = state

    @property
    def pending(self) -> Any:
        """What the last step computes."""
        return self.computed, self.state

    def traced(
        self, function: Callable[..., Any], *given: Any, replaced: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        """Return a step, compiled for what it is given if that is asked for."""
        return (
            jax.jit(function, donate_argnums=replaced).lower(*given).compile(compiler_options=OPTIONS)
            if self.compiled
            else function
        )

    def layers(self, model: nnx.Module) -> Iterable[tuple[str, nnx.Module]]:
        """Return all layers of a model with their paths (:meth:`concord.backends.session.FrameworkSession.layers`)."""
        return [(".".join(map(str, path)), node) for path, node in nnx.iter_graph(model)]

    def number(self, value: float) -> Array:
        """Return a number that a step is given as a tensor: whole steps are compiled."""
        return jnp.asarray(value, dtype=self.request.dtype)

    def infer(self, state: nnx.State, fixed: nnx.State, inputs: Mapping[str, Array]) -> Array:
        """Return the logits (B, C)."""
        return self.evaluate(nnx.merge(self.graph, state, fixed), inputs, {}, False, False)[0]

    def differentiated(
        self, model: nnx.Module, inputs: Mapping[str, Array], zeros: Mapping[str, Array]
    ) -> Observation:
        """Return what a step of training needs (:meth:`concord.backends.session.FrameworkSession.differentiated`)."""
        return differentiate(self.evaluate, model, self.request.part, inputs, zeros, bool(zeros))

    def seeded(self, words: NDArray[np.uint32]) -> Array:
        """Have dropout begin anew (:meth:`concord.backends.session.FrameworkSession.seeded`)."""
        return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")

    def dropped(self, tensor: Array, rate: float, seed: Array, place: int) -> Array:
        """Return a tensor with elements dropped (:meth:`concord.backends.session.FrameworkSession.dropped`)."""
        return nnx.Dropout(rate, deterministic=False)(tensor, rngs=jax.random.fold_in(seed, place))

    def observe(
        self, state: nnx.State, fixed: nnx.State, inputs: Mapping[str, Array], zeros: Mapping[str, Array]
    ) -> Observation:
        """Return output, loss and every tap, and gradients if they are asked for (:meth:`concord.backends.session.FrameworkSession.observe`)."""
        model = nnx.merge(self.graph, state, fixed)
        if self.request.gradients:
            return differentiate(self.evaluate, model, self.request.part, inputs, zeros, True)
        output, loss, taps = self.evaluate(model, inputs, {}, True)
        return Observation(output, loss, taps, {})
