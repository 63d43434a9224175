"""What is said of a wrong run.

Explanations that were held against all of its cases, and what is seen where none holds.
"""

from concord.conformance.diagnosis.description import Description
from concord.conformance.diagnosis.diagnosis import Diagnosis, diagnose

__all__ = ["Description", "Diagnosis", "diagnose"]
