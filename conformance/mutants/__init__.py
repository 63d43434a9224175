"""Mutants: injected bugs, which prove that the judge finds and names them."""
