"""Requests and runs as JSON and safetensors bytes: between processes and hosts, and in files."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from concord.backends.interface import Request, Run
from concord.spec.batch import Batch, from_arrays
from concord.spec.config import EncoderConfig, from_mapping
from concord.spec.deviations import declared
from concord.spec.errors import SpecError
from concord.spec.files import section
from concord.spec.parameters import Weights, parameters, shape_of
from concord.spec.precision import precision
from concord.spec.tensors import from_output_on, output_name, resolve, sizes_of, taps
from concord.spec.text import first_of, legible, shown
from concord.spec.training.recipe import recipe_from_mapping
from concord.spec.training.trajectory import Training

NAMED = ("taps", "gradients", "tap_gradients", "steps")
"""What a run has by name."""

Message = tuple[str, bytes]
"""A JSON header, and arrays by name in the safetensors format."""

TRAINING = "train/"
"""How the operations of training that is held open begin."""

SETTINGS = (
    "part",
    "dtype",
    "implementation",
    "execution",
    "device",
    "taps",
    "gradients",
    "precision",
    "deterministic",
    "tap_gradients",
)
"""What a header says of a request."""


LONGEST, DEEPEST = 1 << 24, 32
"""Characters, and levels of nesting, that JSON from another process may have."""


def received(text: str) -> Any:
    """Return what JSON from another process says, with every text of it legible.

    Raises:
        SpecError: if there is too much of it, or it is nested too deeply.
    """
    if len(text) > LONGEST:
        raise SpecError(f"has {len(text)} characters but must have at most {LONGEST}")
    try:
        return legibly(json.loads(text))
    except RecursionError:
        raise SpecError(f"is nested deeper than {DEEPEST} levels") from None


def legibly(value: Any, left: int = DEEPEST) -> Any:
    """Return JSON data with every text of it legible.

    Raises:
        RecursionError: if it is nested deeper than so many levels.
    """
    if isinstance(value, str):
        return legible(value)
    if isinstance(value, (dict, list)) and left == 0:
        raise RecursionError
    if isinstance(value, dict):
        return {legible(key): legibly(entry, left - 1) for key, entry in value.items()}
    return [legibly(entry, left - 1) for entry in value] if isinstance(value, list) else value


CHUNK = 32 << 20
"""Bytes of a chunk: a message of execnet may hold 2 GiB at most, and is copied several times on its way."""


class Payload:
    """Bytes that are sent in chunks, used once, and let go as soon as they have been.

    There may be gigabytes of them.

    Attributes:
        size: how many they are.
    """

    def __init__(self, content: bytes) -> None:
        self.size, self._content = len(content), [content]

    def take(self) -> bytes:
        """Return the bytes, which are the taker's from then on."""
        return self._content.pop()

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes in chunks."""
        content = self.take()
        for first in range(0, self.size, CHUNK):
            yield content[first : first + CHUNK]


def payload_of(size: int, receive: Callable[[], Any]) -> Payload:
    """Return the payload whose chunks are received one after the other.

    Args:
        size: bytes of it.
        receive: returns the next chunk.
    """
    content = io.BytesIO()
    while content.tell() < size:
        content.write(receive())
    return Payload(content.getvalue())


def pack(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return arrays as safetensors bytes, bit for bit."""
    # safetensors writes the buffer as it lies in memory: it must be in C order. np.ascontiguousarray would
    # lose rank 0.
    return save({name: np.asarray(array, order="C") for name, array in arrays.items()})


def encode_request(request: Request) -> Message:
    """Return a request as a message."""
    header = {name: getattr(request, name) for name in SETTINGS} | {"config": request.config.as_dict()}
    trained, batches = encode_training(request.training)
    header |= trained
    weights = {f"weights/{name}": array for name, array in request.weights.items()}
    inputs = {f"inputs/{name}": array for name, array in request.batch.arrays().items()}
    return json.dumps(header), pack({**weights, **inputs, **batches})


def decode_request(message: Message) -> Request:
    """Return the request of a message."""
    request = request_of(json.loads(message[0]), load(message[1]))
    exact, others = narrower(request.weights, request.dtype)
    return (
        dataclasses.replace(
            request, weights={**others, **{name: array.astype(np.float64) for name, array in exact.items()}}
        )
        if exact
        else request
    )


def request_of(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Request:
    """Return the request of a message's header and arrays."""
    settings = {name: header[name] for name in SETTINGS}
    config = from_mapping(header["config"])
    return Request(
        config=config,
        weights=in_order(section(arrays, "weights/"), config, header["part"]),
        batch=from_arrays(section(arrays, "inputs/")),
        training=decode_training(header, arrays),
        **settings,
    )


def narrower(weights: Weights, dtype: str) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Return the weights that a precision holds exactly and in more bytes.

    Which are sent as they are and widened on arrival, and the others.
    """
    fewer = {
        name
        for name, array in weights.items()
        if dtype == "float64" and array.dtype.kind == "f" and array.dtype.itemsize < 8
    }
    return {name: array for name, array in weights.items() if name in fewer}, {
        name: array for name, array in weights.items() if name not in fewer
    }


def in_order(weights: Weights, config: EncoderConfig, part: str = "model") -> Weights:
    """Return weights in the order of the specification.

    Files and messages have none, and are read in another order each time.
    """
    return {
        name: weights[name]
        for name in dict.fromkeys([*parameters(config, part), *sorted(weights)])
        if name in weights
    }


def encode_training(training: Training | None) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return what a header says of training, and its batches by name."""
    if training is None:
        return {}, {}
    said = {
        "recipe": training.recipe.as_dict(),
        "steps": [len(batches) for batches in training.steps],
        "seed": training.seed,
        "reported": training.reported,
        "dropout_by": training.dropout_by,
    }
    batches = {
        f"steps/{step}/{name}": array
        for step, batches in enumerate(training.steps)
        for name, array in encode_batches(batches).items()
    }
    return {"training": said}, batches


def decode_training(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Training | None:
    """Return the training of a message, if there is any."""
    said = header.get("training")
    if said is None:
        return None
    steps = [
        batches_of_step(section(arrays, f"steps/{step}/"), size) for step, size in enumerate(said["steps"])
    ]
    return Training(
        recipe_from_mapping(said["recipe"]),
        steps,
        said["seed"],
        tuple(said["reported"]),
        said["dropout_by"],
    )


def encode_batches(batches: Sequence[Batch]) -> dict[str, NDArray[Any]]:
    """Return the batches of a step as arrays by name."""
    return {
        f"{number}/{name}": array
        for number, batch in enumerate(batches)
        for name, array in batch.arrays().items()
    }


def batches_of_step(arrays: Mapping[str, NDArray[Any]], size: int) -> list[Batch]:
    """Return the batches of a step from arrays by name."""
    return [from_arrays(section(arrays, f"{number}/")) for number in range(size)]


def returned(run: Any) -> Run:
    """Return what a backend's ``run`` returned as a run that can be sent.

    None in place of tensors by name, or of what it says of itself, is none.

    Raises:
        TypeError: listing what it has and what it must have instead.
    """
    if not isinstance(run, Run):
        raise TypeError(f"run() returned a {type(run).__name__} but must return a Run")
    absent: dict[str, Any] = {name: {} for name in (*NAMED, "info") if getattr(run, name) is None}
    made: Run = dataclasses.replace(run, **absent)
    wrong = [
        f"{name!r} is a {type(value).__name__} but must be a dict"
        for name in (*NAMED, "info")
        if not isinstance(value := getattr(made, name), Mapping)
    ]
    wrong += [
        f"{name!r} is a {type(value).__name__} but must be text"
        for name in ("backend", "dtype")
        if not isinstance(value := getattr(made, name), str)
    ]
    tensors = {"output": made.output} | ({} if made.loss is None else {"loss": made.loss})
    tensors |= {
        f"{kind}[{name!r}]": array
        for kind in NAMED
        if isinstance(named := getattr(made, kind), Mapping)
        for name, array in named.items()
    }
    tensors = {
        name: array
        for name, array in tensors.items()
        if array is not None or not name.startswith("tap_gradients")
    }
    wrong += [
        f"{name} is a {type(array).__name__} but must be an array of numbers"
        for name, array in tensors.items()
        if not _is_array(array)
    ]
    if wrong:
        raise TypeError(f"run() returned a Run whose {'; '.join(wrong)}")
    return made


def arrays_of(method: str, found: Any) -> dict[str, NDArray[Any]]:
    """Return the arrays that a method of a session returned, by name.

    Raises:
        TypeError: if it returned no mapping of names to arrays of numbers.
    """
    if not isinstance(found, Mapping):
        raise TypeError(
            f"{method}() returned a {type(found).__name__} but must return a dict of arrays by name"
        )
    arrays = {}
    for name, value in found.items():
        if not isinstance(name, str):
            raise TypeError(f"{method}() returned an array by the name {name!r} but must name each by text")
        try:
            arrays[name] = np.asarray(value)
        except ValueError:  # rows of different lengths
            arrays[name] = np.asarray(None)
        if arrays[name].dtype.kind in "OSUMm":
            raise TypeError(
                f"{method}() returned {name!r} as a {type(value).__name__} but must return an array of "
                "numbers"
            )
    return arrays


def _is_array(value: Any) -> bool:
    try:
        return (
            np.asarray(value).dtype.kind in "fiubV"
        )  # the last: NumPy's view of types that it has not, such as bfloat16
    except Exception:  # noqa: BLE001 - whatever a framework's tensor raises
        return False


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
    steps = {f"steps.{name}": array for name, array in section(arrays, "steps/").items()}
    about = header["backend"], header["dtype"], header["info"]
    return Run(
        arrays["output"],
        arrays.get("loss"),
        taps,
        gradients,
        *about,
        tap_gradients=tap_gradients,
        steps=steps,
    )


def split_gradients(
    arrays: Mapping[str, NDArray[Any]],
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Return gradients by parameters and inputs, and those by taps.

    Which a message or a file has as ``taps.<name>``.
    """
    by_taps = section(arrays, "taps.")
    return {name: array for name, array in arrays.items() if not name.startswith("taps.")}, by_taps


def misfits(run: Run, config: EncoderConfig, batch: Batch, part: str) -> list[str]:
    """Return what keeps a run from being judged: names that nobody knows, and wrong types and shapes.

    Each tensor goes by the name that a verdict gives it; those with the same problem share a line. Output and
    loss may be wider than the run, all else has the dtype in which the precision is stored (SPEC PRC-2).
    """
    given = batch.arrays()
    sizes = sizes_of(config, given)
    wanted = {name: resolve(tensor.shape, sizes) for name, tensor in taps(config, part).items()}
    wanted |= {f"gradients.taps.{name}": shape for name, shape in wanted.items()}
    wanted |= {
        f"gradients.{name}": shape_of(config, parameter)
        for name, parameter in parameters(config, part).items()
    }
    wanted |= {f"gradients.inputs.{name}": array.shape for name, array in given.items()}
    gradients = {
        **run.gradients,
        **{f"taps.{name}": array for name, array in run.tap_gradients.items() if array is not None},
    }
    found = [
        *run.taps.items(),
        *run.results(output_name(config, part)).items(),
        *((f"gradients.{name}", array) for name, array in gradients.items()),
    ]
    storage, problems = precision(run.dtype).storage, dict[str, list[str]]()
    may_be_wider = {*from_output_on(config, part)}
    for name, array in found:
        wider = name in may_be_wider and array.dtype.kind == "f" and array.dtype.itemsize > storage.itemsize
        if name not in wanted:
            nearest = get_close_matches(name, wanted, 1)
            meant = f": did you mean {nearest[0]!r}?" if nearest else ""
            problem = f"named like nothing that part {part!r} has{meant}"
        elif array.shape != wanted[name]:
            problem = f"of shape {array.shape} but must be {wanted[name]}"
        elif array.dtype != storage and not wider:
            problem = f"of dtype {array.dtype} but must be {storage} in a {run.dtype} run"
        else:
            continue
        if name not in problems.setdefault(problem, []):  # the output is a tap too
            problems[problem].append(name)
    return [
        f"{_listed(names)} {'is' if len(names) == 1 else 'are'} {problem}"
        for problem, names in problems.items()
    ]


def _listed(names: Sequence[str], most: int = 3) -> str:
    """Return names as they stand in a line: the first few, shortened, and how many more there are."""
    return first_of([repr(shown(name, 80)) for name in names], most)


def check_info(info: Any) -> None:
    """Refuse what a run says of itself if it cannot be understood: text for a list would excuse every tensor.

    Raises:
        SpecError: saying what is wrong.
    """
    if not isinstance(info, dict):
        raise SpecError(f"'info' is {repr(info)[:40]} but must be an object")
    patterns = info.get("not_exposed", [])
    if not _is_list_of(str, patterns):
        raise SpecError(f"'not_exposed' is {patterns!r} but must be a list of strings")
    switches = info.get("precision_switches", {})
    if not isinstance(switches, dict):
        raise SpecError(f"'precision_switches' is {switches!r} but must be an object")
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
        raise SpecError(
            f"describe(): 'implementation_deviations' is a {type(further).__name__} but must be a dict "
            "[clause=PRC-4]"
        )
    for stated in (described.get("deviations", []), *further.values()):
        for entries in stated.values() if isinstance(stated, dict) else [stated]:
            if not _is_list_of(dict, entries):
                raise SpecError(
                    "describe(): 'deviations' must be a list of dicts, or one for each kind of device "
                    "[clause=PRC-4]"
                )
            declared(entries)


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, kind) for entry in value)


def run_arrays(run: Run) -> dict[str, NDArray[Any]]:
    """Return every array of a run under the name that it has in a message or a file."""
    taps = {f"taps/{name}": array for name, array in run.taps.items()}
    by_taps = {f"taps.{name}": array for name, array in run.tap_gradients.items() if array is not None}
    gradients = {f"gradients/{name}": array for name, array in {**run.gradients, **by_taps}.items()}
    steps = {f"steps/{name.removeprefix('steps.')}": array for name, array in run.steps.items()}
    loss = {} if run.loss is None else {"loss": np.asarray(run.loss)}
    return {"output": np.asarray(run.output), **loss, **taps, **gradients, **steps}
