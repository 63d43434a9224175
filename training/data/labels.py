"""Names of classes in data, and the numbers that a model knows them by."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError, located
from concord.spec.files import read_as
from concord.spec.text import shown

MANY = 20
"""Classes from which on half as many as there are samples are texts in a column of labels."""


@dataclass(frozen=True)
class Labels:
    """The classes of a model.

    Attributes:
        names: the name of class 0, of class 1, and so on.

    Raises:
        SpecError: if a name comes twice, or there are fewer than two.
    """

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        said = ", ".join(map(repr, self.names[:20])) or "none"
        if len(set(self.names)) < len(self.names) or "" in self.names:
            raise SpecError(f"labels are {said} but each must be there once, and none be empty")
        if len(self.names) < 2:
            raise SpecError(f"labels are {said} but there must be at least two classes to tell apart")

    @classmethod
    def of(cls, names: Iterable[str | None]) -> Labels:
        """Return the classes that bear some names, sorted: as numbers, if all are numbers.

        Args:
            names: as often as they come; None is no name.

        Raises:
            SpecError: if there are fewer than two, or nearly each sample has one of its own.
        """
        given = [name for name in names if name is not None]
        different = set(given)
        if len(different) > max(MANY, len(given) / 2):
            raise SpecError(
                f"{len(given)} samples have {len(different)} different labels, among them "
                f"{shown(given[0], 40)!r}, but classes must be few: which column has the label?"
            )
        if all(name.isascii() and name.isdigit() for name in different):
            return cls(tuple(sorted(different, key=lambda name: (int(name), name))))
        return cls(tuple(sorted(different)))

    def num_classes(self, config: EncoderConfig) -> int:
        """Return how many outputs a model needs: one each, or one for two if it has one (SPEC LOS-1)."""
        return 1 if config.num_classes == 1 and len(self.names) == 2 else len(self.names)

    def to_json(self) -> str:
        """Return the text of the file that :meth:`read` reads."""
        return json.dumps({"format": _File.format, "names": self.names}, ensure_ascii=False, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> Labels:
        """Read a file of labels.

        Raises:
            SpecError: if it cannot be read, or holds no labels.
        """
        with located(str(path)):
            return cls(tuple(read_as(path, _File, written_by="'concord train'").names))


@dataclass
class _File:
    names: list[str]
    format: Literal["concord.labels/1"] = "concord.labels/1"
