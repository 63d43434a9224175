"""That they agree: cases, tolerances, verdicts, and the pytest suite itself."""

from concord.conformance.again import Repeats
from concord.conformance.campaign import Job, Report, Result, Settings, conduct
from concord.conformance.check import check_jobs
from concord.conformance.comparison import Row, Verdict
from concord.conformance.expectation import Expectation
from concord.conformance.judging import judge
from concord.conformance.tolerance import expect

__all__ = [
    "Expectation",
    "Job",
    "Repeats",
    "Report",
    "Result",
    "Row",
    "Settings",
    "Verdict",
    "check_jobs",
    "conduct",
    "expect",
    "judge",
]
