"""The JAX backend. Shapes: M rows, N columns."""

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
from concord.backends.cores import available_cores
from concord.backends.interface import Implementation, Request, Unsupported
from concord.backends.jax import library, optimizers, training
from concord.backends.jax.model import PARTS
from concord.backends.session import FrameworkSession

# Otherwise XLA skips roundings to bfloat16 in fused steps, so results depend on the fusion.
OPTIONS: dict[str, str | bool] = {"xla_allow_excess_precision": False}


class ModelSession(FrameworkSession):
    """A :class:`concord.backends.interface.Session`."""

    graph: nnx.GraphDef[Any]
    variables: nnx.State[Any, Any]
    fixed: nnx.State[Any, Any]

    @property
    def model(self) -> nnx.Module:
        return nnx.merge(self.graph, self.variables, self.fixed)

    @model.setter
    def model(self, model: nnx.Module) -> None:
        self.graph, self.variables, self.fixed = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]

    @property
    def held(self) -> tuple[Any, Any]:
        return self.variables, self.fixed

    def model_of(self, state: nnx.State, fixed: nnx.State) -> nnx.Module:
        return nnx.merge(self.graph, state, fixed)

    def held_by(self, model: nnx.Module) -> nnx.State:
        return nnx.state(model, nnx.Param)

    def hold(self, state: nnx.State) -> None:
        self.variables = state

    def synchronize(self) -> None:
        self.adapter.synchronize((self.computed, self.variables))

    def traced(
        self, function: Callable[..., Any], *given: Any, replaced: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        return (
            jax.jit(function, donate_argnums=replaced).lower(*given).compile(compiler_options=OPTIONS)
            if self.compiled
            else function
        )

    def number(self, value: float) -> Array:
        return jnp.asarray(value, dtype=self.request.dtype)


class Adapter(FrameworkAdapter):
    """A :class:`concord.backends.interface.Backend`."""

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
        # Without this, JAX silently converts float64 to float32 and int64 to int32.
        jax.config.update("jax_enable_x64", True)

    def cuda_devices(self) -> int:
        return len(_devices("cuda"))

    def threads(self) -> int:
        # XLA's thread pool has NPROC threads, or one for each core that the process may use.
        return int(os.environ.get("NPROC") or available_cores())

    def place(self, kind: str, index: int) -> jax.Device:
        return _devices(kind)[index]

    @contextmanager
    def within(self, request: Request) -> Iterator[None]:
        with jax.default_device(self.device(request.device)):
            yield

    def construct(self, part: Callable[..., nnx.Module], request: Request, device: jax.Device) -> nnx.Module:
        model = nnx.eval_shape(
            lambda: part(request.config, param_dtype=jnp.dtype(request.dtype), rngs=nnx.Rngs(0))
        )  # shapes only: nothing is allocated or drawn
        place = SingleDeviceSharding(device)
        nnx.update(
            model,
            jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), nnx.state(model)
            ),
        )
        return model

    def tensor(self, array: np.ndarray, dtype: str, device: jax.Device) -> Array:
        with np.errstate(over="ignore"):  # Values beyond float16 become infinite.
            return jax.device_put(
                array.astype(jnp.dtype(dtype)) if np.issubdtype(array.dtype, np.floating) else array, device
            )

    def peak_memory(self, device: str, reset: bool = False) -> int | None:
        place = self.device(device)
        # JAX cannot reset its peak.
        statistics = place.memory_stats()
        return int(statistics["peak_bytes_in_use"]) if statistics else None

    def event(self) -> Any:
        return None

    def layers(self, model: nnx.Module) -> Iterable[tuple[str, nnx.Module]]:
        return [(".".join(map(str, path)), node) for path, node in nnx.iter_graph(model)]

    def synchronize(self, computed: Any) -> None:
        jax.block_until_ready(computed)

    def multiply(self, left: Array, right: Array) -> Array:
        return jnp.matmul(left, right)

    # Switches.

    def read_switches(self) -> dict[str, Any]:
        config: Any = jax.config
        return {
            "jax_default_matmul_precision": config.jax_default_matmul_precision,
            "jax_enable_x64": config.jax_enable_x64,
            "xla_gpu_deterministic_ops": "--xla_gpu_deterministic_ops=true"
            in os.environ.get("XLA_FLAGS", "").split(),
            "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE"),
        }

    def put_switches(self, wanted: Mapping[str, Any]) -> None:
        jax.config.update("jax_default_matmul_precision", wanted["jax_default_matmul_precision"])

    def set_determinism(self, on: bool) -> None:
        """Allow only deterministic kernels, or all.

        Raises:
            Unsupported: if XLA was started without its flag, which it reads only once.
        """
        if on and not self.read_switches()["xla_gpu_deterministic_ops"]:
            raise Unsupported(
                "jax is deterministic only if its process is started with --xla_gpu_deterministic_ops=true "
                "in XLA_FLAGS; this one was not"
            )

    def has_tf32(self, device: jax.Device) -> bool:
        return device.platform == "gpu" and tuple(map(int, device.compute_capability.split("."))) >= (8, 0)

    # Weights.

    def assign(self, parameter: nnx.Variable, array: np.ndarray) -> None:
        with np.errstate(over="ignore"):  # Values beyond float16 become infinite.
            parameter.set_value(jax.device_put(array.astype(parameter.dtype), parameter.sharding))

    def to_numpy(self, tensor: Array | nnx.Variable) -> np.ndarray:
        array = np.asarray(tensor[...])
        return array.astype(np.float32) if array.dtype.itemsize == 2 else array


def _devices(platform: str) -> list[jax.Device]:
    try:
        return jax.devices(platform)
    except RuntimeError:
        return []
