"""What the four models share: accepted requests, and names of parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from concord import spec
from concord.backends.interface import Request, Run, Unsupported

SIZES = ("vocab_size", "max_positions", "d_model", "num_heads", "d_ff", "num_layers", "num_classes")

Arrays = dict[str, np.ndarray]


class Plain:
    """A backend that computes BERT of any size on the CPU, operation by operation.

    A subclass has a ``name``, a ``version``, known ``deviations`` of its framework, and ``compute``.
    """

    name = version = ""
    deviations: ClassVar[list[dict[str, object]]] = []

    def describe(self) -> dict[str, object]:
        return {
            "version": self.version,
            "devices": ["cpu"],
            "dtypes": {"cpu": ["float64", "float32"]},
            "deviations": {"cpu": self.deviations},
        }

    def run(self, request: Request) -> Run:
        config = request.config
        bert = spec.variant("bert", **{size: getattr(config, size) for size in SIZES})
        mode = (request.part, request.execution, request.device, request.implementation, request.precision)
        if mode != ("model", "eager", "cpu", "explicit", "strict") or request.training:
            raise Unsupported(
                f"only the model, explicit, eager and strict, on the cpu; not {', '.join(mode)}"
            )
        if config != bert or config.num_classes < 2 or request.dtype not in ("float64", "float32"):
            raise Unsupported("only BERT with two classes or more, in float64 or float32")
        logits, loss, gradients = self.compute(
            config,
            {name: np.asarray(array, request.dtype) for name, array in request.weights.items()},
            request.batch.arrays(),
            request.dtype,
        )
        return Run(logits, loss, {}, gradients if request.gradients else {}, self.name, request.dtype)

    def compute(
        self, config: spec.EncoderConfig, weights: Arrays, inputs: Arrays, dtype: str
    ) -> tuple[np.ndarray, np.ndarray, Arrays]:
        """Return logits (B, C), the loss, and its gradients by parameter.

        Args:
            weights: by canonical name; linear layers are (in, out).
            inputs: ``input_ids`` and ``segment_ids`` (B, T), ``labels`` (B,).
        """
        raise NotImplementedError


def canonical(path: Iterable[object]) -> str:
    """Return the canonical name of a parameter, given its path in the framework."""
    *scope, last = map(str, path)  # the last part differs by framework: kernel, gamma, scale, embeddings
    return ".".join([*scope, "bias" if last in ("bias", "beta") else "weight"])
