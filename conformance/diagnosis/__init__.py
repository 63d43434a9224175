"""What is said of a wrong run.

Explanations that were held against all of its cases, and what is seen where none holds.
"""

from concord.conformance.diagnosis.said import Description, Diagnosis

__all__ = ["Description", "Diagnosis"]
