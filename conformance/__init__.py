"""That they agree: cases, tolerances, verdicts, and the pytest suite itself."""

from conformance.campaign import Job, Repeats, Report, Result, Settings, conduct
from conformance.check import check_jobs
from conformance.comparison import Row, Verdict
from conformance.expectation import Expectation
from conformance.judging import judge
from conformance.tolerance import expect

__all__ = ["Expectation", "Job", "Repeats", "Report", "Result", "Row", "Settings", "Verdict", "check_jobs", "conduct", "expect", "judge"]
