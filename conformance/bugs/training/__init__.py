"""Bugs of training: edits of a step, injected into backends and recomputed on the reference's tape."""
