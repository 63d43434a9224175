"""Training in the specification: recipes, schedules, optimizers, dropout (SPEC OPT, DRP)."""
