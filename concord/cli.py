"""The command line.

Exit codes: 0 agrees; 1 diverges; 2 bad usage or input; 3 a backend crashed, is missing or was not judged; 130
interrupted.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from concord import output_files
from concord.backends import machine
from concord.commands import case, show
from concord.commands.certify import certify
from concord.commands.check import check
from concord.commands.compare import compare
from concord.commands.demo import demo
from concord.commands.diff import diff
from concord.commands.doctor import doctor
from concord.commands.explain import explain
from concord.commands.fuzz import fuzz
from concord.commands.golden import golden
from concord.commands.lockstep import lockstep
from concord.commands.mutants import mutants
from concord.commands.port import port
from concord.commands.predict import predict
from concord.commands.speed import speed
from concord.exit_codes import end
from concord.help_screen import Command, examples
from concord.options import command

COMMANDS = {  # in the order of the help
    "Judge": (compare, check, lockstep),
    "Port": (port, diff, certify, predict),
    "Measure and inspect": (speed, demo, doctor, explain),
    "For maintainers": (golden, fuzz, mutants),
}

GROUPS = (  # groups with their own commands
    ("For maintainers", "case", "Export cases as files, or run exported cases.", (case.export, case.run)),
    (
        "Measure and inspect",
        "show",
        "Make a page or a table.",
        (show.variants, show.report, show.attention),
    ),
)

EXAMPLES = "Examples: concord demo · concord compare my.model:build port.onnx · concord doctor"


new = partial(
    typer.Typer,
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    rich_markup_mode="rich",
)
app = new(pretty_exceptions_enable=False, epilog=EXAMPLES)


def _version(value: bool) -> None:
    if value:
        print(f"concord {machine.installed() or 'from a checkout that is not installed'}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[  # noqa: ARG001 - its callback prints it
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Tell rounding from bugs: judge whether models compute the same results."""
    # A test or a notebook may run several commands in one process.
    output_files.READ.clear()


for panel, functions in COMMANDS.items():
    for function in functions:
        app.command(rich_help_panel=panel, cls=Command, epilog=examples(function))(command(function))
for panel, name, words, members in GROUPS:
    group = new(help=words)
    app.add_typer(group, name=name, rich_help_panel=panel)
    for member in members:
        group.command(cls=Command, epilog=examples(member))(command(member))


run = partial(app, standalone_mode=False, prog_name="concord")


def main() -> None:
    """Run the command line; refused input prints one line per problem, and exits with 2."""
    end(run)
