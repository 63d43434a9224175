"""Options that commands share: each is defined once, in a group whose fields become options of a command."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_type_hints

import typer

from concord import backends, spec, writing
from concord.backends.interface import EXECUTIONS, IMPLEMENTATIONS, PRECISION_MODES
from concord.backends.machine import wrong_host
from concord.backends.worker import TIME_LIMIT
from concord.conformance import record
from concord.conformance.campaign import Setup
from concord.spec.errors import SpecError, collecting, refuse, unknowns

T = TypeVar("T")

MOST_THREADS = 2**14

MOST_MEMORY = 2.0**30
"""MiB of the largest limit that may be given: a pebibyte, more than any machine has."""

DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def option(
    text: str, metavar: str | None = None, *names: str, values: Callable[[], Iterable[str]] | None = None
) -> Any:
    """Return an option.

    Args:
        text: its help.
        metavar: what stands for its value in the help; by default its type.
        names: by default that of the parameter.
        values: what completes it in the shell.
    """

    def complete(incomplete: str) -> list[str]:
        return [name for name in (values or list)() if name.startswith(incomplete)]

    return typer.Option(*names, metavar=metavar, help=text, autocompletion=complete if values else None)


def reads(text: str, metavar: str = "FILE", *names: str) -> Any:
    """Return an option for a file or folder that the command reads."""
    return typer.Option(*names, metavar=metavar, help=text, parser=writing.path)


def writes(text: str, metavar: str = "FILE", *names: str) -> Any:
    """Return an option for a file or folder that the command writes."""
    return typer.Option(*names, metavar=metavar, help=text, parser=writing.output)


argument = partial(typer.Argument, parser=writing.path)
"""An argument that names a file or folder that the command reads."""


def named(metavar: str, text: str) -> Any:
    """Return an argument that names something that need not be a file."""
    return typer.Argument(metavar=metavar, help=text)


class OptionGroup:
    """Options that commands share: a dataclass whose fields become options, in a panel of the help."""

    panel: ClassVar[str]


def command(function: Callable[..., T]) -> Callable[..., T]:
    """Return a command whose groups of options are options of its own; a switch has no opposite."""
    parameters, groups = list[inspect.Parameter](), dict[str, Any]()
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        group = hints[name]
        if not (inspect.isclass(group) and issubclass(group, OptionGroup)):
            parameters.append(_parameter(name, group, parameter.default))
            continue
        groups[name], fields = group, get_type_hints(group, include_extras=True)
        parameters += [
            _parameter(field.name, fields[field.name], field.default, group.panel)
            for field in dataclasses.fields(group)  # type: ignore[arg-type]
        ]

    @wraps(function)
    def run(**given: Any) -> T:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
            for name, group in groups.items()
        }
        return function(**given, **made)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _parameter(name: str, hint: Any, default: Any, panel: str | None = None) -> inspect.Parameter:
    if hint is not typer.Context:
        kind, about = get_args(hint)
        about = copy.copy(about)
        about.rich_help_panel = panel
        if kind is bool and about.default is ...:
            about.default = f"--{name.replace('_', '-')}"
        hint = Annotated[kind, about]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


# Groups.

PLUGIN = "torch, tf, paddle, jax, an installed plug-in, or package.module:Class"

Dtypes = Annotated[
    list[str] | None,
    option(f"{', '.join(spec.PRECISIONS)}; may be repeated.", "D", values=lambda: spec.PRECISIONS),
]
Dtype = Annotated[str, option(f"One of {', '.join(spec.PRECISIONS)}.", "D", values=lambda: spec.PRECISIONS)]
Variants = Annotated[
    list[str] | None, option("A variant; may be repeated. Default: all.", "V", values=spec.variants)
]
Part = Annotated[
    str,
    option(
        f"The part of the model that runs: one of {', '.join(spec.PARTS)}.", "P", values=lambda: spec.PARTS
    ),
]
Cases = Annotated[list[str] | None, option("A standard case by name; may be repeated. Default: all.", "C")]
ForwardOnly = Annotated[bool, option("Run and judge the forward pass alone, without gradients.")]
Seed = Annotated[int, option("The seed of everything that is drawn.", "S")]


@dataclass(frozen=True)
class Workers(OptionGroup):
    """Which backends run, and how much their workers may take."""

    panel = "Workers"
    elsewhere: ClassVar[bool] = False
    """Whether several devices may be named."""

    backend: Annotated[
        list[str] | None,
        option(f"{PLUGIN}; may be repeated. Default: all that are installed.", "B", values=backends.names),
    ] = None
    threads: Annotated[int | None, option("Threads of each worker. Default: one for each core.")] = None
    time_limit: Annotated[float, option("Seconds that one run may take.", "SECONDS")] = TIME_LIMIT
    memory_limit: Annotated[
        float | None,
        option("MiB that one worker may hold. Default: four fifths of the machine's memory.", "MIB"),
    ] = None

    def settings(self) -> Setup:
        """Return the settings that the options describe: those of the same names, checked.

        Raises:
            SpecError: listing every option that cannot be understood.
        """
        given = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(Setup)
            if hasattr(self, field.name)
        }
        problems: list[str] = []
        self.check(given, problems)
        refuse(problems)
        return Setup(**given, asked=tuple(self.backend or ()))

    def check(self, given: dict[str, Any], problems: list[str]) -> None:
        """Put values of options into the form of settings, and say what is wrong with them."""
        known = {"implementation": IMPLEMENTATIONS, "execution": EXECUTIONS, "precision": PRECISION_MODES}
        for name, values in known.items():
            if name in given and not (name == "implementation" and ":" in given[name]):  # a backend's own
                problems += unknowns(name, [given[name]], values)
        problems += too_small(("repeat", given.get("repeat"), 1))
        if not self.time_limit > 0:
            problems.append(f"--time-limit is {self.time_limit:g} but must be above 0")
        limit = self.memory_limit
        if limit is not None and not 0 < limit <= MOST_MEMORY:
            problems.append(
                f"--memory-limit is {limit:g} MiB but must be above 0 and at most {MOST_MEMORY:g}"
            )
        elif limit is not None:
            given["memory_limit"] = int(limit * 2**20)
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            problems.append(f"--threads is {self.threads} but must be at least 1 and at most {MOST_THREADS}")

    def names(self) -> list[str]:
        """Return the backends to run: those asked for, each once, or all known ones.

        Raises:
            SpecError: listing every name that is unknown, and every place of one that does not run.
        """
        return names(self.backend, getattr(self, "python", None), getattr(self, "ssh", None))

    def one(self, why: str) -> str:
        """Return the one backend that runs.

        Raises:
            SpecError: if there is not exactly one; ``why`` says why it must be one.
        """
        if (count := len(self.backend or ())) != 1:
            raise SpecError(f"--backend is given {count} times but must be given once: {why}")
        return self.names()[0]


@dataclass(frozen=True)
class Places(Workers):
    """And where they run."""

    device: Annotated[
        list[str] | None,
        option("cpu, cuda or cuda:N; where a command takes several, each backend runs on each.", "D"),
    ] = None
    python: Annotated[
        list[str] | None, option("Run a backend with the interpreter of another environment.", "B=PATH")
    ] = None
    ssh: Annotated[
        list[str] | None, option("Run a backend on another host, from a checkout in DIR.", "B=HOST[:DIR]")
    ] = None

    def check(self, given: dict[str, Any], problems: list[str]) -> None:
        """Put values of options into the form of settings, and say what is wrong with them."""
        devices = list(dict.fromkeys(self.device or ["cpu"]))
        python, ssh = (_pairs(f"--{name}", getattr(self, name), problems) for name in ("python", "ssh"))
        problems += [f"--ssh: {wrong}" for host in ssh.values() if (wrong := wrong_host(host))]
        problems += [
            f"--device is {name!r} but must be cpu, cuda or cuda:N"
            for name in devices
            if not DEVICE.fullmatch(name)
        ]
        several = len(devices) > 1
        if several and not self.elsewhere:
            problems.append(f"--device is given {len(devices)} times but must be given once")
        given |= {"device": devices[0], "devices": tuple(devices * several), "python": python, "ssh": ssh}
        super().check(given, problems)


@dataclass(frozen=True)
class Runs(Places):
    """And how they compute."""

    precision: Annotated[
        str,
        option(
            "How float32 products are computed. strict: in full float32; tf32: as tensor cores do, judged by "
            "TF32's own rules; default: as each framework does unasked, judged as float32.",
            "P",
            values=lambda: PRECISION_MODES,
        ),
    ] = "strict"
    implementation: Annotated[
        str,
        option(
            "explicit: written out as the sources write it; library: the framework's own layers, where they "
            "can express it; or a backend's own, for example library:layer (torch, paddle).",
            "I",
            values=lambda: IMPLEMENTATIONS,
        ),
    ] = "explicit"
    execution: Annotated[
        str,
        option(
            "eager, compiled, unpadded (library layers without the rows of padding) or unpadded-compiled.",
            "E",
            values=lambda: EXECUTIONS,
        ),
    ] = "eager"


@dataclass(frozen=True)
class Spread(Runs):
    """And on several devices, each backend on each."""

    elsewhere = True


@dataclass(frozen=True)
class Lines(OptionGroup):
    """How files of texts are read."""

    panel = "Texts"

    layout: Annotated[
        str | None,
        option(
            "tsv, sep (words<SEP>label), jsonl or plain. Default: as the file's name ends, or as it begins.",
            "L",
        ),
    ] = None
    columns: Annotated[
        str | None,
        option(
            "Of a tab-separated file: text_a, text_b, label, in their order. Default: as its header or its "
            "first line says.",
            "A,B,…",
        ),
    ] = None
    on_error: Annotated[
        str,
        option(
            "fail: bad lines are listed, and nothing is done; skip: they are left out, listed and counted.",
            "fail|skip",
        ),
    ] = "fail"

    @property
    def names(self) -> list[str] | None:
        """The names of the columns."""
        return None if self.columns is None else [name.strip() for name in self.columns.split(",")]

    def read(self, files: Sequence[Path]) -> Any:
        """Return the samples of files.

        Raises:
            SpecError: listing what cannot be read.
        """
        from concord.training.data import read

        return read(*files, layout=self.layout, columns=self.names, on_error=self.on_error)


def too_small(*sizes: tuple[str, int | None, int]) -> list[str]:
    """Return what is wrong with sizes that are below the least that they may be.

    Args:
        sizes: of each the option, what is given, and the least.
    """
    return [
        f"--{option} is {size} but must be at least {least}"
        for option, size, least in sizes
        if size is not None and size < least
    ]


def _pairs(option: str, values: Sequence[str] | None, problems: list[str]) -> dict[str, str]:
    pairs = {}
    for value in values or ():
        name, equals, rest = value.partition("=")
        if not (name and equals and rest):
            problems.append(f"{option} is {value!r} but must be BACKEND=VALUE")
            continue
        if wrong := _unknown(name):
            problems += [f"{option} is {value!r}: {problem}" for problem in wrong]
        pairs[name] = rest
    return pairs


def names(asked: Sequence[str] | None, *placed: Sequence[str] | None) -> list[str]:
    """Return the backends to run: those asked for, each once, or all known ones.

    Args:
        placed: options that place a backend, as ``NAME=VALUE``; each has to name one that runs.

    Raises:
        SpecError: listing every name that is unknown, and every place of one that does not run.
    """
    chosen = once(asked) or backends.names()
    elsewhere = [value.partition("=") for values in placed for value in values or ()]
    # A name that no backend bears is the options' own error.
    problems = [
        f"{name!r} is given an interpreter or a host but does not run; add --backend {name}"
        for name, equals, _ in elsewhere
        if equals and name not in chosen and not _unknown(name)
    ]
    refuse(problems + [problem for name in chosen for problem in _unknown(name)])
    return chosen


def _unknown(name: str) -> list[str]:
    """Return why a name is no backend's, if it is none."""
    problems: list[str] = []
    with collecting(problems):
        backends.resolve(name)
    return problems


def once(values: Iterable[T] | None) -> list[T] | None:
    """Return each value of a repeated option once."""
    return list(dict.fromkeys(values)) if values else None


def typed(context: typer.Context, among: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return those of some options that stand on the command line, and what is said of each."""
    found = []
    for each in context.command.params:
        source = context.get_parameter_source(str(each.name))
        if each.name in among and source is not None and source.name == "COMMANDLINE":
            found.append((each.opts[0], among[str(each.name)]))
    return found


Html = Annotated[Path | None, writes("Write the results as a page: one file that needs nothing else.")]


@dataclass(frozen=True)
class Outputs(OptionGroup):
    """The files of what came of a command."""

    panel = "Output"

    json: Annotated[Path | None, writes("Write the results as JSON.")] = None
    html: Html = None

    def check(self, *more: Path | None, **how: Any) -> None:
        """Refuse files that cannot be written, before anything runs; see :func:`concord.writing.check`."""
        writing.check(self.json, self.html, *more, **how)

    def finish(self, found: Any, kind: str, title: str, show: Callable[[], None], **more: Any) -> None:
        """Write what a command came to, and show it; see :func:`concord.writing.outcome`."""
        writing.outcome(record.made(found, kind, title), self.json, self.html, show, **more)


Markdown = Annotated[Path | None, writes("Put the table between its markers in a Markdown file.")]
Svg = Annotated[Path | None, writes("Write a figure as SVG, whose text stays text.", "FILE", "--svg", "-o")]
