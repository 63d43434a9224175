"""Faults of conversion: what goes wrong with checkpoints on their way from one framework to another, from real threads, written once."""
