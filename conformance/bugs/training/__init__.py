"""Bugs of training, injected into backends and recomputed on the reference's tape."""
