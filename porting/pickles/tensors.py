"""What a pickle says about tensors, made out of names and calls that nobody has looked for or made.

A class or function that is not listed here is refused by its name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from types import NoneType
from typing import Any

from concord.porting.located import Found, Refused
from concord.porting.pickles.machine import Call, Name, Span, Stored
from concord.porting.stored import NUMPY, are_sizes, elements

STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16", "LongStorage": "int64",
    "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool", "UntypedStorage": "uint8",
}  # fmt: skip
"""What PyTorch calls storages, and the dtype of what they hold."""

NUMPY_CODES = {
    "f8": "float64",
    "f4": "float32",
    "f2": "float16",
    "i8": "int64",
    "i4": "int32",
    "i2": "int16",
    "i1": "int8",
    "u8": "uint64",
    "u4": "uint32",
    "u2": "uint16",
    "u1": "uint8",
    "b1": "bool",
}
"""What NumPy calls dtypes in a pickle. PaddlePaddle keeps bfloat16 as uint16."""

DEEPEST = 50
"""How deep dictionaries of tensors may lie in each other."""

MOST = 1 << 18
"""Entries that a file may have, each counted as often as it is met: a list that is in many others may be met more often than there are atoms."""

OPAQUE = {
    "torch.Size",
    "torch.device",
    "torch.nn.parameter.Parameter",
    "argparse.Namespace",
    "builtins.set",
    "__builtin__.set",
    "_codecs.encode",
} | {f"torch.{name}" for name in NUMPY if not name.startswith("u")}
"""Names that are no tensors, do no harm, and stand beside tensors."""


def tensors(value: Any) -> list[Found]:
    """Return the tensors of a pickle.

    Raises:
        Refused: if it names a class or function that is not listed, or says of a tensor what cannot be.
    """
    return [tensor_of(name, tensor) for name, tensor in _walk(value, "", 0, itertools.count())]


def _walk(value: Any, name: str, depth: int, met: Iterator[int]) -> Iterator[tuple[str, Call]]:
    """Yield the tensors in dictionaries and lists, by name; numbers and texts beside them are passed over."""
    if next(met) >= MOST:
        raise Refused(f"it holds more than {MOST} entries")
    if depth > DEEPEST:
        raise Refused(f"its dictionaries lie more than {DEEPEST} deep in each other")
    if isinstance(value, Call) and _function(value) in _TENSORS:
        yield name, value
        return
    if isinstance(value, Name) and str(value) not in OPAQUE:
        _refuse(value)
    entries = _entries(value)
    for key, inner in entries.items():
        yield from _walk(inner, f"{name}.{_brief(key)}" if name else _brief(key), depth + 1, met)


def _entries(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, Call):
        function = _function(value)
        if function in ("collections.OrderedDict", "collections.defaultdict"):
            given = value.arguments[0] if value.arguments and isinstance(value.arguments[0], list) else []
            pairs = {
                _brief(pair[0]): pair[1]
                for pair in given
                if isinstance(pair, (list, tuple)) and len(pair) == 2
            }
            return {**pairs, **value.entries}
        if function not in OPAQUE and not function.endswith(("multiarray.scalar", "numpy.dtype")):
            _refuse(value.function)
    return {}


def _function(call: Call) -> str:
    return str(call.function) if isinstance(call.function, Name) else ""


def _refuse(function: Any) -> None:
    if isinstance(function, Name):
        raise Refused(
            f"it asks for {str(function)[:100]!r}, which no file of weights needs; nothing of it was run"
        )
    raise Refused("it calls what is no function")


def _brief(value: Any) -> str:
    """Return what a value is called; of one that holds others its type alone, since they may hold each other."""
    return (
        str(value)
        if isinstance(value, (str, int, float, Name, Span, NoneType))
        else f"a {type(value).__name__}"
    )


def tensor_of(name: str, call: Call) -> Found:
    """Return what a call says about a tensor."""
    return _TENSORS[_function(call)](name, call)


# PyTorch


def _torch(name: str, call: Call) -> Found:
    given: tuple[Any, ...] = (*call.arguments, None, None, None, None)
    storage, begin, shape, stride = given[:4]
    if not isinstance(storage, Stored) or not isinstance(storage.key, tuple) or len(storage.key) < 5:
        raise Refused(f"{name!r} has no storage")
    _, kind, key, _, count = storage.key[:5]
    dtype = STORAGES.get(kind.name if isinstance(kind, Name) and kind.module.startswith("torch") else "", "")
    if len(call.arguments) > 6 and isinstance(
        call.arguments[6], Name
    ):  # _rebuild_tensor_v3, of storages that have no dtype
        dtype = call.arguments[6].name
    if dtype not in NUMPY:
        raise Refused(f"{name!r} has a storage of {_brief(kind)[:60]!r}, which is of no known dtype")
    if (
        not are_sizes([begin, count])
        or not are_sizes(shape)
        or not are_sizes(stride)
        or len(shape) != len(stride)
    ):
        raise Refused(f"{name!r} has a shape, stride or offset that is none")
    last = begin + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if elements(shape) and (last >= count or elements(shape) > count):
        raise Refused(
            f"{name!r} has shape {shape} from element {begin} on, which reaches beyond its storage of {count} elements"
        )
    return Found(name, dtype, tuple(shape), tuple(stride), _brief(key), begin, count)


def _torch_parameter(name: str, call: Call) -> Found:
    inner = call.arguments[0] if call.arguments else None
    if not isinstance(inner, Call) or _function(inner) not in _TENSORS:
        raise Refused(f"{name!r} is a parameter without a tensor")
    return tensor_of(name, inner)


# NumPy, which PaddlePaddle's files are made of


def _array(name: str, call: Call) -> Found:
    """Return an array as ``_reconstruct`` and its state say it: version, shape, dtype, whether in Fortran's order, bytes."""
    state = call.state
    if not isinstance(state, tuple) or len(state) != 5 or not are_sizes(state[1]):
        raise Refused(f"{name!r} is an array without shape, dtype and bytes")
    _, shape, kind, fortran, content = state
    return _numpy(name, tuple(shape), kind, bool(fortran), content)


def _buffer(name: str, call: Call) -> Found:
    """Return an array as ``_frombuffer`` is given it: bytes, dtype, shape, order."""
    content, kind, shape, order = (*call.arguments, None, None, None, None)[:4]
    if not are_sizes(shape):
        raise Refused(f"{name!r} is an array without a shape")
    return _numpy(name, tuple(shape), kind, order == "F", content)


def _numpy(name: str, shape: tuple[int, ...], kind: Any, fortran: bool, content: Any) -> Found:
    code = (
        kind.arguments[0]
        if isinstance(kind, Call) and _function(kind) == "numpy.dtype" and kind.arguments
        else ""
    )
    order = (
        kind.state[1]
        if isinstance(kind, Call) and isinstance(kind.state, tuple) and len(kind.state) > 1
        else "|"
    )
    dtype = NUMPY_CODES.get(code if isinstance(code, str) else "")
    if dtype is None or order == ">":
        raise Refused(
            f"{name!r} is an array of dtype {_brief(code)!r}, order {_brief(order)!r}, which is not known"
        )
    if isinstance(content, Call) and _function(content) == "_codecs.encode" and content.arguments:
        content = (
            content.arguments[0].encode("latin-1")
            if isinstance(content.arguments[0], str)
            else content.arguments[0]
        )
    if (
        isinstance(content, Call)
        and _function(content) in ("builtins.bytes", "__builtin__.bytes")
        and not content.arguments
    ):
        content = b""
    if isinstance(content, str):
        content = content.encode("latin-1", "replace")
    wanted = elements(shape) * int(code[1:])
    stride = tuple(elements(shape[:axis]) for axis in range(len(shape))) if fortran else None
    if isinstance(content, bytes) and len(content) == wanted:
        return Found(name, dtype, shape, stride, "", 0, wanted, inline=content.hex())
    if (
        isinstance(content, Span)
        and (content.text or content.length == wanted)
        and content.length <= 2 * wanted
    ):
        return Found(name, dtype, shape, stride, "", content.begin, content.length, content.text)
    raise Refused(
        f"{name!r} has shape {shape} of {dtype}, which takes {wanted} bytes, but its bytes are others"
    )


_TENSORS: dict[str, Callable[[str, Call], Found]] = {
    "torch._utils._rebuild_tensor": _torch,
    "torch._utils._rebuild_tensor_v2": _torch,
    "torch._utils._rebuild_tensor_v3": _torch,
    "torch._utils._rebuild_parameter": _torch_parameter,
    "torch._utils._rebuild_parameter_with_state": _torch_parameter,
    "numpy.core.multiarray._reconstruct": _array,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy.core.numeric._frombuffer": _buffer,
    "numpy._core.numeric._frombuffer": _buffer,
}
"""What makes a tensor, and what it is given."""
