"""Bugs of training: step edits, injected into backends and recomputed on the reference's tape."""
