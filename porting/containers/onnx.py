"""ONNX graphs of this project's PyTorch model, exported by PyTorch; write-only."""

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

# This version has all operators that the family needs, and current runtimes support it.
OPSET = 17

DTYPES = ("float32", "float16", "float64")  # for computing a graph

# Dynamic axes; otherwise the exporter would fix them at its example's length.
AXES = {"batch": "B", "tokens": "T", "query": "T", "key": "T"}


def save(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    config: Mapping[str, Any],
    part: str,
    dtype: str,
    every_tap: bool,
) -> None:
    """Write a graph, with its weights in ``<name>.data``."""
    with optional("writing ONNX", "torch"):
        import torch
    with optional("writing ONNX", "porting"):
        import onnx

    from concord.backends.taps import attach
    from concord.backends.torch.model import PARTS

    family = from_mapping(dict(config), str(path))
    model = PARTS[part](family, dtype=getattr(torch, dtype)).eval()
    model.load_state_dict(state(tensors))
    tapped: dict[str, Any] = {}

    def tap(name: str, tensor: Any) -> Any:
        tapped[name] = tensor
        return tensor

    def outputs(_: Any, __: Any, result: Any) -> Any:
        if not every_tap:
            tap(output_name(family, part), result)
        return tuple(tapped.values())

    if every_tap:
        attach(model.named_modules(), tap)
    model.register_forward_hook(outputs)
    room = family.max_tokens
    ids = torch.ones(2, room if family.pooling == "flatten" else min(3, room), dtype=torch.int64)
    example = {"input_ids": ids, **({"segment_ids": ids * 0} if family.num_segments else {})}
    with (
        torch.no_grad(),
        warnings.catch_warnings(action="ignore"),
        refusing(path),
        tempfile.TemporaryDirectory(
            dir=path.parent
        ) as folder,  # beyond 2 GB, the exporter writes one file per tensor
    ):
        model(**example)  # determines the taps
        descriptions = {**inputs(family, part), **taps(family, part)}
        torch.onnx.export(
            model,
            tuple(example.values()),
            f"{folder}/{path.name}",
            input_names=list(example),
            output_names=list(tapped),
            dynamic_axes={
                name: {
                    place: AXES[axis]
                    for place, axis in enumerate(descriptions[name].shape.split())
                    if axis in AXES
                }
                for name in (*example, *tapped)
            },
            opset_version=OPSET,
            dynamo=False,  # the other exporter also needs onnxscript
        )
        # A protobuf message is limited to 2 GB, so the weights are stored in a separate file.
        onnx.save_model(
            onnx.load(f"{folder}/{path.name}"),
            path,
            save_as_external_data=True,
            location=f"{path.name}.data",
        )
