"""Comparisons that a project keeps in git: ``concord.toml``, or ``[tool.concord]`` of ``pyproject.toml``."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from concord.conformance.judging.verdict import ACCEPTED, Result
from concord.conformance.wording import gather
from concord.spec.errors import SpecError, located, refuse
from concord.spec.files import parse_toml, read_arrays, read_text, typed
from concord.spec.sources.schema import StrictTable


class AcceptedFinding(StrictTable):
    """Divergences that a project accepts: of tensors, for a reason, with a version of a package."""

    tensor: str  # a name, in which * stands for anything: "layers.*.mlp"
    reason: str = Field(min_length=1)
    version: str = Field("", pattern=r"^(\S+ \S+)?$")  # "onnxruntime 1.22.0"; empty: any

    @property
    def outdated(self) -> str:
        """What is installed in place of the version that it was accepted for; empty if that is installed."""
        package, _, accepted = self.version.partition(" ")
        try:
            installed = importlib.metadata.version(package) if package else ""
        except importlib.metadata.PackageNotFoundError:
            installed = "none"
        return "" if installed == accepted else f"{package} {installed}"

    def named(self, tensors: Sequence[str]) -> list[str]:
        """Return those tensors that it names."""
        pattern = re.compile(re.escape(self.tensor).replace(r"\*", ".*"))  # brackets belong to names
        return [name for name in tensors if pattern.fullmatch(name)]


class KeptCandidate(StrictTable):
    """A candidate: what it is, or how the reference runs again, with its own options."""

    candidate: str = ""
    way: str = Field("", alias="as")
    inputs: str = ""
    declare: list[str] = []
    names: str = ""
    python: str | None = None
    dtype: Literal["bfloat16", "float16"] | None = None
    accepted: list[AcceptedFinding] = []

    def options(self, names_exist: bool = True) -> dict[str, Any]:
        """Return its own options, as :func:`concord.conformance.compare.prepare` takes them."""
        names = read_names(Path(self.names)) if self.names and names_exist else None
        return {"declared": self.declare, "names": names, "python": self.python, "dtype": self.dtype}


class ComparisonFile(StrictTable):
    """A reference and its candidates; files are named from the folder of this one."""

    reference: str
    inputs: str = ""
    texts: list[str] = []
    gradients: bool = False
    seed: int | None = None
    candidates: dict[str, KeptCandidate] = Field(min_length=1)

    def arrays(self, inputs: str) -> tuple[Any, str]:
        """Return the arrays of a file, or of the texts, and what they are in words; None: standard ones."""
        if inputs:
            return read_arrays(Path(inputs)), inputs
        if not self.texts:
            return None, "standard texts"
        from concord.conformance.compare.candidates import tokens

        return tokens(Path(self.reference), self.texts), "texts"


def read_comparison_file() -> ComparisonFile:
    """Read the file of the current folder.

    Raises:
        SpecError: if there is none, with everything that is wrong in it.
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
    raise SpecError("a REFERENCE is required where neither concord.toml nor [tool.concord] holds comparisons")


def judge_all(kept: ComparisonFile, model: Any) -> tuple[list[Result], dict[str, str], float]:
    """Judge every candidate; return results, notes and the milliseconds of the reference.

    Raises:
        SpecError: if none of those with the same inputs can be compared.
    """
    from concord.conformance.compare.comparisons import compare_several

    results, notes, milliseconds = list[Result](), dict[str, str](), 0.0
    by_inputs = gather(kept.candidates.items(), lambda item: item[1].inputs or kept.inputs)
    for inputs, entries in by_inputs.items():
        arrays, case = kept.arrays(inputs)
        compared = compare_several(
            model,
            {name: entry.way or entry.candidate for name, entry in entries},
            arrays,
            {name: entry.options() for name, entry in entries},
            gradients=kept.gradients,
            seed=kept.seed,
        )
        results += compared.explained().results(kept.reference, case)
        notes |= compared.notes
        milliseconds = milliseconds or compared.milliseconds.get("reference", 0.0)
    findings = {name: entry.accepted for name, entry in kept.candidates.items()}
    notes |= {
        judgement.backend: note
        for judgement in results
        if (note := unneeded(judgement, findings[judgement.backend]))
    }
    return [accept(result, findings[result.backend]) for result in results], notes, milliseconds


def divergent(result: Result) -> list[str]:
    """Return the names of the tensors that diverge."""
    return [row.tensor for row in result.table if row.status == "diverges"]


def accept(result: Result, findings: Sequence[AcceptedFinding]) -> Result:
    """Return a result: accepted if findings name every tensor that diverges."""
    if result.status != "diverges" or not findings:
        return result
    tensors = divergent(result)
    finding_by_tensor = {name: finding for finding in findings for name in finding.named(tensors)}
    outdated = [
        f"{finding.version} was accepted, not {finding.outdated}"
        for finding in finding_by_tensor.values()
        if finding.outdated
    ]
    others = [
        f"`{name}` diverges too, and is not accepted" for name in tensors if name not in finding_by_tensor
    ]
    if problems := [*dict.fromkeys(outdated), *others[:1]]:
        return replace(result, attribution="; ".join(problems))
    reasons = "; ".join(dict.fromkeys(finding.reason for finding in finding_by_tensor.values()))
    return replace(result, status=ACCEPTED, attribution=f"accepted: {reasons}")


def unneeded(result: Result, findings: Sequence[AcceptedFinding]) -> str:
    """Name the findings that a result no longer has; empty if there are none."""
    tensors = divergent(result)
    names = [finding.tensor for finding in findings if result.verdict and not finding.named(tensors)]
    return f"accepted, but does not diverge any more: {', '.join(names)}" if names else ""


def read_names(path: Path) -> dict[str, str]:
    """Read a file of lines ``CANDIDATE'S NAME = REFERENCE'S NAME``."""
    reference_names, problems = dict[str, str](), list[str]()
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        theirs, equals, ours = (part.strip() for part in line.partition("="))
        if theirs.startswith("#") or not line.strip():
            continue
        if equals and "=" not in ours:
            reference_names[theirs] = ours
        else:
            problems.append(f"{path}:{number}: must be CANDIDATE'S NAME = REFERENCE'S NAME")
    refuse(problems)
    return reference_names
