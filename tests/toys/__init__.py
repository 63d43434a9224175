"""Backends that need no framework: one that is right, and one for each way of being wrong."""
