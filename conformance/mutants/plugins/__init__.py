"""A backend class for each framework, to be opened as ``conformance.mutants.plugins.NAME:Mutated``."""
