"""Containers: what lies in a file by its own names, whatever they mean."""

from collections.abc import Mapping
from pathlib import Path

from concord.porting.containers import flax, hdf5, orbax, paddle, safetensors, tensorflow, torch
from concord.porting.containers.container import Container
from concord.porting.stored import StoredTensor
from concord.spec.errors import SpecError

SAFETENSORS = Container(
    "safetensors", "torch", (".safetensors",), (), None, safetensors.write, whole=safetensors.read
)

TORCH = Container(
    "torch",
    "torch",
    (".pt", ".pth", ".bin", ".ckpt"),
    (b"PK", b"\x80\x02"),
    torch.load,
    torch.write,
    "torch",
)

PADDLE = Container("paddle", "paddle", (".pdparams",), (b"\x80",), paddle.load, paddle.write)

HDF5 = Container("hdf5", "tf", (".h5", ".hdf5"), (b"\x89HDF\r\n\x1a\n",), hdf5.load, hdf5.write)

HDF5_MODELS = Container(
    "hdf5 of models", "tf", HDF5.endings, HDF5.begins, hdf5.load_models, hdf5.write_models
)

KERAS = Container("keras", "tf", (".keras",), (b"PK\x03\x04",), hdf5.load_keras, hdf5.write_keras)

MSGPACK = Container(
    "msgpack",
    "jax",
    (".msgpack",),
    tuple(bytes([code]) for code in (*range(0x80, 0x90), 0xDE, 0xDF)),  # a dictionary
    flax.load,
    flax.write,
)

TENSORFLOW = Container(
    "tensorflow", "tf", (".index",), (), tensorflow.load, tensorflow.write, "tf", looks=tensorflow.is_index
)

ORBAX = Container("orbax", "jax", (), (), orbax.load, orbax.write, "jax", looks=orbax.is_folder)


def _never(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    raise SpecError(f"{path}: a graph is more than {len(tensors)} tensors")


ONNX = Container("onnx", "", (), (), None, _never, looks=lambda _: False)
"""Graphs, which are written alone (:mod:`concord.porting.onnx`): a program, and weights under names that
nobody chose."""

__all__ = [
    "HDF5",
    "HDF5_MODELS",
    "KERAS",
    "MSGPACK",
    "ONNX",
    "ORBAX",
    "PADDLE",
    "SAFETENSORS",
    "TENSORFLOW",
    "TORCH",
    "Container",
]
