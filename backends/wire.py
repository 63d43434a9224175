"""Messages between processes: JSON text and safetensors arrays; nothing is pickled."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from concord.backends.interface import Request, Run
from concord.spec.arrays import Arrays
from concord.spec.batch import Batch
from concord.spec.config import EncoderConfig, from_mapping
from concord.spec.deviations import parse_deviations
from concord.spec.errors import SpecError
from concord.spec.files import section
from concord.spec.parameters import Weights, parameters, shape_of
from concord.spec.precision import precision
from concord.spec.tensors import from_output_on, output_name, resolve, sizes_of, taps
from concord.spec.text import first_of, legible, shown
from concord.spec.training.recipe import Recipe, recipe_from_mapping
from concord.spec.training.trajectory import Training

# Fields of a run with tensors by name.
NAMED = ("taps", "gradients", "tap_gradients", "steps")

# The JSON text's name in a message, and the keys of objects that represent an array or a value of our types.
TEXT, ARRAY, KIND = "text", "__array__", "__kind__"

# Kinds of dtypes that arrays may have.
NUMBERS = "fiub"

# Our types that may be sent, with their constructors. A pickle could run a worker's code here (decision
# 0001).
MAKERS: dict[type, Callable[..., Any]] = {
    EncoderConfig: lambda **fields: from_mapping(fields),
    Recipe: lambda **fields: recipe_from_mapping(fields),
    Training: lambda **fields: Training(**{**fields, "reported": tuple(fields["reported"])}),
    **{kind: kind for kind in (Batch, Request, Run)},
}


class WorkerFailure(RuntimeError):
    """A worker that did not return a result.

    Attributes:
        status: ``"absent"`` (not installed), ``"broken"`` (cannot be imported), ``"crashed"``, ``"timed
            out"``, ``"out of memory"``, or ``"error"`` (an exception; the backend survives).
        stderr: last lines of its standard error.
    """

    def __init__(self, status: str, detail: str, stderr: str = "") -> None:
        self.status, self.detail, self.stderr = status, legible(detail), legible(stderr)
        super().__init__(f"{status}: {self.detail}")


def encode(value: Any) -> bytes:
    """Encode JSON data with arrays and types of :data:`MAKERS`."""
    arrays: Arrays = {}

    def plain(part: Any) -> Any:
        if isinstance(part, np.ndarray):
            arrays[str(len(arrays))] = part
            return {ARRAY: str(len(arrays) - 1)}
        if isinstance(part, Mapping):
            return dict(part)
        for kind in MAKERS:
            if isinstance(part, kind):
                fields = dataclasses.fields(kind)
                return {KIND: kind.__name__, **{field.name: getattr(part, field.name) for field in fields}}
        raise TypeError(f"Object of type {type(part).__name__} is not JSON serializable")

    text = json.dumps(value, default=plain)
    return pack({TEXT: np.frombuffer(text.encode(), np.uint8), **arrays})


def pack(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Arrays as safetensors bytes."""
    # safetensors writes raw memory, so arrays must be in C order. np.ascontiguousarray would lose rank 0.
    return save({name: np.asarray(array, order="C") for name, array in arrays.items()})


def decode(content: bytes) -> Any:
    """Decode a message."""
    arrays, makers = load(content), {kind.__name__: make for kind, make in MAKERS.items()}

    def whole(fields: dict[str, Any]) -> Any:
        if ARRAY in fields:
            return arrays[fields[ARRAY]]
        return makers[fields.pop(KIND)](**fields) if KIND in fields else fields

    return json.loads(arrays[TEXT].tobytes(), object_hook=whole)


def legibly(value: Any) -> Any:
    """Make all text in JSON data legible."""
    if isinstance(value, dict):
        return {legible(key): legibly(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [legibly(entry) for entry in value]
    return legible(value) if isinstance(value, str) else value


def in_order(weights: Weights, config: EncoderConfig, part: str = "model") -> Weights:
    """Weights in the order of the specification."""
    return {
        name: weights[name]
        # safetensors has no order: the read order differs each time.
        for name in dict.fromkeys([*parameters(config, part), *sorted(weights)])
        if name in weights
    }


def returned(run: Any) -> Run:
    """Check and complete a backend's run; None counts as no tensors.

    Raises:
        TypeError: naming the wrong and the expected type.
    """
    if not isinstance(run, Run):
        raise TypeError(f"run() returned type {type(run).__name__} but must return a Run")
    sections = {name: {} if getattr(run, name) is None else getattr(run, name) for name in NAMED}
    if isinstance(run.tap_gradients, Mapping):
        sections["tap_gradients"] = {
            name: gradient for name, gradient in run.tap_gradients.items() if gradient is not None
        }
    arrays: dict[str, Any] = {name: arrays_of(f"run().{name}", tensors) for name, tensors in sections.items()}
    results = arrays_of("run()", {"output": run.output} | ({} if run.loss is None else {"loss": run.loss}))
    return dataclasses.replace(
        run, output=results["output"], loss=results.get("loss"), **arrays, info=plain(run.info or {})
    )


def plain(data: Any) -> Any:
    """Convert a description to JSON data.

    Raises:
        TypeError, ValueError: if JSON cannot represent it.
    """
    return legibly(json.loads(json.dumps(data)))


def arrays_of(what: str, tensors: Any) -> Arrays:
    """Convert a backend's tensors to named arrays.

    Args:
        what: the source, for messages.

    Raises:
        TypeError: listing all values other than arrays of numbers.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"{what} has type {type(tensors).__name__} but must be a dict of named arrays")
    arrays, problems = {}, []
    for name, value in tensors.items():
        try:
            arrays[name] = np.asarray(value)
        except Exception:  # noqa: BLE001 - whatever a framework's tensor raises
            arrays[name] = np.asarray(None)
        if not isinstance(name, str):
            problems.append(f"{what} has an array with the name {name!r} but every name must be a string")
        elif arrays[name].dtype.kind not in NUMBERS:
            dtype = "" if arrays[name].dtype == object else f" of dtype {arrays[name].dtype}"
            problems.append(
                f"{what}[{name!r}] has type {type(value).__name__}{dtype} but must be an array of numbers"
            )
    if problems:
        raise TypeError("; ".join(problems))
    return arrays


def split_gradients(
    arrays: Mapping[str, NDArray[Any]],
) -> tuple[Arrays, Arrays]:
    """Separate gradients by parameters and inputs from those by taps."""
    own = {name: array for name, array in arrays.items() if not name.startswith("taps.")}
    return own, section(arrays, "taps.")


def misfits(run: Run, config: EncoderConfig, batch: Batch, part: str) -> list[str]:
    """Describe unknown names, wrong dtypes and wrong shapes, which prevent judgement."""
    inputs = batch.arrays()
    sizes = sizes_of(config, inputs)
    shapes = {name: resolve(tensor.shape, sizes) for name, tensor in taps(config, part).items()}
    shapes |= {f"gradients.taps.{name}": shape for name, shape in shapes.items()}
    shapes |= {
        f"gradients.{name}": shape_of(config, parameter)
        for name, parameter in parameters(config, part).items()
    }
    shapes |= {f"gradients.inputs.{name}": array.shape for name, array in inputs.items()}
    delivered = [
        *run.taps.items(),
        *run.results(output_name(config, part)).items(),
        *((f"gradients.{name}", array) for name, array in run.gradients.items()),
        *(
            (f"gradients.taps.{name}", array)
            for name, array in run.tap_gradients.items()
            if array is not None
        ),
    ]
    storage, problems = precision(run.dtype).storage, dict[str, list[str]]()
    # A model in half precision may return float32 logits (SPEC PRC-2).
    may_be_wider = {*from_output_on(config, part)}
    for name, array in delivered:
        wider = name in may_be_wider and array.dtype.kind == "f" and array.dtype.itemsize > storage.itemsize
        if name not in shapes:
            nearest = get_close_matches(name, shapes, 1)
            meant = f": did you mean {nearest[0]!r}?" if nearest else ""
            problem = f"unknown in part {part!r}{meant}"
        elif array.shape != shapes[name]:
            problem = f"of shape {array.shape} but must be {shapes[name]}"
        elif array.dtype != storage and not wider:
            problem = f"of dtype {array.dtype} but must be {storage} in a {run.dtype} run"
        else:
            continue
        if name not in problems.setdefault(problem, []):  # the output is also a tap
            problems[problem].append(name)
    return [
        f"{_listed(names)} {'is' if len(names) == 1 else 'are'} {problem}"
        for problem, names in problems.items()
    ]


def _listed(names: Sequence[str], most: int = 3) -> str:
    return first_of([repr(shown(name, 80)) for name in names], most)


def check_info(info: Any) -> None:
    """Refuse a malformed description of a run."""
    if not isinstance(info, dict):
        raise SpecError(f"'info' is {repr(info)[:40]} but must be an object")
    # A string instead of a list would match, and so exempt, every tensor.
    lists = {"not_exposed": (str, "strings"), "deviations": (dict, "objects [clause=PRC-4]")}
    for name, (kind, plural) in lists.items():
        if not _is_list_of(kind, info.get(name, [])):
            raise SpecError(f"{name!r} is {info[name]!r} but must be a list of {plural}")
    switches = info.get("precision_switches", {})
    if not isinstance(switches, dict):
        raise SpecError(f"'precision_switches' is {switches!r} but must be an object")
    parse_deviations(info.get("deviations", []))


def check_description(described: Any) -> dict[str, Any]:
    """Return a backend's description, or refuse a malformed one."""
    if not isinstance(described, dict):
        raise SpecError(f"describe() returned type {type(described).__name__} but must return a dict")
    further = described.get("implementation_deviations", {})
    if not isinstance(further, dict):
        raise SpecError(
            f"describe(): 'implementation_deviations' has type {type(further).__name__} but must be a dict "
            "[clause=PRC-4]"
        )
    for declarations in (described.get("deviations", []), *further.values()):
        for entries in declarations.values() if isinstance(declarations, dict) else [declarations]:
            if not _is_list_of(dict, entries):
                raise SpecError(
                    "describe(): 'deviations' must be a list of dicts, or one for each kind of device "
                    "[clause=PRC-4]"
                )
            parse_deviations(entries)
    return described


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, kind) for entry in value)
