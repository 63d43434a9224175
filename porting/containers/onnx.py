"""ONNX graphs: this project's PyTorch model as PyTorch exports it, in a process of its own. Written alone."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from concord.porting.containers.torch_files import state
from concord.porting.file_tensors import StoredTensor
from concord.spec.config import from_mapping
from concord.spec.errors import optional
from concord.spec.files import refusing
from concord.spec.tensors import inputs, output_name, taps

OPSET = 17
"""The version of the operators: all that the family needs, and every runtime of today knows it."""

DTYPES = ("float32", "float16", "float64")
"""Those that a graph may compute in."""

AXES = {"batch": "B", "tokens": "T", "query": "T", "key": "T"}
"""Those of any length."""


def save(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    config: Mapping[str, Any],
    part: str,
    dtype: str,
    every_tap: bool,
) -> None:
    """Write a graph, in the process that has PyTorch, and ``<name>.data`` with its weights beside it.

    Args:
        tensors: the state of the model.
        every_tap: whether every tap is an output, and not what the part hands out alone.
    """
    with optional("to write ONNX", "torch"):
        import torch
    with optional("to write ONNX", "porting"):
        import onnx

    from concord.backends.taps import attach
    from concord.backends.torch.model import PARTS

    family = from_mapping(dict(config), str(path))
    model = PARTS[part](family, dtype=getattr(torch, dtype)).eval()
    model.load_state_dict(state(tensors))
    found: dict[str, Any] = {}

    def tap(name: str, tensor: Any) -> Any:
        found[name] = tensor
        return tensor

    def outputs(_: Any, __: Any, result: Any) -> Any:
        if not every_tap:
            tap(output_name(family, part), result)
        return tuple(found.values())

    if every_tap:
        attach(model.named_modules(), tap)
    model.register_forward_hook(outputs)
    room = family.max_positions - family.position_start
    ids = torch.ones(2, room if family.pooling == "flatten" else min(3, room), dtype=torch.int64)
    given = {"input_ids": ids, **({"segment_ids": ids * 0} if family.num_segments else {})}
    with (
        torch.no_grad(),
        warnings.catch_warnings(action="ignore"),
        refusing(path),
        tempfile.TemporaryDirectory(dir=path.parent) as folder,  # of more than 2 GB become many files
    ):
        model(**given)  # says which taps there are
        shown = {**inputs(family, part), **taps(family, part)}
        torch.onnx.export(
            model,
            tuple(given.values()),
            f"{folder}/{path.name}",
            input_names=list(given),
            output_names=list(found),
            dynamic_axes={
                name: {
                    place: AXES[axis] for place, axis in enumerate(shown[name].shape.split()) if axis in AXES
                }
                for name in (*given, *found)
            },
            opset_version=OPSET,
            dynamo=False,  # the other exporter needs one more package
        )
        graph = onnx.load(f"{folder}/{path.name}")
        onnx.save_model(graph, path, save_as_external_data=True, location=f"{path.name}.data")
