"""``concord certify``: prove that two checkpoints compute the same results, or verify such a proof."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from concord import options, output_files
from concord.conformance.run import record
from concord.options import Written
from concord.spec.errors import SpecError, refuse
from concord.terminal import Terminal, telling

if TYPE_CHECKING:
    from concord.porting.certificate import Certificate


def certify(
    source: Path | None = None,
    target: Path | None = None,
    *,
    certificate: Written | None = None,
    html: Written | None = None,
    verify: Path | None = None,
    form: str = "auto",
    to: str = "auto",
    table: Path | None = None,
    texts: Path | None = None,
    workers: options.Workers,
) -> None:
    """Prove that DST computes what SRC computes, or repeat a proof.

    Args:
        source (SRC): The checkpoint that was ported. Without --backend, each checkpoint runs in the
            framework of its format.
        target (DST): The checkpoint that it was ported to.
        certificate (--certificate, -o): Write the certificate as JSON.
        html: Write the certificate as a page.
        verify: Recreate this certificate, and compare the two. If the checkpoints have moved, give their
            new locations as SRC and DST.
        to (FORMAT): The format of DST. Default: recognised from its files.

    Examples: concord certify all-MiniLM-L6-v2 minilm-jax -o minilm.json ·
        concord certify --verify minilm.json
    """
    from concord.porting import certificate as certificates
    from concord.porting.texts import read_texts

    names, settings, problems = workers.backend or (), workers.settings(), list[str]()
    workers.names()  # an unknown name is refused
    output_files.check(certificate, html)
    if verify is not None:
        inputs = {"from": form != "auto", "to": to != "auto", "table": table, "texts": texts}
        # With different inputs or a different device, it would not be the same proof.
        extra = [name for name, value in {**inputs, "device": workers.device != "cpu"}.items() if value]
        refuse([f"--{name} is given with --verify, but the certificate already states it" for name in extra])
        kind = certificates.KIND
        certified = record.read(verify, {kind: output_files.KINDS[kind]}).outcome
        problems, proof = certificates.verify(certified, source, target, settings, telling(), names)
    else:
        if source is None or target is None:
            raise SpecError(f"{'DST' if source else 'SRC'} is not given but is required")
        proof = certificates.certify(
            source,
            target,
            form,
            to,
            str(table) if table else None,
            names,
            read_texts(texts) if texts else (),
            settings,
            telling(),
        )
    console = Terminal()
    if proof is not None:
        written = record.make_record(proof, certificates.KIND, f"{proof.source.path} as {proof.target.path}")
        output_files.write(
            (certificate, lambda: record.text(written)),
            (html, lambda: output_files.page(written)),
            show=lambda: _show(proof, console),
        )
    for problem in problems:
        console.tell(problem, style="red")
    if verify is not None:
        console.tell(
            f"{verify}: {len(problems) or 'no'} difference{'s' * (len(problems) != 1)}", style="bold"
        )
    raise typer.Exit(1 if proof is None or problems else proof.exit_code)


def _show(proof: Certificate, console: Terminal) -> None:
    for side, role in ((proof.source, "source"), (proof.target, "target")):
        console.tell(
            f"{role}: {side.path} ({side.format}), {len(side.files)} file{'s' * (len(side.files) != 1)}"
        )
    console.tell(f"diff: {proof.comparison.summary}")
    for run in proof.report.results:
        worst = f", at most {run.worst:.2g} tolerances" if run.verdict else f": {run.detail}"
        console.tell(f"{run.group} in {run.backend} on {run.case}: {run.status}{worst}")
    for bug in proof.bugs:
        if bug.outcome != bug.status:
            console.tell(
                f"bug: {bug.bug}: {bug.outcome}, first at {bug.tensor or 'no tensor'}; "
                f"diff says: {bug.difference or 'nothing'}"
            )
    console.tell(proof.summary, style="bold")
