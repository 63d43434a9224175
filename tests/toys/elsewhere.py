"""Another environment: an interpreter with its own packages."""

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
    folder: Path
    python: Path
    site: Path

    def run(self, *arguments, **environment):
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
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", *words],
            check=True,
            capture_output=True,
            timeout=MINUTES,
        )


def place(folder, project, alone=False):
    """Create an environment for a project's programs; ``alone`` hides current libraries."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    if not alone:
        # Only a path: a .pth file in that folder, which would add this checkout, is not read.
        (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Place(project, folder / "bin" / "python", site)
