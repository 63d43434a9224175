"""Making a certificate again, and comparing: files first, then everything."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from concord import backends
from concord.conformance.campaign import Settings
from concord.porting.certificate.certificate import Certificate, HashedFile, Item, PortSide
from concord.porting.certificate.ledger import files_of
from concord.porting.certificate.making import certify


@dataclass(frozen=True)
class Verified:
    """What came of verifying a certificate.

    Attributes:
        files: how many files have the bytes that it states.
        problems: what is not as it states, a line each.
        again: the one that was made again; None: it did not come to that.
    """

    files: int
    problems: tuple[str, ...]
    again: Certificate | None = None

    @property
    def exit_code(self) -> int:
        """1 if something is not as the certificate states, else what the one that was made again says."""
        return 1 if self.problems else self.again.exit_code if self.again else 0


def verify(
    found: Certificate,
    source: Path | None = None,
    target: Path | None = None,
    settings: Settings | None = None,
    files_alone: bool = False,
    tell: Callable[[str], None] = lambda text: None,
    named: Collection[str] = (),
) -> Verified:
    """Look at a certificate's files, and make it again.

    Args:
        source, target: where the checkpoints lie now; by default where they lay.
        settings: where and how backends run; by default as it states.
        files_alone: whether to stop when the files have been looked at.
        named: backends that may be imported though nothing here offers them: a file does not say what code is
            imported.

    Raises:
        SpecError: if a checkpoint is not there or cannot be read, or a backend is neither known nor named.
    """
    paths = source or Path(found.source.path), target or Path(found.target.path)
    asked = found.asked
    if not files_alone:
        backends.check_offered((*asked.backends, asked.home), "the certificate", named)
    tell("reading files")
    problems = [
        problem
        for path, side in zip(paths, (found.source, found.target), strict=True)
        for problem in _files(files_of(path), side, path)
    ]
    count = len(found.source.files) + len(found.target.files)
    if problems or files_alone:
        return Verified(count, tuple(problems))
    again = certify(*paths, asked, replace(settings or Settings(), asked=tuple(asked.backends)), tell)
    return Verified(count, tuple(_differing(found, again)), again)


def _files(now: Mapping[str, HashedFile], side: PortSide, path: Path) -> Iterator[str]:
    """Yield which files are not as they were."""
    for name, file in side.files.items():
        if name not in now:
            yield f"{path}: {name} is gone"
        elif now[name] != file:
            yield f"{path}: {name} was altered: its SHA-256 is {now[name].sha256} but must be {file.sha256}"
    yield from (
        f"{path}: {name} was not there when the certificate was made"
        for name in now
        if name not in side.files
    )


def _differing(one: Certificate, other: Certificate) -> Iterator[str]:
    """Yield what a certificate states and the one that was made again does not.

    Measured errors need not be the same.
    """
    mine, theirs = ({_key(item): item for item in found.items} for found in (one, other))
    for key, item in mine.items():
        now = theirs.get(key)
        if now is None or now.status != item.status:
            yield (
                f"{' '.join(filter(None, key))}: was {item.status}, is "
                f"{now.status if now else 'not there'}{f': {now.reason}' if now else ''}"
            )
    yield from (
        f"{' '.join(filter(None, key))}: is {item.status}, was not there"
        for key, item in theirs.items()
        if key not in mine
    )
    for name in ("parameters", "others", "sensitivity"):
        if getattr(one, name) != getattr(other, name):
            yield f"{name}: not what the certificate states"


def _key(item: Item) -> tuple[str, str, str]:
    return item.name, item.backend, item.dtype
