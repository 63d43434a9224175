"""Training (SPEC OPT, DRP)."""
