"""What a page says of results in a word, a sign and a colour, and how it gathers them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from concord.conformance import drawing
from concord.conformance.report import SHORT, gravity, ordered
from concord.conformance.verdict import FAILED_WORKER, NOT_JUDGED, Judgement, Result, Row, number

SIGNS = {
    "agrees": "✓",
    "diverges": "✗",
    "undetermined": "?",
    "unsupported": "–",
    "absent": "–",
    "refused": "✗",
    "nondeterministic": "✗",
}
TONES = {
    "agrees": "good",
    "diverges": "bad",
    "nondeterministic": "bad",
    "unsupported": "quiet",
    "absent": "quiet",
    "undetermined": "quiet",
}


@dataclass(frozen=True, eq=False)
class CaseResults:
    """All results of one case."""

    anchor: str
    name: str
    group: str
    part: str
    results: list[Result]

    @property
    def worst(self) -> Result:
        """The one that speaks for all."""
        return min(self.results, key=gravity)

    @property
    def order(self) -> int:
        """0 where something diverges, 1 where a run failed, 2 otherwise."""
        found = {result.status for result in self.results}
        return (
            0
            if "diverges" in found
            else 1
            if found & {*FAILED_WORKER, NOT_JUDGED, "refused", "nondeterministic"}
            else 2
        )

    @property
    def dtypes(self) -> list[str]:
        """Its precisions."""
        return ordered(result.dtype for result in self.results)

    def worst_of(self, dtype: str) -> Result:
        """Return the result that speaks for a precision."""
        return min(self.of(dtype), key=gravity)

    def of(self, dtype: str) -> list[Result]:
        """Return the results of a precision."""
        return [result for result in self.results if result.dtype == dtype]

    @property
    def chips(self) -> list[tuple[Result, str]]:
        """For each backend and status that is no agreement, the worst result, and backend and precisions
        in few letters.
        """
        odd = [result for result in self.results if result.status not in ("agrees", "absent", "unsupported")]
        gathered = gather(odd, lambda result: (result.backend, result.status))
        return [
            (min(found, key=gravity), f"{tail(found[0].backend)} {self.precisions(found)}".strip())
            for found in gathered
        ]

    @property
    def silent(self) -> list[tuple[Result, str]]:
        """Results of which there is nothing to draw.

        One for all precisions of a backend with the same reason.
        """
        mute = [result for result in self.results if not result.verdict or result.status == "undetermined"]
        return [
            (found[0], ", ".join(result.dtype for result in found))
            for found in gather(mute, lambda result: (result.backend, result.status, result.detail))
        ]

    def precisions(self, results: Sequence[Result]) -> str:
        """Return the precisions of some results in few letters; nothing if they are all."""
        return (
            ""
            if len({result.dtype for result in results}) == len(self.dtypes) > 1
            else " ".join(ordered(SHORT.get(result.dtype, result.dtype) for result in results))
        )


def gather(results: Iterable[Any], key: Any) -> list[list[Any]]:
    """Return things that share a key together, in the order in which they come."""
    gathered: dict[Any, list[Any]] = {}
    for result in results:
        gathered.setdefault(key(result), []).append(result)
    return list(gathered.values())


def word(result: Result) -> str:
    """Return what became of a run, in a word or a number."""
    return number(result.worst) if result.status in ("agrees", "diverges") else result.status


def rows_of(result: Result) -> list[Row]:
    """Return the tensors of a result."""
    return result.verdict.table if result.verdict else []


def beyond(result: Result) -> list[Row]:
    """Return the tensors of a result that lie beyond their tolerance."""
    return [row for row in rows_of(result) if row.status == "diverges"]


def largest(result: Result) -> Row | None:
    """Return the tensor of a result with the largest error."""
    judged = [row for row in rows_of(result) if row.status in ("agrees", "diverges")]
    return max(judged, key=lambda row: row.ratio, default=None)


def judged(row: Row, way: str) -> Judgement | None:
    """Return what is known of a tensor's error, judged in one way; None if nothing is."""
    judgement: Judgement | None = getattr(row, way)
    return judgement if judgement and judgement.status != "undetermined" else None


def level(row: Row, way: str) -> int | None:
    """Return the level of a tensor's error; what could not be compared at all is of the last, both ways."""
    judgement = judged(row, way)
    if judgement is None:
        return len(drawing.LEVELS) if row.status == "diverges" and row.deciding is None else None
    return drawing.level(judgement.ratio, beyond=row.status == "diverges" and judgement is row.deciding)


def cases_of(results: Sequence[Result]) -> list[CaseResults]:
    """Return the cases: those that diverge first, then those with failed runs, then the others, each in
    the order of the results.
    """
    gathered = gather(results, lambda result: (result.group, result.case, result.part))
    cases = [
        CaseResults(f"case-{place}", found[0].case, found[0].group, found[0].part, found)
        for place, found in enumerate(gathered, 1)
    ]
    return sorted(cases, key=lambda case: case.order)


def tail(name: str) -> str:
    """Return the name of a backend without the module that it comes from."""
    return name.rpartition(":")[2] or name
