"""``concord certify``: proof that one checkpoint is another, or a proof made again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.text import Text

from concord import options, writing
from concord.model import OwnModel, lengths
from concord.options import Written
from concord.progress import telling
from concord.spec.errors import refuse, unknowns
from concord.spec.precision import PRECISIONS
from concord.spec.text import shown
from concord.terminal import Terminal

if TYPE_CHECKING:
    from concord.porting.certificate import Certificate

COLOURS = {"proven": "green", "failed": "red", "unverified": "magenta", "not applicable": "dim"}

OF_MAKING = (
    "certificate",
    "html",
    "source_backend",
    "form",
    "to",
    "table",
    "texts",
    "dtype",
    "seed",
    "quick",
    "all",
    "device",
    "precision",
    "implementation",
    "execution",
)
"""Options of a certificate that is made: one that is made again states all of them itself."""


def certify(
    source: Path | None = None,
    target: Path | None = None,
    *,
    context: typer.Context,
    workers: options.Runs,
    certificate: Written | None = None,
    html: Written | None = None,
    verify: Path | None = None,
    quick: bool = False,
    all: bool = False,
    files: bool = False,
    source_backend: str | None = None,
    form: str = "auto",
    to: str = "auto",
    table: Path | None = None,
    texts: Path | None = None,
    dtype: list[str] | None = None,
    seed: int = 0,
) -> None:
    """Prove that one checkpoint is another, or make a proof again.

    Args:
        source (SRC): The checkpoint that was ported.
        target (DST): What it was ported to.
        certificate (--certificate, -o): Write the certificate, as JSON.
        html: Write the certificate as a page.
        verify: Make this certificate again, and compare. SRC and DST say where the two lie now,
            if they moved.
        quick: Compare bits, and run sentences forward in one precision: seconds, not minutes.
        all: Run everything, even if bits have failed.
        files: With --verify: look at the files alone, and compute nothing.
        source_backend (B): What computes SRC; --backend computes DST. Default of each: the
            framework of its format.
        dtype (D): {values}; may be repeated.
        to (FORMAT): The format of DST. Default: recognised by its files.
    """
    if verify is not None:
        refuse(
            [
                f"{name} is given beside --verify, whose certificate states it itself"
                for name in options.typed(context, OF_MAKING)
            ]
        )
        _verify(verify, source, target, workers, files)
    refuse(
        [f"{name} is not given" for name, path in (("SRC", source), ("DST", target)) if path is None]
        + ["--files is given but --verify is not"] * files
        + ["--quick and --all are both given but one of them alone may be"] * (quick and all)
    )
    assert source is not None
    assert target is not None
    from concord.porting import certificate as certificates
    from concord.porting.certificate import Asked
    from concord.porting.certificate.files import MADE
    from concord.porting.folder import folder_of

    writing.check(certificate, html)
    folders = [folder_of(one).resolve() for one in (source, target) if one.exists()]
    refuse(
        [
            f"{path}: lies in {folder}, whose files it is about; only {' and '.join(MADE)} may lie there"
            for path in (certificate, html)
            if path is not None and path.name not in MADE
            for folder in folders
            if path.resolve().is_relative_to(folder)
        ]
    )
    named = [*(workers.backend or ()), *([source_backend] if source_backend else ())]
    settings = workers.settings()
    if named:
        options.names(named, workers.python)
    refuse(unknowns("dtype", dtype or (), PRECISIONS))
    asked = Asked(
        source_format=form,
        target_format=to,
        source_table=str(table) if table else None,
        backends=workers.backend or [],
        home=source_backend or "",
        texts=_rows_of(source, form, table, texts),
        seed=seed,
        extent="quick" if quick else "all" if all else "usual",
        dtypes=list(dict.fromkeys(dtype or ())),
    )
    found = certificates.certify(source, target, asked, settings, telling())
    made = certificates.recorded(found)
    writing.write(
        (certificate, lambda: certificates.text(made)),
        (html, lambda: writing.page(made)),
        show=lambda: _show(found, Terminal()),
    )
    raise typer.Exit(found.exit_code)


def _rows_of(
    source: Path, form: str, table: Path | None, texts: Path | None
) -> list[tuple[list[int], list[int]]] | None:
    """Return the ids and segments of each text of a file; None: there is no file.

    Raises:
        SpecError: if there is no tokenizer, or a line is no text.
    """
    if texts is None:
        return None
    found = OwnModel(source, form, table, texts).load(gradients=False)
    rows = []
    for batch in found.batches.values():
        ids = batch.required("input_ids")
        segments = ids * 0 if batch.segment_ids is None else batch.segment_ids
        for row, other, length in zip(ids, segments, lengths(batch, found.config), strict=True):
            rows.append((row[:length].tolist(), other[:length].tolist()))
    return rows


def _show(found: Certificate, console: Terminal) -> None:
    """Print every claim of a certificate, and what it comes to."""
    source, target = found.source, found.target
    console.tell(f"{source.path} ({source.format}) as {target.path} ({target.format})", style="bold")
    for one in found.claims:
        claim = " ".join(filter(None, (one.name, one.backend, one.dtype)))
        worst = "" if one.worst is None else f" (at most {one.worst:.2g} of a tolerance)"
        status = (f"{one.status:>14}", COLOURS[one.status])
        console.print(Text.assemble(status, f"  {shown(f'{claim}: {one.reason}{worst}')}"), soft_wrap=True)
    console.tell(found.verdict, style="bold")


def _verify(
    path: Path, source: Path | None, target: Path | None, workers: options.Runs, files: bool
) -> NoReturn:
    """Make a certificate again and compare: its own bytes, every file, then everything that it claims."""
    from concord.porting import certificate as certificates

    console = Terminal()
    stated = certificates.read(path).outcome
    problems, again = certificates.verify(
        stated, source, target, workers.settings(), files, telling(), workers.backend or ()
    )
    for problem in problems:
        console.tell(problem, style="red")
    if again is not None:
        _show(again, console)
    said = f"{len(problems)} things are not as it states"
    if not problems:
        count = len(stated.source.files) + len(stated.target.files)
        came = "all that it claims came out again" if again else "nothing was computed"
        said = f"{count} files have the bytes that it states; {came}"
    console.tell(f"{path}: {said}", style="bold")
    raise typer.Exit(1 if problems else again.exit_code if again else 0)
