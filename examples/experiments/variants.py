"""Variants: every published source in the same sizes."""

from comparison import SIZES, Models, compare

from concord import spec


def models(config: spec.EncoderConfig) -> Models:
    """Return the models by name."""
    room = {"max_positions": config.max_positions, "vocab_size": config.vocab_size}
    return {name: spec.variant(name, **SIZES, **room) for name in spec.variants()}


if __name__ == "__main__":
    compare(__doc__, models)
