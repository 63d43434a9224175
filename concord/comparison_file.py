"""Comparisons stored in a project: ``concord.toml``, or ``[tool.concord]`` of ``pyproject.toml``."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from concord.conformance.compare import prepare
from concord.conformance.compare.activation_names import PlacedName
from concord.conformance.judging.verdict import ACCEPTED, Result
from concord.conformance.run.campaign import Report
from concord.conformance.wording import gather
from concord.spec.errors import SpecError, located, refuse
from concord.spec.files import parse_toml, read_arrays, read_text, typed
from concord.spec.sources.schema import StrictTable

if TYPE_CHECKING:
    from concord.conformance.compare.model_comparison import ModelComparison


class AcceptedFinding(StrictTable):
    """Divergences that a project accepts, with a reason and a package version."""

    tensor: str  # a name, in which * matches any text: "layers.*.mlp"
    reason: str = Field(min_length=1)
    version: str = Field("", pattern=r"^(\S+ \S+)?$")  # "onnxruntime 1.22.0"; empty: any

    @property
    def outdated(self) -> str:
        """The installed version, if different from the accepted finding's."""
        package, _, accepted = self.version.partition(" ")
        try:
            installed = importlib.metadata.version(package) if package else ""
        except importlib.metadata.PackageNotFoundError:
            installed = "none"
        return "" if installed == accepted else f"{package} {installed}"

    def named(self, tensors: Sequence[str]) -> list[str]:
        """Tensors that it names."""
        pattern = re.compile(re.escape(self.tensor).replace(r"\*", ".*"))  # brackets are part of names
        return [name for name in tensors if pattern.fullmatch(name)]


class KeptCandidate(StrictTable):
    """A candidate, or a way to rerun the reference, with its options."""

    candidate: str = ""
    way: str = Field("", alias="as")
    inputs: str = ""
    declare: list[str] = []
    names: str = ""
    python: str | None = None
    dtype: Literal["bfloat16", "float16"] | None = None
    accepted: list[AcceptedFinding] = []

    @field_validator("inputs", "names", mode="before")
    @classmethod
    def _check_path(cls, value: Any) -> Any:
        if not isinstance(value, str):
            raise ValueError("must be the path of a file")
        return value

    def options(self, names_exist: bool = True) -> dict[str, Any]:
        """Its own options, as arguments of :func:`concord.conformance.compare.prepare`."""
        names = read_names(Path(self.names)) if self.names and names_exist else None
        return {"declared": self.declare, "names": names, "python": self.python, "dtype": self.dtype}


class ComparisonFile(StrictTable):
    """A reference and its candidates; paths are relative to this file's folder."""

    reference: str
    inputs: str = ""
    texts: list[str] = []
    gradients: bool = False
    seed: int | None = None
    log_probabilities: bool = False
    candidates: dict[str, KeptCandidate] = Field(min_length=1)

    @property
    def options(self) -> dict[str, Any]:
        """Options that all candidates share."""
        return {
            "gradients": self.gradients,
            "seed": self.seed,
            "log_probabilities": self.log_probabilities,
        }

    def arrays(self, inputs: str) -> Any:
        """Arrays of a file or the texts; None for standard inputs."""
        if inputs or not self.texts:
            return read_arrays(Path(inputs)) if inputs else None
        from concord.conformance.compare.candidates import tokens

        return tokens(Path(self.reference), self.texts)

    def case(self, inputs: str) -> str:
        """Name of the inputs in a report."""
        return inputs or ("texts" if self.texts else "standard inputs")


def read_comparison_file() -> ComparisonFile:
    """Read the file of the current folder.

    Raises:
        SpecError: if there is none, or listing all problems in it.
    """
    for path, keys in ((Path("concord.toml"), ()), (Path("pyproject.toml"), ("tool", "concord"))):
        content = parse_toml(read_text(path), str(path)) if path.exists() else None
        for key in keys:
            content = content and content.get(key)
        if content is None:
            continue
        with located(str(path)):
            comparison_file = typed(ComparisonFile, content)
            refuse(
                [
                    f"'candidates.{name}' must have either 'candidate' or 'as'"
                    for name, entry in comparison_file.candidates.items()
                    if bool(entry.candidate) == bool(entry.way)
                ]
            )
        return comparison_file
    raise SpecError("a REFERENCE is required if neither concord.toml nor [tool.concord] contains comparisons")


def judge_all(kept: ComparisonFile, model: Any, report: Report) -> None:
    """Judge every candidate; an interrupt leaves what was judged in the report.

    Raises:
        SpecError: if no candidate with the same inputs can be compared.
    """
    from concord.conformance.compare.comparisons import Comparisons, compare_several

    by_inputs = gather(kept.candidates.items(), lambda item: item[1].inputs or kept.inputs)
    for inputs, entries in by_inputs.items():
        compared = Comparisons(notes=report.notes)
        try:
            compare_several(
                model,
                {name: entry.way or entry.candidate for name, entry in entries},
                kept.arrays(inputs),
                {name: entry.options() for name, entry in entries},
                compared,
                **kept.options,
            )
        finally:
            for result in compared.results(kept.reference, kept.case(inputs)):
                findings = kept.candidates[result.backend].accepted
                report.results.append(accept(result, findings))
                if note := unneeded(result, findings):
                    report.notes[result.backend] = note
            report.unfinished = len(kept.candidates) - len(report.results)
        report.milliseconds = report.milliseconds or compared.milliseconds.get("reference", 0.0)


def prepare_only(kept: ComparisonFile, model: Any, names_exist: bool) -> ModelComparison:
    """Run the only candidate."""
    (entry,) = kept.candidates.values()
    return prepare(
        model,
        entry.candidate or None,
        kept.arrays(kept.inputs),
        way=entry.way,
        **kept.options,
        **entry.options(names_exist=names_exist),
    )


def divergent(result: Result) -> list[str]:
    """Names of divergent tensors."""
    return [row.tensor for row in result.table if row.status == "diverges"]


def accept(result: Result, findings: Sequence[AcceptedFinding]) -> Result:
    """Mark a result as accepted if findings name every divergent tensor."""
    if result.status != "diverges" or not findings:
        return result
    tensors = divergent(result)
    finding_by_tensor = {name: finding for finding in findings for name in finding.named(tensors)}
    outdated = [
        f"{finding.version} was the accepted version, but {finding.outdated} is installed"
        for finding in finding_by_tensor.values()
        if finding.outdated
    ]
    others = [
        f"`{name}` diverges{' too,' if finding_by_tensor else ''} and is not accepted"
        for name in tensors
        if name not in finding_by_tensor
    ]
    if problems := [*dict.fromkeys(outdated), *others[:1]]:
        return replace(result, attribution="; ".join(problems))
    reasons = "; ".join(dict.fromkeys(finding.reason for finding in finding_by_tensor.values()))
    return replace(result, status=ACCEPTED, attribution=f"accepted: {reasons}")


def unneeded(result: Result, findings: Sequence[AcceptedFinding]) -> str:
    """Name the findings that no longer occur in a result, if any."""
    tensors = divergent(result)
    names = [finding.tensor for finding in findings if result.verdict and not finding.named(tensors)]
    return f"accepted, but no longer diverging: {', '.join(names)}" if names else ""


def read_names(path: Path) -> dict[str, str]:
    """Read a file of lines ``CANDIDATE'S NAME = REFERENCE'S NAME``."""
    reference_names, problems = dict[str, str](), list[str]()
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        theirs, equals, ours = (part.strip() for part in line.partition("="))
        if theirs.startswith("#") or not line.strip():
            continue
        if equals and "=" not in ours:
            name = PlacedName(theirs)
            name.place = f"{path}:{number}: "
            reference_names[name] = ours
        else:
            problems.append(f"{path}:{number}: the line must be CANDIDATE'S NAME = REFERENCE'S NAME")
    refuse(problems)
    return reference_names
