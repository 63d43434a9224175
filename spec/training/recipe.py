"""Training recipes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from concord.spec.errors import ConfigError, unknown
from concord.spec.fields import build, replaced, type_problems
from concord.spec.files import parse_toml, read_text
from concord.spec.precision import precision

CHOICES: dict[str, tuple[str, ...]] = {
    "algorithm": ("sgd", "adam", "rmsprop"),
    "momentum_form": ("velocity", "displacement"),
    "epsilon_placement": ("corrected", "uncorrected", "inside"),
    "decay_form": ("none", "coupled", "times_rate", "alone"),
    "clipping": ("none", "global_norm", "group_norm", "tensor_norm", "value"),
    "embedding_gradients": ("dense", "slices"),
    "embedding_updates": ("dense", "lazy"),
    "schedule": ("constant", "linear", "inverse_square_root", "cosine"),
    "decay_start": ("warmup_end", "first_step"),
    "accumulation_mean": ("configured", "batches", "samples", "labels"),
}
"""Values of each option (SPEC, section 10)."""

RATES = (
    "dropout_embeddings",
    "dropout_weights",
    "dropout_attention",
    "dropout_activation",
    "dropout_feed_forward",
    "dropout_output",
    "dropout_head",
)
"""Dropout rates by kind of site (SPEC DRP-2)."""

KINDS_OF_PARAMETERS = ("embedding", "positions", "kernel", "bias", "gamma", "beta")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training recipe (SPEC OPT-1); unused fields keep their defaults.

    Raises:
        ConfigError: listing all problems.
    """

    algorithm: str  # OPT-2 to OPT-5
    learning_rate: float  # at the schedule's maximum
    # SGD and RMSProp.
    momentum: float = 0.0  # OPT-2
    momentum_form: str = "velocity"  # OPT-2: whether the stored momentum excludes or includes the rate
    dampening: float = 0.0  # OPT-2
    nesterov: bool = False  # OPT-2
    # Adam and RMSProp.
    beta1: float = 0.9  # OPT-3
    beta2: float = 0.999  # OPT-3; RMSProp's share of the old average, OPT-5
    epsilon: float = 1e-8  # OPT-3
    epsilon_placement: str = "corrected"  # OPT-3, OPT-5
    bias_correction: bool = True  # OPT-3
    amsgrad: bool = False  # OPT-4
    centered: bool = False  # OPT-5
    # Decay.
    weight_decay: float = 0.0  # OPT-6
    decay_form: str = "none"  # OPT-6
    undecayed: tuple[str, ...] = ()  # OPT-6: kinds of parameters
    # Clipping.
    clipping: str = "none"  # OPT-7
    clip_at: float | None = None  # OPT-7
    clip_epsilon: float = 0.0  # OPT-7: added to the norm
    embedding_gradients: str = "dense"  # OPT-7: the form of a table's gradient in the norm
    embedding_updates: str = "dense"  # OPT-8
    # Schedule.
    schedule: str = "constant"  # OPT-9
    first_step: int = 1  # OPT-9
    warmup_steps: int = 0  # OPT-9
    total_steps: int | None = None  # OPT-9
    decay_start: str = "warmup_end"  # OPT-9: where linear and cosine decay start
    final_share: float = 0.0  # OPT-9: share of the learning rate at the end of the schedule
    # Accumulation.
    accumulation: int = 1  # OPT-10: batches per step
    accumulation_mean: str = "configured"  # OPT-10
    # Dropout: the dropped share at each site (DRP-2).
    dropout_embeddings: float = 0.0
    dropout_weights: float = 0.0
    dropout_attention: float = 0.0
    dropout_activation: float = 0.0
    dropout_feed_forward: float = 0.0
    dropout_output: float = 0.0
    dropout_head: float = 0.0

    def __post_init__(self) -> None:
        problems = type_problems(self, CHOICES, "OPT-1") or _value_problems(self)
        if problems:
            raise ConfigError(problems)

    def replace(self, **fields: Any) -> Recipe:
        """Return a copy with some fields replaced.

        Raises:
            UnknownNameError: for an unknown field.
            ConfigError: if the result is invalid.
        """
        return replaced(self, "field of a recipe", fields)

    def as_dict(self) -> dict[str, Any]:
        """Fields by name, without absent ones."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


def recipe_from_mapping(fields: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """Build a recipe from plain data.

    Args:
        where: the data's name in messages.

    Raises:
        ConfigError: listing all unknown, missing and wrong fields.
    """
    return build(Recipe, fields, where, "OPT-1")


_RECIPES = Path(__file__).parent / "recipes"


def recipes() -> list[str]:
    """Names of the recipes of published sources and frameworks."""
    return sorted(path.stem for path in _RECIPES.glob("*.toml"))


def recipe(name: str, **fields: Any) -> Recipe:
    """Return a known recipe, with any field replaced, for example ``learning_rate=1e-4``.

    Raises:
        UnknownNameError: for an unknown recipe or field.
        ConfigError: if the result is invalid.
    """
    if name not in recipes():
        raise unknown("recipe", name, recipes())
    path = _RECIPES / f"{name}.toml"
    return recipe_from_mapping(parse_toml(read_text(path), path.name), where=path.name).replace(**fields)


def rounded_hyperparameters(recipe: Recipe, dtype: str) -> list[str]:
    """Return one line per hyperparameter that a precision loses (SPEC OPT-11).

    Raises:
        UnknownNameError: for an unknown precision.
    """
    target, adaptive = precision(dtype), recipe.algorithm != "sgd"
    share = recipe.weight_decay * (recipe.learning_rate if recipe.decay_form == "times_rate" else 1.0)
    averages = {"beta1": recipe.algorithm == "adam", "beta2": adaptive, "momentum": recipe.momentum > 0}
    warnings = []
    for name in ("learning_rate", "momentum", "beta1", "beta2", "epsilon", "weight_decay", "clip_epsilon"):
        value = float(getattr(recipe, name))
        rounded = float(target.round(np.asarray(value)))
        consequence = None
        if averages.get(name) and rounded == 1.0:
            consequence = "the average never decays, and only grows"
        elif name == "epsilon" and adaptive and value and not rounded:
            consequence = "a step divides by zero where a gradient or its square is zero"
        elif name == "epsilon" and adaptive and 0 < rounded < target.smallest_normal:
            consequence = "a device that flushes subnormal numbers divides by zero"
        elif (
            name == "weight_decay"
            and recipe.decay_form in ("times_rate", "alone")
            # A parameter times 1 - share then rounds to itself.
            and 0 < share < target.unit_roundoff / 2
        ):
            below = f"{share:g} of a weight is below half a unit in its last place"
            consequence = f"weight decay has no effect: {below}"
        elif name in ("learning_rate", "weight_decay", "clip_epsilon") and value and not rounded:
            consequence = "it has no effect"
        if consequence:
            change = f"{name} is {value:g} but {rounded:.6g} in {dtype}"
            warnings.append(f"{change}: {consequence} [clause=OPT-11]")
    return warnings


def _value_problems(recipe: Recipe) -> list[str]:
    r = recipe
    problems: list[str] = []

    def require(holds: bool, problem: str) -> None:
        if not holds:
            problems.append(problem)

    for name in (
        "learning_rate",
        "momentum",
        "dampening",
        "epsilon",
        "weight_decay",
        "clip_epsilon",
        "final_share",
    ):
        value = getattr(r, name)
        require(
            math.isfinite(value) and value >= 0,
            f"{name!r} is {value} but must be finite and not negative [clause=OPT-1]",
        )
    for name in RATES:
        require(
            0 <= getattr(r, name) < 1, f"{name!r} is {getattr(r, name)} but must lie in [0, 1) [clause=DRP-2]"
        )
    for name in ("beta1", "beta2"):
        require(
            0 <= getattr(r, name) < 1, f"{name!r} is {getattr(r, name)} but must lie in [0, 1) [clause=OPT-3]"
        )
    require(
        not r.nesterov or (r.momentum > 0 and r.dampening == 0),
        f"'nesterov' is true, so 'momentum' must be positive (it is {r.momentum}) and 'dampening' 0 "
        f"(it is {r.dampening}) [clause=OPT-2]",
    )
    require(
        r.momentum_form == "velocity" or r.dampening == 0,
        f"'dampening' is {r.dampening} but must be 0 with 'momentum_form' 'displacement' [clause=OPT-2]",
    )
    placements = {
        "sgd": ("corrected",),
        "adam": ("corrected", "uncorrected"),
        "rmsprop": ("uncorrected", "inside"),
    }[r.algorithm]
    require(
        r.algorithm == "sgd" or r.epsilon_placement in placements,
        f"'epsilon_placement' is {r.epsilon_placement!r} but must be "
        f"{' or '.join(map(repr, placements))} with 'algorithm' {r.algorithm!r} [clause=OPT-3]",
    )
    require(
        (r.decay_form == "none") == (r.weight_decay == 0) or r.weight_decay == 0,
        f"'weight_decay' is {r.weight_decay} but 'decay_form' is 'none'; it must say how weights "
        "decay [clause=OPT-6]",
    )
    unknown_kinds = sorted(set(r.undecayed) - set(KINDS_OF_PARAMETERS))
    require(
        not unknown_kinds,
        f"'undecayed' names {', '.join(unknown_kinds)} but must name kinds of parameters: "
        f"{', '.join(KINDS_OF_PARAMETERS)} [clause=OPT-6]",
    )
    require(
        (r.clipping == "none") == (r.clip_at is None),
        f"'clip_at' is {r.clip_at} but must be {'absent' if r.clipping == 'none' else 'given'} "
        f"with 'clipping' {r.clipping!r} [clause=OPT-7]",
    )
    require(
        r.clip_at is None or (math.isfinite(r.clip_at) and r.clip_at > 0),
        f"'clip_at' is {r.clip_at} but must be finite and positive [clause=OPT-7]",
    )
    require(r.first_step in (0, 1), f"'first_step' is {r.first_step} but must be 0 or 1 [clause=OPT-9]")
    require(
        r.warmup_steps >= 0, f"'warmup_steps' is {r.warmup_steps} but must not be negative [clause=OPT-9]"
    )
    ends = r.schedule in ("linear", "cosine")
    require(
        ends == (r.total_steps is not None),
        f"'total_steps' is {r.total_steps} but must be {'given' if ends else 'absent'} with "
        f"'schedule' {r.schedule!r} [clause=OPT-9]",
    )
    require(
        r.total_steps is None or r.total_steps > r.warmup_steps,
        f"'total_steps' is {r.total_steps} but must be above 'warmup_steps', which is "
        f"{r.warmup_steps} [clause=OPT-9]",
    )
    require(
        r.schedule != "inverse_square_root" or r.warmup_steps > 0,
        "'warmup_steps' is 0 but must be positive with 'schedule' 'inverse_square_root' [clause=OPT-9]",
    )
    require(r.accumulation >= 1, f"'accumulation' is {r.accumulation} but must be at least 1 [clause=OPT-10]")
    return problems
