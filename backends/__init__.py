"""How each framework computes it: the four backends, and the door to them.

Nothing here imports a framework; that happens in a worker process (:mod:`concord.backends.worker`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from concord.backends.interface import Backend, Request, Run, Unsupported
from concord.spec.errors import SpecError, UnknownNameError, unknown

if TYPE_CHECKING:
    from concord.backends.wire import WorkerFailure
    from concord.backends.worker import Worker

BUILT_IN = ("torch", "tf", "paddle", "jax")
"""The backends that live in this repository."""

ENTRY_POINTS = "concord.backends"
"""The entry-point group in which an installed package offers a backend of its own."""


SEARCHED = "its module is looked for in the current folder, in PYTHONPATH and in the environment's packages"
"""Where a class of one's own is found (docs/guides/joining.md)."""


def names() -> list[str]:
    """Return the names of all known backends: the four, and those that installed packages offer."""
    return [*BUILT_IN, *sorted({point.name for point in entry_points(group=ENTRY_POINTS)} - set(BUILT_IN))]


def resolve(name: str) -> str:
    """Return the class behind a backend's name, as ``"package.module:Class"``.

    Args:
        name: a known name, or such a path itself.

    Raises:
        UnknownNameError: with the nearest names.
    """
    if name in BUILT_IN:
        return f"concord.backends.{name}.backend:Adapter"
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == name:
            return point.value
    module, _, attribute = name.partition(":")
    if all(word.isidentifier() for word in [*module.split("."), attribute]):
        return name
    if "." in name:
        raise UnknownNameError(
            f"unknown backend {name!r}: must be a name, or a class as package.module:Class; {SEARCHED}"
        )
    raise unknown("backend", name, names())


def check_offered(found: Iterable[str], where: str, named: Collection[str] = ()) -> None:
    """Refuse backends that a file names and nothing here offers: a file does not say what code is imported.

    Args:
        found: the names in the file.
        where: what the file is, for the message.
        named: those that the user names too, and so may be imported.

    Raises:
        SpecError: with a line for each.
    """
    strange = [name for name in dict.fromkeys(found) if name not in (*names(), *named)]
    if strange:
        raise SpecError(
            [
                f"{where} names backend {name!r}, which is not known here; to have it imported, say "
                f"--backend {name}"
                for name in strange
            ]
        )


def open(name: str, device: str = "cpu", **settings: Any) -> Worker:
    """Start a backend in a process of its own.

    Args:
        name: a known name (:func:`names`) or ``"package.module:Class"``.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        settings: the other arguments of :class:`concord.backends.worker.Worker`.

    Raises:
        UnknownNameError: with the nearest names.
        WorkerFailure: if it cannot be started, for example because the framework is not installed.
    """
    from concord.backends.worker import Worker

    return Worker(name, resolve(name), device, **settings)


def __getattr__(name: str) -> Any:
    # A worker process imports this package too, in environments that have no psutil.
    if name in ("Worker", "WorkerFailure"):
        from concord.backends import worker

        return getattr(worker, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BUILT_IN",
    "ENTRY_POINTS",
    "Backend",
    "Request",
    "Run",
    "Unsupported",
    "Worker",
    "WorkerFailure",
    "names",
    "open",
    "resolve",
]
