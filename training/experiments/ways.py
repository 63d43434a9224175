"""In what the models of an experiment differ."""

from __future__ import annotations

from concord.spec.config import EncoderConfig, variant, variants
from concord.spec.errors import SpecError, unknown

EXPERIMENTS = {
    "depth": "one block against two, as NNDL asks",
    "norm-placement": "a norm after each residual sum against one before each sublayer, with and without one at the end",
    "heads": "one head against several of the same width together",
    "variants": "the seven variants, in the same sizes",
}
"""The experiments, and what each compares."""

SIZES = ("num_segments", "d_model", "num_heads", "d_ff", "num_layers", "max_positions", "vocab_size")
"""What variants share in an experiment; segments only where they have some."""

USUAL = {"d_model": 64, "num_heads": 4, "d_ff": 128, "num_layers": 2, "max_positions": 65}
"""Sizes of a model that a machine without accelerators trains in minutes."""


def ways(experiment: str, config: EncoderConfig) -> dict[str, EncoderConfig]:
    """Return the models of an experiment, by what is said of each.

    Args:
        config: what they share.

    Raises:
        UnknownNameError: for an unknown experiment.
        SpecError: if there is nothing to compare.
    """
    match experiment:
        case "depth":
            return {"1 block": config.replace(num_layers=1), "2 blocks": config.replace(num_layers=2)}
        case "norm-placement":
            places = {
                "post-norm": ("post", False),
                "pre-norm": ("pre", False),
                "pre-norm, last norm": ("pre", True),
            }
            return {
                name: config.replace(norm_placement=placement, final_norm=final)
                for name, (placement, final) in places.items()
            }
        case "heads":
            counts = [
                count
                for count in (1, 2, 4, 8, 16)
                if config.d_model % count == 0 and config.d_model // count > 1
            ]
            if len(counts) < 2:
                raise SpecError(
                    f"'d_model' is {config.d_model} but must be even: it is divided among heads [clause=ATT-2]"
                )
            return {
                f"{count} head{'' if count == 1 else 's'}": config.replace(num_heads=count)
                for count in counts
            }
        case "variants":
            return {name: _sized(name, config) for name in variants()}
        case _:
            raise unknown("experiment", experiment, list(EXPERIMENTS))


def _sized(name: str, config: EncoderConfig) -> EncoderConfig:
    """Return a variant in the sizes of another configuration; it keeps its segments if it has any."""
    sizes = {field: getattr(config, field) for field in SIZES if field != "num_segments"}
    return variant(name, **sizes)
