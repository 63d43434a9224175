"""Lockstep training: backends process the same batches, step by step."""
