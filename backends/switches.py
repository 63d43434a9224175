"""How the four frameworks are told how to compute products of float32 numbers, and whether by deterministic kernels. No framework is called here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from concord.backends.interface import Request


class FrameworkSwitches(ABC):
    """A framework's own switches. It is constructed once, before any of them is set.

    Attributes:
        precisions: what ``strict`` and ``tf32`` of :data:`concord.backends.interface.PRECISION_MODES` set.
        determinism: what is set where only kernels may run that give the same bits each time.
        defaults: the switches as they were when the framework was imported.
    """

    precisions: ClassVar[Mapping[str, Mapping[str, Any]]]
    determinism: ClassVar[Mapping[str, Any]]

    def __init__(self) -> None:
        self.defaults = self.read_back()

    def precision(self, mode: str) -> dict[str, Any]:
        """Return what a precision mode sets."""
        return (
            {name: self.defaults[name] for name in self.precisions["strict"]}
            if mode == "default"
            else dict(self.precisions[mode])
        )

    def set_precision(self, mode: str) -> None:
        """Have products of float32 numbers computed in one of :data:`concord.backends.interface.PRECISION_MODES`."""
        self.put(self.precision(mode))

    def wanted(self, request: Request) -> dict[str, Any]:
        """Return the switches that a request sets, as they have to be still when it is done."""
        return {**self.precision(request.precision), **(self.determinism if request.deterministic else {})}

    def at_import(self) -> dict[str, Any]:
        """Return the switches as imported, and in which arithmetic float32 products then run on each kind of device."""
        return {
            **self.defaults,
            "products": {"cpu": "float32", "cuda": "float32" if self.full_products() else "tf32"},
        }

    # What each framework does in its own way.

    @abstractmethod
    def read_back(self) -> dict[str, Any]:
        """Return every switch as it is now, with what the environment says of it."""

    @abstractmethod
    def full_products(self) -> bool:
        """Return whether GPUs compute products of float32 numbers in full, as imported."""

    @abstractmethod
    def put(self, wanted: Mapping[str, Any]) -> None:
        """Set switches of a precision."""

    @abstractmethod
    def set_determinism(self, on: bool) -> None:
        """Have only kernels run that give the same bits each time, or let any run."""

    @abstractmethod
    def has_tf32(self, device: Any) -> bool:
        """Return whether a device has tensor cores for TF32."""
