"""Explanations of a divergence: hypotheses tested by recomputation, and descriptions.

A hypothesis is one bug. It explains the first wrong tensor if recomputation with this bug, from the run's
preceding tensors, agrees within the derived tolerance. If none does, a description states which elements are
wrong and how they relate to the correct ones (decision 19).
"""
