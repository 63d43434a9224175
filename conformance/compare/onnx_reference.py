"""An ONNX graph as the reference, converted to a PyTorch module by onnx2pytorch.

An activation's name is that of its node: the type of its operation and its first result, ``MatMul_scores``.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
from torch import Tensor, nn
from torch.nn import functional

from concord.conformance.compare.module_reference import ConvertedGraph, running
from concord.spec.files import opened


class _Absent(ModuleType):
    """A module whose names are all None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


# onnx2pytorch imports torchvision for boxes and regions of images, but its wheel does not load with every
# PyTorch.
try:
    import torchvision
except (ImportError, RuntimeError):
    torchvision = _Absent("torchvision")
    absent = dict.fromkeys(("torchvision", "torchvision.ops", "torchvision.io"), torchvision)
    sys.modules.update(absent)
else:
    absent = {}
from onnx2pytorch import ConvertModel  # noqa: E402
from onnx2pytorch.operations.instancenorm import InstanceNormWrapper  # noqa: E402

for name in absent:  # other libraries test for them
    del sys.modules[name]


class InstanceNorm(nn.Module):
    """ONNX's operation, which normalizes by the statistics of its input.

    onnx2pytorch's normalizes by running statistics in evaluation mode.
    """

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        """Normalize (N, C, …) for each sample and channel."""
        return functional.instance_norm(x, weight=scale, bias=bias, eps=self.epsilon)


class OnnxGraph(ConvertModel, ConvertedGraph):
    """A graph as a module."""

    def __init__(self, path: str, graph: onnx.ModelProto) -> None:
        super().__init__(graph)
        self.path, self.activations = Path(path), dict[str, str]()
        for node in graph.graph.node:
            name = self.mapping[node.output[0]]
            several = {f"{name}[{place}]": tensor for place, tensor in enumerate(node.output)}
            self.activations |= {name: node.output[0], **several}
        for name, module in self.named_children():
            if isinstance(module, InstanceNormWrapper):
                setattr(self, name, InstanceNorm(module.inu.eps))

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the outputs by name."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about doubts that the conversion check settles
            outputs = super().forward(*args, **kwargs)
        return dict(zip(self.output_names, outputs if len(self.output_names) > 1 else [outputs], strict=True))


def load(path: str) -> OnnxGraph:
    """Convert a graph.

    Raises:
        SpecError: if the file is not a graph, or has an operation that cannot be converted.
    """
    with opened(Path(path)), running(path, "is not an ONNX graph"):
        onnx.checker.check_model(path)
        graph = onnx.load(path)
    with running(path, "cannot be converted by onnx2pytorch"):
        return OnnxGraph(path, graph).eval()
