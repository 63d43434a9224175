"""Reports for CI: JUnit XML and GitHub's annotations."""

from __future__ import annotations

from concord.conformance.judging.verdict import ACCEPTED, FAILED_WORKER, NOT_JUDGED, Result, result_lines
from concord.conformance.run.campaign import Report

OUTCOMES = {
    **dict.fromkeys(("diverges", "refused", "nondeterministic", "undetermined"), "failure"),
    **dict.fromkeys((*FAILED_WORKER, NOT_JUDGED), "error"),
    **dict.fromkeys(("unsupported", "absent", ACCEPTED), "skipped"),
}


def junit_xml(report: Report, title: str) -> str:
    """A report as JUnit XML, with one test per run."""
    from xml.etree import ElementTree  # few commands need it

    suite = ElementTree.Element(
        "testsuite", name=title, tests=str(len(report.results)), time=f"{report.seconds:.3f}"
    )
    for result in report.results:
        attributes = {"classname": f"{result.group}.{result.backend}", "name": _name(result)}
        if result.seconds:  # a candidate's is not measured
            attributes["time"] = f"{result.seconds:.3f}"
        test = ElementTree.SubElement(suite, "testcase", attributes)
        if outcome := OUTCOMES.get(result.status):
            lines, verdict = _lines(result), result.verdict
            message = verdict.headline if verdict and result.status != ACCEPTED else lines[0]
            ElementTree.SubElement(test, outcome, message=message).text = "\n".join(lines)
    outcomes = [OUTCOMES.get(result.status) for result in report.results]
    for outcome, count in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(count, str(outcomes.count(outcome)))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def github_annotations(report: Report) -> list[str]:
    """One line per failed run, which GitHub shows next to a change."""
    lines = []
    for result in report.results:
        if OUTCOMES.get(result.status) in ("failure", "error"):
            text = "\n".join(_lines(result)).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
            lines.append(f"::error title=concord {result.backend} {_name(result)}::{text}".replace("\n", " "))
    return lines


def _lines(result: Result) -> list[str]:
    # A run without a comparison has no verdict, and an accepted divergence needs no other message.
    return [result.attribution] if result.status == ACCEPTED else result_lines(result)


def _name(result: Result) -> str:
    return " ".join(filter(None, (result.case, result.part, result.dtype)))
