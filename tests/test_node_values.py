import json

import torch
from safetensors.numpy import save_file

from concord.conformance.compare import prepare
from concord.conformance.compare.node_values import LARGEST, write_node_values
from tests.toys.kinds import Of, drawn, linear


def test_each_module_has_the_error_of_its_last_node(tmp_path):
    right, wrong = (
        Of(lambda m, x, act=act: m.b(act(m.a(x))), {"a": linear(7, 5), "b": linear(5, 3)})
        for act in (torch.relu, torch.sigmoid)
    )
    comparison = prepare(right, wrong, drawn(2, 7))
    verdict = comparison.verdict()
    said = write_node_values(comparison, verdict, tmp_path / "values.json")
    assert said == f"written: {tmp_path / 'values.json'}, with values.json.pt2"
    (graph,) = json.loads((tmp_path / "values.json").read_text()).values()
    ratios = {name: entry["value"] for name, entry in graph["results"].items()}
    nodes = {node.name: node for node in torch.export.load(tmp_path / "values.json.pt2").graph.nodes}
    a, b = ratios
    assert nodes[a].target == nodes[b].target == torch.ops.aten.linear.default
    assert ratios[a] <= 1 < ratios[b] <= LARGEST


def branching():
    return Of(
        lambda m, input_ids: m.a(input_ids) if input_ids.sum() > 0 else m.a(-input_ids), {"a": linear(7, 7)}
    )


def test_a_module_that_cannot_be_exported_is_judged_without_its_node_values(tmp_path, entered):
    save_file({"input_ids": drawn(2, 7).numpy()}, tmp_path / "in.safetensors")
    line = f"compare tests.test_node_values:branching --inputs {tmp_path / 'in.safetensors'} --node-values"
    output, (*_, error) = entered(line, tmp_path / "values.json", ends=2)
    assert "1 agrees" in output
    assert "cannot be exported" in error
    assert len(list(tmp_path.iterdir())) == 1
