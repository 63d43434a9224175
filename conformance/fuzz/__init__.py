"""Random cases: any configuration of the family on every backend, and each failure made as small as can
be.
"""

from concord.conformance.fuzz import summary
from concord.conformance.fuzz.cases import FuzzCase
from concord.conformance.fuzz.findings import Failure, Findings
from concord.conformance.fuzz.hunting import hunt
from concord.conformance.fuzz.plan import Plan, sample
from concord.conformance.fuzz.replay import read_found, write_failures

__all__ = [
    "Failure",
    "Findings",
    "FuzzCase",
    "Plan",
    "hunt",
    "read_found",
    "sample",
    "summary",
    "write_failures",
]
