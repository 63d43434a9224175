"""Hugging Face's ``BertForSequenceClassification`` on PyTorch, with scaled dot-product attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification
from transformers.initialization import no_init_weights

from concord.backends.interface import Request, Session, Unsupported, refuse_tf32
from concord.backends.torch.backend import Adapter
from concord.backends.torch.optimizers import optimizer
from concord.spec.batch import Batch
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError
from concord.spec.files import section
from concord.spec.parameters import Weights, parameters
from concord.spec.sources import source_tables
from concord.spec.training.schedules import learning_rate

TABLE = source_tables.load("bert-hugging-face")

MODES = {"library": None, "library:max-autotune": "max-autotune"}
"""The mode of PyTorch's compiler, by implementation."""


# For devices and switches of PyTorch.
ADAPTER = Adapter()


class HuggingFaceModel:
    """A session for forward passes and training steps."""

    def __init__(self, request: Request, model: torch.nn.Module) -> None:
        self.request, self.model = request, model
        self.computed: dict[str, torch.Tensor] = {}
        self.feed(request.batch)
        self.parts = source_tables.bindings(source_tables.part_of(TABLE), request.config)
        self.run = (
            torch.compile(model, fullgraph=True, dynamic=False, mode=MODES[request.implementation])
            if request.execution == "compiled"
            else model
        )
        self.steps = 0
        if request.training:
            canonical = parameters(request.config)
            kinds = {
                native: canonical[name].kind for name, part in self.parts.items() for native in part.names
            }
            self.optimizer = optimizer(request.training.recipe, dict(model.named_parameters()), kinds)

    def feed(self, batch: Batch) -> None:
        """Set inputs of the same shapes."""
        arrays = tensors(self.request.config, batch)
        if arrays["attention_mask"].all():
            del arrays["attention_mask"]  # without one, PyTorch has faster kernels, such as flash attention
        if not self.request.training:
            del arrays["labels"]  # with labels, it would also compute a loss, unlike a deployed model
        self.inputs = {
            name: torch.from_numpy(array).to(self.request.device) for name, array in arrays.items()
        }

    def compile(self) -> None:
        """Do nothing; PyTorch compiles in the first step."""

    def step(self) -> None:
        """Start a training step or a forward pass."""
        if not self.request.training:
            with torch.inference_mode():
                self.computed = {"logits": self.run(**self.inputs).logits}
            return
        self.model.zero_grad(set_to_none=True)
        loss = self.run(**self.inputs).loss
        loss.backward()
        numbers = self.optimizer.numbers(self.steps, learning_rate(self.optimizer.recipe, self.steps))
        self.optimizer.step(
            {name: variable.grad for name, variable in self.optimizer.variables.items()}, numbers, {}
        )
        self.steps += 1
        self.computed = {"loss": loss.detach()}

    def synchronize(self) -> None:
        """Wait for the device."""
        ADAPTER.synchronize(next(iter(self.computed.values()), None))

    def results(self) -> dict[str, np.ndarray]:
        """Logits (B, C), or the loss before the update."""
        return {name: ADAPTER.to_numpy(tensor) for name, tensor in self.computed.items()}

    def state(self) -> dict[str, np.ndarray]:
        """Copies of parameters and optimizer state, by canonical name."""
        tensors = {f"parameters.{name}": tensor for name, tensor in self.model.named_parameters()}
        arrays = {key: ADAPTER.to_numpy(tensor) for key, tensor in (tensors | self.optimizer.kept()).items()}
        return {
            prefix + name: array.copy()
            for prefix in dict.fromkeys(f"{key.partition('.')[0]}." for key in arrays)
            for name, array in source_tables.gather(
                self.parts, section(arrays, prefix), f"source={TABLE.source}"
            )[0].items()
        }


class HuggingFacePeer:
    """Hugging Face's model, judged only by its results."""

    name = "hf"
    event, peak_memory = ADAPTER.event, ADAPTER.peak_memory

    def describe(self) -> dict[str, Any]:
        """Versions, devices and threads."""
        version = f"transformers {transformers.__version__} on torch {torch.__version__}"
        return {**ADAPTER.describe(), "version": version, "implementations": list(MODES)}

    def session(self, request: Request) -> Session:
        """Build the model for repeated runs."""
        place = ADAPTER.device(request.device)
        refuse_tf32(self.name, request, ADAPTER.has_tf32(place))
        ADAPTER.set_precision(request.precision)
        if request.execution == "compiled":
            # Programs of earlier workloads count towards PyTorch's recompilation limit.
            torch.compiler.reset()
        model = build(request.config, request.weights)
        return HuggingFaceModel(request, model.to(device=place, dtype=getattr(torch, request.dtype)))


def build(config: EncoderConfig, weights: Weights) -> torch.nn.Module:
    """The model with its weights, without dropout.

    Raises:
        Unsupported: for a model other than BERT.
    """
    try:
        settings = source_tables.stated(TABLE, config)
    except SpecError as error:
        raise Unsupported(f"this BERT cannot express the model: {'; '.join(error.problems)}") from None
    hf_config = BertConfig(
        **settings, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="sdpa"
    )
    with no_init_weights():  # they are loaded below
        model = BertForSequenceClassification(hf_config).eval()
    arrays = source_tables.native(TABLE, config, weights)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    return model


def tensors(config: EncoderConfig, batch: Batch) -> dict[str, np.ndarray]:
    """Inputs under Hugging Face's names."""
    arrays = batch.arrays()
    return {
        "input_ids": arrays["input_ids"],
        "attention_mask": (arrays["input_ids"] != config.pad_id).astype(np.int64),
        "token_type_ids": arrays["segment_ids"],
        "labels": arrays["labels"],
    }
