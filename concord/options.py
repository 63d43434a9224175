"""Options that several commands share, and what they mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from concord import backends, spec, writing
from concord.backends.interface import EXECUTIONS, IMPLEMENTATIONS, PRECISION_MODES
from concord.backends.machine import wrong_host
from concord.backends.worker import TIME_LIMIT
from concord.conformance.campaign import Settings
from concord.spec.errors import SpecError, collecting, unknowns
from concord.spec.errors import (
    collect as collect,
)  # for the commands, which collect what is wrong with their options

if TYPE_CHECKING:
    from concord.own import Given

T = TypeVar("T")


def among(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return what completes a value in the shell: the names that begin as it does."""
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


Variants = Annotated[
    list[str] | None,
    typer.Option(
        "--variant",
        metavar="V",
        autocompletion=among(spec.variants),
        help="A variant; may be repeated. Default: all.",
    ),
]
Backends = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        metavar="B",
        autocompletion=among(backends.names),
        help="torch, tf, paddle, jax, an installed plugin, or package.module:Class; may be repeated. Default: all that are installed.",
    ),
]
Dtypes = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        metavar="D",
        autocompletion=among(lambda: spec.PRECISIONS),
        help="float64, float32, bfloat16 or float16; may be repeated.",
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="D",
        autocompletion=among(lambda: spec.PRECISIONS),
        help="float64, float32, bfloat16 or float16.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N.")]
Devices = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        metavar="D",
        help="cpu, cuda or cuda:N; may be repeated: every backend on every device. Default: cpu.",
    ),
]
Precision = Annotated[
    str,
    typer.Option(
        "--precision",
        metavar="P",
        autocompletion=among(lambda: PRECISION_MODES),
        help="How float32 products are computed. strict: in full float32; tf32: as tensor cores do, judged by TF32's own rules; default: as each framework does unasked, judged as float32.",
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Only kernels that give the same bits each time; what has none is unsupported.",
    ),
]
Repeat = Annotated[
    int,
    typer.Option(
        "--repeat",
        metavar="N",
        help="Run each case N times on the same inputs, and say whether the results are the same bit for bit.",
    ),
]
Implementation = Annotated[
    str,
    typer.Option(
        "--implementation",
        autocompletion=among(lambda: IMPLEMENTATIONS),
        help="explicit: written out as the sources write it; library: out of the framework's own layers, where they can express it; or a name with a colon, a backend's own, for example library:layer (torch, paddle).",
    ),
]
Execution = Annotated[
    str,
    typer.Option(
        "--execution",
        autocompletion=among(lambda: EXECUTIONS),
        help="eager, compiled, unpadded (library layers without the rows of padding) or unpadded-compiled.",
    ),
]
Part = Annotated[
    str,
    typer.Option(
        "--part",
        autocompletion=among(lambda: spec.PARTS),
        help="model, pooled, encoder, stack, attention or dot_product.",
    ),
]
Parts = Annotated[
    list[str] | None,
    typer.Option(
        "--part",
        metavar="P",
        autocompletion=among(lambda: spec.PARTS),
        help="model, pooled, encoder, stack, attention or dot_product; may be repeated. Default: all, mostly model.",
    ),
]
Cases = Annotated[
    list[str] | None,
    typer.Option("--case", metavar="C", help="A standard case by name; may be repeated. Default: all."),
]
Tokenization = Annotated[
    str, typer.Option("--tokenization", metavar="T", help="characters, wordpiece or words.")
]
Layout = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="L",
        help="tsv, sep (words<SEP>label), jsonl or plain. Default: as the name of the file ends, or as it begins.",
    ),
]
Columns = Annotated[
    str | None,
    typer.Option(
        "--columns",
        metavar="A,B,…",
        help="Of a tab-separated file: text_a, text_b, label, in their order. Default: as its header or its first line says.",
    ),
]
OnError = Annotated[
    str,
    typer.Option(
        "--on-error",
        metavar="fail|skip",
        help="What becomes of bad lines. fail: all are listed, and nothing is done; skip: they are left out, listed and counted.",
    ),
]
Json = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", parser=writing.output, help="Write the results as JSON."),
]
Html = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE",
        parser=writing.output,
        help="Write the results as a page: one file that needs nothing else.",
    ),
]
Python = Annotated[
    list[str] | None,
    typer.Option(
        "--python", metavar="B=PATH", help="Run a backend with the interpreter of another environment."
    ),
]
Ssh = Annotated[
    list[str] | None,
    typer.Option(
        "--ssh", metavar="B=HOST[:DIR]", help="Run a backend on another host, from a checkout in DIR."
    ),
]
TimeLimit = Annotated[
    float, typer.Option("--time-limit", metavar="SECONDS", help="Time that one run may take.")
]
MemoryLimit = Annotated[
    float | None,
    typer.Option(
        "--memory-limit",
        metavar="MIB",
        help="Memory that one worker may hold. Default: four fifths of the machine's.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", metavar="N", help="Computing threads of each backend. Default: one for each core."
    ),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        metavar="PATH",
        parser=writing.path,
        help="A model of your own instead: a checkpoint of any format that 'concord' reads.",
    ),
]
Format = Annotated[
    str,
    typer.Option(
        "--from", metavar="FORMAT", help="The checkpoint's format. Default: auto, which recognises it."
    ),
]
NameTable = Annotated[
    Path | None,
    typer.Option(
        "--table",
        metavar="FILE",
        parser=writing.path,
        help="Names and layouts of the checkpoint's tensors, as TOML, in place of the format's own.",
    ),
]
Texts = Annotated[
    Path | None,
    typer.Option(
        "--texts",
        metavar="FILE",
        parser=writing.path,
        help="With --checkpoint: texts to run it on. One on a line, or two with a tab between them; or JSON Lines with text, or text_a and text_b.",
    ),
]
Inputs = Annotated[
    Path | None,
    typer.Option(
        "--inputs",
        metavar="FILE",
        parser=writing.path,
        help="With --checkpoint: arrays to run it on, as safetensors: input_ids, and segment_ids, labels, cotangent where you have them.",
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(
        "--batch",
        metavar="N",
        help="With --checkpoint: samples of a case. Default: 8 texts, and all samples of --inputs.",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        metavar="N",
        help="With --texts: tokens that a text may have; what is longer is cut off. Default: as many as the model takes.",
    ),
]
ShowTokens = Annotated[
    bool, typer.Option("--show-tokens", help="With --texts: print what tokens each text became.")
]
ForwardOnly = Annotated[
    bool,
    typer.Option("--forward-only", help="Neither ask for gradients nor judge them: the forward pass alone."),
]
DEFAULT_TIME_LIMIT = TIME_LIMIT

MOST_THREADS = 2**14

MOST_MEMORY = 2.0**30
"""MiB of the largest limit that may be given: a pebibyte, more than any machine has."""


def typed(context: typer.Context, among: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return those of some options that stand on the command line, as they are written there, and what is said of each."""
    sources: dict[str, Any] = {
        str(each.name): context.get_parameter_source(str(each.name)) for each in context.command.params
    }
    return [
        (each.opts[0], among[str(each.name)])
        for each in context.command.params
        if each.name in among and (source := sources[str(each.name)]) and source.name == "COMMANDLINE"
    ]


def settings(
    asked: list[str] | None,
    device: str | Sequence[str] = "cpu",
    implementation: str = "explicit",
    execution: str = "eager",
    python: list[str] | None = None,
    ssh: list[str] | None = None,
    time_limit: float = DEFAULT_TIME_LIMIT,
    memory_limit: float | None = None,
    threads: int | None = None,
    precision: str = "strict",
    deterministic: bool = False,
    repeat: int = 1,
) -> Settings:
    """Return the settings that the options describe.

    Args:
        device: one, or several: each counts once.

    Raises:
        SpecError: listing every option that cannot be understood.
    """
    problems: list[str] = []
    interpreters, hosts = _pairs("--python", python, problems), _pairs("--ssh", ssh, problems)
    problems += [f"--ssh: {wrong}" for host in hosts.values() if (wrong := wrong_host(host))]
    if ":" not in implementation:  # a name with a colon is a backend's own
        problems += unknowns("implementation", [implementation], IMPLEMENTATIONS)
    problems += unknowns("execution", [execution], EXECUTIONS) + unknowns(
        "precision", [precision], PRECISION_MODES
    )
    devices = [device] if isinstance(device, str) else list(dict.fromkeys(device))
    problems += [
        f"--device is {name!r} but must be cpu, cuda or cuda:N"
        for name in devices
        if not re.fullmatch(r"cpu|cuda(:\d+)?", name)
    ]
    if repeat < 1:
        problems.append(f"--repeat is {repeat} but must be at least 1")
    if not time_limit > 0:
        problems.append(f"--time-limit is {time_limit:g} but must be above 0")
    if memory_limit is not None and not 0 < memory_limit <= MOST_MEMORY:
        problems.append(
            f"--memory-limit is {memory_limit:g} MiB but must be above 0 and at most {MOST_MEMORY:g}"
        )
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        problems.append(f"--threads is {threads} but must be at least 1 and at most {MOST_THREADS}")
    if problems:
        raise SpecError(problems)
    limit = None if memory_limit is None else int(memory_limit * 2**20)
    several = tuple(devices) if len(devices) > 1 else ()
    places = (tuple(asked or ()), interpreters, hosts, time_limit, limit, threads)
    return Settings(devices[0], implementation, execution, *places, precision, deterministic, repeat, several)


def given(
    checkpoint: Path | None,
    form: str,
    table: Path | None,
    texts: Path | None,
    inputs: Path | None,
    batch: int | None,
    max_tokens: int | None,
    instead: Mapping[str, Any],
) -> Given | None:
    """Return what the options say of a model of one's own; None: they say nothing.

    Args:
        instead: values of options that have no meaning beside it.

    Raises:
        SpecError: listing options that exclude each other, or that are about a checkpoint that is not given.
    """
    about = {
        "--from": form != "auto",
        "--table": table,
        "--texts": texts,
        "--inputs": inputs,
        "--max-tokens": max_tokens,
    }
    if checkpoint is None:
        lonely = [name for name, value in about.items() if value]
        if lonely:
            raise SpecError([f"{name} is given but --checkpoint is not: whose weights?" for name in lonely])
        return None
    from concord.own import Given

    excluded = [
        f"{name} is given beside --checkpoint, which takes its place; leave one out"
        for name, value in instead.items()
        if value
    ]
    if excluded:
        raise SpecError(excluded)
    return Given(checkpoint, form, table, texts, inputs, batch, max_tokens)


def _pairs(option: str, values: list[str] | None, problems: list[str]) -> dict[str, str]:
    pairs = {}
    for value in values or []:
        name, equals, rest = value.partition("=")
        if not (name and equals and rest):
            problems.append(f"{option} is {value!r} but must be BACKEND=VALUE")
            continue
        try:
            backends.resolve(name)
        except SpecError as error:
            problems.append(f"{option} is {value!r}: {error}")
        pairs[name] = rest
    return pairs


def names(asked: list[str] | None, *elsewhere: list[str] | None) -> list[str]:
    """Return the backends to run: those asked for, each once, or all known ones.

    Args:
        elsewhere: options that place a backend, as ``NAME=VALUE``; each has to name one that runs.

    Raises:
        SpecError: listing every name that is unknown, and every place of one that does not run.
    """
    chosen = once(asked) or backends.names()
    # A name that no backend bears is the options' own error.
    placed = [
        name
        for values in elsewhere
        for name, equals, _ in (value.partition("=") for value in values or [])
        if equals and _is_backend(name)
    ]
    problems = [
        f"{name!r} is given an interpreter or a host but does not run; add --backend {name}"
        for name in placed
        if name not in chosen
    ]
    for name in chosen:
        with collecting(problems):
            backends.resolve(name)
    if problems:
        raise SpecError(problems)
    return chosen


def _is_backend(name: str) -> bool:
    try:
        backends.resolve(name)
    except SpecError:
        return False
    return True


def columns_of(columns: str | None) -> list[str] | None:
    """Return the names in the value of ``--columns``."""
    return None if columns is None else [name.strip() for name in columns.split(",")]


def once(values: list[T] | None) -> list[T] | None:
    """Return each value of a repeated option once."""
    return list(dict.fromkeys(values)) if values else None
