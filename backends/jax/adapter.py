"""The JAX backend: NumPy in and out, devices, dtypes."""

import os
from collections.abc import Callable, Iterator
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
from concord.backends.interface import Implementation, Request
from concord.backends.jax import library
from concord.backends.jax.model import PARTS
from concord.backends.jax.optimizers import optimizer
from concord.backends.jax.session import Session, multiply, synchronize, timed
from concord.backends.jax.switches import Switches
from concord.backends.jax.weights import NativeWeights

DTYPES = {"float64": jnp.float64, "float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}

KNOWN_DEVIATIONS: dict[str, list[dict[str, Any]]] = {"cpu": [], "cuda": []}

IMPLEMENTATIONS = {"explicit": Implementation(PARTS), **library.IMPLEMENTATIONS}


class Adapter(FrameworkAdapter):
    """The backend (:class:`concord.backends.interface.Backend`)."""

    name = "jax"
    version = f"{jax.__version__} (jaxlib {jaxlib.version.__version__}, flax {flax.__version__})"
    dtypes = {kind: list(DTYPES) for kind in ("cpu", "cuda")}
    thread_switches = ("NPROC",)
    implementations = IMPLEMENTATIONS
    known_deviations = KNOWN_DEVIATIONS
    switches = Switches()
    weights = NativeWeights()
    session_type = Session
    optimizer = staticmethod(optimizer)
    multiply = staticmethod(multiply)
    synchronize = staticmethod(synchronize)
    timed = staticmethod(timed)

    def __init__(self) -> None:
        # Without it JAX makes every float64 a float32 and every int64 an int32, and says nothing.
        jax.config.update("jax_enable_x64", True)

    def cuda_devices(self) -> int:
        """Return the number of CUDA devices that the framework sees."""
        return len(_devices("cuda"))

    def threads(self) -> int:
        """Return the number of threads that the framework computes with on the CPU."""
        # The size of XLA's thread pool on the CPU: what NPROC says, else the number of cores that the process may use.
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
        """Return a part of the model in the dtype of a request, on a device, for weights to be loaded into it."""
        model = nnx.eval_shape(
            lambda: part(request.config, param_dtype=DTYPES[request.dtype], rngs=nnx.Rngs(0))
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
                array.astype(DTYPES[dtype]) if np.issubdtype(array.dtype, np.floating) else array, device
            )

    def peak_memory(self, device: str, reset: bool = False) -> int | None:
        """Return the largest number of bytes held on a device (:meth:`concord.backends.interface.Measurable.peak_memory`)."""
        place = self.device(device)
        # JAX cannot be made to forget it.
        held = place.memory_stats()
        return int(held["peak_bytes_in_use"]) if held else None


def _devices(platform: str) -> list[jax.Device]:
    """Return the devices of a platform; none where JAX does not have it."""
    try:
        return jax.devices(platform)
    except RuntimeError:
        return []
