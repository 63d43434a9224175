"""What surrounds a run in a test: the command line, installed packages, another interpreter, another host."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

import pytest
from typer.main import get_command

from concord import backends, cli
from concord.spec.errors import SpecError

T = TypeVar("T")

EACH_BACKEND = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in sorted(backends.BUILT_IN)]
"""The four, as parameters of a test.

All that one of them computes is computed in the same process, whose workers start once.
"""


def sample_of(entries, sampled):
    """Return the entries of a table, as parameters of a test, of which a sample is quick.

    The others are slow.
    """
    return [
        pytest.param(entry, marks=[] if sampled(place, entry) else [pytest.mark.slow])
        for place, entry in enumerate(entries)
    ]


def quick_case(_, case):
    """Whether a standard case is of a usual size.

    The long ones take as much as all others together, and one of them will do.
    """
    return case.scenario != "long" or case.variant == "bert"


ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0
"""Seconds after which a command of a test has failed."""
PROGRESS = re.compile(r" *\d+ s  \S")
"""How a line of :mod:`concord.terminal` begins."""


def commands(group=None, before=""):
    """Return every command of the command line by the words that call it."""
    found = {}
    for name, command in (group or get_command(cli.app)).commands.items():
        within = hasattr(command, "commands")
        found |= commands(command, f"{before}{name} ") if within else {f"{before}{name}": command}
    return found


def toy(name, module="numpy_backend"):
    """Return how a toy is asked for."""
    return f"tests.toys.{module}:{name}"


def program(*words, folder=ROOT, patience=PATIENCE, **environment):
    """Run a program in a process of its own, from a folder."""
    return subprocess.run(
        [*map(str, words)],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=patience,
        check=False,
    )


def python(*words, **settings):
    """Run Python in a process of its own."""
    return program(sys.executable, *words, **settings)


def concord(line, *words, **settings):
    """Run a command line, and words that follow it, in a process of its own, in a wide terminal."""
    return python("-m", "concord", *shlex.split(line), *words, **{"COLUMNS": "200", **settings})


def suite(line, folder=ROOT):
    """Run the conformance suite in a pytest of its own, from a folder."""
    words = f"-m pytest -q -p no:cacheprovider --pyargs concord.conformance {line}".split()
    return python(*words, folder=folder, patience=10 * PATIENCE, PYTHONPATH=str(ROOT))


def errors(said):
    """Return what a command said on standard error but for how far it had come."""
    return "".join(line for line in said.splitlines(keepends=True) if not PROGRESS.match(line))


def contents(folder):
    """Return what is in the files of a folder, by path; links are no files."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def refusal(function, *arguments, **options):
    """Return the lines in which a function refuses what it is given."""
    with pytest.raises(SpecError) as refused:
        function(*arguments, **options)
    return refused.value.problems


def options(option, values):
    """Return an option repeated for each value."""
    return [word for value in values for word in (option, value)]


def offer(folder, **backends):
    """Write the metadata of an installed package that offers backends; return what PYTHONPATH has to hold."""
    about = folder / "toy_backends-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-backends\nVersion: 1.0\n")
    points = "".join(f"{name} = {target}\n" for name, target in backends.items())
    (about / "entry_points.txt").write_text(f"[concord.backends]\n{points}")
    return folder


def hide(folder, *names):
    """Write modules that make packages look absent; return what PYTHONPATH has to hold."""
    for name in names:
        (folder / f"{name}.py").write_text(
            f"raise ModuleNotFoundError(\"No module named '{name}'\", name='{name}')\n"
        )
    return folder


def hide_frameworks(folder):
    """Make the four frameworks look absent."""
    return hide(folder, "torch", "tensorflow", "keras", "paddle", "jax", "jaxlib", "flax")


def script(path, text):
    """Write a shell script that can be executed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def marked_python(path, marker):
    """Write an interpreter that can be told apart: it has ``TOY_MARKER`` in its environment."""
    return script(path, f'TOY_MARKER={shlex.quote(marker)} exec {shlex.quote(sys.executable)} "$@"')
