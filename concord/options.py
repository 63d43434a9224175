"""Groups of options that commands share."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from math import inf
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_type_hints

import typer

from concord import backends, junit, output_files, spec
from concord.backends.interface import EXECUTIONS, IMPLEMENTATIONS, PRECISION_MODES
from concord.conformance.compare import DECLARATIONS
from concord.conformance.run import record, report
from concord.conformance.run.campaign import Report, Setup
from concord.exit_codes import Halt
from concord.help_screen import print_all
from concord.spec.errors import collecting, refuse, unknowns
from concord.terminal import Terminal

T = TypeVar("T")

MOST_THREADS = 2**14

MOST_SECONDS = 1e9

MOST_MEMORY = 2.0**30  # MiB: a pebibyte, more than any machine has

DEVICE = re.compile(r"cpu|cuda(:\d+)?")

# A file to write; any other Path is read, and must not be overwritten.
Written = Annotated[Path, output_files.output]


def named(text: str) -> str:
    """Parse a name that may be a file, a folder or ``package.module:name``, and record it as read."""
    module, colon, _ = text.partition(":")
    output_files.path(f"{module.replace('.', '/')}.py" if colon else text)
    return text


# A known name, or one of a file, a folder or a module's member.
Named = Annotated[str, named]
NamedList = Annotated[list[str] | None, named]

PLUGIN = "torch, tf, paddle or jax; an installed plug-in; package.module:Class"

# Replacements of ``{values}`` in the help of these options.
VALUES: dict[str, Iterable[str]] = {
    "declare": DECLARATIONS,
    "dtype": spec.PRECISIONS,
    "part": spec.PARTS,
    "precision": PRECISION_MODES,
}

# An entry of a docstring: name (metavar and command-line names): help.
ENTRY = re.compile(r"^    (\w+)(?: \((.*?)\))?: (.*\n(?: {5,}.*\n)*)", re.M)


class OptionGroup:
    """A dataclass whose fields become options, in one panel of the help.

    A field ``checkpoint`` becomes an argument. Docstrings of groups and commands contain each field's
    metavar, command-line names and help. The common ones:

    Attributes:
        case (C): A standard case by name; may be repeated. Default: all.
        checkpoint ([CHECKPOINT]): A checkpoint in any format.
        dtype (D): One of {values}.
        form (FORMAT, --from): The checkpoint's format. Default: recognised from its files.
        forward_only: Run and judge only the forward pass, without gradients.
        html: Write the results as a self-contained HTML page.
        json: Write the results as JSON.
        part (P): The part of the model to run: one of {values}.
        seed (S): The seed of all random numbers.
        table: A TOML file of tensor names and layouts; it replaces the
            format's own.
        texts: A file of texts to run the model on: one per line, or two separated by a tab; or JSON
            Lines with text, or text_a and text_b.
        variant (V): A variant; may be repeated. Default: all.
    """

    panel: ClassVar[str]


def command(function: Callable[..., T]) -> Callable[..., T]:
    """Convert a function to a command, with its docstring as help.

    Positional parameters become arguments, others options, and groups several options. Repeated values count
    once.
    """
    parameters, groups = list[inspect.Parameter](), dict[str, Any]()
    hints, entries = get_type_hints(function, include_extras=True), _entries(OptionGroup, function)
    for name, parameter in inspect.signature(function).parameters.items():
        group = hints[name]
        if not (inspect.isclass(group) and issubclass(group, OptionGroup)):
            positional = parameter.kind is not parameter.KEYWORD_ONLY
            parameters.append(_parameter(name, group, parameter.default, entries[name], positional))
            continue
        groups[name], types = group, get_type_hints(group, include_extras=True)
        shared = _entries(*reversed(group.__mro__[:-1]))
        for field in dataclasses.fields(group):  # type: ignore[arg-type]
            about = (field.name, types[field.name], field.default, shared[field.name])
            parameters.append(_parameter(*about, field.name == "checkpoint", group.panel))

    parameters.append(HELP_ALL)

    @wraps(function)
    def run(**values: Any) -> T:
        del values[HELP_ALL.name]
        for name, group in groups.items():
            options = {field.name: values.pop(field.name) for field in dataclasses.fields(group)}
            values[name] = group(
                **{
                    key: list(dict.fromkeys(value)) if isinstance(value, list) else value
                    for key, value in options.items()
                }
            )
        return function(**values)

    run.__doc__ = (function.__doc__ or "").partition("\n")[0]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option("--help-all", is_eager=True, callback=print_all, help="Explain every option."),
    ],
)

Entry = tuple[list[str], str]  # names in brackets, and help


def _entries(*documented: Any) -> dict[str, Entry]:
    """Entries of docstrings; later ones replace earlier ones."""
    entries = {}
    for owner in documented:
        for name, brackets, text in ENTRY.findall(inspect.cleandoc(owner.__doc__ or "") + "\n"):
            words, values = " ".join(text.split()), vars(sys.modules[owner.__module__])
            if "{values}" in words:
                values = {"values": ", ".join(VALUES[name])}
            entries[name] = brackets.split(", ") if brackets else [], words.format_map(values)
    return entries


def _parameter(
    name: str, hint: Any, default: Any, entry: Entry, positional: bool, panel: str | None = None
) -> inspect.Parameter:
    (brackets, text), parser = entry, _parser(hint)
    names = [each for each in brackets if each.startswith("-")]
    usual = "FILE" if parser else "N" if {int, float} & {hint, *get_args(hint)} else None
    metavar = next((each for each in brackets if each not in names), usual)
    about: dict[str, Any] = {"metavar": metavar, "help": text, "parser": parser, "rich_help_panel": panel}
    # A switch with an explicit name gets no --no- opposite.
    if hint is bool and not names:
        names = [f"--{name.replace('_', '-')}"]
    option = typer.Argument(**about) if positional else typer.Option(*names, **about)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=Annotated[hint, option])


def _parser(hint: Any) -> Any:
    if hint is Path:
        return output_files.path
    if hasattr(hint, "__metadata__"):
        return hint.__metadata__[0]
    return next(filter(None, map(_parser, get_args(hint))), None)


# Groups.


@dataclass(frozen=True)
class Workers(OptionGroup):
    """The backends to run, and their devices.

    Attributes:
        backend (B): {PLUGIN}; may be repeated. Default: all that are installed, or the framework
            of a checkpoint's format.
        threads: Threads of each worker. Default: one for each core.
        device (D): cpu, cuda or cuda:N.
        python (B=PATH): Run a backend in the Python of another environment.
    """

    panel = "Workers"

    backend: NamedList = None
    threads: int | None = None
    device: str = "cpu"
    python: list[str] | None = None

    def settings(self) -> Setup:
        """Check all options at once, and return the settings with the same names."""
        fields = {field.name for field in dataclasses.fields(Setup)}
        values: dict[str, Any] = {name: value for name, value in vars(self).items() if name in fields}
        values["python"] = dict(value.partition("=")[::2] for value in self.python or ())
        problems = [
            f"--python is {value!r} but must be BACKEND=PATH"
            for value in self.python or ()
            if not all(value.partition("="))
        ]
        if not DEVICE.fullmatch(self.device):
            problems.append(f"--device is {self.device!r} but must be cpu, cuda or cuda:N")
        choices = {"implementation": IMPLEMENTATIONS, "execution": EXECUTIONS, "precision": PRECISION_MODES}
        for name, allowed in choices.items():
            if name in values and not (name == "implementation" and ":" in values[name]):  # a backend's own
                problems += unknowns(name, [values[name]], allowed)
        problems += outside(
            ("repeat", values.get("repeat"), 1, inf),
            ("time-limit", values.get("time_limit"), 0, MOST_SECONDS),
            ("memory-limit", memory := values.get("memory_limit"), 1, MOST_MEMORY),
            ("threads", self.threads, 1, MOST_THREADS),
        )
        refuse(problems)
        if memory is not None:
            values["memory_limit"] = int(memory * 2**20)
        return Setup(**values, asked=tuple(self.backend or ()))

    def names(self) -> list[str]:
        """Backends to run: the requested ones, or all known ones."""
        names, problems = list(self.backend or backends.names()), list[str]()
        placed = [value.partition("=")[0] for value in self.python or () if all(value.partition("="))]
        for name in dict.fromkeys([*names, *placed]):
            with collecting(problems):
                backends.resolve(name)
                if name not in names:
                    problems.append(
                        f"--python names {name!r}, which is not among the backends to run; add --backend "
                        f"{name}"
                    )
        refuse(problems)
        return names


@dataclass(frozen=True)
class Runs(Workers):
    """The backends to run, their devices, and how they compute.

    Attributes:
        precision (P): How float32 products are computed. strict: in full float32; tf32: as tensor
            cores do, judged by TF32 rules; default: as each framework does by default, judged as
            float32.
        implementation (I): How layers are implemented. explicit: written out as in the sources;
            library: the framework's own layers, where they can express the model; or a backend's
            own, for example library:fused (torch), library:onednn (torch, paddle).
        execution (E): How the model runs: eager, compiled, unpadded (library layers without padding
            rows) or unpadded-compiled.
    """

    precision: str = "strict"
    implementation: str = "explicit"
    execution: str = "eager"


def outside(*sizes: tuple[str, float | None, float, float]) -> list[str]:
    """One problem per (option, value, least, most) out of range."""
    return [
        f"--{option} is {size:.15g} but must be at least {least:g}"
        + ("" if most == inf else f" and at most {most:.15g}")
        for option, size, least, most in sizes
        if size is not None and not least <= size <= most
    ]


@dataclass(frozen=True)
class Outputs(OptionGroup):
    """The files for a command's results."""

    panel = "Output"

    json: Written | None = None
    html: Written | None = None

    def check(self, *others: Path | None) -> None:
        """Refuse files that cannot be written, before anything runs."""
        output_files.check(self.json, self.html, *others)

    def finish(
        self,
        outcome: Any,
        kind: str,
        title: str,
        show: Callable[[], None],
        problems: Sequence[str] = (),
        others: Sequence[output_files.Output] = (),
    ) -> int:
        """Write and show a result; return its exit code, or that of a signal."""
        written = record.make_record(outcome, kind, title)
        written = dataclasses.replace(written, exit_code=Halt.code or written.exit_code)
        json = self.json, lambda: record.text(written)
        html = self.html, lambda: output_files.page(written)
        output_files.write(json, html, *others, show=show, problems=problems)
        return written.exit_code

    def show_report(self, outcome: Report, kind: str, title: str, group: str, **more: Any) -> int:
        """Write and show a report; ``group`` heads the lines of its table. More: see :meth:`finish`."""

        def show() -> None:
            report.show(outcome, Terminal(), title, group)
            if os.environ.get("GITHUB_ACTIONS") == "true":
                print(*junit.github_annotations(outcome), sep="\n")

        return self.finish(outcome, kind, title, show, **more)
