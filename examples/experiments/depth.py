"""Depth: one block against two, as NNDL asks."""

from comparison import Models, compare

from concord.spec import EncoderConfig


def models(config: EncoderConfig) -> Models:
    """Return the models by name."""
    return {"1 block": config.replace(num_layers=1), "2 blocks": config.replace(num_layers=2)}


if __name__ == "__main__":
    compare(__doc__, models)
