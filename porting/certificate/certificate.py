"""What a certificate says, as data: the keys of its JSON are the fields here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from concord.conformance import record
from concord.conformance.campaign import Setup
from concord.conformance.check import DTYPES
from concord.conformance.fields import Count, Number
from concord.conformance.verdict import FAILED_WORKER, NOT_JUDGED
from concord.porting.reading import AUTO
from concord.spec.errors import SpecError, located, refuse, unknowns
from concord.spec.files import LARGEST, parse_json, read_bytes
from concord.spec.precision import PRECISIONS
from concord.spec.training.recipe import Recipe

Status = Literal["proven", "failed", "not applicable", "unverified"]
"""What an item came to."""

PROVEN: Final = "proven"
FAILED: Final = "failed"
NOT_APPLICABLE: Final = "not applicable"
UNVERIFIED: Final = "unverified"

OTHERS: Final = "tensors that are no parameters"
"""The claim about heads that the family does not have, and whatever else its models do not."""


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
class PortSide:
    """One of the two checkpoints.

    Attributes:
        path: as it was given.
        format: one of :func:`concord.porting.formats`.
        recognised: how that was known, in words.
        part: of the model that it has.
        config: the member of the family that it is.
        files: every file that lies there, by name.
        carried: the files beside the weights that belong to the model, by name, and the SHA-256 of each:
            labels and tokenizer.
    """

    path: str
    format: str
    recognised: str
    part: str
    config: Mapping[str, Any]
    files: Mapping[str, HashedFile]
    carried: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Placement:
    """How a parameter lies in one of the two.

    Attributes:
        foreign: its name there.
        transform: how it is laid out there, one of :data:`concord.spec.sources.layouts.WEIGHT_LAYOUTS`.
        dtype: there.
        sha256: of its bits in the canonical layout.
    """

    foreign: str
    transform: str
    dtype: str
    sha256: str

    @property
    def held(self) -> tuple[str, str]:
        """What it holds (:attr:`concord.porting.LazyTensor.held`)."""
        return self.dtype, self.sha256


@dataclass(frozen=True)
class LedgerParameter:
    """A line of the ledger: a parameter.

    Attributes:
        name: the canonical one.
        shape: the canonical one.
        source, target: how it lies in each; null: it is not there.
        difference: what differs, in words, and its likely cause; empty: nothing.
    """

    name: str
    shape: tuple[Count, ...]
    source: Placement | None = None
    target: Placement | None = None
    difference: str = ""


@dataclass(frozen=True)
class Other:
    """A line of the ledger: a tensor that is no parameter, or a parameter that is in no file.

    Attributes:
        side: ``"source"`` or ``"target"``.
        foreign: its name in the file; empty: it is in none.
        name: the canonical name of the parameter that it belongs to; empty: none.
        status: ignored, tied, added or computed.
        reason: why.
        dtype: its type.
        shape: in the file.
        sha256: of its bytes there.
    """

    side: str
    foreign: str
    status: str
    reason: str
    dtype: str
    shape: tuple[Count, ...]
    sha256: str
    name: str = ""


@dataclass(frozen=True)
class Item:
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


@dataclass(frozen=True)
class Ran:
    """A run of the target, or of the source in its own framework, judged.

    Attributes:
        backend: that computed it.
        case: the inputs.
        dtype: the precision.
        status: what the judge says, or why there was nothing to judge.
        tensors: how many were judged.
        worst: the largest error of each kind of tensor, in tolerances.
        words: where it left its tolerance first and what explains that, or what went wrong.
        side: ``"target"`` or ``"source"``.
    """

    backend: str
    case: str
    dtype: str
    status: str
    tensors: Count = 0
    worst: Mapping[str, Number] = field(default_factory=dict)
    words: str = ""
    side: str = "target"


@dataclass
class Tried:
    """What came of one kind of change to tensors.

    Attributes:
        kind: of change.
        made: how many were made.
        same: how many of them change no bit: there is nothing to notice.
        by_bits: of the others, how many the comparison of bits notices.
        run: of how many the outputs were computed.
        by_outputs: how many of these the judge of the outputs notices.
        equivalent: how many of these compute the same, for a reason that was worked out before.
        unseen: the others, by tensor: outputs did not show them, and nobody has worked out why.
        contradicted: changes that were said to compute the same, and do not.
    """

    kind: str
    made: Count
    same: Count
    by_bits: Count
    run: Count
    by_outputs: Count
    equivalent: Count
    unseen: tuple[str, ...] = ()
    contradicted: tuple[str, ...] = ()

    @property
    def changing(self) -> int:
        """How many change a bit."""
        return self.made - self.same


@dataclass(frozen=True)
class Sensitivity:
    """Proof that the certificate would have failed.

    Attributes:
        tried: by kind of change.
        reasons: why changes compute the same, and of how many of those that were run that was said.
        seed: of the choice of those whose outputs were computed, where not all were.
        case: the inputs on which they were.
    """

    tried: tuple[Tried, ...]
    reasons: Mapping[str, Count]
    seed: Count
    case: str


Rows = Sequence[tuple[Sequence[int], Sequence[int]]]
"""The ids and segments of each text."""

HOW = ("device", "implementation", "execution", "precision", "deterministic")
"""What decides of :class:`concord.conformance.campaign.Setup` what a certificate says."""

RECIPE = Recipe(
    algorithm="adam",
    learning_rate=2.0**-10,
    epsilon=1e-8,
    weight_decay=0.01,
    decay_form="times_rate",
    clipping="global_norm",
    clip_at=1.0,
)
"""Of the optimizer step: AdamW, as models like these are mostly trained on."""

Extent = Literal["quick", "usual", "all"]
"""How much is looked at: of ``quick`` files, bits and one forward pass; ``usual`` runs nothing once bits have
failed."""

OPTIMIZER = (
    *("algorithm", "learning_rate", "beta1", "beta2", "epsilon"),
    *("weight_decay", "decay_form", "clipping", "clip_at"),
)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a certificate is made with: made again with the same, it must say the same.

    Attributes:
        source_format, target_format: of :func:`concord.porting.formats`, or ``"auto"``.
        source_table: the file with names and layouts of the source in place of its format's.
        backends: that compute the target; empty: that of the target's format.
        home: the backend that computes the source; empty: that of its format.
        texts: ids and segments of each sentence; none: drawn.
        dtypes: the precisions.
        seed: of what is drawn.
        extent: how much is looked at.
        device, implementation, execution, precision, deterministic: how the backends run.
        optimizer: what the optimizer step is made with.
    """

    source_format: str
    target_format: str
    source_table: str | None
    backends: list[str]
    home: str
    texts: Rows | None
    dtypes: list[str]
    seed: int
    extent: Extent
    device: str
    implementation: str
    execution: str
    precision: str
    deterministic: bool
    optimizer: Mapping[str, Any]

    @classmethod
    def of(cls, settings: Setup | None = None, **given: Any) -> Asked:
        """Return what is asked for by some fields; all others are as usual, or as settings say.

        No field has a default: a record states each.
        """
        usual = {
            **{
                "source_format": AUTO,
                "target_format": AUTO,
                "source_table": None,
                "backends": [],
                "home": "",
            },
            **{"texts": None, "seed": 0, "extent": "usual"},
            "dtypes": [*DTYPES[given.get("extent") == "quick" :]],
            "optimizer": {key: getattr(RECIPE, key) for key in OPTIMIZER},
            **{key: getattr(settings or Setup(), key) for key in HOW},
        }
        return cls(**{**usual, **given})

    @property
    def quick(self) -> bool:
        """Whether one forward pass is all that is computed."""
        return self.extent == "quick"

    def settings(self, others: Setup) -> Setup:
        """Return how the backends run: as was asked, and else as others say."""
        return replace(others, **{key: getattr(self, key) for key in HOW})


@dataclass(frozen=True)
class Certificate:
    """A certificate of a port.

    Attributes:
        verdict: in a sentence.
        source, target: the two checkpoints.
        asked: what it was made with.
        items: every claim.
        parameters: the ledger, in the order of computation.
        others: the rest of the ledger.
        inputs: what the target was run on: what each name means.
        runs: of the target, and of the source in its own framework.
        errors: the largest error of each tensor of the target over all inputs, in tolerances, by backend and
            precision.
        sensitivity: proof that it could have failed.
        environments: what each backend said of itself.
    """

    verdict: str
    source: PortSide
    target: PortSide
    asked: Asked
    items: tuple[Item, ...]
    parameters: tuple[LedgerParameter, ...]
    others: tuple[Other, ...]
    inputs: Mapping[str, str]
    runs: tuple[Ran, ...]
    errors: Mapping[str, Mapping[str, Mapping[str, Number]]]
    sensitivity: Sensitivity
    environments: Mapping[str, Any]

    @property
    def exit_code(self) -> int:
        """How a command ends: 0 if nothing failed, 1 if something did, 3 if nothing could be judged.

        The last: a backend that was to compute the target crashed or is missing, or none judged anything.
        """
        if any(item.status == FAILED for item in self.items):
            return 1
        lost = any(run.status in (*FAILED_WORKER, NOT_JUDGED) for run in self.runs)
        return 3 if lost or not any(run.tensors for run in self.runs if run.side == "target") else 0


def verdict(items: tuple[Item, ...], sensitivity: Sensitivity) -> str:
    """Return what items come to, in a sentence."""
    failed = [item for item in items if item.status == FAILED]
    if failed:
        named = list(dict.fromkeys(item.name for item in failed))
        return f"The port is wrong: {', '.join(named)} failed."
    open_ = list(dict.fromkeys(item.name for item in items if item.status == UNVERIFIED))
    proven = sum(item.status == PROVEN for item in items)
    noticed = sum(tried.by_bits for tried in sensitivity.tried)
    made = sum(tried.changing for tried in sensitivity.tried)
    rest = f"; not verified: {', '.join(open_)}" if open_ else ""
    whole = "The parameters of the target are the source's" if OTHERS in open_ else "The target is the source"
    begin = (
        "Nothing is known to be wrong, but what the target computes was not judged"
        if "outputs" in open_
        else whole
    )
    return (
        f"{begin}: {proven} of {len(items)} claims are proven and none failed{rest}. Of {made} "
        f"changes that were made to try it, it notices {noticed}."
    )


KIND = "certificate"
CLASS = "concord.porting.certificate.certificate:Certificate"


def recorded(found: Certificate) -> record.Record:
    """Return a certificate as a record."""
    return record.made(found, KIND, f"{Path(found.source.path).name} as {Path(found.target.path).name}")


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


def read(path: Path) -> tuple[record.Record, Certificate]:
    """Read a certificate: the record, and what it says.

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
        made = record.parsed(content, {KIND: CLASS})
        refuse(unknowns("dtype", made.outcome.asked.dtypes, PRECISIONS))
    return made, made.outcome
