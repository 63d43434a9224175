"""What training computes: recipes, schedules, optimizers, dropout. Clauses OPT and DRP of SPEC.md."""
