"""A backend class for each framework, to be opened as
``concord.conformance.mutants.plugins.NAME:Mutated``.
"""
