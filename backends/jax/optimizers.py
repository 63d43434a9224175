"""Optimizers: Optax's where it computes what a recipe says, else what is written out above the frameworks."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from concord.backends.update_rules import Operations, Optimizer
from concord.spec.training.recipe import Recipe

MOMENTS = {"trace": "momentum", "mu": "first_moment", "nu": "second_moment"}
"""What Optax keeps, by its own name."""


OPERATIONS = Operations(
    lambda parameter: parameter[...],
    lambda parameter, value: parameter.set_value(value),
    jnp.zeros_like,
    jnp.sqrt,
    jnp.maximum,
    lambda tensor, limit: jnp.clip(tensor, -limit, limit),
    jnp.sum,
    jnp.where,
)


def direction(recipe: Recipe) -> optax.GradientTransformation | None:
    """Return what Optax makes of gradients before the learning rate, if that is what a recipe says."""
    if (
        recipe.algorithm == "adam"
        and recipe.epsilon_placement == "corrected"
        and recipe.bias_correction
        and not recipe.amsgrad
    ):
        return optax.scale_by_adam(b1=recipe.beta1, b2=recipe.beta2, eps=recipe.epsilon, eps_root=0.0)
    if (
        recipe.algorithm != "adam"
        and recipe.momentum
        and (recipe.momentum_form == "displacement" or recipe.dampening)
    ):
        return None
    momentum = (
        optax.trace(decay=recipe.momentum, nesterov=recipe.nesterov) if recipe.momentum else optax.identity()
    )
    if recipe.algorithm == "sgd":
        return momentum
    if recipe.algorithm == "rmsprop":
        scale = optax.scale_by_stddev if recipe.centered else optax.scale_by_rms
        inside = recipe.epsilon_placement == "inside"
        return optax.chain(
            scale(decay=recipe.beta2, eps=recipe.epsilon, initial_scale=0.0, eps_in_sqrt=inside), momentum
        )
    return None


def own(recipe: Recipe, decayed: Mapping[str, bool]) -> optax.GradientTransformation | None:
    """Return Optax's optimizer of a recipe, if it has one that computes it, without the learning rate.

    Args:
        decayed: by native name of a parameter, whether it decays.
    """
    found = direction(recipe)
    if found is None or recipe.embedding_updates == "lazy" or recipe.decay_form == "alone":
        return None
    decay = (
        optax.add_decayed_weights(recipe.weight_decay, mask=dict(decayed))
        if recipe.weight_decay
        else optax.identity()
    )
    return optax.chain(decay, found) if recipe.decay_form == "coupled" else optax.chain(found, decay)


class OwnOptimizer(Optimizer):
    """Optax's (:class:`concord.backends.update_rules.Optimizer`)."""

    def step(
        self, gradients: Mapping[str, Array], numbers: Mapping[str, Array], rows: Mapping[str, Array]
    ) -> None:
        """Update every parameter (:meth:`concord.backends.update_rules.Optimizer.step`)."""
        parameters = {name: variable[...] for name, variable in self.variables.items()}
        updates, self.state = self.native.update(
            {name: gradients[name] for name in self.variables}, self.state, parameters
        )
        for name, updated in optax.apply_updates(
            parameters, jax.tree.map(lambda update: -numbers["rate"] * update, updates)
        ).items():
            self.variables[name].set_value(updated)

    def kept(self) -> dict[str, Array]:
        """Return what is kept (:meth:`concord.backends.update_rules.Optimizer.kept`)."""
        parts = jax.tree.leaves(self.state, is_leaf=_keeps)
        return {
            f"{moment}.{name}": getattr(part, key)[name]
            for part in parts
            for key, moment in MOMENTS.items()
            if hasattr(part, key)
            for name in self.variables
        }

    def resume(self, kept: Mapping[str, Array], steps: int) -> None:
        """Go on from what was kept (:meth:`concord.backends.update_rules.Optimizer.resume`)."""

        def resumed(part: Any) -> Any:
            if not _keeps(part):
                return part
            found = {
                key: {name: kept[f"{moment}.{name}"] for name in self.variables}
                for key, moment in MOMENTS.items()
                if hasattr(part, key)
            }
            counted = (
                {"count": jnp.full_like(part.count, steps)} if "count" in part._fields else {}
            )  # every tuple has a method of that name
            return part._replace(**found, **counted)

        self.state = jax.tree.map(resumed, self.state, is_leaf=_keeps)


def _keeps(part: Any) -> bool:
    """Return whether a part of Optax's state keeps something of parameters."""
    return any(hasattr(part, key) for key in MOMENTS)


def optimizer(recipe: Recipe, variables: Mapping[str, nnx.Param], kinds: Mapping[str, str]) -> Optimizer:
    """Return what updates parameters as a recipe says (:class:`concord.backends.update_rules.Optimizer`)."""
    native = own(recipe, {name: kinds[name] not in recipe.undecayed for name in variables})
    kind = Optimizer if native is None else OwnOptimizer
    found = kind(OPERATIONS, recipe, variables, kinds, native)
    if native is not None:
        found.state = native.init({name: variable[...] for name, variable in variables.items()})
    return found
