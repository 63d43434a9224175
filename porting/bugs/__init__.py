"""Bugs of conversion: what is put into a checkpoint, and what must be found of it."""
