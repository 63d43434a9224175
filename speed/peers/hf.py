"""Hugging Face's ``BertForSequenceClassification`` on PyTorch, with attention by ``scaled_dot_product_attention``."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification
from transformers.initialization import no_init_weights

from backends.interface import LEARNING_RATE, Program, Request, Run, Unsupported
from backends.torch.program import timed
from spec.config import EncoderConfig
from spec.errors import SpecError
from spec.parameters import Weights
from spec.sources import table

TABLE = table.load("bert-hugging-face")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Inference:
    """The forward pass (:class:`backends.interface.Program`)."""

    def __init__(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], config: EncoderConfig, compiled: bool) -> None:
        self.model, self.config = model, config
        self.inputs = {name: tensor for name, tensor in inputs.items() if name != "labels"}
        self.output: torch.Tensor | None = None
        self.forward = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model

    def compile(self) -> None:
        """Do nothing: PyTorch compiles when the first step runs."""

    def step(self) -> None:
        """Start one forward pass."""
        with torch.inference_mode():
            self.output = self.forward(**self.inputs).logits

    def wait(self) -> None:
        """Wait until the device is done."""
        _wait(self.output)

    def timed(self, steps: int) -> list[float]:
        """Return the seconds of steps on a device."""
        return timed(self, steps)

    def results(self) -> dict[str, np.ndarray]:
        """Return the logits (B, C)."""
        assert self.output is not None
        return {"logits": self.output.float().cpu().numpy()}

    def parameters(self) -> Weights:
        """Return the parameters by canonical name."""
        return read(self.model, self.config)


class Training:
    """Training steps by gradient descent (:class:`backends.interface.Program`)."""

    def __init__(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], config: EncoderConfig, compiled: bool) -> None:
        self.model, self.inputs, self.config = model, inputs, config
        self.loss: torch.Tensor | None = None
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, foreach=True)
        self.forward = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model

    def compile(self) -> None:
        """Do nothing: PyTorch compiles when the first step runs."""

    def step(self) -> None:
        """Start one step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = self.forward(**self.inputs).loss
        self.loss.backward()
        self.optimizer.step()

    def wait(self) -> None:
        """Wait until the device is done."""
        _wait(self.loss)

    def timed(self, steps: int) -> list[float]:
        """Return the seconds of steps on a device."""
        return timed(self, steps)

    def results(self) -> dict[str, np.ndarray]:
        """Return the loss before the update."""
        assert self.loss is not None
        return {"loss": self.loss.detach().float().cpu().numpy()}

    def parameters(self) -> Weights:
        """Return the parameters by canonical name."""
        return read(self.model, self.config)


class Peer:
    """The peer (:class:`backends.interface.Measurable`)."""

    name = "hf"

    def describe(self) -> dict[str, Any]:
        """Return versions, devices and threads."""
        return {
            "version": f"transformers {transformers.__version__} on torch {torch.__version__}",
            "devices": ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))],
            "dtypes": {"cpu": list(DTYPES), "cuda": list(DTYPES)},
            "threads": torch.get_num_threads(),
            "thread_switches": {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")},
        }

    def run(self, request: Request) -> Run:
        """Refuse: only whole programs are measured."""
        raise Unsupported("hf is measured by 'concord speed' alone")

    def program(self, request: Request, kind: str) -> Program:
        """Build the model to be run many times."""
        if request.implementation != "library" or request.execution not in ("eager", "compiled"):
            raise Unsupported("hf has its own implementation: --implementation library, --execution eager or compiled")
        torch.set_float32_matmul_precision("highest")
        if request.dtype not in DTYPES:
            raise Unsupported(f"hf is measured in {', '.join(DTYPES)}, not in {request.dtype}")
        if request.execution == "compiled":
            torch.compiler.reset()
        model = build(request.config, request.weights).to(device=request.device, dtype=DTYPES[request.dtype])
        inputs = {name: torch.from_numpy(array).to(request.device) for name, array in tensors(request).items()}
        return {"inference": Inference, "training": Training}[kind](model, inputs, request.config, request.execution == "compiled")

    def product(self, left: np.ndarray, right: np.ndarray, dtype: str, device: str, precision: str) -> Program:
        """Refuse: torch has the same product."""
        raise Unsupported("hf has no product of its own")


def build(config: EncoderConfig, weights: Weights) -> torch.nn.Module:
    """Return the model, without dropout, with the weights loaded.

    Raises:
        Unsupported: for a model that is no BERT.
    """
    try:
        stated = table.stated(TABLE, config)
    except SpecError as error:
        raise Unsupported(f"this BERT cannot express the model: {'; '.join(error.problems)}") from None
    described = BertConfig(**stated, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="sdpa")
    with no_init_weights():  # they are loaded
        model = BertForSequenceClassification(described).eval()
    arrays = {name: torch.from_numpy(array) for name, array in table.native(TABLE, config, weights).items()}
    missing, unexpected = model.load_state_dict(arrays, strict=False)
    if unexpected or any(not name.endswith("position_ids") for name in missing):
        raise RuntimeError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    return model


def read(model: torch.nn.Module, config: EncoderConfig) -> Weights:
    """Return the parameters of a model by canonical name and in canonical layout."""
    arrays = {name: parameter.detach().cpu().numpy() for name, parameter in model.named_parameters()}
    return table.gather(table.bindings(table.part_of(TABLE), config), arrays, f"source={TABLE.source}")[0]


def tensors(request: Request) -> dict[str, np.ndarray]:
    """Return the inputs by the names that they have there."""
    given = request.batch.arrays()
    mask = (given["input_ids"] != request.config.pad_id).astype(np.int64)
    return {"input_ids": given["input_ids"], "attention_mask": mask, "token_type_ids": given["segment_ids"], "labels": given["labels"]}


def _wait(tensor: torch.Tensor | None) -> None:
    if tensor is not None and tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
