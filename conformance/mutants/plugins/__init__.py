"""Backends with bugs on request, opened as ``concord.conformance.mutants.plugins.NAME:Mutated``."""
