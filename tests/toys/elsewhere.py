"""Another environment: an interpreter with packages of its own, and the libraries of this one beside them."""

import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

from tests.toys.surroundings import PATIENCE

MINUTES = 10 * PATIENCE


@dataclass(frozen=True)
class Place:
    """A folder from which programs run, and an environment in which they do."""

    folder: Path
    python: Path
    site: Path

    def run(self, *arguments, **environment):
        """Run Python there."""
        surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [self.python, *map(str, arguments)],
            cwd=self.folder,
            env={**surroundings, "COLUMNS": "200", **environment},
            capture_output=True,
            text=True,
            timeout=MINUTES,
            check=False,
        )

    def install(self, *words):
        """Install packages there."""
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", *words],
            check=True,
            capture_output=True,
            timeout=MINUTES,
        )


def place(folder, project, alone=False):
    """Make an environment in a folder, whose programs run in that of a project."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    if not alone:
        # A path: the file beside it that says where this checkout is installed is not read.
        (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Place(project, folder / "bin" / "python", site)
