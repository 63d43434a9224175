"""Optax's optimizer if it can compute a recipe, otherwise :mod:`concord.backends.update_rules`."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from concord.backends.update_rules import Operations, Optimizer
from concord.spec.training.recipe import Recipe

# Optax's names for the moments.
MOMENTS = {"trace": "momentum", "mu": "first_moment", "nu": "second_moment"}


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
    transformation = direction(recipe)
    if transformation is None or recipe.embedding_updates == "lazy" or recipe.decay_form == "alone":
        return None
    decay = (
        optax.add_decayed_weights(recipe.weight_decay, mask=dict(decayed))
        if recipe.weight_decay
        else optax.identity()
    )
    return (
        optax.chain(decay, transformation)
        if recipe.decay_form == "coupled"
        else optax.chain(transformation, decay)
    )


class OwnOptimizer(Optimizer):
    """Optax's optimizer."""

    def step(
        self, gradients: Mapping[str, Array], numbers: Mapping[str, Array], rows: Mapping[str, Array]
    ) -> None:
        parameters = {name: variable[...] for name, variable in self.variables.items()}
        updates, self.state = self.native.update(
            {name: gradients[name] for name in self.variables}, self.state, parameters
        )
        for name, updated in optax.apply_updates(
            parameters, jax.tree.map(lambda update: -numbers["rate"] * update, updates)
        ).items():
            self.variables[name].set_value(updated)

    def kept(self) -> dict[str, Array]:
        parts = jax.tree.leaves(self.state, is_leaf=_keeps)
        return {
            f"{moment}.{name}": getattr(part, key)[name]
            for part in parts
            for key, moment in MOMENTS.items()
            if hasattr(part, key)
            for name in self.variables
        }

    def resume(self, kept: Mapping[str, Array], steps: int) -> None:
        def resumed(part: Any) -> Any:
            if not _keeps(part):
                return part
            moments = {
                key: {name: kept[f"{moment}.{name}"] for name in self.variables}
                for key, moment in MOMENTS.items()
                if hasattr(part, key)
            }
            counts = (
                {"count": jnp.full_like(part.count, steps)} if "count" in part._fields else {}
            )  # hasattr would find tuple.count
            return part._replace(**moments, **counts)

        self.state = jax.tree.map(resumed, self.state, is_leaf=_keeps)


def _keeps(part: Any) -> bool:
    return any(hasattr(part, key) for key in MOMENTS)


def optimizer(recipe: Recipe, variables: Mapping[str, nnx.Param], kinds: Mapping[str, str]) -> Optimizer:
    native = own(recipe, {name: kinds[name] not in recipe.undecayed for name in variables})
    kind = Optimizer if native is None else OwnOptimizer
    rule = kind(OPERATIONS, recipe, variables, kinds, native)
    if native is not None:
        rule.state = native.init({name: variable[...] for name, variable in variables.items()})
    return rule
