"""Ways to run the reference's module as a candidate, such as ``cuda+bfloat16+compile``."""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from concord.conformance.compare.aten_operations import Operation, Tensors, Watched
from concord.conformance.compare.draws import change
from concord.conformance.compare.module_reference import (
    DYNAMO,
    OUTPUT,
    ModelReference,
    ModuleReference,
    described,
    is_output,
    named,
    running,
    unwrapped,
)
from concord.conformance.compare.state import copy_of
from concord.spec.arrays import Arrays
from concord.spec.errors import SpecError, optional, refuse, unknown
from concord.spec.text import first_line

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

DEVICES = ("cuda", "tf32")

# Kernels of scaled_dot_product_attention; PyTorch reports missing ones.
ATTENTION = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}

# Ways that return a different module and can be joined.
MODULES = ("eager", "sdpa", *ATTENTION, *DTYPES, "int8", *DEVICES, "compile")

# Ways that export the module and run the graph in an engine.
ENGINES = ("onnx", "openvino")

# Ways that change the batch: more padding, or one token at a time with a cache.
BATCHES = ("padded", "padded-left", "cached")

WAYS = (*MODULES, *ENGINES, *BATCHES)

# Number of padding tokens that the way padded adds.
MORE = 3


def parts_of(way: str) -> list[str]:
    """Split a joined way."""
    names = way.split("+")
    for name in names:
        if name not in WAYS:
            raise unknown("way", name, list(WAYS))
    alone = [name for name in names if name not in MODULES]
    refuse([f"way {way!r}: {name!r} cannot be joined with others" for name in alone if len(names) > 1])
    return names


def candidate_of(reference: ModuleReference, way: str, folder: Path) -> Any:
    """A way's candidate: a module, a graph, or a function of arrays."""
    names = parts_of(way)
    if way == "onnx":
        return exported(reference, folder)
    if way == "openvino":
        return in_openvino(reference)
    if way == "cached":
        return partial(token_by_token, reference)
    if way in BATCHES:
        return partial(padded, reference, way == "padded-left")
    return module_of(reference.model, names, way)


def module_of(reference: nn.Module, names: list[str], way: str) -> nn.Module:
    """Copy a module, and configure it for the ways."""
    dtype = next((DTYPES[name] for name in names if name in DTYPES), None)
    model: Any
    converted = {*DTYPES, *DEVICES, "int8"}.intersection(names)
    shared = {} if converted else {id(weight): weight for weight in reference.parameters()}
    with running("the reference", f"cannot be copied, as way {way!r} requires"):
        model = copy_of(reference, shared).to(dtype)
    for name in sorted(names, key=MODULES.index):  # compilation comes last
        if name in ("eager", "sdpa"):
            what = f"{type(model).__name__} cannot run as {name!r}"
            if not hasattr(model, "set_attn_implementation"):
                raise SpecError(f"{what}: only transformers models allow a choice of attention")
            try:
                model.set_attn_implementation(name)
            except ValueError as error:
                raise SpecError(f"{what}: {first_line(error)}") from None
        if name in ATTENTION:
            if hasattr(model, "set_attn_implementation"):
                model.set_attn_implementation("sdpa")
            model.forward = partial(_attending, ATTENTION[name], model.forward)
        if name in DEVICES:
            if not torch.cuda.is_available():
                raise SpecError(f"way is {way!r} but PyTorch sees no CUDA device here")
            model.to("cuda")
            torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
            torch.backends.cudnn.allow_tf32 = name == "tf32"
        if name == "int8":
            with optional("way 'int8'", "peers"):
                from torchao.quantization import Int8WeightOnlyConfig, quantize_
            quantize_(model, Int8WeightOnlyConfig())
        if name == "compile":
            model = torch.compile(unwrapped(model), dynamic=False)
    return model


def captured() -> int:
    """Number of operations that PyTorch's compiler has captured so far."""
    utilities: Any = sys.modules.get(f"{DYNAMO}.utils")
    return utilities.counters["stats"]["calls_captured"] if utilities else 0


def without_effect(
    way: str,
    original: Any,
    candidate: ModuleReference | None,
    reference: ModelReference,
    arrays: Arrays,
    captured_before: int,
) -> str:
    """Say so if the way's module computes what the reference computes, by the same kernels.

    Args:
        original: the reference before a cast to the candidate's dtype.
        arrays: the candidate's tensors.
        captured_before: :func:`captured` before the candidate ran.
    """
    names = way.split("+")
    if not way or candidate is None or ("compile" in names and captured() > captured_before):
        return ""
    if change(reference.arrays, arrays)[0]:
        return ""
    kernels = _kernels(original)
    differ = _kernels(replace(candidate, compiled=False)) != kernels
    if not differ and {"eager", "sdpa", *ATTENTION}.intersection(names):
        # The reference itself may already run the requested kernel, which is judged then.
        with sdpa_kernel(SDPBackend.MATH):
            differ = _kernels(original) != kernels
    return "" if differ else f"the way {way} changes nothing: the reference runs the same kernels without it"


def _kernels(run: ModuleReference) -> list[tuple[Any, ...]]:
    kernels = list[tuple[Any, ...]]()

    def watch(operation: Operation) -> Any:
        operands = tree_leaves((operation.args, operation.kwargs))
        tensors = [x for x in operands if isinstance(x, Tensor)]
        kernels.append((operation.func, *((type(x), x.dtype, x.device) for x in tensors)))
        return operation()

    run.watched(Watched(watch), hooked=False)
    return kernels


def _attending(kernel: SDPBackend, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with sdpa_kernel(kernel):
        return forward(*args, **kwargs)


# Engines.


def exported(reference: ModuleReference, folder: Path) -> Path:
    """Export to ONNX, unless the reference is a graph."""
    if reference.graph:
        return reference.graph.path
    with optional("way 'onnx'", "peers"):
        import onnxruntime  # noqa: F401 - runs the exported graph
        import onnxscript  # noqa: F401
    path, host_reference = folder / "model.onnx", reference.on_host()
    for name in ("torch.onnx", "onnxscript"):  # they warn of missing packages, and of nodes they keep
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.onnx.export(
                copy_of(host_reference.model),
                host_reference.args,
                path,
                kwargs=dict(host_reference.kwargs),
                dynamo=True,
                verbose=False,
            )
        except Exception as error:  # the exporter, or the model in it, may raise any exception
            cause: BaseException = error
            while cause.__cause__:  # the last cause is the actual obstacle
                cause = cause.__cause__
            raise SpecError(f"the reference cannot be exported to ONNX: {described(cause)}") from error
    return path


def in_openvino(reference: ModuleReference) -> Callable[..., dict[str, Any]]:
    """OpenVINO's function of arrays, in float32."""
    with optional("way 'openvino'", "peers"):
        import openvino
    host_reference = reference.on_host()
    example = host_reference.args or dict(host_reference.kwargs)
    with running("the reference", "cannot be converted by OpenVINO"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = (
            openvino.convert_model(reference.graph.path)
            if reference.graph
            else openvino.convert_model(copy_of(host_reference.model), example_input=example)
        )
        # OpenVINO's default precision depends on the processor.
        hints = {"INFERENCE_PRECISION_HINT": "f32", "EXECUTION_MODE_HINT": "ACCURACY"}
        compiled = openvino.Core().compile_model(graph, "CPU", hints)

    def call(*args: Any, **kwargs: Any) -> dict[str, Any]:
        results = compiled(list(args) if args else kwargs)
        return {f"result {place}": array for place, array in enumerate(results.values())}

    return call


# Batches.


def padded(reference: ModuleReference, left: bool, *_args: Any, **_inputs: Any) -> dict[str, Any]:
    """Run with :data:`MORE` padding tokens, and remove them from the results.

    Left padding changes positions, so only outputs are returned.
    """
    samples, tokens = reference.real.shape
    fill = {"input_ids": getattr(getattr(reference.model, "config", None), "pad_token_id", None) or 0}

    def longer(name: str, entry: Any) -> Any:
        if not isinstance(entry, Tensor) or entry.shape[:2] != (samples, tokens):
            return entry
        more = entry.new_full((samples, MORE, *entry.shape[2:]), fill.get(name, 0))
        return torch.cat([more, entry] if left else [entry, more], 1)

    def cut(tensor: Tensor) -> Tensor:
        for axis in range(1, tensor.ndim):
            if tensor.shape[axis] == tokens + MORE:
                tensor = tensor.narrow(axis, MORE if left else 0, tokens)
        return tensor

    kwargs = {name: longer(name, entry) for name, entry in reference.kwargs.items()}
    run = ModuleReference(reference.model, kwargs=kwargs, role="the candidate")
    return {name: cut(tensor) for name, tensor in run.values.items() if is_output(name) or not left}


def token_by_token(reference: ModuleReference, *_args: Any, **_inputs: Any) -> dict[str, Any]:
    """Feed a decoder one token at a time."""
    model, kwargs = reference.model, dict(reference.kwargs)
    ids, mask = kwargs.pop("input_ids", None), kwargs.pop("attention_mask", None)
    takes = inspect.signature(model.forward).parameters
    place = next((name for name in ("cache", "past_key_values") if name in takes), "")
    if not isinstance(ids, Tensor) or not place:
        raise SpecError("way 'cached' needs a transformers decoder that takes input_ids and a cache")
    cache, steps = None, list[Tensors]()
    for token in range(ids.shape[1]):
        until = {} if mask is None else {"attention_mask": mask[:, : token + 1]}
        options = {**kwargs, **until, place: cache, "use_cache": True}
        with torch.inference_mode():
            result = model(input_ids=ids[:, token : token + 1], **options)
        cache = getattr(result, place, None)
        if cache is None:
            raise SpecError(f"{type(model).__name__} returns no {place}")
        steps.append(named(result, OUTPUT))
    by_token = {name for name, x in steps[-1].items() if x.ndim > 1 and x.shape[1] == 1}
    return {
        name: torch.cat([step[name] for step in steps], 1) if name in by_token else tensor
        for name, tensor in steps[-1].items()
    }
