import copy
import re
import runpy

import pytest
import torch.nn.functional as F
from torch import nn

from concord.conformance.compare import prepare
from concord.conformance.compare.reproduction import write
from tests.toys.kinds import Of, drawn, linear


@pytest.fixture
def reproduced(tmp_path, capsys):
    """A function that writes a script and runs it, and returns its text and the errors that it prints."""

    def run(right, candidate, x):
        comparison, path = prepare(right, candidate, x), tmp_path / "report.py"
        verdict = comparison.verdict().explained()
        write(comparison, verdict, path)
        text = path.read_text()
        assert {*re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)} == {"pathlib", "torch"}
        runpy.run_path(str(path))
        row = re.compile(r"^(.{24}) (\S+), largest error ÷ largest value (\S+)", re.MULTILINE)
        rows = {name.strip(): rest for name, *rest in row.findall(capsys.readouterr().out)}
        judged = verdict.first_divergence.deciding
        assert rows["candidate"][0] == f"{judged.actual:.9g}"
        assert rows["reference in float64"][0] == f"{judged.expected:.9g}"
        return text, {name: float(error) for name, (_, error) in rows.items()}

    return run


@pytest.mark.parametrize("arrays", [False, True])
def test_a_script_shows_what_the_verdict_says(reproduced, arrays):
    right = nn.TransformerEncoderLayer(13, 1, 31, batch_first=True, activation="gelu").eval()
    port, x = copy.deepcopy(right), drawn(3, 7, 13)
    port.norm1.eps = 1e-3
    text, errors = reproduced(right, prepare(right, port, x).tensors if arrays else port, x)
    assert errors["candidate"] > 1e-5 > errors["reference in float32"]
    assert ("def candidate" in text) != arrays


def test_what_works_in_place_starts_from_what_was_there(reproduced):
    def forward(m, x):
        y = m.a(x)
        y[:, 0].mul_(3)
        return y.add_(1).relu_()

    right, port = Of(forward, {"a": linear(7, 5)}), Of(forward, {"a": linear(7, 5)})
    port.a.bias.data += 1e-3
    reproduced(right, port, drawn(3, 7))


def test_a_script_has_the_infinity_of_a_causal_mask(reproduced):
    def attention(causal):
        def forward(m, x):
            return F.scaled_dot_product_attention(m.a(x), x, x, is_causal=causal)

        return Of(forward, {"a": linear(8, 8)})

    text, _ = reproduced(attention(causal=True), attention(causal=False), drawn(3, 7, 8))
    assert "float('-inf')" in text


@pytest.mark.parametrize("gradients", [False, True])
def test_without_a_stretch_there_is_no_script(tmp_path, gradients):
    right = nn.Sequential(linear(7, 5)()).eval()
    comparison = prepare(right, right, drawn(3, 7), gradients=gradients)
    if gradients:
        comparison.tensors["gradients.0.weight"] = comparison.tensors["gradients.0.weight"] * 1.01
    comparison.allow_same_bits = False
    said = write(comparison, comparison.verdict(), tmp_path / "report.py")
    assert ("no sequence of forward operations" if gradients else "nothing to reproduce") in said
    assert not [*tmp_path.iterdir()]
