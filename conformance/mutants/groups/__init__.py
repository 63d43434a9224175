"""The mutants, one module for each group."""
