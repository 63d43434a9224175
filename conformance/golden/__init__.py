"""Tensors that the published sources computed, and what reads them."""
