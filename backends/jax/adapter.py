"""The JAX backend: NumPy in and out, devices, dtypes."""

import os
from collections.abc import Iterator
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
from concord.backends.jax import library, packing, switches, weights
from concord.backends.jax.model import PARTS
from concord.backends.jax.session import Session, multiply, synchronize, timed

# Without it JAX makes every float64 a float32 and every int64 an int32, and says nothing.
jax.config.update("jax_enable_x64", True)

DTYPES = {"float64": jnp.float64, "float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}

DEVIATIONS: dict[str, list[dict[str, Any]]] = {"cpu": [], "cuda": []}

IMPLEMENTATIONS = {"explicit": Implementation(PARTS), **library.IMPLEMENTATIONS, **packing.IMPLEMENTATIONS}


class Adapter(FrameworkAdapter):
    """The backend (:class:`concord.backends.interface.Backend`)."""

    name = "jax"
    implementations = IMPLEMENTATIONS
    deviations = DEVIATIONS
    switches = switches
    weights = weights
    session_type = Session
    multiply = staticmethod(multiply)
    synchronize = staticmethod(synchronize)
    timed = staticmethod(timed)

    def environment(self) -> dict[str, Any]:
        """Return version, devices, dtypes and threads."""
        return {
            "version": f"{jax.__version__} (jaxlib {jaxlib.__version__}, flax {flax.__version__})",
            "devices": ["cpu", *(f"cuda:{i}" for i in range(len(_devices("cuda"))))],
            "dtypes": {device: list(DTYPES) for device in ("cpu", "cuda")},
            "threads": _threads(),
            "thread_switches": {"NPROC": os.environ.get("NPROC")},
        }

    @contextmanager
    def within(self, request: Request) -> Iterator[None]:
        """Do what a block does on the device of a request."""
        with jax.default_device(self.device(request.device)):
            yield

    def build(self, request: Request, device: jax.Device) -> nnx.Module:
        """Return the part of the model with the weights loaded."""
        model = nnx.eval_shape(lambda: self.implementation(request).parts[request.part](request.config))  # Shapes alone; nothing is allocated or drawn.
        dtype, place = DTYPES[request.dtype], SingleDeviceSharding(device)
        nnx.update(model, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=place), nnx.state(model)))
        weights.load(model, request.config, request.weights, request.part)
        return model

    def peak_memory(self, device: str, reset: bool = False) -> int | None:
        """Return the largest number of bytes held on a device (:meth:`concord.backends.interface.Measurable.peak_memory`)."""
        place = self.device(device)
        # JAX cannot be made to forget it.
        held = place.memory_stats()
        return int(held["peak_bytes_in_use"]) if held else None

    def device(self, name: str) -> jax.Device:
        """Return the device of that name.

        Raises:
            Unsupported: if this machine has none.
        """
        platform, _, index = name.partition(":")
        found = _devices(platform)
        if int(index or 0) >= len(found):
            raise Unsupported(f"jax {jax.__version__} sees {len(found)} {platform.upper()} devices; {name!r} is not among them")
        return found[int(index or 0)]

    def tensor(self, array: np.ndarray, dtype: str, device: jax.Device) -> Array:
        """Return an input as a tensor: numbers in the precision of the run, ids as int64, masks as bool."""
        with np.errstate(over="ignore"):  # What float16 cannot hold becomes infinite.
            return jax.device_put(array.astype(DTYPES[dtype]) if np.issubdtype(array.dtype, np.floating) else array, device)


def _devices(platform: str) -> list[jax.Device]:
    """Return the devices of a platform; none where JAX does not have it."""
    try:
        return jax.devices(platform)
    except RuntimeError:
        return []


def _threads() -> int:
    """Return the size of XLA's thread pool on the CPU: what NPROC says, else the number of cores that the process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return int(os.environ.get("NPROC") or cores or 1)
