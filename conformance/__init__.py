"""Conformance checks: cases, tolerances, verdicts, and the pytest suite."""

from concord.conformance.explain.family_judge import judge
from concord.conformance.judging.expectation import Expectation
from concord.conformance.judging.family import expect
from concord.conformance.judging.verdict import Result, Row, Verdict
from concord.conformance.run.campaign import Job, Report, Setup, conduct
from concord.conformance.run.standard_jobs import check_jobs

__all__ = [
    "Expectation",
    "Job",
    "Report",
    "Result",
    "Row",
    "Setup",
    "Verdict",
    "check_jobs",
    "conduct",
    "expect",
    "judge",
]
