import copy
import re
import subprocess
import sys

import pytest
from torch import nn

from concord.conformance.compare import prepare
from concord.conformance.compare.reproduction import write
from concord.spec.errors import SpecError
from tests.toys.kinds import Of, drawn, linear


def reproduced(folder, right, candidate, x, **options):
    comparison = prepare(right, candidate, x, **options)
    verdict = comparison.verdict().explained()
    write(comparison, verdict, folder / "report.py")
    done = subprocess.run(
        [sys.executable, "-I", folder / "report.py"], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(.{24}) (\S+), largest error ÷ largest value (\S+)", done.stdout, re.MULTILINE)
    numbers = {name.strip(): number for name, number, _ in rows}
    judged = verdict.first_divergence.deciding
    assert numbers["candidate"] == f"{judged.actual:.9g}"
    assert numbers["reference in float64"] == f"{judged.expected:.9g}"
    return {name.strip(): float(error) for name, _, error in rows}


@pytest.mark.parametrize("arrays", [False, True])
def test_a_script_shows_what_the_verdict_says(tmp_path, arrays):
    right = nn.TransformerEncoderLayer(13, 1, 31, batch_first=True, activation="gelu").eval()
    port, x = copy.deepcopy(right), drawn(3, 7, 13)
    port.norm1.eps = 1e-3
    errors = reproduced(tmp_path, right, prepare(right, port, x).tensors if arrays else port, x)
    assert errors["candidate"] > 1e-5 > errors["reference in float32"]
    assert ("def candidate" in (tmp_path / "report.py").read_text()) != arrays


def test_what_works_in_place_starts_from_what_was_there(tmp_path):
    def forward(m, x):
        y = m.a(x)
        y[:, 0].mul_(3)
        return y.add_(1).relu_()

    right, port = Of(forward, {"a": linear(7, 5)}).eval(), Of(forward, {"a": linear(7, 5)}).eval()
    port.a.bias.data += 1e-3
    reproduced(tmp_path, right, port, drawn(3, 7))


@pytest.mark.parametrize("gradients", [False, True])
def test_without_a_stretch_there_is_no_script(tmp_path, gradients):
    right = nn.Sequential(linear(7, 5)()).eval()
    comparison = prepare(right, right, drawn(3, 7), gradients=gradients)
    if gradients:
        comparison.tensors["gradients.0.weight"] = comparison.tensors["gradients.0.weight"] * 1.01
    comparison.allow_same_bits = False
    with pytest.raises(
        SpecError, match="no sequence of forward operations" if gradients else "nothing to reproduce"
    ):
        write(comparison, comparison.verdict(), tmp_path / "report.py")
    assert not [*tmp_path.iterdir()]
