"""Surroundings of a run: command line, packages, interpreters and hosts."""

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import pytest
from typer.main import get_command

from concord import backends, cli
from concord.spec.errors import SpecError

T = TypeVar("T")

# All tests of a backend run in one process, so that its worker starts once.
EACH_BACKEND = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in sorted(backends.BUILT_IN)]

# The same for tests that start a process of their own, where JAX and TensorFlow take ten times as long.
EACH_BACKEND_ANEW = [
    pytest.param(
        *entry.values, marks=[*entry.marks, *[pytest.mark.slow] * (entry.values[0] in ("jax", "tf"))]
    )
    for entry in EACH_BACKEND
]


def sample_of(entries, sampled):
    """Parameters of a test, some quick and the others slow."""
    return [
        pytest.param(entry, marks=[] if sampled(place, entry) else [pytest.mark.slow])
        for place, entry in enumerate(entries)
    ]


def quick_case(_, case):
    # Long cases take as long as all others together, so one has to do.
    return case.scenario != "long" or case.variant == "bert"


def needs(backend):
    """Skip a test where a framework is not installed, without starting its worker."""
    module = {"tf": "tensorflow"}.get(backend, backend)
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed")


ROOT = Path(__file__).resolve().parents[2]
# Seconds after which a command has failed.
PATIENCE = 60.0
# The start of a progress line of `concord.terminal`.
PROGRESS = re.compile(r" *\d+ s  \S")


def commands(group=None, before=""):
    """All commands by the words that call them."""
    table = {}
    for name, command in (group or get_command(cli.app)).commands.items():
        within = hasattr(command, "commands")
        table |= commands(command, f"{before}{name} ") if within else {f"{before}{name}": command}
    return table


def toy(name, module="numpy_backend"):
    return f"tests.toys.{module}:{name}"


def program(*words, folder=ROOT, patience=PATIENCE, **environment):
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
    return program(sys.executable, *words, **settings)


def concord(line, *words, **settings):
    """Run a command line in its own process, in a wide terminal."""
    return python("-m", "concord", *shlex.split(line), *words, **{"COLUMNS": "200", **settings})


def suite(line, folder=ROOT):
    """Run the conformance suite in its own pytest."""
    words = f"-m pytest -q -p no:cacheprovider --pyargs concord.conformance {line}".split()
    return python(*words, folder=folder, patience=10 * PATIENCE, PYTHONPATH=str(ROOT))


def errors(output):
    # Without progress.
    return "".join(line for line in output.splitlines(keepends=True) if not PROGRESS.match(line))


def state(path, **entries):
    """Change entries of a JSON file; None removes one."""
    data = {**json.loads(path.read_text()), **entries}
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def contents(folder):
    """Contents of a folder's files by path, without links."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def refusal(function, *arguments, **options):
    """The lines with which a function refuses its arguments."""
    with pytest.raises(SpecError) as refused:
        function(*arguments, **options)
    return refused.value.problems


def options(option, values):
    return [word for value in values for word in (option, value)]


def offer(folder, **backends):
    """Write metadata of an installed package that offers backends; its folder belongs on PYTHONPATH."""
    about = folder / "toy_backends-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-backends\nVersion: 1.0\n")
    points = "".join(f"{name} = {target}\n" for name, target in backends.items())
    (about / "entry_points.txt").write_text(f"[concord.backends]\n{points}")
    return folder


def hide(folder, *names):
    """Make packages look absent; the folder belongs on PYTHONPATH."""
    for name in names:
        (folder / f"{name}.py").write_text(
            f"raise ModuleNotFoundError(\"No module named '{name}'\", name='{name}')\n"
        )
    return folder


def hide_frameworks(folder):
    return hide(folder, "torch", "tensorflow", "keras", "paddle", "jax", "jaxlib", "flax")


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def marked_python(path, marker):
    """An interpreter that sets ``TOY_MARKER``."""
    return script(path, f'TOY_MARKER={shlex.quote(marker)} exec {shlex.quote(sys.executable)} "$@"')
