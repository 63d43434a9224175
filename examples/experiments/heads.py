"""Heads: one head against several of the same width together."""

from comparison import Models, compare

from concord.spec import EncoderConfig


def models(config: EncoderConfig) -> Models:
    """Return the models by name."""
    counts = [count for count in (1, 2, 4, 8, 16) if config.d_model % count == 0]
    return {f"{count} heads": config.replace(num_heads=count) for count in counts}


if __name__ == "__main__":
    compare(__doc__, models)
