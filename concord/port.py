"""``concord port``: a checkpoint of one format as one of another."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from concord import certifying, options, writing
from concord.spec.errors import SpecError
from concord.terminal import Terminal

if TYPE_CHECKING:
    from concord.porting import Checkpoint


def _formats() -> list[str]:
    from concord.porting import formats

    return list(formats())


def port(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC",
            parser=writing.path,
            help="A folder with a checkpoint, or the file of weights in it.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DST", parser=writing.output, help="The folder to write."),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            autocompletion=options.among(_formats),
            help="What to write: see docs/guides/porting.md.",
        ),
    ],
    format_of: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="FORMAT",
            autocompletion=options.among(_formats),
            help="What SRC is. Default: what it is recognised as.",
        ),
    ] = "auto",
    table: Annotated[
        Path | None,
        typer.Option(
            "--table",
            metavar="FILE.toml",
            parser=writing.path,
            help="Names and layouts of SRC, in place of its format's.",
        ),
    ] = None,
    taps: Annotated[bool, typer.Option("--taps", help="Every tap is an output of an ONNX graph.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a checkpoint that is there.")] = False,
    certificate: Annotated[
        Path | None,
        typer.Option(
            "--certificate",
            metavar="FILE",
            parser=writing.output,
            help="Prove that DST is SRC, as 'concord certify' does, and write the certificate as JSON.",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", parser=writing.output, help="The certificate as a page."),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            "--texts", metavar="FILE", parser=writing.path, help="Texts to run DST on for the certificate."
        ),
    ] = None,
) -> None:
    """Write a checkpoint of one format as one of another, bit for bit."""
    from concord import porting  # its containers are read by what few commands need

    console = Terminal()
    proof = certificate or html
    if proof and to == porting.registry.ONNX:
        raise SpecError(
            "--certificate is about two checkpoints that can be read, but a graph of ONNX is written alone"
        )
    if texts is not None and not proof:
        raise SpecError(
            "--texts is given but neither --certificate nor --html is: it is what they run DST on"
        )
    writing.check_apart(output, replaced=True)
    certifying.check_outputs([certificate, html], [source, output])
    if format_of == "auto" and table is None:
        found = porting.recognise(source)
        console.tell(f"{source}: {found.format}: {found.why}")
    checkpoint = porting.read(source, format_of, table)
    checkpoint.checked()
    _show(checkpoint, console)
    porting.write(checkpoint, output, to, force, taps)
    console.tell(f"{output}: {to}, written")
    if proof:
        from concord.porting.certificate import Asked

        rows = certifying.rows_of(source, format_of, table, texts)
        certifying.issue(Asked(source, output, format_of, to, table, texts=rows), certificate, html)


def _show(checkpoint: Checkpoint, console: Terminal) -> None:
    """Print what has become of the tensors of the file: those that are parameters in a line, all others each in one."""
    counts = Counter(entry.status for entry in checkpoint.ledger)
    dtypes = ", ".join(sorted({tensor.dtype for tensor in checkpoint.tensors.values()}))
    numbers = ", ".join(
        f"{counts[status]} {status}"
        for status in ("read", "tied", "ignored", "computed", "added")
        if counts[status]
    )
    console.tell(
        f"part {checkpoint.part}, {len(checkpoint.tensors)} parameters, {dtypes}; tensors: {numbers}"
    )
    for entry in checkpoint.ledger:
        if entry.status != "read":
            console.tell(f"  {entry.status}: {entry.foreign or entry.name}: {entry.reason}")
