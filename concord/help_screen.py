"""The help of a command."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from itertools import chain
from typing import Any

import typer
from typer.core import TyperCommand

# A terminal's lines, of which the shell's prompt takes one.
LINES = 23

# Widest column of names, in characters.
WIDEST = 26

# Separates examples.
SEPARATOR = " · "

# Examples in a command's docstring.
EXAMPLES = re.compile(r"^Examples: (.*(?:\n +.*)*)", re.M)

# Where a statement of an option's help ends, and where one may be cut.
ENDS = re.compile(r"[.;](?= |$)"), re.compile(r":(?= )")


class Command(TyperCommand):
    """A command whose ``--help`` is one screen; ``--help-all`` explains every option."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the first screen."""
        if ctx.meta.get("all"):
            super().format_help(ctx, formatter)
            return
        width = formatter.width
        usage = " ".join(["Usage:", ctx.command_path, *self.collect_usage_pieces(ctx)])
        head = [*textwrap.wrap(usage, width), "", *textwrap.wrap(self.help or "", width), ""]
        lines = [f"  {example}" for example in (self.epilog or "").split(SEPARATOR) if example]
        tail = ["", "Examples:", *lines] if lines else []
        parameters = [parameter for parameter in self.params if parameter.name != "help_all"]
        entries = [_entry(parameter) for parameter in sorted(parameters, key=_place)]
        column = min(max(len(names) for names, _ in entries), WIDEST) + 4
        rows = [
            textwrap.wrap(
                _shortened(text, width - column),
                width,
                initial_indent=f"  {names}".ljust(column),
                subsequent_indent=" " * column,
                break_on_hyphens=False,
            )
            for names, text in entries
        ]
        for shown in range(len(rows), -1, -1):
            names = [names.partition(" ")[0] for names, _ in entries[shown:]]
            text = f"Also: {', '.join(names)}. Full help: {ctx.command_path} --help-all"
            more = textwrap.wrap(text if names else text.partition(". ")[2], width, subsequent_indent="  ")
            screen = [*head, *chain(*rows[:shown]), "", *more, *tail]
            if len(screen) <= LINES:
                break
        formatter.write("\n".join([*screen, ""]))


def _place(parameter: Any) -> tuple[bool, bool]:
    # Options that commands share appear in panels.
    return parameter.param_type_name != "argument", bool(parameter.rich_help_panel)


def _entry(parameter: Any) -> tuple[str, str]:
    is_argument, is_flag = parameter.param_type_name == "argument", getattr(parameter, "is_flag", False)
    names = "" if is_argument else ", ".join(parameter.opts)
    value = "" if is_flag else re.sub(r"[][.]", "", parameter.metavar or parameter.name.upper())
    return f"{names} {value}".strip(), parameter.help or ""


def _shortened(text: str, width: int) -> str:
    """Return as many statements as fit into a line, else the first."""
    for pattern in ENDS:
        if ends := [end.start() for end in pattern.finditer(text) if end.start() <= width]:
            return text[: ends[-1]]
    return text[: end.start()] if (end := ENDS[0].search(text)) else text


def examples(function: Callable[..., Any]) -> str:
    """Examples in a function's docstring, separated by :data:`SEPARATOR`."""
    found = EXAMPLES.search(inspect.cleandoc(function.__doc__ or ""))
    return " ".join(found[1].split()) if found else ""


def print_all(context: typer.Context, value: bool) -> None:
    """Print the help of every option, and exit."""
    if value:
        context.meta["all"] = True
        typer.echo(context.get_help())
        raise typer.Exit
