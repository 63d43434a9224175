"""A graph that grows node by node; weights lie in a file beside it, and are written one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from concord.porting.stored import NUMPY, StoredTensor, in_memory
from concord.spec.errors import SpecError, optional
from concord.spec.files import write_bytes, writing

OPSET = 17
"""The version of the operators: all that the family needs, and every runtime of today knows it."""

IR = 8
"""The version of the file."""

KINDS = {"float32": 1, "float16": 10, "float64": 11}
"""ONNX' numbers of the dtypes that a graph may compute in."""

INT64 = 7

ALIGNMENT = 64

CONSTANT = "constant_"
"""How the names of tensors begin that stand in the graph itself; no parameter is called so."""


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
        self.tensors: dict[str, StoredTensor] = {}
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
        return self.weight(f"{CONSTANT}{self.count}", in_memory(array))

    def weight(self, name: str, tensor: StoredTensor) -> GraphValue:
        """Return a tensor that lies beside the graph."""
        self.tensors.setdefault(name, tensor)
        return GraphValue(self, name)

    def write(self, path: Path, inputs: Mapping[str, Sequence[str]]) -> None:
        """Write the graph, and ``<name>.data`` beside it.

        Args:
            inputs: the axes of each, by name; all are int64.

        Raises:
            SpecError: if it cannot be written.
        """
        helper, beside = self.onnx.helper, f"{path.name}.data"
        initializers, reached = [], 0
        with writing(path.with_name(beside)) as put:
            for name, tensor in self.tensors.items():
                if name.startswith(CONSTANT):  # shapes and axes have to be known when the graph is loaded
                    initializers.append(self._proto(name, tensor, raw_data=bytes(tensor.data())))
                    continue
                put(bytes(-reached % ALIGNMENT))
                reached += -reached % ALIGNMENT
                initializers.append(self._beside(name, tensor, beside, reached))
                put(tensor.data())
                reached += tensor.size
        given = [helper.make_tensor_value_info(name, INT64, list(axes)) for name, axes in inputs.items()]
        results = [
            helper.make_tensor_value_info(name, KINDS[self.dtype], axes)
            for name, axes in self.outputs.items()
        ]
        graph = helper.make_graph(self.nodes, "concord", given, results, initializers)
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="concord", ir_version=IR
        )
        write_bytes(path, model.SerializeToString())

    def _proto(self, name: str, tensor: StoredTensor, **content: Any) -> Any:
        return self.onnx.TensorProto(
            name=name, dims=tensor.shape, data_type=KINDS.get(tensor.dtype, INT64), **content
        )

    def _beside(self, name: str, tensor: StoredTensor, file: str, begin: int) -> Any:
        proto = self._proto(name, tensor, data_location=self.onnx.TensorProto.EXTERNAL)
        for key, value in (("location", file), ("offset", begin), ("length", tensor.size)):
            proto.external_data.add(key=key, value=str(value))
        return proto
