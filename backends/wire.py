"""Requests and runs as JSON and safetensors bytes: between processes and hosts, and in files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from backends.interface import Request, Run
from spec.batch import from_arrays
from spec.cases.files import section
from spec.config import from_mapping
from spec.deviations import declared
from spec.errors import SpecError

Message = tuple[str, bytes]
"""A JSON header, and arrays by name in the safetensors format."""

SETTINGS = ("part", "dtype", "implementation", "execution", "device", "taps", "gradients")
LATER = ("precision", "deterministic", "tap_gradients")
"""Settings that a header may lack: cases were exported without them once."""


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
    header, arrays = json.loads(message[0]), load(message[1])
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


def check_info(info: Any) -> None:
    """Refuse what a run says of itself if it cannot be understood: text for a list would excuse every tensor.

    Raises:
        SpecError: saying what is wrong.
    """
    if not isinstance(info, dict):
        raise SpecError("'info' must be an object")
    patterns = info.get("undelivered_taps", [])
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise SpecError(f"'undelivered_taps' is {patterns!r} but must be a list of strings")
    deviations = info.get("deviations", [])
    if not isinstance(deviations, list) or not all(isinstance(entry, dict) for entry in deviations):
        raise SpecError(f"'deviations' is {deviations!r} but must be a list of objects [clause=PRC-4]")
    declared(deviations)


def run_arrays(run: Run) -> dict[str, NDArray[Any]]:
    """Return every array of a run under the name that it has in a message or a file."""
    taps = {f"taps/{name}": array for name, array in run.taps.items()}
    by_taps = {f"taps.{name}": array for name, array in run.tap_gradients.items()}
    gradients = {f"gradients/{name}": array for name, array in {**run.gradients, **by_taps}.items()}
    return {"output": np.asarray(run.output), "loss": np.asarray(run.loss), **taps, **gradients}
