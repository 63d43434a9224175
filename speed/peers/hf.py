"""Hugging Face's ``BertForSequenceClassification`` on PyTorch, with scaled dot-product attention."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification
from transformers.initialization import no_init_weights

from concord.backends.interface import Request, Session, Unsupported
from concord.backends.torch.optimizers import optimizer
from concord.spec.batch import Batch
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError
from concord.spec.parameters import Weights, parameters
from concord.spec.sources import source_tables
from concord.spec.training.schedules import learning_rate

TABLE = source_tables.load("bert-hugging-face")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class HuggingFaceModel:
    """A session for forward passes and training steps."""

    def __init__(self, request: Request, model: torch.nn.Module) -> None:
        self.request, self.model = request, model
        self.computed: dict[str, torch.Tensor] = {}
        self.feed(request.batch)
        self.parts = source_tables.bindings(source_tables.part_of(TABLE), request.config)
        self.run = (
            torch.compile(model, fullgraph=True, dynamic=False) if request.execution == "compiled" else model
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
        self.inputs = {
            name: torch.from_numpy(array).to(self.request.device)
            for name, array in tensors(self.request.config, batch).items()
        }

    def compile(self) -> None:
        """Do nothing; PyTorch compiles in the first step."""

    def step(self) -> None:
        """Start a training step or a forward pass."""
        if not self.request.training:
            # With labels, the model would also compute a loss, unlike a deployed model.
            inputs = {name: tensor for name, tensor in self.inputs.items() if name != "labels"}
            with torch.inference_mode():
                self.computed = {"logits": self.run(**inputs).logits}
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
        if self.request.device != "cpu":
            torch.cuda.synchronize(self.request.device)

    def results(self) -> dict[str, np.ndarray]:
        """Logits (B, C), or the loss before the update."""
        return {name: tensor.float().cpu().numpy() for name, tensor in self.computed.items()}

    def state(self) -> dict[str, np.ndarray]:
        """Copies of parameters and optimizer state, by canonical name."""
        parameters = {f"parameters.{name}": tensor for name, tensor in self.model.named_parameters()}
        sections: dict[str, dict[str, np.ndarray]] = {}
        for key, tensor in {**parameters, **self.optimizer.kept()}.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = tensor.detach().float().cpu().numpy()
        return {
            f"{section}.{name}": array.copy()
            for section, arrays in sections.items()
            for name, array in source_tables.gather(self.parts, arrays, f"source={TABLE.source}")[0].items()
        }


class HuggingFacePeer:
    """Hugging Face's model, judged only by its results."""

    name = "hf"

    def describe(self) -> dict[str, Any]:
        """Versions, devices and threads."""
        return {
            "version": f"transformers {transformers.__version__} on torch {torch.__version__}",
            "devices": ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))],
            "dtypes": {"cpu": list(DTYPES), "cuda": list(DTYPES)},
            "threads": torch.get_num_threads(),
            "thread_switches": {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")},
        }

    def event(self) -> torch.cuda.Event:
        """An event of the device's clock."""
        return torch.cuda.Event(enable_timing=True)

    def session(self, request: Request) -> Session:
        """Build the model for repeated runs."""
        if request.implementation != "library" or request.execution not in ("eager", "compiled"):
            raise Unsupported(
                "hf has only its own implementation: --implementation library, --execution eager or compiled"
            )
        torch.set_float32_matmul_precision("highest")
        if request.dtype not in DTYPES:
            raise Unsupported(f"hf is measured in {', '.join(DTYPES)}, not in {request.dtype}")
        if request.execution == "compiled":
            # Programs of earlier workloads count towards PyTorch's recompilation limit.
            torch.compiler.reset()
        return HuggingFaceModel(
            request,
            build(request.config, request.weights).to(device=request.device, dtype=DTYPES[request.dtype]),
        )


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
    mask = (arrays["input_ids"] != config.pad_id).astype(np.int64)
    return {
        "input_ids": arrays["input_ids"],
        "attention_mask": mask,
        "token_type_ids": arrays["segment_ids"],
        "labels": arrays["labels"],
    }
