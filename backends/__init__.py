"""Finding backends and starting them in workers (:mod:`concord.backends.worker`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from concord.backends.interface import Backend, Request, Run, Unsupported
from concord.spec.errors import UnknownNameError, refuse, unknown

if TYPE_CHECKING:
    from concord.backends.wire import WorkerFailure
    from concord.backends.worker import Worker

BUILT_IN = ("torch", "tf", "paddle", "jax")
ENTRY_POINTS = "concord.backends"
"""Entry-point group of installed backends."""


def names() -> list[str]:
    """All known backends: built-in, then installed."""
    return [*BUILT_IN, *sorted({point.name for point in entry_points(group=ENTRY_POINTS)} - set(BUILT_IN))]


def resolve(name: str) -> str:
    """A backend's ``"package.module:Class"`` path, given its name or path.

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
    raise UnknownNameError(f"{unknown('backend', name, names())} (a class of your own: package.module:Class)")


def check_offered(found: Iterable[str], where: str, named: Collection[str] = ()) -> None:
    """Refuse backends from a file that are neither known here nor ``named`` by the user.

    Raises:
        SpecError: with one line per backend.
    """
    # A name may be a class path, and a file must not determine which code is imported.
    refuse(
        [
            f"{where} names backend {name!r}, which is not known here; to import it, give --backend {name}"
            for name in dict.fromkeys(found)
            if name not in (*names(), *named)
        ]
    )


def open(name: str, device: str = "cpu", **settings: Any) -> Worker:
    """Start a known backend or ``"package.module:Class"`` in its own process.

    Args:
        settings: other arguments of :class:`concord.backends.worker.Worker`.

    Raises:
        UnknownNameError: with the nearest names.
        WorkerFailure: if it cannot start, for example without its framework.
    """
    from concord.backends.worker import Worker

    return Worker(name, resolve(name), device, **settings)


def __getattr__(name: str) -> Any:
    # A worker process imports this package too, in environments without psutil.
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
