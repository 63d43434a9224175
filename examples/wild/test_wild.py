"""Each program whose requirements are installed gives the verdicts that the guide shows."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROGRAMS = "attention", "exported", "fastpath", "kerashub", "older", "quantized", "translated"


# Exports and quantization take a quarter of a minute each.
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ("exported", "quantized"))) for name in PROGRAMS],
)
def test_a_program_gives_the_verdicts_that_the_guide_shows(name, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(HERE)
    path = HERE / f"{name}.py"
    missing = runpy.run_path(str(HERE / "small.py"))["lacking"](runpy.run_path(str(path))["REQUIREMENTS"])
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    process = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    page = (HERE.parents[1] / "docs/guides/found-in-the-wild.md").read_text()
    verdicts = re.findall(r"^\| ([^|]*) \| (\w+) \|", process.stdout, re.MULTILINE)
    assert verdicts
    assert all(f"| {candidate} | {verdict} |" in page for candidate, verdict in verdicts)
