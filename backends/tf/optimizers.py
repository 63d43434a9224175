"""Keras' optimizer if it can compute a recipe, otherwise :mod:`concord.backends.update_rules`."""

from collections.abc import Mapping

import keras
import tensorflow as tf
from tensorflow import Tensor

from concord.backends.update_rules import Operations, Optimizer
from concord.spec.training.recipe import Recipe
from concord.spec.training.reference_optimizer import moments

# The order of Keras' variables: group by group, and by parameter within each group.
ORDER = {
    "sgd": (("momentum",),),
    "adam": (("first_moment", "second_moment"), ("largest_second_moment",)),
    "rmsprop": (("second_moment",), ("momentum",), ("first_moment",)),
}


OPERATIONS = Operations(
    tf.convert_to_tensor,
    lambda variable, value: variable.assign(value),
    tf.zeros_like,
    tf.sqrt,
    tf.maximum,
    lambda tensor, limit: tf.clip_by_value(tensor, -limit, limit),
    tf.reduce_sum,
    tf.where,
)


def own(recipe: Recipe, dtype: str) -> keras.optimizers.Optimizer | None:
    # Keras stores the learning rate as float32, which is too coarse for float64 runs (decision 0023).
    if recipe.embedding_updates == "lazy" or recipe.decay_form in ("alone", "coupled") or dtype == "float64":
        return None
    rate, decay = recipe.learning_rate, recipe.weight_decay or None
    if recipe.algorithm == "adam" and recipe.epsilon_placement == "uncorrected" and recipe.bias_correction:
        return keras.optimizers.Adam(
            rate, recipe.beta1, recipe.beta2, recipe.epsilon, recipe.amsgrad, weight_decay=decay
        )
    if recipe.momentum and recipe.momentum_form == "velocity":
        return None
    if recipe.algorithm == "sgd":
        return keras.optimizers.SGD(rate, recipe.momentum, recipe.nesterov, weight_decay=decay)
    if recipe.algorithm == "rmsprop" and recipe.epsilon_placement == "inside" and not recipe.nesterov:
        return keras.optimizers.RMSprop(
            rate, recipe.beta2, recipe.momentum, recipe.epsilon, recipe.centered, weight_decay=decay
        )
    return None


class OwnOptimizer(Optimizer):
    """Keras' optimizer."""

    def step(
        self, gradients: Mapping[str, Tensor], numbers: Mapping[str, Tensor], rows: Mapping[str, Tensor]
    ) -> None:
        self.native.learning_rate.assign(tf.cast(numbers["rate"], self.native.learning_rate.dtype))
        self.native.apply([gradients[name] for name in self.variables], list(self.variables.values()))

    def _held(self) -> dict[str, keras.Variable]:
        variables = iter(self.native.variables[2:])  # the first two are the step count and the learning rate
        return {
            f"{moment}.{name}": next(variables)
            for group in ORDER[self.recipe.algorithm]
            for name in self.variables
            for moment in group
            if moment in moments(self.recipe)
        }

    def kept(self) -> dict[str, Tensor]:
        return {name: self._signed(variable.value) for name, variable in self._held().items()}

    def resume(self, kept: Mapping[str, Tensor], steps: int) -> None:
        self.native.iterations.assign(steps)
        for name, variable in self._held().items():
            variable.assign(self._signed(kept[name]))

    def _signed(self, tensor: Tensor) -> Tensor:
        # Keras adds the displacement, so it stores its negative.
        return -tensor if self.recipe.algorithm == "sgd" else tensor


def optimizer(recipe: Recipe, variables: Mapping[str, keras.Variable], kinds: Mapping[str, str]) -> Optimizer:
    native = own(recipe, next(iter(variables.values())).dtype)
    if native is not None:
        undecayed = [variable for name, variable in variables.items() if kinds[name] in recipe.undecayed]
        if recipe.weight_decay:
            native.exclude_from_weight_decay(var_list=undecayed)
        native.build(list(variables.values()))
    kind = Optimizer if native is None else OwnOptimizer
    return kind(OPERATIONS, recipe, variables, kinds, native)
