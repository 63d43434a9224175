"""``concord explain``: the meaning of a clause, a bug, a status or a declaration, offline."""

from __future__ import annotations

import re
from pathlib import Path

from concord import spec
from concord.conformance.bugs.catalogue import BUGS
from concord.conformance.compare.kernels import KERNELS
from concord.conformance.explain.option_values import FIELDS
from concord.conformance.judging.verdict import STATUSES
from concord.spec.config import CHOICES
from concord.spec.deviations import KNOWN_DEVIATIONS
from concord.spec.errors import unknown
from concord.spec.files import read_text
from concord.terminal import Terminal


def explain(name: str) -> None:
    """Explain a clause, an option, a bug, a cause, a status or a declaration.

    Args:
        name (NAME): For example ATT-4, gelu_tanh, undetermined or uncomputed_padding.

    Examples: concord explain MSK-2 · concord explain undetermined
    """
    meanings = known_meanings()
    if name not in meanings:
        raise unknown("name", name, [*meanings])
    console = Terminal()
    for line in meanings[name]:
        console.print(line)


def known_meanings() -> dict[str, list[str]]:
    """Lines that explain each name."""
    specification = read_text(Path(spec.__file__).with_name("SPEC.md"))
    clauses = dict(re.findall(r"^\| \*\*([A-Z]{3}-\d+)\*\* \| (.*) \|$", specification, re.MULTILINE))
    meanings = {name: [f"{name}, a status: {text}"] for name, text in STATUSES.items()}
    meanings |= {
        name: [f"{name}, a declaration: {known.meaning}", f"{known.clause}: {clauses[known.clause]}"]
        for name, known in KNOWN_DEVIATIONS.items()
    }
    meanings |= {
        name: [
            f"{name}, a declaration: {kernel.text}",
            f"to switch it off: {kernel.switch}" if kernel.switch else "correct, and needs no declaration",
        ]
        for name, kernel in KERNELS.items()
    }
    for bug in BUGS.values():
        lines = [f"{bug.name}, a bug: {bug.text}", f"{bug.clause}: {clauses[bug.clause]}"]
        meanings[bug.name] = [*lines, *([bug.source] * bool(bug.source))]
    for clause, text in clauses.items():
        broken = [bug.name for bug in BUGS.values() if bug.clause == clause]
        meanings[clause] = [f"{clause}: {text}", *([f"bugs: {', '.join(broken)}"] * bool(broken))]
    for cause in {cause for bug in BUGS.values() for cause in bug.cause.split(" or ")} - {"", *meanings}:
        named = [bug for bug in BUGS.values() if cause in bug.cause.split(" or ")]
        meanings[cause] = [f"{cause}, a cause:", *(f"  {bug.name}: {bug.text}" for bug in named)]
    for option, clause in FIELDS.items():
        known = [f"{option}, an option", f"{clause}: {clauses[clause]}"]
        meanings[option] = [*known, *meanings.get(option, [])]
        for value in CHOICES.get(option, ()):
            words = [f"{value}, a value of the option {option}", f"{clause}: {clauses[clause]}"]
            meanings.setdefault(str(value), words)
    return meanings
