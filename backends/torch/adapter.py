"""The PyTorch backend: NumPy in and out, devices, dtypes, compilation."""

import os
from typing import Any

import numpy as np
import torch

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
from backends.torch import library, packing, switches, weights
from backends.torch.layers import Tap, silent
from backends.torch.model import PARTS, Inputs
from backends.torch.program import PROGRAMS, Product
from backends.torch.training import ClassificationLoss, CotangentLoss, differentiate, evaluate
from spec.parameters import Weights

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

DEVIATIONS: dict[str, list[dict[str, Any]]] = {"cpu": [], "cuda": []}

IMPLEMENTATIONS = {"explicit": Implementation(PARTS), **library.IMPLEMENTATIONS, **packing.IMPLEMENTATIONS}


class Adapter:
    """The backend (:class:`backends.interface.Backend`)."""

    name = "torch"

    def describe(self) -> dict[str, Any]:
        """Return versions, devices, dtypes, threads and precision switches."""
        return {
            "version": torch.__version__,
            "devices": ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))],
            "dtypes": {device: list(DTYPES) for device in ("cpu", "cuda")},
            "threads": torch.get_num_threads(),
            "thread_switches": {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")},
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
                forward = torch.compile(evaluate, fullgraph=True, dynamic=False) if compiled else evaluate
                with torch.no_grad():
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

    def prepare(self, request: Request) -> tuple[Implementation, torch.nn.Module, Inputs]:
        """Return how a request is computed, the model with its weights, and its inputs."""
        implementation, device = choose(self.name, IMPLEMENTATIONS, request), self.device(request.device)
        refuse_tf32(self.name, request, switches.has_tf32(device))
        switches.set_precision(request.precision)
        switches.set_determinism(request.deterministic)
        if request.execution.endswith("compiled"):
            # A worker compiles a model for each run; what earlier ones left counts towards a limit.
            torch.compiler.reset()
        model = implementation.finish(self.build(request, device))
        inputs = {name: self.tensor(array, request.dtype, device) for name, array in {**request.batch.arrays(), **indices(request)}.items()}
        return implementation, model, inputs

    def build(self, request: Request, device: torch.device) -> torch.nn.Module:
        """Return the part of the model with the weights loaded."""
        parts = choose(self.name, IMPLEMENTATIONS, request).parts
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
            torch.cuda.reset_peak_memory_stats(place)
        return torch.cuda.max_memory_allocated(place)

    def round_trip(self, request: Request) -> Weights:
        """Load canonical weights into a model and read them back (SPEC WGT-4)."""
        model = self.build(request, self.device(request.device))
        return weights.export(dict(model.named_parameters()), request.config, request.part)

    def device(self, name: str) -> torch.device:
        """Return the device of that name.

        Raises:
            Unsupported: if this machine has none.
        """
        if name.startswith("cuda") and int(name.partition(":")[2] or 0) >= torch.cuda.device_count():
            raise Unsupported(f"torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices; {name!r} is not among them")
        return torch.device(name)

    def tensor(self, array: np.ndarray, dtype: str, device: torch.device) -> torch.Tensor:
        """Return an input as a tensor: numbers in the precision of the run, ids as int64, masks as bool."""
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(device)
        return tensor.to(DTYPES[dtype]) if tensor.is_floating_point() else tensor
