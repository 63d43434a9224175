"""Requests and runs as JSON and safetensors bytes: between processes and hosts, and in files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from concord.backends.interface import Request, Run
from concord.spec.batch import Batch, from_arrays
from concord.spec.cases.files import section
from concord.spec.config import EncoderConfig, from_mapping
from concord.spec.deviations import declared
from concord.spec.errors import SpecError
from concord.spec.parameters import parameters, shape_of
from concord.spec.tensors import output_name, resolve, sizes_of, taps

Message = tuple[str, bytes]
"""A JSON header, and arrays by name in the safetensors format."""

SETTINGS = ("part", "dtype", "implementation", "execution", "device", "taps", "gradients")
LATER = ("precision", "deterministic", "tap_gradients")
"""Settings that a header may lack: cases were exported without them once."""


def received(text: str) -> Any:
    """Return what JSON from another process says, with every text of it legible."""
    return _legibly(json.loads(text))


def _legibly(value: Any) -> Any:
    if isinstance(value, str):
        return legible(value)
    if isinstance(value, dict):
        return {legible(key): _legibly(entry) for key, entry in value.items()}
    return [_legibly(entry) for entry in value] if isinstance(value, list) else value


def legible(text: str) -> str:
    """Return a text with what cannot be shown, such as control characters and lone surrogates, written out as Python would."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text)


def pack(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return arrays as safetensors bytes, bit for bit."""
    # safetensors writes the buffer as it lies in memory: it must be in C order. np.ascontiguousarray would lose rank 0.
    return save({name: np.asarray(array, order="C") for name, array in arrays.items()})


def encode_request(request: Request) -> Message:
    """Return a request as a message."""
    header = {name: getattr(request, name) for name in (*SETTINGS, *LATER)} | {"config": request.config.as_dict()}
    weights = {f"weights/{name}": array for name, array in request.weights.items()}
    inputs = {f"inputs/{name}": array for name, array in request.batch.arrays().items()}
    return json.dumps(header), pack({**weights, **inputs})


def decode_request(message: Message) -> Request:
    """Return the request of a message."""
    header, arrays = json.loads(message[0]), load(message[1])
    settings = {name: header[name] for name in (*SETTINGS, *LATER) if name in header or name in SETTINGS}
    return Request(
        config=from_mapping(header["config"]),
        weights=section(arrays, "weights/"),
        batch=from_arrays(section(arrays, "inputs/")),
        **settings,
    )


def encode_run(run: Run) -> Message:
    """Return a run as a message."""
    header = {"backend": run.backend, "dtype": run.dtype, "info": run.info, "taps": list(run.taps)}
    return json.dumps(header), pack(run_arrays(run))


def decode_run(message: Message) -> Run:
    """Return the run of a message."""
    header, arrays = received(message[0]), load(message[1])
    check_info(header["info"])
    taps = {name: arrays[f"taps/{name}"] for name in header["taps"]}
    gradients, tap_gradients = split_gradients(section(arrays, "gradients/"))
    return Run(
        arrays["output"], arrays["loss"], taps, gradients, header["backend"], header["dtype"], header["info"], tap_gradients=tap_gradients
    )


def split_gradients(arrays: Mapping[str, NDArray[Any]]) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Return gradients by parameters and inputs, and those by taps, which a message or a file has as ``taps.<name>``."""
    by_taps = section(arrays, "taps.")
    return {name: array for name, array in arrays.items() if not name.startswith("taps.")}, by_taps


def misfits(run: Run, config: EncoderConfig, batch: Batch, part: str) -> list[str]:
    """Return what is wrong with the types and shapes of a run's tensors, each under the name that a verdict gives it."""
    given = batch.arrays()
    sizes = sizes_of(config, given)
    wanted = {name: resolve(tensor.shape, sizes) for name, tensor in taps(config, part, given).items()}
    wanted |= {f"gradients.taps.{name}": shape for name, shape in wanted.items()}
    wanted |= {f"gradients.{name}": shape_of(config, parameter) for name, parameter in parameters(config, part).items()}
    wanted |= {f"gradients.inputs.{name}": array.shape for name, array in given.items()}
    gradients = {**run.gradients, **{f"taps.{name}": array for name, array in run.tap_gradients.items()}}
    found = {**run.taps, output_name(config, part): run.output, "loss": run.loss, **{f"gradients.{name}": array for name, array in gradients.items()}}
    problems = [f"{name!r} has shape {array.shape} but must be {wanted[name]}" for name, array in found.items() if name in wanted and array.shape != wanted[name]]
    return problems + [f"{name!r} has dtype {array.dtype} but must be a floating-point type" for name, array in found.items() if array.dtype.kind != "f"]


def check_info(info: Any) -> None:
    """Refuse what a run says of itself if it cannot be understood: text for a list would excuse every tensor.

    Raises:
        SpecError: saying what is wrong.
    """
    if not isinstance(info, dict):
        raise SpecError("'info' must be an object")
    patterns = info.get("undelivered_taps", [])
    if not _is_list_of(str, patterns):
        raise SpecError(f"'undelivered_taps' is {patterns!r} but must be a list of strings")
    deviations = info.get("deviations", [])
    if not _is_list_of(dict, deviations):
        raise SpecError(f"'deviations' is {deviations!r} but must be a list of objects [clause=PRC-4]")
    declared(deviations)


def check_description(described: Any) -> None:
    """Refuse what a backend says of itself if it cannot be understood.

    Raises:
        SpecError: saying what is wrong.
    """
    if not isinstance(described, dict):
        raise SpecError(f"describe() returned a {type(described).__name__} but must return a dict")
    further = described.get("implementation_deviations", {})
    if not isinstance(further, dict):
        raise SpecError(f"describe(): 'implementation_deviations' is a {type(further).__name__} but must be a dict [clause=PRC-4]")
    for stated in (described.get("deviations", []), *further.values()):
        for entries in stated.values() if isinstance(stated, dict) else [stated]:
            if not _is_list_of(dict, entries):
                raise SpecError("describe(): 'deviations' must be a list of dicts, or one for each kind of device [clause=PRC-4]")
            declared(entries)


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, kind) for entry in value)


def run_arrays(run: Run) -> dict[str, NDArray[Any]]:
    """Return every array of a run under the name that it has in a message or a file."""
    taps = {f"taps/{name}": array for name, array in run.taps.items()}
    by_taps = {f"taps.{name}": array for name, array in run.tap_gradients.items()}
    gradients = {f"gradients/{name}": array for name, array in {**run.gradients, **by_taps}.items()}
    return {"output": np.asarray(run.output), "loss": np.asarray(run.loss), **taps, **gradients}
