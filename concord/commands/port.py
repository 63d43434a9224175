"""``concord port``: convert a checkpoint to another format."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from concord import output_files
from concord.options import Written
from concord.spec.errors import SpecError
from concord.terminal import Terminal

if TYPE_CHECKING:
    from concord.porting import Checkpoint

STATUSES = ("read", "tied", "ignored", "computed", "added")


def port(
    source: Path,
    *,
    output: Written,
    to: str | None = None,
    form: str = "auto",
    table: Path | None = None,
    taps: bool = False,
    force: bool = False,
) -> None:
    """Convert a checkpoint to another format, bit for bit.

    Args:
        source (SRC): A folder with a checkpoint, or the weight file in it.
        output (DST, --output, -o): The folder to write.
        to (FORMAT): The format to write; jax, tf, paddle, pytorch and hf are short names.
            Without it, the command lists all formats.
        taps: Make every activation an output of the ONNX graph.
        force: Replace an existing checkpoint.

    Examples: concord port all-MiniLM-L6-v2 --to jax -o minilm-jax
    """
    from concord import porting  # imports every container, which few commands need

    console = Terminal()
    if to is None:
        raise SpecError(f"--to is not given but must be one of {', '.join(porting.formats())}")
    output_files.check_apart(output)
    form_written = porting.writable(output, to, force, taps)  # before a long read
    if form == "auto" and table is None:
        recognition = porting.recognise(source)
        console.tell(f"{source}: {recognition.format}: {recognition.why}")
    checkpoint = porting.read(source, form, table)
    checkpoint.checked()  # NaN is refused before anything is written
    _show(checkpoint, console)
    porting.write(checkpoint, output, to, force, taps)
    console.tell(f"{output}: {form_written.name}, written")
    if lines := porting.loading(checkpoint, output, to):
        console.tell("load it with")
    for line in lines:
        console.tell(f"  {line}")
    console.tell(f"next: concord certify {source} {output}")


def _show(checkpoint: Checkpoint, console: Terminal) -> None:
    counts: Counter[str] = Counter(entry.status for entry in checkpoint.ledger)
    dtypes = ", ".join(sorted({tensor.dtype for tensor in checkpoint.tensors.values()}))
    numbers = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    console.tell(
        f"part {checkpoint.part}, {len(checkpoint.tensors)} parameters, {dtypes}; tensors: {numbers}"
    )
    for entry in checkpoint.ledger:
        if entry.status != "read":
            console.tell(f"  {entry.status}: {entry.foreign or entry.name}: {entry.reason}")
