"""Mutants: bugs injected into a backend, to prove that the judge finds and names them."""
