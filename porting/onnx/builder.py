"""A graph that grows node by node; weights lie in a file beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from concord.porting.stored import NUMPY
from concord.spec.errors import SpecError, optional
from concord.spec.files import refusing

OPSET = 17
"""The version of the operators: all that the family needs, and every runtime of today knows it."""

IR = 8
"""The version of the file."""

KINDS = {"float32": 1, "float16": 10, "float64": 11}
"""ONNX' numbers of the dtypes that a graph may compute in."""

INT64 = 7

SMALL = 1024
"""Bytes of a tensor up to which it stands in the graph itself: shapes have to be known when it is loaded."""


@dataclass(frozen=True)
class GraphValue:
    """What a node of a graph gives, by name."""

    graph: Builder
    name: str

    def __add__(self, other: Operand) -> GraphValue:
        return self.graph.node("Add", self, other)

    def __sub__(self, other: Operand) -> GraphValue:
        return self.graph.node("Sub", self, other)

    def __mul__(self, other: Operand) -> GraphValue:
        return self.graph.node("Mul", self, other)

    def __truediv__(self, other: Operand) -> GraphValue:
        return self.graph.node("Div", self, other)

    def __matmul__(self, other: Operand) -> GraphValue:
        return self.graph.node("MatMul", self, other)

    def __invert__(self) -> GraphValue:
        return self.graph.node("Not", self)


Operand = GraphValue | float | int | tuple[int, ...]
"""A value, a number in the dtype of the graph, a whole number without axes, or some along one."""


class Builder:
    """A graph in the making.

    Args:
        dtype: that it computes in.
    """

    def __init__(self, dtype: str) -> None:
        if dtype not in KINDS:
            raise SpecError(
                f"the parameters are {dtype} but an ONNX graph must have one of {', '.join(KINDS)}"
            )
        with optional("to write ONNX", "porting"):
            import onnx
        self.onnx, self.dtype = onnx, dtype
        self.nodes: list[Any] = []
        self.tensors: dict[str, Any] = {}
        self.outputs: dict[str, list[int | str]] = {}
        self.count = 0

    def node(self, kind: str, *inputs: Operand, **attributes: Any) -> GraphValue:
        """Add a node; return what it gives."""
        given = [self.value(one).name for one in inputs]
        self.count += 1
        name = f"{kind.lower()}_{self.count}"
        self.nodes.append(self.onnx.helper.make_node(kind, given, [name], name=name, **attributes))
        return GraphValue(self, name)

    def named(self, value: GraphValue, name: str) -> GraphValue:
        """Give a value a name of its own."""
        node = self.onnx.helper.make_node("Identity", [value.name], [name], name=f"name_{name}")
        self.nodes.append(node)
        return GraphValue(self, name)

    def value(self, operand: Operand) -> GraphValue:
        """Return an operand as a value; numbers are constants."""
        if isinstance(operand, GraphValue):
            return operand
        array = np.asarray(operand)
        return self.constant(array.astype(NUMPY[self.dtype] if array.dtype.kind == "f" else np.int64))

    def constant(self, array: Any) -> GraphValue:
        """Return a constant."""
        self.count += 1
        return self.weight(f"constant_{self.count}", np.asarray(array))

    def weight(self, name: str, array: Any) -> GraphValue:
        """Return a tensor of the graph, which nothing computes."""
        if name not in self.tensors:
            self.tensors[name] = self.onnx.numpy_helper.from_array(array, name)
        return GraphValue(self, name)

    def write(self, path: Path, inputs: Mapping[str, Sequence[str]]) -> None:
        """Write the graph, and ``<name>.data`` with its weights beside it.

        Args:
            inputs: the axes of each, by name; all are int64.

        Raises:
            SpecError: if it cannot be written.
        """
        helper = self.onnx.helper
        given = [helper.make_tensor_value_info(name, INT64, list(axes)) for name, axes in inputs.items()]
        results = [
            helper.make_tensor_value_info(name, KINDS[self.dtype], axes)
            for name, axes in self.outputs.items()
        ]
        graph = helper.make_graph(self.nodes, "concord", given, results, list(self.tensors.values()))
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="concord", ir_version=IR
        )
        with refusing(path):
            self.onnx.save_model(
                model,
                path,
                save_as_external_data=True,
                location=f"{path.name}.data",
                size_threshold=SMALL,
            )
