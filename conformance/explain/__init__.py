"""Explanations of a divergence: hypotheses tested by recomputation, and descriptions.

A bug explains the first wrong tensor if recomputation with it agrees within tolerance. Otherwise a
description states which elements are wrong (decision 19).
"""
