"""Errors of the specification, with actual value, required value, and clause."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from concord import installation
from concord.spec.text import first_of


class SpecError(ValueError):
    """Input that the specification rejects.

    Attributes:
        problems: one line each.
    """

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type, tuple[list[str]]]:
        return type(self), (self.problems,)


class ConfigError(SpecError):
    """A configuration that does not describe a model of the family."""


class WeightsError(SpecError):
    """Weights that do not fit a configuration."""


class BatchError(SpecError):
    """Inputs that do not fit a configuration."""


class UnknownNameError(SpecError):
    """An unknown name; the message gives the nearest known ones."""


# Common names of the frameworks, since string distance does not lead from "keras" to "tf".
USUAL = {"tensorflow": "tf", "keras": "tf", "pytorch": "torch", "paddlepaddle": "paddle", "flax": "jax"}

# Longest list of names in a message.
MOST_NAMES = 12

# Commands that list all names of a kind.
LISTING = {
    "case": "concord show variants",
    "variant": "concord show variants",
    "preset": "concord speed --help-all",
}


def _choice(names: list[str]) -> str:
    *others, last = map(repr, names)
    return " or ".join([*filter(None, [", ".join(others)]), last])


def unknown(kind: str, name: str, known: list[str]) -> UnknownNameError:
    """The error for an unknown name, with the nearest known ones."""
    # Imported here because only an error needs it.
    import difflib

    usual = USUAL.get(name.lower())
    near = [usual] if usual in known else difflib.get_close_matches(name, known)
    hint = f"did you mean {_choice(near)}?" if near else f"it must be one of {first_of(known, MOST_NAMES)}"
    if kind in LISTING:
        hint += f" ('{LISTING[kind]}' lists all)"
    return UnknownNameError(f"unknown {kind} {name!r}: {hint}")


def unknowns(kind: str, names: Iterable[str], known: Iterable[str]) -> list[str]:
    """One line per unknown name."""
    among = list(known)
    return [str(unknown(kind, name, among)) for name in names if name not in among]


@contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """Catch an error in the block, and collect its problems, each once."""
    try:
        yield
    except SpecError as error:
        problems += [problem for problem in error.problems if problem not in problems]


# If a problem begins with one of these words, its place is the subject.
VERBS = ("has ", "holds ", "is ", "lacks ")


@contextmanager
def located(where: str) -> Iterator[None]:
    """Prefix an error's problems with a place, keeping its class."""
    try:
        yield
    except SpecError as error:
        raise type(error)(
            [
                problem
                if problem.startswith(where)
                else f"{where}{'' if problem.startswith(VERBS) else ':'} {problem}"
                for problem in error.problems
            ]
        ) from None


def collect(*steps: Callable[[], Any]) -> list[Any]:
    """Return all steps' results, or raise one ``SpecError`` with all problems."""
    results, problems = list[Any](), list[str]()
    for step in steps:
        with collecting(problems):
            results.append(step())
    refuse(problems)
    return results


def refuse(problems: list[str]) -> None:
    """Raise an error if there are problems."""
    if problems:
        raise SpecError(problems)


@contextmanager
def optional(what: str, extra: str) -> Iterator[None]:
    """Import an optional dependency within this block.

    Args:
        what: the feature that needs it.
        extra: the extra of this distribution that installs it.

    Raises:
        SpecError: if it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        # A missing module of Concord is a bug, not a missing package.
        if (error.name or "").startswith("concord"):
            raise
        raise SpecError(
            f"{what} needs {error.name or 'a package'}, which is not installed: {installation(extra)}"
        ) from None
