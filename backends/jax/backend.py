"""The JAX backend: NumPy in and out, devices, dtypes, switches, and a session on a model.

Shapes: B batch, T tokens, C classes, M rows, N columns.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import flax
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import SingleDeviceSharding

from concord.backends.adapter import FrameworkAdapter
from concord.backends.interface import Implementation, Request, Unsupported
from concord.backends.jax import library, optimizers, training
from concord.backends.jax.model import PARTS
from concord.backends.session import FrameworkSession

OPTIONS: dict[str, str | bool] = {"xla_allow_excess_precision": False}
"""Of the compiler: allowed, XLA leaves out roundings to bfloat16 where it fuses steps."""


class ModelSession(FrameworkSession):
    """A model and its inputs on a device (:class:`concord.backends.interface.Session`)."""

    graph: nnx.GraphDef[Any]
    variables: nnx.State[Any, Any]
    fixed: nnx.State[Any, Any]

    @property
    def model(self) -> nnx.Module:
        """The model as it is now."""
        return nnx.merge(self.graph, self.variables, self.fixed)

    @model.setter
    def model(self, model: nnx.Module) -> None:
        self.graph, self.variables, self.fixed = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]

    @property
    def held(self) -> tuple[Any, Any]:
        """What a step of training is given of the model."""
        return self.variables, self.fixed

    def model_of(self, state: nnx.State, fixed: nnx.State) -> nnx.Module:
        """Return the model of what a step is given."""
        return nnx.merge(self.graph, state, fixed)

    def held_by(self, model: nnx.Module) -> nnx.State:
        """Return what a step leaves of the model."""
        return nnx.state(model, nnx.Param)

    def hold(self, state: nnx.State) -> None:
        """Take what a step left of the model."""
        self.variables = state

    def synchronize(self) -> None:
        """Wait until the device is done."""
        self.adapter.synchronize((self.computed, self.variables))

    def traced(
        self, function: Callable[..., Any], *given: Any, replaced: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        """Return a step, compiled for what it is given if that is asked for."""
        return (
            jax.jit(function, donate_argnums=replaced).lower(*given).compile(compiler_options=OPTIONS)
            if self.compiled
            else function
        )

    def number(self, value: float) -> Array:
        """Return a number that a step is given as a tensor: whole steps are compiled."""
        return jnp.asarray(value, dtype=self.request.dtype)


class Adapter(FrameworkAdapter):
    """The backend (:class:`concord.backends.interface.Backend`)."""

    name = "jax"
    version = f"{jax.__version__} (jaxlib {jaxlib.version.__version__}, flax {flax.__version__})"
    thread_switches = ("NPROC",)
    implementations = {"explicit": Implementation(PARTS), **library.IMPLEMENTATIONS}
    known_deviations = {"cpu": [], "cuda": []}
    training, optimizers = training, optimizers
    precisions = {
        "strict": {"jax_default_matmul_precision": "highest"},
        "tf32": {"jax_default_matmul_precision": "tensorfloat32"},
    }
    determinism = {"xla_gpu_deterministic_ops": True}
    session_type = ModelSession

    def __init__(self) -> None:
        super().__init__()
        # Without it JAX makes every float64 a float32 and every int64 an int32, and says nothing.
        jax.config.update("jax_enable_x64", True)

    def cuda_devices(self) -> int:
        """Return the number of CUDA devices that the framework sees."""
        return len(_devices("cuda"))

    def threads(self) -> int:
        """Return the number of threads that the framework computes with on the CPU."""
        # The size of XLA's thread pool on the CPU: what NPROC says, else the number of cores that the process
        # may use.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return int(os.environ.get("NPROC") or cores or 1)

    def place(self, kind: str, index: int) -> jax.Device:
        """Return the framework's device: ``"cpu"``, or ``"cuda"`` of that number."""
        return _devices(kind)[index]

    @contextmanager
    def within(self, request: Request) -> Iterator[None]:
        """Do what a block does on the device of a request."""
        with jax.default_device(self.device(request.device)):
            yield

    def construct(self, part: Callable[..., nnx.Module], request: Request, device: jax.Device) -> nnx.Module:
        """Return a part of the model in the dtype of a request, on a device, without its weights."""
        model = nnx.eval_shape(
            lambda: part(request.config, param_dtype=jnp.dtype(request.dtype), rngs=nnx.Rngs(0))
        )  # Shapes alone; nothing is allocated or drawn.
        place = SingleDeviceSharding(device)
        nnx.update(
            model,
            jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), nnx.state(model)
            ),
        )
        return model

    def tensor(self, array: np.ndarray, dtype: str, device: jax.Device) -> Array:
        """Return an input as a tensor: numbers in the precision of the run, ids as int64, masks as bool."""
        with np.errstate(over="ignore"):  # What float16 cannot hold becomes infinite.
            return jax.device_put(
                array.astype(jnp.dtype(dtype)) if np.issubdtype(array.dtype, np.floating) else array, device
            )

    def peak_memory(self, device: str, reset: bool = False) -> int | None:
        """Return the largest number of bytes held on a device."""
        place = self.device(device)
        # JAX cannot be made to forget it.
        held = place.memory_stats()
        return int(held["peak_bytes_in_use"]) if held else None

    def event(self) -> Any:
        """Return an event of the device's clock; None if the framework does not give it away."""
        return None

    def layers(self, model: nnx.Module) -> Iterable[tuple[str, nnx.Module]]:
        """Return all layers of a model with their paths."""
        return [(".".join(map(str, path)), node) for path, node in nnx.iter_graph(model)]

    def synchronize(self, computed: Any) -> None:
        """Wait until tensors are computed."""
        jax.block_until_ready(computed)

    def multiply(self, left: Array, right: Array) -> Array:
        """Start a matrix product: (M, K) and (K, N) to (M, N)."""
        return jnp.matmul(left, right)

    # Switches.

    def read_switches(self) -> dict[str, Any]:
        """Return every switch as it is now, with what the environment says of it."""
        config: Any = jax.config
        return {
            "jax_default_matmul_precision": config.jax_default_matmul_precision,
            "jax_enable_x64": config.jax_enable_x64,
            "xla_gpu_deterministic_ops": "--xla_gpu_deterministic_ops=true"
            in os.environ.get("XLA_FLAGS", "").split(),
            "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE"),
        }

    def put_switches(self, wanted: Mapping[str, Any]) -> None:
        """Set switches of a precision."""
        jax.config.update("jax_default_matmul_precision", wanted["jax_default_matmul_precision"])

    def set_determinism(self, on: bool) -> None:
        """Have only kernels run that give the same bits each time, or let any run.

        Raises:
            Unsupported: if XLA was started without: it reads its flags once.
        """
        if on and not self.read_switches()["xla_gpu_deterministic_ops"]:
            raise Unsupported(
                "jax is deterministic only if its process is started with --xla_gpu_deterministic_ops=true "
                "in XLA_FLAGS; this one was not"
            )

    def has_tf32(self, device: jax.Device) -> bool:
        """Return whether a device has tensor cores for TF32."""
        return device.platform == "gpu" and tuple(map(int, device.compute_capability.split("."))) >= (8, 0)

    # Weights.

    def assign(self, parameter: nnx.Variable, array: np.ndarray) -> None:
        """Copy an array of the native layout into a parameter, rounding to its dtype once."""
        with np.errstate(over="ignore"):  # What float16 cannot hold becomes infinite.
            parameter.set_value(jax.device_put(array.astype(parameter.dtype), parameter.sharding))

    def to_numpy(self, tensor: Array | nnx.Variable) -> np.ndarray:
        """Return a tensor as an array; the half precisions come as float32, exactly."""
        array = np.asarray(tensor[...])
        return array.astype(np.float32) if array.dtype.itemsize == 2 else array


def _devices(platform: str) -> list[jax.Device]:
    """Return the devices of a platform; none where JAX does not have it."""
    try:
        return jax.devices(platform)
    except RuntimeError:
        return []
