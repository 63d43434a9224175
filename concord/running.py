"""``concord case run``: what a backend makes of a model of one's own, as arrays, without a judgement."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from safetensors.numpy import save

from concord import options, predicting, writing
from concord.backends.interface import Run, Settings, Unsupported
from concord.backends.wire import run_arrays
from concord.backends.worker import Worker, WorkerFailure
from concord.conformance.campaign import Settings as Places  # where and how long a worker runs
from concord.own import Own, load, tell
from concord.progress import bars
from concord.spec.batch import Batch
from concord.spec.errors import SpecError
from concord.spec.files import write_bytes
from concord.terminal import Terminal, complain

ROWS = 32
"""Samples that are computed at once, where nothing but the output is wanted."""

ALL = 2**62
"""More samples than any file has: they are one batch, of one width."""

FORMAT = "concord.run/1"


def run(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", parser=writing.path, help="A checkpoint of any format that 'concord' reads."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            parser=writing.output,
            help="Where to write the arrays, as safetensors.",
        ),
    ],
    backend: predicting.Backend = None,
    texts: options.Texts = None,
    inputs: options.Inputs = None,
    taps: Annotated[
        bool, typer.Option("--taps", help="Write every intermediate tensor too, as taps/NAME.")
    ] = False,
    gradients: Annotated[
        bool,
        typer.Option(
            "--gradients", help="Write the gradient of the loss for every parameter too, as gradients/NAME."
        ),
    ] = False,
    form: options.Format = "auto",
    table: options.NameTable = None,
    part: options.Part = "model",
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch",
            metavar="N",
            help="Samples that are computed at once. Default: 32; with --taps or --gradients all.",
        ),
    ] = None,
    max_tokens: options.MaxTokens = None,
    show_tokens: options.ShowTokens = False,
    dtype: options.Dtype = "float32",
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
    """Run a model of your own on one backend, and write what it computes."""
    writing.check(out)
    problems = [] if texts or inputs else ["neither --texts nor --inputs is given: what is it to be run on?"]
    problems += (
        ["--batch is given beside --taps or --gradients, which are those of all samples at once"]
        if batch and (taps or gradients)
        else []
    )
    if problems:
        raise SpecError(problems)
    (name, where, settings), given = options.collect(
        lambda: predicting.place(
            backend,
            device,
            implementation,
            execution,
            python,
            ssh,
            time_limit,
            memory_limit,
            threads,
            precision,
            dtype,
            ROWS if batch is None else batch,
        ),
        lambda: options.given(checkpoint, form, table, texts, inputs, None, max_tokens, {}),
    )
    found = load(dataclasses.replace(given, batch=ALL), part, gradients)
    tell(found, show_tokens)
    (whole,) = found.batches.values()
    arrays, info = computed(
        found,
        whole,
        name,
        where,
        settings,
        taps,
        gradients,
        len(whole.required("input_ids")) if taps or gradients else batch or ROWS,
    )
    header = {
        "format": FORMAT,
        "checkpoint": str(checkpoint),
        "part": found.part,
        "dtype": dtype,
        "backend": name,
        "info": json.dumps(info, sort_keys=True),
    }
    write_bytes(out, save({name: np.asarray(array, order="C") for name, array in arrays.items()}, header))
    Terminal().print(f"written: {out}: {', '.join(shown(arrays))}", highlight=False, soft_wrap=True)


def computed(
    found: Own,
    whole: Batch,
    backend: str,
    where: Places,
    settings: Settings,
    taps: bool,
    gradients: bool,
    rows: int,
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return what a backend computes of a batch, by name, and what it says of itself; that it cannot ends the command with exit code 3.

    Args:
        rows: samples that are computed at once.
    """
    try:
        with (
            where.open(backend) as worker,
            bars([backend], len(whole.required("input_ids")), "samples") as reached,
        ):
            runs = list(
                _runs(
                    worker,
                    found,
                    whole,
                    settings,
                    taps,
                    gradients,
                    rows,
                    lambda done: reached(backend, done, ""),
                )
            )
    except (WorkerFailure, Unsupported) as error:
        complain(f"{backend}: {error}")
        raise typer.Exit(3) from None
    arrays = {
        f"inputs/{name}": array
        for name, array in whole.arrays().items()
        if gradients or name not in ("labels", "cotangent")
    }
    if len(runs) > 1:
        return {**arrays, "output": np.concatenate([run.output for run in runs])}, runs[0].info
    named = run_arrays(runs[0])
    return {
        **arrays,
        **{
            name: array
            for name, array in named.items()
            if gradients or name not in ("loss", "taps/loss", "taps/losses")
        },
    }, runs[0].info


def _runs(
    worker: Worker,
    found: Own,
    whole: Batch,
    settings: Settings,
    taps: bool,
    gradients: bool,
    rows: int,
    done: Any,
) -> Iterator[Run]:
    for start in range(0, len(whole.required("input_ids")), rows):
        some = Batch(**{name: array[start : start + rows] for name, array in whole.arrays().items()})
        ways = (
            settings.dtype,
            settings.implementation,
            settings.execution,
            taps,
            gradients,
            settings.precision,
        )
        yield worker.run(found.config, found.weights, some, found.part, *ways)
        done(min(start + rows, len(whole.required("input_ids"))))


def shown(arrays: dict[str, NDArray[Any]]) -> Iterator[str]:
    """Yield what was written, in words: arrays by name, those of a kind by their number."""
    plain = [f"{name} {array.dtype} {array.shape}" for name, array in arrays.items() if "/" not in name]
    kinds = [name.partition("/")[0] for name in arrays if "/" in name]
    yield from (*plain, *(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)))
