"""Mutants: injected bugs that the judge must find and name."""
