"""The judge: expected values, tolerances, and the verdict."""
