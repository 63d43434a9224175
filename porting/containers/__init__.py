"""The file types of checkpoints."""

from concord.porting.containers import (
    flax,
    hdf5,
    onnx,
    orbax,
    paddle_files,
    safetensors,
    tensorflow,
    torch_files,
)
from concord.porting.containers.container import Container
from concord.porting.file_tensors import NUMPY

NARROWEST = tuple(dtype for dtype in NUMPY if dtype.startswith("float8"))

SAFETENSORS = Container(
    "safetensors", "torch", safetensors.read, safetensors.write, (".safetensors",), isolated=False
)

TORCH = Container(
    "torch", "torch", torch_files.load, torch_files.save, (".pt", ".pth", ".bin", ".ckpt"), "torch"
)

PADDLE = Container(
    "paddle", "paddle", paddle_files.load, paddle_files.save, (".pdparams",), lacks=paddle_files.LACKS
)

HDF5 = Container("hdf5", "tf", hdf5.load, hdf5.save, (".h5", ".hdf5"), lacks=NARROWEST)

HDF5_MODELS = Container(
    "hdf5 of models", "tf", hdf5.load_models, hdf5.save_models, HDF5.endings, lacks=NARROWEST
)

KERAS = Container("keras", "tf", hdf5.load_keras, hdf5.save_keras, (".keras",), lacks=NARROWEST)

MSGPACK = Container("msgpack", "jax", flax.load, flax.save, (".msgpack",))

TENSORFLOW = Container(
    "tensorflow",
    "tf",
    tensorflow.load,
    tensorflow.save,
    framework="tf",
    lacks=NARROWEST,
    looks=tensorflow.is_index,
)

ORBAX = Container("orbax", "jax", orbax.load, orbax.save, framework="jax", looks=orbax.is_folder)

# Write-only: a graph is a program, and its exporter chooses the names of weights.
ONNX = Container("onnx", "", None, onnx.save, framework="torch", looks=lambda _: False)
