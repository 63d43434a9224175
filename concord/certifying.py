"""``concord certify``, ``concord verify`` and ``concord diff``: whether one checkpoint is another, and how that is known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from concord import backends, options, writing
from concord.conformance import record
from concord.progress import telling
from concord.spec.errors import SpecError, unknowns
from concord.spec.files import write_text
from concord.spec.precision import PRECISIONS
from concord.spec.text import shown
from concord.terminal import Terminal

if TYPE_CHECKING:
    from concord.porting.certificate import Certificate
    from concord.porting.comparison import Comparison

QUIET = 2.0
"""Seconds that most comparisons of two checkpoints take, and say nothing of."""

MOST = 40
"""Tensors that differ of which there is a row."""

COLOURS = {"proven": "green", "failed": "red", "unverified": "magenta", "not applicable": "dim"}


def _formats() -> list[str]:
    from concord.porting import formats

    return list(formats())


def certify(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", parser=writing.path, help="The checkpoint that was ported.")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="DST", parser=writing.path, help="What it was ported to.")
    ],
    certificate: Annotated[
        Path | None,
        typer.Option(
            "--certificate", metavar="FILE", parser=writing.output, help="Write the certificate, as JSON."
        ),
    ] = None,
    html: options.Html = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            metavar="B",
            autocompletion=options.among(backends.names),
            help="What computes DST; may be repeated. Default: the framework of its format.",
        ),
    ] = None,
    source_backend: Annotated[
        str | None,
        typer.Option(
            "--source-backend",
            metavar="B",
            autocompletion=options.among(backends.names),
            help="What computes SRC. Default: the framework of its format.",
        ),
    ] = None,
    format_of: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="FORMAT",
            autocompletion=options.among(_formats),
            help="What SRC is. Default: what it is recognised as.",
        ),
    ] = "auto",
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            autocompletion=options.among(_formats),
            help="What DST is. Default: what it is recognised as.",
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
    texts: Annotated[
        Path | None,
        typer.Option(
            "--texts",
            metavar="FILE",
            parser=writing.path,
            help="Texts to run it on, as 'concord check' takes them; SRC has to have a tokenizer. Default: ids that are drawn.",
        ),
    ] = None,
    dtype: options.Dtypes = None,
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            metavar="S",
            help="Of the ids that are drawn, and of the changes whose outputs are computed.",
        ),
    ] = 0,
    device: options.Device = "cpu",
    precision: options.Precision = "strict",
    implementation: options.Implementation = "explicit",
    execution: options.Execution = "eager",
    python: options.Python = None,
    ssh: options.Ssh = None,
    time_limit: options.TimeLimit = options.DEFAULT_TIME_LIMIT,
    memory_limit: options.MemoryLimit = None,
    threads: options.Threads = None,
) -> None:
    """Prove that one checkpoint is another: bits, outputs, gradients and an optimizer step; and that it would have been noticed if it were not."""
    from concord.porting import certificate as certificates

    check_outputs([certificate, html], [source, target])
    named = [*(backend or []), *([source_backend] if source_backend else [])]
    settings = options.settings(
        named or None,
        device,
        implementation,
        execution,
        python,
        ssh,
        time_limit,
        memory_limit,
        threads,
        precision,
    )
    if named:
        options.names(named, python, ssh)
    chosen, home = tuple(options.once(backend) or ()), source_backend or ""
    dtypes, rows = _dtypes(dtype), rows_of(source, format_of, table, texts)
    issue(
        certificates.Asked(source, target, format_of, to, table, chosen, home, rows, dtypes, seed, settings),
        certificate,
        html,
    )


def rows_of(
    source: Path, form: str, table: Path | None, texts: Path | None
) -> list[tuple[list[int], list[int]]] | None:
    """Return the ids and segments of each text of a file; None: there is no file.

    Raises:
        SpecError: if there is no tokenizer, or a line is no text.
    """
    if texts is None:
        return None
    from concord.own import Given, load

    found = load(Given(source, form, table, texts), gradients=False)
    rows = []
    for batch in found.batches.values():
        ids = batch.required("input_ids")
        segments = ids * 0 if batch.segment_ids is None else batch.segment_ids
        lengths = (len(row) - int((row[::-1] != found.config.pad_id).argmax()) for row in ids)
        rows += [
            (row[:length].tolist(), other[:length].tolist())
            for row, other, length in zip(ids, segments, lengths, strict=True)
        ]
    return rows


def issue(asked: Any, certificate: Path | None, html: Path | None) -> None:
    """Make a certificate, write it and show it; leave with what it came to."""
    from concord.porting import certificate as certificates

    with telling() as tell:
        found = certificates.certify(asked, tell)
    made = certificates.recorded(found)
    console = Terminal()
    lost: list[str] = []
    try:
        if certificate is not None:
            write_text(certificate, certificates.text(made))
    except SpecError as error:
        certificate, lost = None, error.problems
    show(found, console)
    if certificate is not None:
        console.tell(f"written: {certificate}")
    writing.write(console, (html, lambda: writing.page(made)), problems=lost)
    raise typer.Exit(found.exit_code)


def check_outputs(outputs: list[Path | None], folders: list[Path]) -> None:
    """Refuse files that cannot be written, or would become part of what they are about.

    Raises:
        SpecError: listing every problem.
    """
    from concord.porting.certificate.ledger import MADE

    writing.check(*outputs)
    inside = [
        (path, folder)
        for path in outputs
        if path is not None and path.name not in MADE
        for folder in folders
        if path.resolve().is_relative_to(_place(folder))
    ]
    if inside:
        raise SpecError(
            [
                f"{path}: lies in {folder}, whose files it is about; only {' and '.join(MADE)} may lie there"
                for path, folder in inside
            ]
        )


def _place(checkpoint: Path) -> Path:
    """Return the folder of a checkpoint, which need not be there yet."""
    from concord.porting.folder import folder_of

    return (folder_of(checkpoint) if checkpoint.exists() else checkpoint).resolve()


def _dtypes(asked: list[str] | None) -> tuple[str, ...]:
    from concord.porting.certificate.making import DTYPES

    wrong = unknowns("dtype", asked or [], PRECISIONS)
    if wrong:
        raise SpecError(wrong)
    return tuple(options.once(asked) or DTYPES)


def show(found: Certificate, console: Terminal) -> None:
    """Print every claim of a certificate, and what it comes to."""
    console.tell(
        f"{found.source.path} ({found.source.format}) as {found.target.path} ({found.target.format})",
        style="bold",
    )
    for item in found.items:
        claim = " ".join(filter(None, (item.name, item.backend, item.dtype)))
        worst = "" if item.worst is None else f" (at most {item.worst:.2g} of a tolerance)"
        console.print(
            Text.assemble(
                (f"{item.status:>14}", COLOURS[item.status]), f"  {shown(f'{claim}: {item.reason}{worst}')}"
            ),
            soft_wrap=True,
        )
    console.tell(found.verdict, style="bold")


def verify(
    certificate: Annotated[
        Path, typer.Argument(metavar="CERT", parser=writing.path, help="What 'concord certify' wrote.")
    ],
    source: Annotated[
        Path | None,
        typer.Option("--source", metavar="SRC", parser=writing.path, help="Where the source lies now."),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option("--target", metavar="DST", parser=writing.path, help="Where the target lies now."),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            metavar="B",
            help="A backend of the certificate that is imported though nothing offers it; may be repeated.",
        ),
    ] = None,
    files: Annotated[
        bool, typer.Option("--files", help="Look at the files alone, and compute nothing.")
    ] = False,
    python: options.Python = None,
    ssh: options.Ssh = None,
    time_limit: options.TimeLimit = options.DEFAULT_TIME_LIMIT,
    memory_limit: options.MemoryLimit = None,
    threads: options.Threads = None,
) -> None:
    """Make a certificate again and compare: its own bytes, every file, then everything that it claims."""
    from concord.porting import certificate as certificates

    console = Terminal()
    try:
        _, stated = certificates.read(certificate)
    except SpecError as error:
        altered = [problem for problem in error.problems if "was altered" in problem]
        if not altered:
            raise
        console.tell(altered[0], style="red")
        raise typer.Exit(1) from None
    settings = options.settings(
        None, "cpu", "explicit", "eager", python, ssh, time_limit, memory_limit, threads
    )
    with telling() as tell:
        found = certificates.verify(stated, source, target, settings, files, tell, backend or ())
    for problem in found.problems:
        console.tell(problem, style="red")
    if found.again is not None:
        show(found.again, console)
    said = (
        f"{len(found.problems)} things are not as it states"
        if found.problems
        else f"{found.files} files have the bytes that it states"
        + ("; all that it claims came out again" if found.again else "; nothing was computed")
    )
    console.tell(f"{certificate}: {said}", style="bold")
    raise typer.Exit(found.exit_code)


def diff(
    first: Annotated[
        Path, typer.Argument(metavar="A", parser=writing.path, help="A checkpoint of any format.")
    ],
    second: Annotated[
        Path, typer.Argument(metavar="B", parser=writing.path, help="Another, of the same or another format.")
    ],
    format_a: Annotated[
        str,
        typer.Option(
            "--from-a",
            metavar="FORMAT",
            autocompletion=options.among(_formats),
            help="What A is. Default: what it is recognised as.",
        ),
    ] = "auto",
    format_b: Annotated[
        str,
        typer.Option(
            "--from-b",
            metavar="FORMAT",
            autocompletion=options.among(_formats),
            help="What B is. Default: what it is recognised as.",
        ),
    ] = "auto",
    json: options.Json = None,
) -> None:
    """Compare two checkpoints tensor by tensor, whatever their formats: what differs, how, and what is likely to have caused it."""
    from concord.porting import read
    from concord.porting.comparison import compare

    writing.check(json)
    a, b = options.collect(lambda: read(first, format_a), lambda: read(second, format_b))
    with _counted(len(a.tensors)) as progress:
        found = compare(a, b, progress)
    console = Terminal()
    _show(found, console)
    writing.write(console, (json, lambda: record.lines(record.plain(found))))
    raise typer.Exit(found.exit_code)


@contextmanager
def _counted(total: int) -> Iterator[Any]:
    """Show how many tensors have been compared."""
    from concord.progress import bars

    with bars(["tensors"], total, quiet=QUIET) as reached:
        yield lambda done: reached("tensors", done, "")


def _show(found: Comparison, console: Terminal) -> None:
    """Print every difference, and what they come to."""
    for key, (mine, other) in found.config.items():
        console.tell(f"configuration: {key} is {mine} in A and {other} in B")
    for name, words in found.files.items():
        console.tell(f"{name}: {words}", style="red")
    for names, where in zip(found.alone, ("A", "B"), strict=True):
        if names:
            console.tell(f"beside the weights of {where} alone: {', '.join(names)}")
    for names, where in ((found.missing, "missing in B"), (found.extra, "in B alone")):
        for name in names[:MOST]:
            console.tell(f"{name}: {where}", style="red")
    for pair in found.pairs[:MOST]:
        console.tell(f"{pair.name}: {pair.words}", style="red")
        if pair.cause:
            console.tell(f"  likely: {pair.cause}")
    for pair in found.others.pairs[:MOST]:
        console.tell(f"{pair.name}, which is no parameter: {pair.words}", style="red")
    for name, why in list(found.others.apart.items())[:MOST]:
        console.tell(f"{name}, which is no parameter, was not compared: {why}", style="magenta")
    if len(found.pairs) > MOST:
        console.tell(f"and {len(found.pairs) - MOST} more")
    console.tell(found.summary, style="bold")
