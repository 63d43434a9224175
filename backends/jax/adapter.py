"""The JAX backend: NumPy in and out, devices, dtypes, compilation."""

import os
from typing import Any

import flax
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import SingleDeviceSharding

from backends.interface import (
    Implementation,
    Program,
    Request,
    Run,
    Unsupported,
    choose,
    confirm_switches,
    refuse_tf32,
    refusing_nondeterminism,
)
from backends.jax import library, packing, switches, weights
from backends.jax.layers import Tap, silent
from backends.jax.model import PARTS, Inputs
from backends.jax.program import PROGRAMS, Product
from backends.jax.training import ClassificationLoss, CotangentLoss, differentiate, evaluate
from backends.packing import indices
from spec.parameters import Weights

# Without it JAX makes every float64 a float32 and every int64 an int32, and says nothing.
jax.config.update("jax_enable_x64", True)

DTYPES = {"float64": jnp.float64, "float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}

DEVIATIONS: dict[str, list[dict[str, Any]]] = {"cpu": [], "cuda": []}

IMPLEMENTATIONS = {"explicit": Implementation(PARTS), **library.IMPLEMENTATIONS, **packing.IMPLEMENTATIONS}


class Adapter:
    """The backend (:class:`backends.interface.Backend`)."""

    name = "jax"

    def describe(self) -> dict[str, Any]:
        """Return versions, devices, dtypes, threads and precision switches."""
        return {
            "version": f"{jax.__version__} (jaxlib {jaxlib.__version__}, flax {flax.__version__})",
            "devices": ["cpu", *(f"cuda:{i}" for i in range(len(_devices("cuda"))))],
            "dtypes": {device: list(DTYPES) for device in ("cpu", "cuda")},
            "threads": _threads(),
            "thread_switches": {"NPROC": os.environ.get("NPROC")},
            "deviations": DEVIATIONS,
            "implementations": list(IMPLEMENTATIONS),
            "implementation_deviations": {name: dict(entry.deviations) for name, entry in IMPLEMENTATIONS.items() if entry.deviations},
            "precision_switches": switches.read_back(),
            "precision_defaults": switches.defaults(),
        }

    def run(self, request: Request) -> Run:
        """Compute what is asked (:meth:`backends.interface.Backend.run`)."""
        implementation, model, inputs = self.prepare(request)
        config, part = request.config, request.part
        edit, zeros = self.edit(request), {name: self.tensor(array, request.dtype, self.device(request.device)) for name, array in request.zeros().items()}
        loss_function = (ClassificationLoss if part == "model" else CotangentLoss)(config)
        compiled, gradients, tap_gradients = request.execution.endswith("compiled"), {}, {}
        with refusing_nondeterminism(self.name, request), implementation.context(request):
            if request.gradients:
                output, loss, taps, named = differentiate(model, loss_function, inputs, part, compiled, edit, zeros)
                gradients = weights.export(named, config, part)
                gradients |= {name: weights.to_numpy(g) for name, g in named.items() if name.startswith("inputs.")}
                tap_gradients = {name.removeprefix("taps."): weights.to_numpy(g) for name, g in named.items() if name.startswith("taps.")}
            else:
                options = {"xla_allow_excess_precision": False}
                forward = jax.jit(evaluate, static_argnums=(1, 3), compiler_options=options) if compiled else evaluate
                output, loss, taps = forward(model, loss_function, inputs, edit, {})
        arrays = {name: weights.to_numpy(tensor) for name, tensor in taps.items()} if request.taps else {}
        confirm_switches(self.name, switches.wanted(request), switches.read_back())
        kind = request.device.split(":")[0]
        asked = ("device", "implementation", "execution", "precision", "deterministic")
        info = {**{name: getattr(request, name) for name in asked}, **self.describe()}
        info["deviations"] = [*DEVIATIONS[kind], *implementation.deviations.get(kind, [])]
        info["undelivered_taps"] = list(implementation.undelivered)
        return Run(weights.to_numpy(output), weights.to_numpy(loss), arrays, gradients, self.name, request.dtype, info, tap_gradients=tap_gradients)

    def edit(self, request: Request) -> Tap:
        """Return what makes each tap into the one that is recorded and that the model goes on with: nothing does.

        A subclass may return another function of name and tensor; compilers trace it like the model.
        """
        return silent

    def prepare(self, request: Request) -> tuple[Implementation, nnx.Module, Inputs]:
        """Return how a request is computed, the model with its weights, and its inputs."""
        implementation, device = choose(self.name, IMPLEMENTATIONS, request), self.device(request.device)
        refuse_tf32(self.name, request, switches.has_tf32(device))
        switches.set_precision(request.precision)
        switches.set_determinism(request.deterministic)
        jax.config.update("jax_default_device", device)
        model = implementation.finish(self.build(request, device))
        inputs = {name: self.tensor(array, request.dtype, device) for name, array in {**request.batch.arrays(), **indices(request)}.items()}
        return implementation, model, inputs

    def build(self, request: Request, device: jax.Device) -> nnx.Module:
        """Return the part of the model with the weights loaded."""
        parts = choose(self.name, IMPLEMENTATIONS, request).parts
        model = nnx.eval_shape(lambda: parts[request.part](request.config))  # Shapes alone; nothing is allocated or drawn.
        dtype, place = DTYPES[request.dtype], SingleDeviceSharding(device)
        nnx.update(model, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=place), nnx.state(model)))
        weights.load(model, request.config, request.weights, request.part)
        return model

    def program(self, request: Request, kind: str) -> Program:
        """Build the model to be run many times (:meth:`backends.interface.Measurable.program`)."""
        implementation, model, inputs = self.prepare(request)
        compiled = request.execution.endswith("compiled")
        return PROGRAMS[kind](model, ClassificationLoss(request.config), inputs, request.config, compiled, lambda: implementation.context(request))

    def product(self, left: np.ndarray, right: np.ndarray, dtype: str, device: str, precision: str) -> Program:
        """Return the product of two matrices (:meth:`backends.interface.Measurable.product`)."""
        place = self.device(device)
        switches.set_precision(precision)
        return Product(self.tensor(left, dtype, place), self.tensor(right, dtype, place))

    def peak_memory(self, device: str, reset: bool = False) -> int | None:
        """Return the largest number of bytes held on a device (:meth:`backends.interface.Measurable.peak_memory`)."""
        place = self.device(device)
        # JAX cannot be made to forget it.
        held = place.memory_stats()
        return int(held["peak_bytes_in_use"]) if held else None

    def round_trip(self, request: Request) -> Weights:
        """Load canonical weights into a model and read them back (SPEC WGT-4)."""
        model = self.build(request, self.device(request.device))
        named = {".".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(nnx.state(model))}
        return weights.export(named, request.config, request.part)

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
