"""What a certificate says, as data: the keys of its JSON are the fields here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from concord.conformance import record
from concord.conformance.campaign import Report
from concord.conformance.fields import Config, Count, Number, also, among
from concord.conformance.mutants.matrix import Finding
from concord.conformance.verdict import FAILED_WORKER, NOT_JUDGED
from concord.porting.comparison.checkpoints import Comparison
from concord.porting.recognition import AUTO
from concord.spec.errors import SpecError, located
from concord.spec.files import LARGEST, parse_json, read_bytes
from concord.spec.precision import PRECISIONS

Status = Literal["proven", "failed", "not applicable", "unverified"]
"""What a claim came to."""

PROVEN: Final = "proven"
FAILED: Final = "failed"
NOT_APPLICABLE: Final = "not applicable"
UNVERIFIED: Final = "unverified"

OTHERS: Final = "tensors that are no parameters"
"""The claim about heads that the family does not have, and whatever else its models do not."""

BITS, OUTPUTS = "bits", "outputs"
"""The two that look for mutants: the comparison of bits, and the judge of outputs."""

HOW = ("device", "implementation", "execution", "precision", "deterministic")
"""What a certificate states of how backends run; the rest is the machine's."""


@dataclass(frozen=True)
class HashedFile:
    """A file of a checkpoint.

    Attributes:
        sha256: of its bytes.
        size: how many they are.
    """

    sha256: str
    size: Count


@dataclass(frozen=True)
class HashedTensor:
    """A tensor of a checkpoint: a parameter, or what else lies in its file.

    Attributes:
        name: of the parameter that it is, or is a copy of; empty: of none.
        foreign: its name in the file; empty: it is in none.
        status: what became of it, one of :data:`concord.porting.checkpoint.Status`.
        layout: of a parameter, one of :data:`concord.spec.sources.layouts.WEIGHT_LAYOUTS`.
        dtype, shape: of a parameter the canonical shape, else that in the file.
        sha256: of its bits, of a parameter in the canonical layout.
        reason: why it is no parameter.
    """

    name: str
    foreign: str
    status: str
    layout: str
    dtype: str
    shape: tuple[Count, ...]
    sha256: str
    reason: str = ""

    @property
    def held(self) -> tuple[str, str]:
        """What it holds (:attr:`concord.porting.LazyTensor.held`)."""
        return self.dtype, self.sha256


@dataclass(frozen=True)
class PortSide:
    """One of the two checkpoints.

    Attributes:
        path: as it was given.
        format: one of :func:`concord.porting.formats`.
        recognised: how that was known, in words.
        part: of the model that it has.
        config: the member of the family that it is.
        files: every file that lies there, by name.
        parameters: by canonical name, in the order of computation.
        others: the other tensors of its file.
    """

    path: str
    format: str
    recognised: str
    part: str
    config: Config
    files: Mapping[str, HashedFile]
    parameters: Mapping[str, HashedTensor]
    others: tuple[HashedTensor, ...]


@dataclass(frozen=True)
class Claim:
    """A claim, and what it came to.

    Attributes:
        name: what is claimed.
        status: proven, failed, not applicable or unverified.
        reason: how that is known, or why it is not.
        backend: that computed it; empty: none.
        dtype: in which precision.
        worst: the largest error, in tolerances: up to 1 is rounding.
        tensor: where that is.
    """

    name: str
    status: Status
    reason: str
    backend: str = ""
    dtype: str = ""
    worst: Number | None = None
    tensor: str = ""


Rows = Sequence[tuple[Sequence[int], Sequence[int]]]
"""The ids and segments of each text."""

Extent = Literal["quick", "usual", "all"]
"""How much is looked at: of ``quick`` files, bits and one forward pass; ``usual`` runs nothing once bits have
failed."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a certificate is made with: made again with the same, it must say the same.

    Attributes:
        source_format, target_format: of :func:`concord.porting.formats`, or ``"auto"``.
        source_table: the file with names and layouts of the source in place of its format's.
        backends: that compute the target; empty: that of the target's format.
        home: the backend that computes the source; empty: that of its format.
        texts: ids and segments of each sentence; none: drawn.
        dtypes: the precisions; empty: those that are usual.
        seed: of what is drawn.
        extent: how much is looked at.
    """

    source_format: str = AUTO
    target_format: str = AUTO
    source_table: str | None = None
    backends: list[str] = field(default_factory=list)
    home: str = ""
    texts: Rows | None = None
    dtypes: list[Annotated[str, among(*PRECISIONS)]] = field(default_factory=list)
    seed: int = 0
    extent: Extent = "usual"

    @property
    def quick(self) -> bool:
        """Whether one forward pass is all that is computed."""
        return self.extent == "quick"


@dataclass(frozen=True)
class Certificate:
    """A certificate of a port.

    Attributes:
        source, target: the two checkpoints.
        asked: what it was made with.
        compared: how the two differ.
        inputs: what the target was run on: what each name means.
        report: the runs of the target, and of the source in its own framework, by the groups of these names.
        mutants: what came of each change of a tensor, for the comparison of bits and for the judge of
            outputs; the mutant is called by the kind of change.
        claims: what all of it comes to.
    """

    as_written = also("verdict")

    source: PortSide
    target: PortSide
    asked: Asked
    compared: Comparison
    inputs: Mapping[str, str]
    report: Report
    mutants: tuple[Finding, ...]
    claims: tuple[Claim, ...]

    def contradictions(self) -> Iterator[str]:
        """Yield where statuses of runs are not what verdicts come to, and how many runs are missing."""
        yield from self.report.contradictions()
        if self.report.unfinished:
            yield f"report.unfinished is {self.report.unfinished} but a certificate needs every run"

    @property
    def exit_code(self) -> int:
        """How a command ends: 0 if nothing failed, 1 if something did, 3 if no output could be judged.

        The last too if a backend that was to compute the target crashed or is missing.
        """
        if any(claim.status == FAILED for claim in self.claims):
            return 1
        lost = any(result.status in (*FAILED_WORKER, NOT_JUDGED) for result in self.report.results)
        judged = any((claim.name, claim.status) == (OUTPUTS, PROVEN) for claim in self.claims)
        return 3 if lost or not judged else 0

    @property
    def verdict(self) -> str:
        """What the claims come to, in a sentence."""
        names = {
            status: list(dict.fromkeys(claim.name for claim in self.claims if claim.status == status))
            for status in (FAILED, UNVERIFIED)
        }
        if names[FAILED]:
            return f"The port is wrong: {', '.join(names[FAILED])} failed."
        unverified = names[UNVERIFIED]
        proven = sum(claim.status == PROVEN for claim in self.claims)
        by_bits = [one.status for one in self.mutants if one.backend == BITS and one.status != "equivalent"]
        rest = f"; not verified: {', '.join(unverified)}" if unverified else ""
        whole = OTHERS not in unverified
        begin = "The target is the source" if whole else "The parameters of the target are the source's"
        if OUTPUTS in unverified:
            begin = "Nothing is known to be wrong, but what the target computes was not judged"
        return (
            f"{begin}: {proven} of {len(self.claims)} claims are proven and none failed{rest}. Of "
            f"{len(by_bits)} changes that were made to try it, it notices {by_bits.count('found')}."
        )


KIND = "certificate"
CLASS = "concord.porting.certificate.certificate:Certificate"


def recorded(found: Certificate) -> record.Record:
    """Return a certificate as a record, as its file is read: errors have the digits that are written."""
    made = record.made(found, KIND, f"{Path(found.source.path).name} as {Path(found.target.path).name}")
    return record.parsed(record.text(made).encode(), {KIND: CLASS})


def text(made: record.Record) -> str:
    """Return a certificate as JSON text, sealed."""
    return record.lines(seal(record.data(made)))


def seal(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return data with the SHA-256 of all the rest of it, as JSON with sorted keys and nothing between."""
    rest = {key: value for key, value in data.items() if key != "digest"}
    canonical = json.dumps(
        json.loads(record.lines(rest)), sort_keys=True, separators=(",", ":"), allow_nan=False
    )
    return {**rest, "digest": hashlib.sha256(canonical.encode()).hexdigest()}


def read(path: Path) -> record.Record:
    """Read a certificate, whose record it returns.

    Raises:
        SpecError: if it is none, or one byte is not as it was written.
    """
    content = read_bytes(path, LARGEST)
    data = parse_json(content, str(path))
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise SpecError(f"{path}: holds no certificate: 'concord certify' writes them")
    with located(str(path)):
        sealed = seal(data)
        if data.get("digest") != sealed["digest"]:
            raise SpecError(
                f"was altered: its digest is {data.get('digest')!s:.16}… but what it says has "
                f"{sealed['digest']:.16}…"
            )
        if content != record.lines(data).encode():
            raise SpecError("was altered: it says the same, but is not laid out as it was written")
        return record.parsed(content, {KIND: CLASS})
