"""Random cases: any configuration of the family on every backend, and each failure made as small as can be."""

from concord.conformance.fuzz import summary
from concord.conformance.fuzz.cases import FuzzCase, case_from
from concord.conformance.fuzz.findings import Failure, Findings
from concord.conformance.fuzz.plan import CHUNK, Plan, sample
from concord.conformance.fuzz.replay import read_found, write_failures
from concord.conformance.fuzz.sets import hunt, places

__all__ = [
    "CHUNK",
    "Failure",
    "Findings",
    "FuzzCase",
    "Plan",
    "case_from",
    "hunt",
    "places",
    "read_found",
    "sample",
    "summary",
    "write_failures",
]
