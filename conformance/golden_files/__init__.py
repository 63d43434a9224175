"""Tensors that published sources computed, read into canonical terms."""
