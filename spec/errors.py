"""Errors of the specification: what is wrong, what is there, what is required, and the clause."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from concord import installation


class SpecError(ValueError):
    """Input that the specification refuses.

    Attributes:
        problems: every problem found, one line each, in the order in which they were found.
    """

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type, tuple[list[str]]]:
        return type(self), (self.problems,)


class ConfigError(SpecError):
    """A configuration that describes no model of the family."""


class WeightsError(SpecError):
    """Weights that do not fit a configuration: missing, unexpected, misshapen, or not finite."""


class BatchError(SpecError):
    """Inputs that do not fit a configuration: wrong shape, dtype or range."""


class UnknownNameError(SpecError):
    """A name that nothing bears; the message gives the nearest names."""


USUAL = {"tensorflow": "tf", "keras": "tf", "pytorch": "torch", "paddlepaddle": "paddle", "flax": "jax"}
"""What a framework is called elsewhere, to what it is called here."""


def unknown(kind: str, name: str, known: list[str]) -> UnknownNameError:
    """Return the error for an unknown name, with the names nearest to it.

    Args:
        kind: what the name should have named, for example ``"variant"``.
        name: the name that was given.
        known: every name that would have been accepted.
    """
    import difflib

    near = (
        [USUAL[name.lower()]]
        if USUAL.get(name.lower()) in known
        else difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    )
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"must be one of {', '.join(known)}"
    return UnknownNameError(f"unknown {kind} {name!r}: {hint}")


def unknowns(kind: str, names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return what is wrong with names of which some are unknown.

    A line for each, as :func:`unknown` says it.
    """
    among = list(known)
    return [str(unknown(kind, name, among)) for name in names if name not in among]


@contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """Add what is refused within to what is wrong already, each once, and go on."""
    try:
        yield
    except SpecError as error:
        problems += [problem for problem in error.problems if problem not in problems]


@contextmanager
def located(where: str) -> Iterator[None]:
    """Say where that is in which something is refused within, but for what says it already.

    Raises:
        SpecError: of the same kind.
    """
    try:
        yield
    except SpecError as error:
        raise type(error)(
            [problem if problem.startswith(where) else f"{where}: {problem}" for problem in error.problems]
        ) from None


def collect(*steps: Callable[[], Any]) -> list[Any]:
    """Return the result of each step, or raise what is wrong with all of them at once.

    Raises:
        SpecError: listing every problem of every step.
    """
    results, problems = list[Any](), list[str]()
    for step in steps:
        with collecting(problems):
            results.append(step())
    refuse(problems)
    return results


def refuse(problems: list[str]) -> None:
    """Raise what is wrong, if anything is.

    Raises:
        SpecError: listing it.
    """
    if problems:
        raise SpecError(problems)


@contextmanager
def optional(what: str, extra: str) -> Iterator[None]:
    """Import what only one thing needs.

    Args:
        what: needs it.
        extra: of this distribution, that installs it.

    Raises:
        SpecError: if it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("concord"):
            raise
        raise SpecError(
            f"{what} needs {error.name or 'a package'}, which is not installed: {installation(extra)}"
        ) from None
