"""A graph that grows node by node; weights lie in a file beside it, and are written one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from concord.porting.stored import NUMPY, Stored, in_memory
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
        self.tensors: dict[str, Stored] = {}
        self.outputs: dict[str, list[int | str]] = {}
        self.count = 0

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node; return the name of what it gives."""
        self.count += 1
        name = f"{kind.lower()}_{self.count}"
        self.nodes.append(self.onnx.helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def named(self, value: str, name: str) -> str:
        """Give a value a name of its own."""
        self.nodes.append(self.onnx.helper.make_node("Identity", [value], [name], name=f"name_{name}"))
        return name

    def number(self, value: float) -> str:
        """Return a constant in the dtype of the graph."""
        return self.constant(np.asarray(value, NUMPY[self.dtype]))

    def whole(self, *values: int) -> str:
        """Return a constant of whole numbers: (n)."""
        return self.constant(np.asarray(values, np.int64))

    def scalar(self, value: int) -> str:
        """Return a whole number as a constant without axes."""
        return self.constant(np.asarray(value, np.int64))

    def constant_range(self, count: int) -> str:
        """Return the numbers from 0 on: (count)."""
        return self.constant(np.arange(count))

    def constant(self, array: Any) -> str:
        """Return a constant."""
        self.count += 1
        return self.weight(f"{CONSTANT}{self.count}", in_memory(np.asarray(array)))

    def weight(self, name: str, tensor: Stored) -> str:
        """Return a tensor that lies beside the graph."""
        self.tensors.setdefault(name, tensor)
        return name

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

    def _proto(self, name: str, tensor: Stored, **content: Any) -> Any:
        return self.onnx.TensorProto(
            name=name, dims=tensor.shape, data_type=KINDS.get(tensor.dtype, INT64), **content
        )

    def _beside(self, name: str, tensor: Stored, file: str, begin: int) -> Any:
        proto = self._proto(name, tensor, data_location=self.onnx.TensorProto.EXTERNAL)
        for key, value in (("location", file), ("offset", begin), ("length", tensor.size)):
            proto.external_data.add(key=key, value=str(value))
        return proto
