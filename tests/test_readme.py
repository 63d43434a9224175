"""What the README shows is true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from concord import backends, spec
from concord.cli import app

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_python_example_runs_and_passes(open_worker):
    open_worker("paddle")  # skips where it is not installed
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    program = example + "\nassert verdict.passed, verdict.first_divergence\nprint(len(verdict.table))\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50


def test_table_is_generated_and_names_every_variant_and_backend():
    table = README.partition("<!-- begin check -->")[2].partition("<!-- end check -->")[0]
    for name in spec.variants():
        assert f"| `{name}` |" in table
    for name in backends.BUILT_IN:
        assert f"{name} f64" in table
        assert f"{name} f32" in table
    assert "✗" not in table


def test_commands_that_are_named_exist():
    named = set(re.findall(r"^concord ([a-z-]+)", README, re.MULTILINE))
    known = {command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands}
    assert named == known


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_lead_somewhere(target):
    assert (Path(__file__).parent.parent / target).exists()


def test_every_record_of_a_gpu_is_made_by_a_command_that_exists(tmp_path):
    done = subprocess.run(["make", "-n", "gpu-records", "DEVICE=tpu", f"GPU={tmp_path}"], cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=60, check=True)
    commands = [line.partition(" -m concord ")[2].partition(" > ")[0].partition(" || ")[0].split() for line in done.stdout.splitlines() if "concord" in line and line.startswith("PYTHONPATH")]
    assert len(commands) == 19
    for words in commands:
        result = CliRunner().invoke(app, words)
        assert [str(result.exception)] == ["--device is 'tpu' but must be cpu, cuda or cuda:N"], words
