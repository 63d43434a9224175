"""Right variations: the ways to compute a step that the specification admits, each as a backend that must
not be flagged.
"""
