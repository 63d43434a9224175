"""Parity: readers can compare the four backends line by line."""

import ast
import difflib
import fnmatch
import re

import pytest

from concord import backends
from tests.test_structure import ROOT, sources, tree

# The only differences in outline from torch: backend, files, a pattern for the line that is gone or new, and
# words of the backend's README that explain it.
PARITY_EXCEPTIONS = [
    (name, *cells)
    for row in """
tf paddle jax | backend.py    | - REDUCED                              | `backend.py`
paddle        | backend.py    | + Adapter.dtypes                       | no half precision on CPU
jax           | backend.py    | + Adapter.__init__(self)               | `jax_enable_x64`
tf jax        | backend.py    | - ModelSession.evaluation(*                 | compiles a whole step
tf jax        | backend.py    | - ModelSession.forget(self)                 | compiles a whole step
tf jax        | backend.py    | - ModelSession.prepare(self)                | compiles a whole step
tf jax        | backend.py    | + ModelSession.number(*                     | compiles a whole step
tf jax        | backend.py    | + ModelSession.traced(*                     | compiles a whole step
tf jax        | backend.py    | - Adapter.without_gradients(*          | compiles a whole step
tf paddle jax | backend.py    | - MODES                                | no graph:
tf paddle jax | backend.py    | - ModelSession.captured                     | no graph:
tf            | backend.py    | + Adapter.forward(self, model, inputs) | takes its inputs in a mapping
jax | backend.py | + ModelSession.model* | the model's state, and gets the new one back
jax | backend.py | + ModelSession.h* | the model's state, and gets the new one back
jax | backend.py | + ModelSession.synchronize(self) | the model's state, and gets the new one back
jax | backend.py | + ModelSession.variables | the model's state, and gets the new one back
tf jax        | backend.py    | + Adapter.within(self, request)        | within `
jax           | backend.py    | + OPTIONS                              | xla_allow_excess_precision
tf            | l*.py         | [+-] *LayerNorm.*                      | weights made by `build`
tf | layers.py | - MultiHeadAttention.output | `output` is a property of every Keras layer
tf | layers.py | + MultiHeadAttention.projection | `output` is a property of every Keras layer
jax           | layers.py     | [+-] *LayerNorm.__init__(*            | `param_dtype`
paddle        | layers.py     | + scalar(*                             | `scalar` and `filled`
paddle        | layers.py     | + filled(*                             | `scalar` and `filled`
jax           | layers.py     | - LayerNorm.weight                     | `scale` and `bias` of a norm
jax           | layers.py     | + LayerNorm.scale                      | `scale` and `bias` of a norm
paddle        | layers.py     | - dtype_name(*                         | default dtype
tf            | layers.py     | - dtype_name(*                         | dtype policy
tf            | layers.py     | + Layer*                               | weights made by `build`
tf            | layers.py     | + Linear*                              | weights made by `build`
tf            | layers.py     | + Model*                               | weights made by `build`
paddle        | library.py    | + UNPADDED_DEVIATIONS                  | `padding_left_out`
tf paddle jax | library.py    | - kernels(request)                     | has one kernel
tf paddle jax | library.py    | - fused_reasons(request)               | has one kernel
paddle        | library.py    | + KNOWN_DEVIATIONS                     | holds epsilon as a float32
tf | library.py | + KNOWN_DEVIATIONS | rounds sqrt(1/2) and 0.044715 to float32
paddle        | library.py    | + LARGEST_EPSILON                      | takes no epsilon above 0.001
tf paddle jax | library.py    | - ReorderedLinear*                     | there is no such layer here
tf paddle jax | library.py    | - reordered_linear(*                   | there is no such layer here
tf paddle jax | library.py    | - reorder_linears(*                    | there is no such layer here
jax           | library.py    | + FusedAttention.kernel                | cuDNN has a kernel
jax           | library.py    | + cudnn_reasons(*                      | cuDNN has a kernel
jax           | library.py    | + CudnnAttention*                      | cuDNN has a kernel
jax           | library.py    | + CUDNN_LAYERS                         | cuDNN has a kernel
tf jax        | library.py    | - onednn_reasons(*                     | there is no such layer here
paddle        | library.py    | + Predictor*                           | Paddle Inference runs the whole model
paddle        | library.py    | + Traced*                              | Paddle Inference runs the whole model
tf            | model.py      | - EncoderStack.layers                  | `layers` of every Keras model
tf            | model.py      | + EncoderStack.blocks                  | `layers` of every Keras model
paddle        | optimizers.py | + CONSTANTS                            | `optimizer_constant_bits`
jax           | optimizers.py | + direction(recipe)                    | own optimizer trains
jax           | optimizers.py | + OwnOptimizer.*                       | own optimizer trains
tf            | optimizers.py | - MOMENTS                                | own optimizer trains
tf            | optimizers.py | + ORDER                                | own optimizer trains
tf paddle jax | optimizers.py | [+-] own(*                             | own optimizer trains
""".strip().splitlines()
    for names, *cells in [[cell.strip() for cell in row.split("|")]]
    for name in names.split()
]


def public(name):
    return not name.startswith("_") or name in ("__init__", "__call__")


def signature(function, prefix=""):
    name = "forward" if function.name in ("call", "__call__") else function.name
    names = [argument.arg for argument in [*function.args.args, *function.args.kwonlyargs]]
    return f"{prefix}{name}({', '.join(names)})"


def assigned(node, prefix=""):
    # Public names, or public attributes of `self`.
    targets = getattr(node, "targets", [node.target] if isinstance(node, ast.AnnAssign) else [])
    names = [text.removeprefix(prefix) for text in map(ast.unparse, targets) if text.startswith(prefix)]
    return [name for name in names if name.isidentifier() and public(name)]


def outline(path):
    # Functions with parameters, classes with constants, methods and attributes, and constants, in order.
    lines = []
    for node in tree(path).body:
        if isinstance(node, ast.ClassDef) and public(node.name):
            names = [
                name for member in node.body if isinstance(member, ast.Assign) for name in assigned(member)
            ]
            lines += [node.name, *(f"{node.name}.{name}" for name in names)]
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and public(method.name):
                    names = [name for inner in ast.walk(method) for name in assigned(inner, "self.")]
                    lines.append(signature(method, f"{node.name}."))
                    lines += [f"{node.name}.{name}" for name in dict.fromkeys(names)]
        elif isinstance(node, ast.FunctionDef) and public(node.name):
            lines.append(signature(node))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            lines += assigned(node)
    return lines


def differences(path, twin):
    # A line that moved is both gone ("- ") and new ("+ ").
    return [line for line in difflib.ndiff(outline(path), outline(twin)) if line.startswith(("- ", "+ "))]


def documented(path):
    # The module itself is "".
    names = {"" for _ in [0] if ast.get_docstring(tree(path))}
    for node in tree(path).body:
        for member in [node, *(node.body if isinstance(node, ast.ClassDef) else [])]:
            if (
                isinstance(member, (ast.ClassDef, ast.FunctionDef))
                and public(member.name)
                and ast.get_docstring(member)
            ):
                names.add(member.name if member is node else f"{node.name}.{member.name}")
    return names


def einsums(path):
    calls = [
        node
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("einsum")
    ]
    # Operands may come in the order that a framework multiplies faster.
    sides = [call.args[0].value.split("->") for call in sorted(calls, key=lambda call: call.lineno)]
    return [(sorted(operands.split(",")), result) for operands, result in sides]


TWINS = [
    (name, file.name)
    for name in backends.BUILT_IN[1:]
    for file in sources("backends/torch")
    if (ROOT / "backends" / name / file.name).exists()
]
each_twin = pytest.mark.parametrize(("backend", "file"), TWINS)


@pytest.mark.parametrize("backend", backends.BUILT_IN)
def test_backend_folders_hold_the_same_files(backend):
    actual, expected = ({path.name for path in sources(f"backends/{name}")} for name in (backend, "torch"))
    assert actual == expected


@each_twin
def test_backends_define_the_same_things_in_the_same_order(backend, file):
    patterns = [
        pattern
        for name, place, pattern, _ in PARITY_EXCEPTIONS
        if name == backend and fnmatch.fnmatch(file, place)
    ]
    lines = differences(ROOT / "backends/torch" / file, ROOT / "backends" / backend / file)
    undeclared = [
        line for line in lines if not any(fnmatch.fnmatchcase(line, pattern) for pattern in patterns)
    ]
    assert not undeclared, f"backends/{backend}/{file} against backends/torch/{file}: {undeclared}"


@pytest.mark.parametrize(("backend", "place", "pattern", "words"), PARITY_EXCEPTIONS)
def test_parity_exceptions_exist_and_are_explained(backend, place, pattern, words):
    pairs = [
        (ROOT / "backends/torch" / file, ROOT / "backends" / backend / file)
        for name, file in TWINS
        if name == backend and fnmatch.fnmatch(file, place)
    ]
    lines = [line for path, twin in pairs for line in differences(path, twin)]
    assert any(fnmatch.fnmatchcase(line, pattern) for line in lines), (
        f"{backend}: nothing deviates as {pattern!r} says any more"
    )
    assert words in (ROOT / "backends" / backend / "README.md").read_text()


@each_twin
def test_backends_document_what_torch_documents(backend, file):
    rename = re.compile(r"\.(call|__call__)$")
    expected, actual = (
        {rename.sub(".forward", name) for name in documented(ROOT / "backends" / b / file)}
        for b in ("torch", backend)
    )
    defined = {"", *(line.partition("(")[0] for line in outline(ROOT / "backends" / backend / file))}
    assert not (expected - actual) & defined


@each_twin
def test_backends_contract_with_the_same_einsum_strings(backend, file):
    assert einsums(ROOT / "backends" / backend / file) == einsums(ROOT / "backends/torch" / file)
