"""Printed results."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap
from pathlib import Path

from rich.box import HEAVY_HEAD, MARKDOWN, Box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from concord.conformance.explain.conclusions import Conclusion
from concord.conformance.explain.partial_model import role_of
from concord.conformance.judging.verdict import (
    ACCEPTED,
    FAILED_WORKER,
    NOT_JUDGED,
    STATUSES,
    Result,
    divergence_lines,
    number,
    unjudged_lines,
)
from concord.conformance.run.campaign import Report
from concord.conformance.wording import counted, few, gather, markdown_table
from concord.spec.deviations import KNOWN_DEVIATIONS
from concord.spec.errors import SpecError
from concord.spec.files import read_text

SHORT = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def gravity(result: Result) -> tuple[int, float]:
    """Sort key of results, worst first."""
    return [*STATUSES].index(result.status), -result.worst


@dataclass(frozen=True)
class FirstDivergence:
    """Runs of a backend that first diverge at the same tensor."""

    results: list[Result]
    together: list[Conclusion]  # conclusions from several cases

    @cached_property
    def result(self) -> Result:
        """The run with a known cause, or the largest error."""

        def order(result: Result) -> tuple[bool, bool, float]:
            cause = result.verdict.cause if result.verdict else None
            return cause is None or not cause.confident, cause is None, -result.worst

        return min(self.results, key=order)

    @property
    def others(self) -> list[Result]:
        """The remaining runs."""
        return [result for result in self.results if result is not self.result]


def findings_of(report: Report) -> list[FirstDivergence]:
    """First divergences, grouped by backend and tensor."""
    wrong = [
        (result, role_of(row.tensor))
        for result in report.results
        if result.status != ACCEPTED and (row := result.first_divergence)
    ]
    return [
        FirstDivergence(
            [result for result, _ in entries],
            [
                conclusion
                for conclusion in report.conclusions
                if len(entries) > 1 and (conclusion.backend, conclusion.tensor) == key
            ],
        )
        for key, entries in gather(wrong, lambda entry: (entry[0].backend, entry[1])).items()
    ]


STYLES = {
    "agrees": "green",
    "diverges": "bold red",
    "nondeterministic": "red",
    "absent": "dim",
    "unsupported": "dim",
    "undetermined": "yellow",
    ACCEPTED: "yellow",
}


def word(result: Result) -> str:
    """A run's largest error, or its status."""
    return number(result.worst) if result.status in ("agrees", "diverges") else result.status


def tail(name: str) -> str:
    """A backend's name without its module."""
    return name.rpartition(":")[2] or name


def ordered(values: Iterable[str]) -> list[str]:
    """Unique values in order of first occurrence."""
    return list(dict.fromkeys(values))


def select(report: Report, **fields: str) -> list[Result]:
    """Results with these fields."""
    return [
        result
        for result in report.results
        if all(getattr(result, key) == value for key, value in fields.items())
    ]


def matrix(report: Report) -> dict[str, dict[str, dict[str, Result | None]]]:
    """The worst result by group, backend and dtype."""
    groups, names, dtypes = (
        ordered(getattr(result, key) for result in report.results) for key in ("group", "backend", "dtype")
    )
    gathered = gather(report.results, lambda result: (result.group, result.backend, result.dtype))

    def worst(*key: str) -> Result | None:
        return min(gathered.get(key, []), key=gravity, default=None)

    return {
        group: {name: {dtype: worst(group, name, dtype) for dtype in dtypes} for name in names}
        for group in groups
    }


def cell(dtype: str, result: Result | None) -> Text:
    """A dtype's entry in the table."""
    if result is None:
        return Text(f"{SHORT.get(dtype, dtype)} –", style="dim")
    sign = {"agrees": " ✓", "diverges": " ✗"}.get(result.status, "")
    return Text(
        f"{SHORT.get(dtype, dtype)} {word(result)}{sign}", style=STYLES.get(result.status, "bold magenta")
    )


def table(report: Report, group: str = "variant") -> Table:
    """Table of worst errors in tolerances."""
    verdicts = Table()
    verdicts.add_column(group, no_wrap=True)
    for name in ordered(result.backend for result in report.results):
        verdicts.add_column(Text(name), justify="right", overflow="fold")
    for entry, backends in matrix(report).items():
        verdicts.add_row(
            Text(entry), *(Group(*starmap(cell, by_dtype.items())) for by_dtype in backends.values())
        )
    return verdicts


def reason(result: Result) -> str:
    """Why a result does not agree, and what is known about that."""
    why = result.verdict.reason if result.verdict else ""
    return "; ".join(filter(None, (why or result.detail, result.attribution)))


def candidates_table(results: Sequence[Result], reference: float = 0.0) -> Table:
    """Tabulate candidates; ``reference`` is the reference's time in milliseconds."""
    timed = any(result.milliseconds for result in results)
    several_cases = len({result.case for result in results}) > 1
    grid = Table("candidate", *(["inputs"] * several_cases), "verdict", Column("worst", justify="right"))
    grid.add_column("first wrong tensor, and why", overflow="fold")
    if timed:
        grid.add_column("ms", justify="right")
    if reference:
        grid.add_row("the reference", *[""] * (len(grid.columns) - 2), f"{reference:.3g}")
    for result in results:
        grid.add_row(
            Text(result.backend),
            *([Text(result.case)] * several_cases),
            Text(result.status, style=STYLES.get(result.status, "bold magenta")),
            number(result.worst) if result.verdict else "",
            Text(reason(result)),
            *([f"{result.milliseconds:.3g}" if result.milliseconds else ""] * timed),
        )
    return grid


def candidates_text(
    results: Sequence[Result], reference: float = 0.0, width: int = 110, box: Box = HEAVY_HEAD
) -> str:
    """That table as text, at most ``width`` wide."""
    text, grid = io.StringIO(), candidates_table(results, reference)
    grid.box = box
    Console(file=text, width=width, color_system=None).print(grid)
    return text.getvalue().strip()


def candidates_markdown(report: Report) -> str:
    """The table of candidates in Markdown."""
    text = candidates_text(report.results, report.milliseconds, 10_000, MARKDOWN)
    narrow = re.sub(r"( |---)\1+", r"\1", text)
    return f"{narrow}\n\n{summary(report)}.\n"


def markdown(report: Report) -> str:
    """The table in Markdown."""
    names = ordered(result.backend for result in report.results)
    lines = [["variant", *names], ["---", *["---:"] * len(names)]]
    for entry, backends in matrix(report).items():
        cells = (
            ", ".join(cell(*entry_of_dtype).plain for entry_of_dtype in by_dtype.items())
            for by_dtype in backends.values()
        )
        lines.append([f"`{entry}`", *cells])
    versions = ", ".join(
        f"{name} {about['version']}" for name, about in report.environments.items() if "version" in about
    )
    return f"{markdown_table(lines)}\n\n{summary(report)}; {versions}.\n"


def runs(report: Report) -> str:
    """A tab-separated line per run."""
    rows = [("backend", "group", "case", "part", "dtype", "status", "tolerances", "tensor", "note")]
    for result in report.results:
        row = result.first_divergence or (result.verdict and result.verdict.nearest)
        ratio = number(row.ratio) if row else ""
        bits = f"different bits in {len(result.differing)} tensors" if result.differing else "the same bits"
        again = f"{result.times} runs, {bits}" if result.times > 1 else ""
        note = result.detail or result.attribution or (row.note if row else "") or again
        about = (result.backend, result.group, result.case, result.part, result.dtype, result.status)
        rows.append((*about, ratio, row.tensor if row else "", note))
    return "".join("\t".join(" ".join(text.split()) for text in row) + "\n" for row in rows)


def within(path: Path, name: str, text: str) -> str:
    """Replace the text between markers in a file."""
    begin, end = (f"<!-- {which} {name} -->" for which in ("begin", "end"))
    match = re.fullmatch(rf"(.*?{re.escape(begin)}\r?\n).*?({re.escape(end)}.*)", read_text(path), re.DOTALL)
    if not match:
        raise SpecError(f"{path} lacks the lines '{begin}' and '{end}'")
    before, after = match.groups()
    return before + (text.replace("\n", "\r\n") if before.endswith("\r\n") else text) + after


def failures(report: Report, details: int = 4, why: bool = True) -> RenderableType:
    """Describe first divergences, and backends without a result; ``why``: with reasons."""
    lines: list[RenderableType] = []
    by_backend = gather(findings_of(report), lambda finding: finding.result.backend)
    for name, results in gather(report.results, lambda result: result.backend).items():
        findings = by_backend.get(name, [])
        for finding in findings[:details]:
            head, *rest = divergence_lines(finding.result)
            lines += [Text(head, style="bold red"), *map(indented, rest)]
            for entry in finding.together:
                lines.append(indented(f"  {entry.text}", style="bold"))
            if finding.others:
                others = few(
                    f"{entry.case} {SHORT.get(entry.dtype, entry.dtype)} ({number(entry.worst)})"
                    for entry in finding.others
                )
                lines.append(indented(f"  likewise in {counted(len(finding.others), 'run')}: {others}"))
        if remainder := findings[details:]:
            lines.append(
                Text(
                    f"{name}: {sum(len(finding.results) for finding in remainder)} more runs diverge "
                    f"first at {len(remainder)} other tensors (--html and --json show them all)",
                    style="red",
                )
            )
        verdicts = [result.verdict for result in results if result.verdict]
        lines += _counted(name, (x for v in verdicts if why or v.first for x in unjudged_lines(v)))
        lines += _explanations(name, [result for result in results if result.detail], why)
        lines += _counted(name, (verdict.unchecked for verdict in verdicts if verdict.unchecked))
    return Group(*lines)


def indented(line: str, style: str = "") -> RenderableType:
    """Return a line that wraps at its indentation."""
    text = line.lstrip(" ")
    return Padding(Text(text, style=style), (0, 0, 0, len(line) - len(text)), expand=False)


def _counted(name: str, texts: Iterable[str]) -> list[Text]:
    return [
        Text(f"{name}: {text} [{counted(count, 'run')}]", style="yellow")
        for text, count in Counter(texts).most_common(3)
    ]


def _explanations(name: str, results: Sequence[Result], why: bool) -> list[Text]:
    lines = []
    for (status, detail), alike in gather(results, lambda result: (result.status, result.detail)).items():
        style = "dim" if status in ("unsupported", "absent") else "bold magenta"
        note = " (not requested)" if status == "absent" else ""
        text = f": {detail} [{counted(len(alike), 'run')}: {few((result.case for result in alike), 1)}]"
        words = alike[0].stderr.splitlines()[-3:] if status in (NOT_JUDGED, *FAILED_WORKER) else []
        if why or words:
            lines.append(Text(f"{name} {status}{note}{text * why}", style=style))
        lines += [Text(f"  | {line}", style="dim") for line in words]
    return lines


def declarations(report: Report) -> list[str]:
    """Describe declared deviations."""
    return [
        f"{name} declares {entry['name']} = {entry['value']:g} "
        f"(SPEC {KNOWN_DEVIATIONS[entry['name']].clause}): {entry['reason']}"
        for name, about in report.environments.items()
        for entry in about.get("deviations", [])
        if entry.get("name") in KNOWN_DEVIATIONS
    ]


def repeated(results: Sequence[Result]) -> str:
    """Describe whether a backend's repeated runs have the same bits."""
    runs = [result for result in results if result.verdict and result.times > 1]
    if not runs:
        return ""
    differing = [result for result in runs if result.differing]
    head = f"{runs[0].times} runs of {'each of ' * (len(runs) > 1)}{counted(len(runs), 'job')}: "
    if not differing:
        return f"{head}the same bits"
    first, count = differing[0], sum(len(result.differing) for result in differing)
    differ = f"differ in {counted(count, 'tensor')} of {counted(len(differing), 'job')}"
    return f"{head}{differ}, first {first.differing[0]} of {first.case}, {first.dtype}"


def repetitions(report: Report) -> list[str]:
    """Describe each backend's repeated runs."""
    names = ordered(result.backend for result in report.results)
    return [f"{name}: {words}" for name in names if (words := repeated(select(report, backend=name)))]


def verb(status: str, count: int) -> str:
    """A status as a verb of ``count`` runs."""
    return {"agrees": "agree", "diverges": "diverge"}.get(status, status) if count > 1 else status


def summary(report: Report) -> str:
    """Count runs by status."""
    counts = Counter(result.status for result in report.results)
    parts = (
        f"{counts[status]} {verb(status, counts[status])}" for status in reversed(STATUSES) if counts[status]
    )
    sentence = ": ".join(filter(None, (counted(len(report.results), "run"), ", ".join(parts))))
    left = f"; stopped with {counted(report.unfinished, 'run')} left" if report.unfinished else ""
    return sentence + left


def show(report: Report, console: Console, title: str, group: str = "variant") -> None:
    """Print table, failures and summary."""
    report = report.explained()
    console.print(title, style="bold")
    if group == "reference":
        console.print(candidates_table(report.results, report.milliseconds))
        meaning = "Worst: the largest error of any tensor, in tolerances: up to 1 is rounding."
    else:
        console.print(table(report, group))
        meaning = "Each cell: worst error ÷ tolerance, over all tensors of all cases; at most 1 is rounding."
    console.print(meaning, style="dim")
    for result in report.results if group == "reference" else ():
        for note in result.verdict.notes if result.verdict else ():
            case = f", {result.case}" * (len({other.case for other in report.results}) > 1)
            console.print(f"{result.backend}{case}: {note}", style="dim")
    console.print(failures(report, why=group != "reference"))
    for line in [*repetitions(report), *declarations(report)]:
        console.print(line, style="dim")
    for name, note in report.notes.items():
        console.print(f"{name}: {note}", style="dim")
    console.print(summary(report), style="bold")
