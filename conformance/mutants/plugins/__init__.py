"""Backends with bugs: ``concord.conformance.mutants.plugins.NAME:Mutated``."""
