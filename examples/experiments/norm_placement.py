"""Norm placement: after each residual sum, or before each sublayer, with and without a norm at the end."""

from comparison import Models, compare

from concord.spec import EncoderConfig


def models(config: EncoderConfig) -> Models:
    """Return the models by name."""
    return {
        "post-norm": config.replace(norm_placement="post", final_norm=False),
        "pre-norm": config.replace(norm_placement="pre", final_norm=False),
        "pre-norm, final norm": config.replace(norm_placement="pre", final_norm=True),
    }


if __name__ == "__main__":
    compare(__doc__, models)
