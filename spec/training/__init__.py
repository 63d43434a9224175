"""Training in the specification (SPEC OPT, DRP)."""
