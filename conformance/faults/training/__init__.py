"""Faults of training: one table, injected into the loop that trains a backend, and tried as explanations on the reference."""
