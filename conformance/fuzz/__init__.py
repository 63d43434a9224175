"""Random cases: any configuration of the family on every backend, and each failure made as small as can be."""

from conformance.fuzz import summary
from conformance.fuzz.cases import FuzzCase, case_from
from conformance.fuzz.findings import Failure, Findings
from conformance.fuzz.plan import CHUNK, Plan, sample
from conformance.fuzz.replay import read_found, write_failures
from conformance.fuzz.spread import hunt, places

__all__ = ["CHUNK", "Failure", "Findings", "FuzzCase", "Plan", "case_from", "hunt", "places", "read_found", "sample", "summary", "write_failures"]
