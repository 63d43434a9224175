"""Loading and running of candidates."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import json
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from concord.backends.wire import WorkerFailure
from concord.conformance.compare import activation_names, child
from concord.conformance.compare.aten_arithmetic import ROUNDOFF
from concord.conformance.compare.draws import again, change, states
from concord.conformance.compare.model_comparison import ModelComparison
from concord.conformance.compare.module_reference import (
    LOG_PROBABILITIES,
    LOGITS,
    OUTPUT,
    ConvertedGraph,
    ModelError,
    ModelReference,
    ModuleReference,
    are_tokens,
    buffers,
    dtype_name,
    dtype_of,
    is_output,
    numbers,
    running,
    seeded,
    submodule_of,
    with_log_probabilities,
)
from concord.conformance.compare.state import copy_of
from concord.conformance.compare.written import Written
from concord.spec.arrays import Array, Arrays
from concord.spec.errors import SpecError, optional, refuse
from concord.spec.files import opened, read_arrays, read_described
from concord.spec.text import first_of

# Length in tokens of the longest standard text, and in samples of the standard audio. They are primes, so
# that all axes have different lengths.
TOKENS = 11

SAMPLES = 5003

ARRAYS = (np.ndarray, np.generic)


def load(reference: str, log_probabilities: bool = False) -> Any:
    """Load a module from ``package.module:function``, an ONNX graph or a transformers folder; for log
    probabilities, a decoder with its head.
    """
    if reference.endswith(".onnx"):
        with optional("an ONNX graph as the reference", "graph"):
            from concord.conformance.compare import onnx_reference
        return onnx_reference.load(reference)
    if ":" in reference and not Path(reference).exists():
        sys.path.insert(0, os.getcwd())
        with running(reference, "gave no result"):
            return pkgutil.resolve_name(reference)()
    if not Path(reference).is_dir():
        raise SpecError(f"{reference!r} is not a folder, an ONNX graph or package.module:function")
    with optional("a transformers model folder", "peers"):
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    with running(reference, "cannot be loaded by transformers"):
        kind: Any = AutoModel
        if log_probabilities:
            names = str(AutoConfig.from_pretrained(reference, local_files_only=True).architectures)
            kind = AutoModelForCausalLM if re.search("ForCausalLM|LMHeadModel", names) else AutoModel
        return kind.from_pretrained(reference, local_files_only=True).eval()


def loaded(candidate: Any, log_probabilities: bool = False) -> Any:
    """Load a folder's or parameterless function's module; return other candidates unchanged."""
    is_named = isinstance(candidate, str) and (Path(candidate).is_dir() or _builds_module(candidate))
    return load(candidate, log_probabilities) if is_named else candidate


def _builds_module(candidate: str) -> bool:
    # Sources are read without importing a package: a port in another framework runs in its own process.
    module, _, name = candidate.partition(":")
    place: Any = [os.getcwd(), *sys.path]
    with contextlib.suppress(AttributeError, OSError, SyntaxError, ValueError):
        for part in module.split("."):
            spec: Any = PathFinder.find_spec(part, place)
            place = spec.submodule_search_locations
        return any(
            isinstance(node, ast.FunctionDef) and node.name == name and not ast.unparse(node.args)
            for node in ast.parse(Path(spec.origin).read_bytes()).body
        )
    return False


def placed(model: Any, device: str) -> Any:
    """Move a reference to a device."""
    if device == "cpu":
        return model
    if not isinstance(model, nn.Module):
        raise SpecError(f"a NumPy reference is computed on the CPU, not on {device}")
    with running("the reference", f"cannot be put on {device}"):
        return model.to(device)


def tokens(folder: Path, texts: list[str]) -> dict[str, Any]:
    """Tokenize texts with a folder's tokenizer."""
    if not folder.is_dir():
        raise SpecError(f"--text requires a transformers model folder, but the reference is {str(folder)!r}")
    with optional("--text", "peers"):
        from transformers import AutoTokenizer
    with running(str(folder), "has no tokenizer for these texts"):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return dict(tokenizer(texts, padding=True, truncation=True, return_tensors="pt"))


def reference_of(reference: Any, log_probabilities: bool) -> Any:
    """Load a reference from its path; refuse objects of other types."""
    if isinstance(reference, (str, Path)):
        reference = load(str(reference), log_probabilities)
    if not isinstance(reference, (nn.Module, Written)):
        kind = type(reference).__name__
        raise SpecError(
            f"the reference has type {kind} but must be a torch.nn.Module, an ONNX path, or a Written"
        )
    return reference


def called_with(model: Any, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as tensors, by default :func:`standard` inputs."""
    if inputs is None:
        with torch.device("cpu"):  # the user may have set another default device
            return (), standard(model)
    tensors = tree_map(lambda x: torch.from_numpy(np.array(x)) if isinstance(x, ARRAYS) else x, inputs)
    if isinstance(tensors, Mapping):
        return (), dict(tensors)
    return tuple(tensors) if isinstance(tensors, (tuple, list)) else (tensors,), {}


def standard(model: Any) -> dict[str, Any]:
    """Standard text, images or audio for a module's parameters."""
    if not isinstance(model, nn.Module):
        raise SpecError("inputs are missing but required by a NumPy reference")
    parameters, config = inspect.signature(model.forward).parameters, getattr(model, "config", None)

    def of(name: str) -> Any:
        # Models of text and images store the image settings in a part of their configuration.
        return getattr(config, name, None) or getattr(getattr(config, "vision_config", None), name, None)

    generator = torch.Generator().manual_seed(0)
    rows = of("vocab_size") or next(
        (module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), None
    )
    lengths, available = torch.tensor([TOKENS, 1, TOKENS // 2]), {}
    if rows:
        real = torch.arange(TOKENS) < lengths[:, None]
        token_ids = torch.randint(0, rows, real.shape, generator=generator)
        available["input_ids"] = available["decoder_input_ids"] = torch.where(
            real, token_ids, of("pad_token_id") or 0
        )
        if "input_ids" in parameters:
            available["attention_mask"] = real.long()
    size, frames = of("image_size"), of("max_source_positions") or 0
    shapes = {
        "input_values": (SAMPLES,),
        "pixel_values": (
            of("num_channels") or 3,
            *(size if isinstance(size, (list, tuple)) else (size, size)),
        ),
        "input_features": (of("num_mel_bins"), 2 * frames),
    }
    for name, shape in shapes.items():
        if all(shape):
            available[name] = torch.randn((len(lengths), *shape), generator=generator)
    inputs = {name: tensor for name, tensor in available.items() if name in parameters}
    named = (
        parameter
        for parameter in parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    )
    missing = [
        parameter.name
        for parameter in named
        if parameter.name not in inputs and (parameter.default is parameter.empty or not inputs)
    ]
    owner = type(model).__name__
    if isinstance(model, ConvertedGraph):
        missing, owner = [*model.input_names], str(model.path)
    if missing:
        raise SpecError(
            f"inputs are missing but required: {first_of(missing, 5)} of {owner}; "
            "give them with --inputs FILE.safetensors, or as inputs={...}"
        )
    return inputs


# PyTorch's layers with 8-bit weights, which the arithmetic cannot follow.
PACKED = ("torch.ao.nn", "torch.nn.quantized")


def refuse_values(model: nn.Module, role: str) -> None:
    """Refuse lazy and meta weights."""
    # A run would also fail, but with a misleading error.
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            why = "is lazy and has no value yet: call the module once first"
        elif tensor.is_meta:
            why = "is on the meta device and has no value: load weights first"
        else:
            continue
        raise SpecError(f"{name} of {role} {why}")


def refuse_kinds(model: nn.Module) -> None:
    """Refuse a reference that no arithmetic can follow."""
    for path, module in model.named_modules():
        kind, where = type(module).__name__, f"{path or 'the module'} of the reference"
        if isinstance(module, torch.jit.ScriptModule):
            raise SpecError(
                f"{where} is scripted or traced, which hides its operations: give the original module"
            )
        if type(module).__module__.startswith(PACKED):
            raise SpecError(f"{where} is an 8-bit {kind}: give the module that it was quantized from")
        for name, tensor in chain(module.named_parameters(path, False), module.named_buffers(path, False)):
            dtype, plain = tensor.dtype, type(tensor.detach()) is Tensor
            if plain and not tensor.is_nested and not (dtype.is_floating_point and dtype not in ROUNDOFF):
                continue
            form = str(dtype) if plain and not tensor.is_nested else type(tensor.detach()).__name__
            raise SpecError(
                f"{name} of the reference is in {form}, which cannot be computed exactly: give it in float32"
            )


def refuse_modes(model: nn.Module, seed: int | None) -> None:
    """Refuse training mode and float64."""
    for name, module in model.named_modules():
        if (
            seed is None
            and module.training
            and "train" not in vars(module)  # modules from torch.export have only one mode
            and (not name or getattr(module, "p", 0) or getattr(module, "dropout", 0))
        ):
            path = name or "the module"
            raise SpecError(f"{path} is in training mode but must be in evaluation mode: call eval() first")
    if dtype_of(model) == torch.float64:
        raise SpecError(
            "the reference is in float64 but must be in float32 or a half precision, as candidates are"
        )


def refuse_logits(reference: ModelReference) -> None:
    """Refuse a reference without the requested log probabilities."""
    has_tokens = are_tokens(reference.kwargs.get("input_ids"))
    if reference.log_probabilities and not (has_tokens and LOG_PROBABILITIES in reference.plain):
        logits = f"{LOGITS} (B, T, vocabulary) of a torch.nn.Module"
        lacking = logits if has_tokens else "an integer input 'input_ids' (B, T)"
        raise SpecError(f"{lacking} is missing but required for log probabilities")


def dequantized(reference: ModuleReference, candidate: nn.Module) -> ModuleReference:
    """The reference with the candidate's 8-bit weights."""
    # 8-bit weights define a different model: compared with the original weights, every correct candidate
    # diverges (decision 32).
    model = reference.model
    copied, apart = copy_of(model), dict[str, float]()
    for path, module in candidate.named_modules():
        for name, weight in module.named_parameters(path, recurse=False):
            if type(weight.detach()) is not Tensor:
                right = weight.detach().dequantize()
                setattr(copied.get_submodule(path), name.rpartition(".")[2], nn.Parameter(right))
                apart[name] = activation_names.apart(numbers(right), numbers(model.get_parameter(name)))
    if not apart:
        raise SpecError(f"{type(model).__name__} has no nn.Linear, but way 'int8' quantizes only nn.Linear")
    return replace(reference, model=copied, quantized=apart)


@contextlib.contextmanager
def weights_kept(reference: ModelReference) -> Iterator[None]:
    """Undo a candidate's changes to the reference, and refuse changed parameters."""
    with reference.untouched() as changed:
        yield
    weights = dict(reference.model.named_parameters()) if isinstance(reference, ModuleReference) else {}
    if names := [name for name in changed if name in weights]:
        raise SpecError(
            f"the candidate changes the reference's {first_of(names, 3)}: give the candidate its own copy"
        )


@contextlib.contextmanager
def failing() -> Iterator[None]:
    """Report an exception of the candidate's code as a worker's failure."""
    try:
        yield
    except ModelError as error:
        status = "missing" if "ModuleNotFoundError: " in str(error) else "error"
        raise WorkerFailure(status, str(error)) from error


@dataclass(frozen=True)
class Delivered:
    """A candidate's tensors."""

    arrays: Arrays  # by name
    # Tensors of a separate run, which therefore do not depend on these activations.
    whole: frozenset[str] = frozenset()
    notes: Mapping[str, str] = field(default_factory=dict)  # remarks on the run
    unsteady: str = ""  # why the candidate is nondeterministic, or empty


HOOKS = "hooks"


def run_module(candidate: ModuleReference) -> Delivered:
    """Run a module without hooks, then with hooks."""

    def unhooked() -> Arrays:
        return {name: numbers(tensor) for name, tensor in candidate.watched(hooked=False).items()}

    # Hooks prevent a compiler's fusions, and disable fast paths. Outputs and parameter gradients therefore
    # come from the run without hooks.
    before, arrays, notes, hooked = states(), unhooked(), dict[str, str](), Arrays()
    try:
        hooked = candidate.arrays
    except SpecError as error:
        notes[HOOKS] = f"the candidate cannot run with them, so only outputs are judged: {error}"
    same = not change(arrays, hooked)[0]
    unchanged = {name: numbers(x) for name, x in buffers(candidate.model).items()}
    steady = same and states() == before
    unsteady = "" if steady else again(unhooked, arrays, dtype_name(dtype_of(candidate.model)))
    if same or notes:
        return Delivered(unchanged | (hooked or arrays), notes=notes, unsteady=unsteady)
    notes[HOOKS] = (
        "activations come from a run with hooks, and outputs from a run without; the two runs are not "
        "bitwise identical"
    )
    return Delivered(unchanged | hooked | arrays, frozenset(arrays), notes, unsteady)


def run(reference: ModelReference, candidate: Any, python: str | None) -> Delivered:
    """Run a candidate that is not a module."""
    if isinstance(candidate, str) and ":" in candidate and not Path(candidate).exists():
        return Delivered(run_alone(reference, candidate, python))
    if isinstance(candidate, (str, Path)):
        path = Path(candidate)
        if path.suffix == ".onnx":
            with opened(path), running(f"{path} in ONNX Runtime"):
                arrays = run_graph(reference, path)
                return Delivered(arrays, frozenset(name for name in arrays if is_output(name)))
        if path.suffix != ".safetensors":
            raise SpecError(f"{path} must contain named arrays (.safetensors) or a graph (.onnx)")
        candidate = read_arrays(path)
    elif callable(candidate):

        def call() -> Arrays:
            with running("the candidate"), seeded(reference.seed):
                return by_name(reference, child.called(candidate, arguments_of(reference, candidate)))

        before, arrays = states(), call()
        return Delivered(arrays, unsteady="" if states() == before else again(call, arrays, "float32"))
    if not isinstance(candidate, Mapping):
        kind = type(candidate).__name__
        raise SpecError(f"the candidate has type {kind} but must be a module, arrays, a file, or a function")
    return Delivered(by_name(reference, candidate))


# Under this key, PyTorch's exporter lists the paths of the modules that contain a node, outermost first.
SCOPES = "pkg.torch.onnx.name_scopes"


def show(graph: Any, modules: Collection[str], activations: Mapping[str, str]) -> dict[str, str]:
    """Add module outputs, and tensors that name activations, to an ONNX graph."""
    # A module's output is its only tensor that is used outside it.
    output_names = {output.name for output in graph.output}
    users: Any = defaultdict(list, {name: [set()] for name in output_names})
    modules_of: dict[str, set[str]] = {}
    leaving = defaultdict[str, list[str]](list)
    for node in graph.node:
        metadata = {entry.key: entry.value for entry in node.metadata_props}
        paths = set(ast.literal_eval(metadata.get(SCOPES, "[]")))
        modules_of |= dict.fromkeys(node.output, paths)
        for name in node.input:
            users[name].append(paths)
    for name, paths in modules_of.items():
        for path in set().union(*(paths - user for user in users[name])):
            leaving[path].append(name)
    tensors = {path: leaving[path][0] for path in modules if len(leaving[path]) == 1}
    tensors |= {
        name: tensor for name, tensor in activations.items() if name in modules and tensor in modules_of
    }
    graph.output.extend(type(graph.output[0])(name=name) for name in {*tensors.values()} - output_names)
    return tensors


def session_of(path: Path, graph: bytes = b"", optimized: bool = True) -> Any:
    """Load a graph in ONNX Runtime."""
    with optional("an ONNX file", "peers"):
        import onnx  # noqa: F401 - run_graph reads the graph
        import onnxruntime
    options = onnxruntime.SessionOptions()
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    with running(str(path), "cannot be loaded by ONNX Runtime"):
        return onnxruntime.InferenceSession(graph or str(path), sess_options=options)


def feed(reference: ModelReference, session: Any) -> Arrays:
    """A graph's inputs, matched by name or position."""
    inputs, names = reference.inputs, [entry.name for entry in session.get_inputs()]
    by_place = dict(zip(names, inputs.values(), strict=False)) if len(names) == len(inputs) else {}
    return {name: array for name, array in (by_place | inputs).items() if name in names}


def run_graph(reference: ModelReference, path: Path, optimized: bool = True) -> Arrays:
    """Run an ONNX graph in ONNX Runtime."""
    session = session_of(path, optimized=optimized)
    import onnx

    model, plain, inputs = (
        onnx.load(str(path), load_external_data=False),
        reference.values,
        feed(reference, session),
    )
    outputs = [output.name for output in model.graph.output]
    results = session.run(outputs, inputs)
    arrays = by_name(reference, dict(zip(outputs, results, strict=True)))
    shown = show(model.graph, plain, reference.graph.activations if reference.graph else {})
    if not shown:
        return arrays
    inner = session_of(path, model.SerializeToString(), optimized).run([*shown.values()], inputs)
    fitting = {
        name: array for name, array in zip(shown, inner, strict=True) if array.shape == plain[name].shape
    }
    return fitting | arrays


# Kept in a reference, beside its cached values, which several candidates share.
VERIFIED = "_verified"


def refuse_conversion(reference: ModelReference) -> None:
    """Refuse a graph whose converted nodes differ from those of ONNX Runtime without optimizations."""
    graph = reference.graph
    if graph is None or VERIFIED in vars(reference):
        return
    verdict = ModelComparison(reference, run_graph(reference, graph.path, optimized=False)).verdict()
    if verdict.status == "diverges":
        raise SpecError(f"{graph.path}: onnx2pytorch converts {verdict.first} incorrectly")
    vars(reference)[VERIFIED] = True


def call_of(reference: ModelReference, candidate: Any) -> Callable[[], Any] | None:
    """Return the candidate's call for timing, if it runs in this process."""
    if isinstance(candidate, ModuleReference):
        inputs = candidate.map_inputs(lambda x: x.to(candidate.device))

        def forward() -> None:
            with torch.inference_mode():
                candidate.model(*inputs["args"], **inputs["kwargs"])

        return forward
    if isinstance(candidate, (str, Path)) and Path(candidate).suffix == ".onnx":
        session = session_of(Path(candidate))
        return functools.partial(session.run, None, feed(reference, session))
    if callable(candidate):
        return lambda: child.called(candidate, arguments_of(reference, candidate))
    return None


def arguments_of(reference: ModelReference, function: Callable[..., Any]) -> dict[str, Any]:
    """Input arrays by name, and those other arguments that a function takes."""
    entries, parameters = dict[str, Any](), dict[str, inspect.Parameter]()
    with contextlib.suppress(TypeError, ValueError):  # a built-in function may have no signature
        parameters = {**inspect.signature(function).parameters}
    positional = [x for x in parameters.values() if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    if len(reference.args) <= len(positional):
        entries = {str(place): entry for place, entry in enumerate(reference.args)}
    entries |= {name: entry for name, entry in reference.kwargs.items() if name in parameters}
    others = {name: entry for name, entry in entries.items() if not isinstance(entry, Tensor)}
    within = tree_map(lambda x: numbers(x).copy() if isinstance(x, Tensor) else x, others)
    return within | reference.inputs


def run_alone(reference: ModelReference, target: str, python: str | None = None) -> Arrays:
    """Call ``package.module:function`` in its own process.

    Raises:
        ModelError: if it raises an exception.
        WorkerFailure: if the process dies.
    """
    if python and shutil.which(python) is None:
        raise SpecError(f"--python is {python!r} but must be a Python interpreter")
    with tempfile.TemporaryDirectory() as folder:
        input_file, output_file = Path(folder) / "inputs.safetensors", Path(folder) / "outputs.safetensors"
        save_file({name: np.ascontiguousarray(array) for name, array in reference.inputs.items()}, input_file)
        process = subprocess.run(
            [python or sys.executable, child.__file__, target, str(input_file), str(output_file)],
            capture_output=True,
            text=True,
            check=False,
        )
        words = process.stderr.strip().splitlines()
        if process.returncode == 1 and words:  # Python ended with an exception
            raise ModelError(f"{target} gave no result: {words[-1]}")
        if process.returncode or not output_file.is_file():
            killed = signal.Signals(-process.returncode).name if process.returncode < 0 else ""
            how = f"killed by {killed}" if killed else f"exit code {process.returncode}"
            raise WorkerFailure("crashed", f"{target} gave no result: {how}", "\n".join(words[-3:]))
        metadata, arrays = read_described(output_file)
        return by_name(reference, {name: arrays[name] for name in json.loads(metadata["names"])})


def pairs(array: Array) -> Array:
    """Complex numbers as real pairs, like those of a module."""
    return np.stack([array.real, array.imag], -1) if np.iscomplexobj(array) else array


def by_name(reference: ModelReference, arrays: Mapping[str, Any]) -> Arrays:
    """Match named arrays by their names, or outputs by key or position."""
    arrays_by_name = {
        name: numbers(array) if isinstance(array, Tensor) else pairs(np.asarray(array))
        for name, array in arrays.items()
    }
    refuse(
        [
            f"{name!r} of the candidate has dtype {array.dtype} but must be numeric"
            for name, array in arrays_by_name.items()
            if array.dtype.kind not in "fiub"
        ]
    )
    plain = reference.values
    keyed = {name: f"{OUTPUT}[{name}]" for name in arrays_by_name if name not in plain}
    if any(name in plain for name in (*arrays_by_name, *keyed.values())):
        return {
            keyed[name] if keyed.get(name) in plain else name: array for name, array in arrays_by_name.items()
        }
    outputs = [name for name in plain if is_output(name)]
    by_place: Arrays = {}
    for continuous in (True, False):  # integers are stored in float64 and matched separately
        names = [name for name in outputs if (plain[name].dtype != torch.float64) == continuous]
        same_kind = [array for array in arrays_by_name.values() if (array.dtype.kind == "f") == continuous]
        fits = len(same_kind) <= len(names) and all(
            array.shape == plain[name].shape for name, array in zip(names, same_kind, strict=False)
        )
        if fits:
            by_place |= zip(names, same_kind, strict=False)
        elif continuous:
            return arrays_by_name
    return by_place or arrays_by_name


def add_log_probabilities(reference: ModelReference, arrays: Arrays, own: dict[str, str]) -> None:
    """Match logits and log probabilities by key; derive the latter if missing."""
    for key, name in ((OUTPUT, LOGITS), ("logits", LOGITS), ("log_probabilities", LOG_PROBABILITIES)):
        if key in arrays and name not in arrays:
            arrays[name], own[name] = arrays.pop(key), own[key]
    if LOGITS in arrays and LOG_PROBABILITIES not in arrays:
        ids = reference.kwargs["input_ids"]
        logits = torch.tensor(arrays[LOGITS], dtype=torch.float32, device=ids.device)
        derived = with_log_probabilities({"logits": logits}, reference.kwargs).get("log_probabilities")
        if derived is not None:  # else the logits have a wrong shape
            arrays[LOG_PROBABILITIES], own[LOG_PROBABILITIES] = numbers(derived), own[LOGITS]


def stub(reference: ModelReference) -> str:
    """Return a Python skeleton of a port with every activation."""
    modules = dict[str, nn.Module]()
    if isinstance(reference, ModuleReference) and not reference.graph:  # nodes have no line of their own
        modules = dict(reference.model.named_modules())

    def source(name: str) -> str:
        module = modules.get(submodule_of(name))
        if module is None:
            return ""
        code = inspect.unwrap(type(module).forward).__code__  # not a library's wrapper
        return f", {type(module).__name__} ({Path(code.co_filename).name}:{code.co_firstlineno})"

    arguments = ", ".join(name if name.isidentifier() else f"input_{name}" for name in reference.inputs)
    if not all(name.isidentifier() or name.isdigit() for name in reference.inputs):  # names of a graph
        arguments = "**inputs"
    entries = "".join(
        f'        "{name}": ...,  # {tuple(tensor.shape)} {dtype_name(tensor.dtype)}{source(name)}\n'
        for name, tensor in reference.values.items()
    )
    return (
        f"def port({arguments}):\n"
        '    """Take NumPy arrays, and return arrays with these names."""\n'
        f"    return {{\n{entries}    }}\n"
    )
