import json

import pytest
import torch

from concord.conformance.compare import prepare
from concord.conformance.compare.node_values import LARGEST, write_node_values
from concord.spec.errors import SpecError
from tests.toys.kinds import Of, drawn, linear


def test_each_module_has_the_error_of_its_last_node(tmp_path):
    right, wrong = (
        Of(lambda m, x, act=act: m.b(act(m.a(x))), {"a": linear(7, 5), "b": linear(5, 3)})
        for act in (torch.relu, torch.sigmoid)
    )
    comparison = prepare(right, wrong, drawn(2, 7))
    verdict = comparison.verdict()
    said = write_node_values(comparison, verdict, tmp_path / "values.json")
    assert said == f"written: {tmp_path / 'values.json'}, with values.pt2"
    (graph,) = json.loads((tmp_path / "values.json").read_text()).values()
    ratios = {name: entry["value"] for name, entry in graph["results"].items()}
    nodes = {node.name: node for node in torch.export.load(tmp_path / "values.pt2").graph.nodes}
    a, b = ratios
    assert nodes[a].target == nodes[b].target == torch.ops.aten.linear.default
    assert ratios[a] <= 1 < ratios[b] <= LARGEST


def test_a_module_that_cannot_be_exported_is_refused(tmp_path):
    branching = Of(lambda m, x: m.a(x) if x.sum() > 0 else x, {"a": linear(7, 7)})
    comparison = prepare(branching, branching, drawn(2, 7))
    with pytest.raises(SpecError, match="cannot be exported"):
        write_node_values(comparison, comparison.verdict(), tmp_path / "values.json")
    assert not list(tmp_path.iterdir())
