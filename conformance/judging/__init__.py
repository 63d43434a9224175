"""The judge: what is right, how far rounding explains, and the verdict."""
