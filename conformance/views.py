"""A record's data as objects that the page is made of."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from concord.conformance import drawing
from concord.conformance.campaign import FAILED_WORKER, NOT_JUDGED
from concord.conformance.report import SHORT, WORST_FIRST, number

SIGNS = {"agrees": "✓", "diverges": "✗", "undetermined": "?", "unsupported": "–", "absent": "–", "refused": "✗", "nondeterministic": "✗"}
TONES = {"agrees": "good", "diverges": "bad", "nondeterministic": "bad", "unsupported": "quiet", "absent": "quiet", "undetermined": "quiet"}
NUMBERS = (int, float, type(None))
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True)
class Error:
    """What is known of a tensor's error, judged in one way."""

    z: float
    rms: float
    ratio: float
    spread: list[int]


@dataclass(frozen=True)
class Tensor:
    """One tensor of a run."""

    name: str
    clause: str
    status: str
    ratio: float
    local: Error | None
    end_to_end: Error | None

    def level(self, kind: str) -> int | None:
        """Return the level of its error; what could not be compared at all is of the last, both ways."""
        error: Error | None = getattr(self, kind)
        if error is None:
            return len(drawing.LEVELS) if self.status == "diverges" and not (self.local or self.end_to_end) else None
        return drawing.level(error.ratio, beyond=self.status == "diverges" and error is (self.local or self.end_to_end))


@dataclass(eq=False)
class Run:
    """One result, with what the page says of it."""

    backend: str
    group: str
    case: str
    part: str
    dtype: str
    status: str
    detail: str
    stderr: str = ""
    worst: float = 0.0
    first: str | None = None
    cause: dict[str, Any] | None = None
    diagnosis: dict[str, Any] | None = None
    attribution: str = ""
    repeats: dict[str, Any] | None = None
    tensors: list[Tensor] = field(default_factory=list)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def short(self) -> str:
        """The precision in few letters."""
        return SHORT.get(self.dtype, self.dtype)

    @property
    def gravity(self) -> tuple[int, float]:
        """What runs are sorted by, the worst first."""
        return WORST_FIRST.index(self.status), -self.worst

    @property
    def word(self) -> str:
        """What became of it, in a word or a number."""
        return number(self.worst) if self.status in ("agrees", "diverges") else self.status

    @property
    def sign(self) -> str:
        """The same as one sign."""
        return SIGNS.get(self.status, "!")

    @property
    def tone(self) -> str:
        """The class of its colour."""
        return TONES.get(self.status, "broken")

    @property
    def seen(self) -> list[str]:
        """What is said of it besides a cause: what is seen, where the cause is not certain, and notes."""
        if self.diagnosis is None:
            return []
        description = self.diagnosis["description"]
        shown = [description["text"]] if description and not (self.cause and self.cause["confident"]) else []
        return [*shown, *self.diagnosis["notes"]]

    @property
    def largest(self) -> Tensor | None:
        """The tensor with the largest error."""
        judged = [tensor for tensor in self.tensors if tensor.status in ("agrees", "diverges")]
        return max(judged, key=lambda tensor: tensor.ratio, default=None)

    @property
    def beyond(self) -> list[Tensor]:
        """The tensors beyond their tolerance."""
        return [tensor for tensor in self.tensors if tensor.status == "diverges"]


@dataclass(frozen=True)
class Case:
    """All runs of one case."""

    anchor: str
    name: str
    group: str
    part: str
    runs: list[Run]

    @property
    def worst(self) -> Run:
        """The run that speaks for all."""
        return min(self.runs, key=lambda run: run.gravity)

    @property
    def order(self) -> int:
        """0 where something diverges, 1 where a run failed, 2 otherwise."""
        found = {run.status for run in self.runs}
        return 0 if "diverges" in found else 1 if found & {*FAILED_WORKER, NOT_JUDGED, "refused", "nondeterministic"} else 2

    @property
    def dtypes(self) -> list[str]:
        """Its precisions."""
        return ordered(run.dtype for run in self.runs)

    def of(self, dtype: str) -> list[Run]:
        """Return the runs of a precision."""
        return [run for run in self.runs if run.dtype == dtype]

    @property
    def chips(self) -> list[tuple[Run, str]]:
        """For each backend and status that is no agreement, the worst run, and backend and precisions in few letters."""
        odd = [run for run in self.runs if run.status not in ("agrees", "absent", "unsupported")]
        gathered = ([run for run in odd if (run.backend, run.status) == key] for key in dict.fromkeys((run.backend, run.status) for run in odd))
        return [(min(found, key=lambda run: run.gravity), f"{tail(found[0].backend)} {self.precisions(found)}".strip()) for found in gathered]

    @property
    def silent(self) -> list[tuple[Run, str]]:
        """Runs of which there is nothing to draw: one for all precisions of a backend with the same reason."""
        mute = [run for run in self.runs if not run.tensors or run.status == "undetermined"]
        keys = dict.fromkeys((run.backend, run.status, run.detail) for run in mute)
        gathered = ([run for run in mute if (run.backend, run.status, run.detail) == key] for key in keys)
        return [(found[0], ", ".join(run.dtype for run in found)) for found in gathered]

    def precisions(self, runs: Sequence[Run]) -> str:
        """Return the precisions of some runs in few letters; nothing if they are all."""
        return "" if len({run.dtype for run in runs}) == len(self.dtypes) > 1 else " ".join(ordered(run.short for run in runs))


def clean(value: Any) -> Any:
    """Return data without characters that a page must not hold, or that change how others are shown."""
    if isinstance(value, str):
        return CONTROL.sub("", value)
    if isinstance(value, Mapping):
        return {clean(key): clean(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [entry if type(entry) in NUMBERS else clean(entry) for entry in value]
    return value


def ordered(values: Iterable[str]) -> list[str]:
    """Return each value once, in the order in which they come."""
    return list(dict.fromkeys(values))


def run_of(result: Mapping[str, Any], data: Mapping[str, Any]) -> Run:
    """Return one result of a record."""
    run = Run(**{key: result[key] for key in ("backend", "group", "case", "part", "dtype", "status", "detail")}, stderr=result.get("stderr", ""))
    run.attribution, run.repeats, run.diagnosis = result.get("attribution", ""), result.get("repeats"), result.get("diagnosis")
    if "measures" in result:
        run.worst, run.first, run.cause = float(result["worst"]), result["first_divergence"], result["cause"]
        run.rows = {row["tensor"]: row for row in result["tensors"]}
        run.tensors = _tensors(result["measures"], data["tables"][result["table"]], data["limits"])
    return run


def _ratio(z: float, rms: float, spread: Sequence[int], limits: Mapping[str, Any]) -> float:
    """Return an error in tolerances: one element of a tensor may err as much as any."""
    mean: float = math.sqrt(limits["rms"] ** 2 + (limits["z"] ** 2 - limits["rms"] ** 2) / max(sum(spread), 1))
    return max(z / float(limits["z"]), rms / mean)


def _tensors(measures: Mapping[str, Any], table: Mapping[str, Any], limits: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors of a run out of their columns."""

    def errors(kind: str) -> list[Error | None]:
        columns = measures[kind]
        if columns is None:
            return [None] * len(table["tensors"])
        return [
            None if z is None or rms is None else Error(float(z), float(rms), _ratio(float(z), float(rms), spread or [], limits), spread or [])
            for z, rms, spread in zip(columns["z"], columns["rms"], columns["spread"], strict=True)
        ]

    columns = (table["tensors"], table["clauses"], measures["status"], map(float, measures["ratio"]), errors("local"), errors("end_to_end"))
    return [Tensor(*entries) for entries in zip(*columns, strict=True)]


def cases_of(runs: Sequence[Run]) -> list[Case]:
    """Return the cases: those that diverge first, then those with failed runs, then the others, each in the order of the runs."""
    gathered: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        gathered.setdefault((run.group, run.case, run.part), []).append(run)
    cases = [Case(f"case-{place}", case, group, part, found) for place, ((group, case, part), found) in enumerate(gathered.items(), 1)]
    return sorted(cases, key=lambda case: case.order)


def tail(name: str) -> str:
    """Return the name of a backend without the module that it comes from."""
    return name.rpartition(":")[2] or name
