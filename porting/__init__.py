"""Weights and tensors of other projects in and out: tables of names and layouts, and the golden files."""
