"""Bugs of training: an edit of the step each, injected into backends and recomputed on the oracle's tape."""
