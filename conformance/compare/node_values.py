"""Errors by node of the exported program, as Model Explorer reads them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from concord.conformance.compare.module_reference import ModuleReference, running, submodule_of
from concord.conformance.compare.state import copy_of
from concord.conformance.judging.verdict import Verdict
from concord.spec.errors import SpecError
from concord.spec.files import write_bytes, write_text

if TYPE_CHECKING:
    from concord.conformance.compare.model_comparison import ModelComparison

# Errors are written up to this, in tolerances.
LARGEST = 1e9

# Up to each value, a node has this colour.
COLOURS = [{"value": 1, "bgColor": "#b5e0c3"}, {"value": LARGEST, "bgColor": "#f5a79f"}]


def write_node_values(comparison: ModelComparison, verdict: Verdict, path: Path) -> str:
    """Write each activation's error in tolerances, by node, and the exported program.

    Returns a message about the files.

    Raises:
        SpecError: if the reference is not a module, or cannot be exported.
    """
    reference, nodes, values = comparison.reference, dict[str, str](), dict[str, dict[str, Any]]()
    if not isinstance(reference, ModuleReference):
        raise SpecError("Model Explorer shows exported PyTorch modules, but the reference is in NumPy")
    host = reference.on_host()
    with running(reference.role, "cannot be exported"):
        program = torch.export.export(copy_of(host.model), host.args, dict(host.kwargs), strict=False)
    for node in program.graph.nodes:  # the last node within a module is its result
        for module, _ in node.meta.get("nn_module_stack", {}).values():
            nodes[module] = node.name
    for row in verdict.table:
        module = submodule_of(row.tensor)
        if row.deciding and module in nodes:
            values.setdefault(nodes[module], {"value": min(row.ratio, LARGEST)})
    content = io.BytesIO()
    torch.export.save(program, content)
    beside = path.with_name(f"{path.name}.pt2")
    write_bytes(beside, content.getvalue())
    graph = {"name": "error in tolerances", "results": values, "thresholds": COLOURS}
    write_text(path, json.dumps({"graph": graph}, indent=1))
    return f"written: {path}, with {beside.name}"
