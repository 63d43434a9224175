"""Training in lockstep: backends process the same batches, and each step is judged."""
