"""The wheel, installed next to a project whose folders have the names of Concord's parts."""

import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.toys import elsewhere
from tests.toys.elsewhere import MINUTES
from tests.toys.surroundings import ROOT, hide

PARTS = ("spec", "backends", "conformance", "porting", "speed")
TAKEN = (*PARTS, "tests")

# One process builds the wheel and the environment.
pytestmark = pytest.mark.xdist_group("wheel")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("concord", *PARTS):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    options = f"--quiet --no-deps --no-build-isolation --wheel-dir {folder} {source}".split()
    command = [sys.executable, "-m", "pip", "wheel", *options]
    subprocess.run(command, check=True, capture_output=True, timeout=MINUTES)
    (path,) = folder.glob("*.whl")
    return path


def project(folder):
    # None of the project's own modules may be mistaken for Concord's.
    for name in TAKEN:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise ImportError('this is not part of Concord')\n")
    return folder


@pytest.fixture(scope="session")
def place(wheel, tmp_path_factory):
    # It has the wheel, and the libraries and frameworks of the current environment.
    folder = tmp_path_factory.mktemp("elsewhere")
    environment = elsewhere.place(folder / "environment", project(folder / "project"))
    environment.install("--no-deps", str(wheel))
    return environment


def test_the_wheel_holds_one_package_with_all_its_data(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in names} == {"concord"}
    here = {
        path.relative_to(ROOT).as_posix()
        for part in PARTS
        for path in (ROOT / part).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name.removeprefix("concord/") for name in names} >= here


@pytest.mark.parametrize(
    ("line", "absent", "code", "said"),
    [
        ("--version", "", 0, "concord 0"),
        # Pages, speed and random cases need more packages, which a plain checkout may lack.
        (
            "check --case bert-single --backend torch",
            "jinja2 markupsafe hypothesis pytest distributed matplotlib keras",
            0,
            "2 agree",
        ),
        (
            "fuzz --cases 1 --backend torch",
            "hypothesis",
            2,
            "needs hypothesis, which is not installed: pip install '.[fuzz]' in a checkout\n",
        ),
        ("doctor --backend torch", "torch", 3, "pip install '.[torch]' in a checkout"),
    ],
)
def test_commands_run_where_others_have_folders_of_these_names(place, tmp_path, line, absent, code, said):
    # Packages are absent; the message names the missing one and how to install it.
    done = place.run("-m", "concord", *line.split(), PYTHONPATH=str(hide(tmp_path, *absent.split())))
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout + done.stderr


@pytest.mark.slow
def test_the_suite_runs_in_the_pytest_of_others(place):
    def run(words):
        return place.run(*f"-m pytest -p no:cacheprovider -q {words}".split())

    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guides/ci.md").read_text(), re.DOTALL)
    (place.folder / "test_own.py").write_text(example)
    done = run(
        "-o addopts=--strict-markers test_own.py --pyargs concord.conformance --concord-backend torch "
        "--concord-variant bert --concord-dtype float32 --concord-golden off --concord-part model "
        "--concord-part attention --concord-forward-only"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.rpartition(" passed")[0].split()[-1]) > 4, done.stdout
    wrong = run("--pyargs concord.conformance --concord-variant brt")
    assert wrong.returncode == 2
    assert "unknown variant 'brt': did you mean 'bert'" in wrong.stdout


@pytest.mark.slow
def test_the_wheel_brings_all_that_it_needs(wheel, tmp_path):
    alone = elsewhere.place(tmp_path / "environment", project(tmp_path / "project"), alone=True)
    alone.install("-c", ROOT / "constraints" / "py311.txt", f"{wheel}[torch]")
    for line in (
        "check --case bert-single --backend torch",
        "show variants",
        "doctor --backend torch",
        "golden --backend torch",
    ):
        done = alone.run("-m", "concord", *line.split())
        assert done.returncode == 0, done.stdout + done.stderr
    assert not list(alone.site.glob("pytest")) + list(alone.site.glob("hypothesis"))
