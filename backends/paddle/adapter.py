"""The PaddlePaddle backend: NumPy in and out, devices, dtypes, compilation."""

import os
from typing import Any

import numpy as np
import paddle

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
from backends.paddle import library, packing, switches, weights
from backends.paddle.layers import Tap, silent
from backends.paddle.model import PARTS, Inputs
from backends.paddle.program import PROGRAMS, Product
from backends.paddle.training import ClassificationLoss, CotangentLoss, differentiate, evaluate
from spec.parameters import Weights

DTYPES = {"float64": paddle.float64, "float32": paddle.float32, "bfloat16": paddle.bfloat16, "float16": paddle.float16}

# Its softmax and log-softmax clip what lies below the largest entry at -64, on the CPU and in float64 too.
DEVIATIONS: dict[str, list[dict[str, Any]]] = {
    "cpu": [{"name": name, "value": -64.0, "reason": "the CPU kernel clips each entry less the largest at -64"} for name in ("softmax_floor", "log_softmax_floor")],
    "cuda": [],
}

IMPLEMENTATIONS = {"explicit": Implementation(PARTS), **library.IMPLEMENTATIONS, **packing.IMPLEMENTATIONS}


class Adapter:
    """The backend (:class:`backends.interface.Backend`)."""

    name = "paddle"

    def describe(self) -> dict[str, Any]:
        """Return versions, devices, dtypes, threads and precision switches."""
        return {
            "version": paddle.version.full_version,
            "devices": ["cpu", *(f"cuda:{i}" for i in range(paddle.device.cuda.device_count()))],
            "dtypes": {"cpu": ["float64", "float32"], "cuda": list(DTYPES)},
            "threads": int(os.environ["OMP_NUM_THREADS"]),  # PaddlePaddle sets it when imported, to 1 unless it was set
            "thread_switches": {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_DEBUG_CPU_TYPE")},
            "deviations": DEVIATIONS,
            "implementations": list(IMPLEMENTATIONS),
            "implementation_deviations": {name: dict(entry.deviations) for name, entry in IMPLEMENTATIONS.items() if entry.deviations},
            "precision_switches": switches.read_back(),
            "precision_defaults": switches.defaults(),
        }

    def run(self, request: Request) -> Run:
        """Compute what is asked (:meth:`backends.interface.Backend.run`)."""
        # Static programs overwrite tensors that they return, if allowed to compute in place.
        paddle.set_flags({"FLAGS_pir_apply_inplace_pass": False})
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
                forward = paddle.jit.to_static(evaluate, full_graph=True, backend=None) if compiled else evaluate
                with paddle.no_grad():
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

    def prepare(self, request: Request) -> tuple[Implementation, paddle.nn.Layer, Inputs]:
        """Return how a request is computed, the model with its weights, and its inputs."""
        implementation, device = choose(self.name, IMPLEMENTATIONS, request), self.device(request.device)
        refuse_tf32(self.name, request, switches.has_tf32(device))
        switches.set_precision(request.precision)
        switches.set_determinism(request.deterministic)
        # Every static program that ran stays in memory until this cache is cleared.
        paddle.base.core.clear_executor_cache()
        model = implementation.finish(self.build(request, device))
        inputs = {name: self.tensor(array, request.dtype, device) for name, array in {**request.batch.arrays(), **indices(request)}.items()}
        return implementation, model, inputs

    def build(self, request: Request, device: str) -> paddle.nn.Layer:
        """Return the part of the model with the weights loaded."""
        parts = choose(self.name, IMPLEMENTATIONS, request).parts
        if device == "cpu" and request.dtype in ("bfloat16", "float16"):
            raise Unsupported(f"paddle {paddle.version.full_version} has no {request.dtype} matrix product on cpu")
        model = parts[request.part](request.config).to(device=device, dtype=DTYPES[request.dtype]).eval()
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
        if reset:
            paddle.device.cuda.reset_max_memory_allocated(place)
        return int(paddle.device.cuda.max_memory_allocated(place))

    def round_trip(self, request: Request) -> Weights:
        """Load canonical weights into a model and read them back (SPEC WGT-4)."""
        model = self.build(request, self.device(request.device))
        return weights.export(dict(model.named_parameters()), request.config, request.part)

    def device(self, name: str) -> str:
        """Return the device of that name, and make it the one for new tensors.

        Raises:
            Unsupported: if this machine has none.
        """
        count = paddle.device.cuda.device_count()
        if name.startswith("cuda") and int(name.partition(":")[2] or 0) >= count:
            raise Unsupported(f"paddle {paddle.version.full_version} sees {count} CUDA devices; {name!r} is not among them")
        paddle.set_device(name.replace("cuda", "gpu"))
        return paddle.get_device()

    def tensor(self, array: np.ndarray, dtype: str, device: str) -> paddle.Tensor:
        """Return an input as a tensor: numbers in the precision of the run, ids as int64, masks as bool."""
        tensor = paddle.to_tensor(np.ascontiguousarray(array), place=device)
        return tensor.astype(DTYPES[dtype]) if tensor.is_floating_point() else tensor
