"""The TensorFlow backend: NumPy in and out, devices, dtypes, compilation."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

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
from backends.packing import indices
from backends.tf import library, packing, switches, weights
from backends.tf.layers import Tap, silent
from backends.tf.model import PARTS, Inputs
from backends.tf.program import PROGRAMS, Product
from backends.tf.training import ClassificationLoss, CotangentLoss, differentiate, evaluate
from spec.parameters import Weights

DTYPES = {"float64": tf.float64, "float32": tf.float32, "bfloat16": tf.bfloat16, "float16": tf.float16}

# BiasAddGrad adds up in bfloat16 from term to term, on the CPU; in float16 it accumulates in float32.
DEVIATIONS: dict[str, list[dict[str, Any]]] = {
    "cpu": [{"name": "narrow_bias_gradients", "value": 1, "reason": "BiasAddGrad on the CPU adds up in bfloat16 from term to term"}],
    "cuda": [],
}

IMPLEMENTATIONS = {"explicit": Implementation(PARTS), **library.IMPLEMENTATIONS, **packing.IMPLEMENTATIONS}


class Adapter:
    """The backend (:class:`backends.interface.Backend`)."""

    name = "tf"

    def describe(self) -> dict[str, Any]:
        """Return versions, devices, dtypes, threads and precision switches."""
        controls = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
        return {
            "version": f"{tf.__version__} (keras {keras.__version__})",
            "devices": ["cpu", *(f"cuda:{i}" for i in range(len(tf.config.list_physical_devices("GPU"))))],
            "dtypes": {device: list(DTYPES) for device in ("cpu", "cuda")},
            # TensorFlow says 0 where nothing was set from Python: then the environment decides, or the number of cores.
            "threads": tf.config.threading.get_intra_op_parallelism_threads() or int(os.environ.get(controls[0]) or os.cpu_count() or 1),
            "thread_switches": {name: os.environ.get(name) for name in controls},
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
        with tf.device(self.device(request.device)), _refusing_missing_kernels(request.dtype), refusing_nondeterminism(self.name, request), implementation.context(request):
            compiled, gradients, tap_gradients = request.execution.endswith("compiled"), {}, {}
            if request.gradients:
                output, loss, taps, named = differentiate(model, loss_function, inputs, part, compiled, edit, zeros)
                gradients = weights.export(named, config, part)
                gradients |= {name: weights.to_numpy(g) for name, g in named.items() if name.startswith("inputs.")}
                tap_gradients = {name.removeprefix("taps."): weights.to_numpy(g) for name, g in named.items() if name.startswith("taps.")}
            else:
                function = tf.function(evaluate, autograph=False, jit_compile=True)
                forward = function.get_concrete_function(model, loss_function, inputs, edit, {}) if compiled else evaluate
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

    def prepare(self, request: Request) -> tuple[Implementation, keras.layers.Layer, Inputs]:
        """Return how a request is computed, the model with its weights, and its inputs."""
        implementation, device = choose(self.name, IMPLEMENTATIONS, request), self.device(request.device)
        refuse_tf32(self.name, request, switches.has_tf32(device))
        switches.set_precision(request.precision)
        switches.set_determinism(request.deterministic)
        # Errors in the words of TensorFlow; Keras would wrap them.
        keras.config.disable_traceback_filtering()
        with tf.device(device), _refusing_missing_kernels(request.dtype):
            model = implementation.finish(self.build(request, device))
        inputs = {name: self.tensor(array, request.dtype, device) for name, array in {**request.batch.arrays(), **indices(request)}.items()}
        return implementation, model, inputs

    def build(self, request: Request, device: str) -> keras.layers.Layer:
        """Return the part of the model with the weights loaded."""
        parts = choose(self.name, IMPLEMENTATIONS, request).parts
        keras.config.set_dtype_policy(request.dtype)
        with tf.device(device):
            model = parts[request.part](request.config)
            weights.load(model, request.config, request.weights, request.part)
        return model

    def program(self, request: Request, kind: str) -> Program:
        """Build the model to be run many times (:meth:`backends.interface.Measurable.program`)."""
        implementation, model, inputs = self.prepare(request)
        compiled = request.execution.endswith("compiled")
        device = self.device(request.device)
        with tf.device(device), _refusing_missing_kernels(request.dtype):
            return PROGRAMS[kind](model, ClassificationLoss(request.config), inputs, request.config, compiled, lambda: _placed(device, implementation.context(request)))

    def product(self, left: np.ndarray, right: np.ndarray, dtype: str, device: str, precision: str) -> Program:
        """Return the product of two matrices (:meth:`backends.interface.Measurable.product`)."""
        place = self.device(device)
        switches.set_precision(precision)
        return Product(self.tensor(left, dtype, place), self.tensor(right, dtype, place))

    def peak_memory(self, device: str, reset: bool = False) -> int | None:
        """Return the largest number of bytes held on a device (:meth:`backends.interface.Measurable.peak_memory`)."""
        place = self.device(device).removeprefix("/")
        if reset:
            tf.config.experimental.reset_memory_stats(place)
        return int(tf.config.experimental.get_memory_info(place)["peak"])

    def round_trip(self, request: Request) -> Weights:
        """Load canonical weights into a model and read them back (SPEC WGT-4)."""
        model = self.build(request, self.device(request.device))
        return weights.export({variable.path: variable.value for variable in model.weights}, request.config, request.part)

    def device(self, name: str) -> str:
        """Return the device of that name.

        Raises:
            Unsupported: if this machine has none.
        """
        count = len(tf.config.list_physical_devices("GPU"))
        if name.startswith("cuda") and int(name.partition(":")[2] or 0) >= count:
            raise Unsupported(f"tensorflow {tf.__version__} sees {count} CUDA devices; {name!r} is not among them")
        return f"/GPU:{name.partition(':')[2] or 0}" if name.startswith("cuda") else "/CPU:0"

    def tensor(self, array: np.ndarray, dtype: str, device: str) -> tf.Tensor:
        """Return an input as a tensor: numbers in the precision of the run, ids as int64, masks as bool."""
        with tf.device(device):
            return tf.constant(array, dtype=DTYPES[dtype] if np.issubdtype(array.dtype, np.floating) else array.dtype)


@contextmanager
def _placed(device: str, context: AbstractContextManager[Any]) -> Iterator[None]:
    """Place what is computed on a device, within a context: TensorFlow takes the first GPU, wherever the operands lie."""
    with tf.device(device), context:
        yield


_NO_KERNEL = ("not find device for node", "in the list of allowed values", "in list of allowed values", "unsupported operations")


@contextmanager
def _refusing_missing_kernels(dtype: str) -> Iterator[None]:
    """Turn TensorFlow's report that it has no kernel for a half precision into a refusal (SPEC PRC-3)."""
    try:
        yield
    except (tf.errors.OpError, TypeError) as error:
        missing = isinstance(error, tf.errors.UnimplementedError) or any(words in str(error) for words in _NO_KERNEL)
        if dtype not in ("bfloat16", "float16") or not missing:
            raise
        raise Unsupported(f"tensorflow {tf.__version__} has no kernel in {dtype}: {error}") from error
