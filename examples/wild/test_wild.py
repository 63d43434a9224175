"""Each program whose requirements are installed gives the verdicts that the guide shows."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
PROGRAMS = "attention", "exported", "fastpath", "kerashub", "older", "quantized", "translated"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_the_verdicts_that_the_guide_shows(name, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(HERE)
    path = HERE / f"{name}.py"
    missing = runpy.run_path(str(HERE / "small.py"))["lacking"](runpy.run_path(str(path))["REQUIREMENTS"])
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (HERE.parents[1] / "docs/guides/found-in-the-wild.md").read_text()
    verdicts = re.findall(r"^\| ([^|]*) \| (\w+) \|", done.stdout, re.MULTILINE)
    assert verdicts
    assert all(f"| {what} | {verdict} |" in page for what, verdict in verdicts)


GRAPH = """<ir_version: 10, opset_import: ["": 18]>
graph (float[7, 3] x, float[3, 5] weight) => (float[7, 5] y) {
    product = MatMul (x, weight)
    y = Tanh (product)
}"""


def test_a_graph_shows_what_modules_return_where_its_exporter_noted_them(tmp_path):
    onnx, torch = pytest.importorskip("onnx"), pytest.importorskip("torch")
    from concord.conformance.compare import compare
    from concord.conformance.compare.candidates import SCOPES

    nn = torch.nn
    model, path = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Tanh()).eval(), tmp_path / "graph.onnx"
    weight = model[0].weight.detach().numpy().T * np.float32(1.001)
    made = onnx.parser.parse_model(GRAPH)
    made.graph.initializer.append(onnx.numpy_helper.from_array(weight, "weight"))
    for place, node in enumerate(made.graph.node):
        node.metadata_props.add(key=SCOPES, value=f"['', '{place}']")
    onnx.save(made, path)
    rows = {
        row.tensor: row.status for row in compare(model, path, torch.linspace(-1, 1, 21).reshape(7, 3)).table
    }
    assert rows == {"0": "diverges", "1": "agrees", "output": "diverges"}
