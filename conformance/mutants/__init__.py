"""Mutants: bugs that are put into a backend on purpose, to prove that the judge finds and names them."""
