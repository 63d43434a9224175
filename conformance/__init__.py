"""That they agree: cases, tolerances, verdicts, and the pytest suite itself."""

from concord.conformance.campaign import Job, Report, Setup, conduct
from concord.conformance.check import check_jobs
from concord.conformance.expectation import Expectation
from concord.conformance.family import expect, judge
from concord.conformance.verdict import Result, Row, Verdict

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
