"""Explanations of a divergence: hypotheses tested by recomputation, and descriptions.

A hypothesis is one bug. It explains the first wrong tensor if recomputation with this bug agrees within
tolerance. Otherwise a description states which elements are wrong (decision 19).
"""
