"""The classifier in JAX, with Flax NNX modules."""
