"""Explanations of a wrong tensor: hypotheses, each tested by recomputation, and descriptions.

The first wrong tensor is recomputed from the run's own preceding tensors with one bug. A bug explains the
tensor if the result is the run's, within its derived tolerance. Where none does, a description states which
elements are wrong, and how they are related to the right ones (decision 19).
"""
