"""Write golden files of what transformers and sentence-transformers compute.

Run it in its own environment, and judge the files with ``concord golden``::

    pip install torch==2.13.0 transformers==5.23.0 sentence-transformers==6.2.0
    python docs/golden/hugging_face.py conformance/golden
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from torch import Tensor, nn

SIZES = {
    "vocab_size": 11,
    "max_position_embeddings": 9,
    "hidden_size": 6,
    "num_attention_heads": 2,
    "intermediate_size": 5,
    "num_hidden_layers": 2,
}
LABELS = 3
PRECISIONS = {"float32": torch.float32, "float64": torch.float64}

# Which tokens are real: in the shared cases; and in rows of padding only, and with padding before and inside
# the text, which is masked by id.
ROWS = {
    "b_ragged": ["1111111", "1111100", "1110000", "1000000"],
    "c_fullpad_row": ["1111111", "0000000", "0011111", "1101011"],
}


class SentenceEmbedder(nn.Module):
    """A BERT followed by the modules of sentence-transformers."""

    def __init__(self, config: transformers.BertConfig) -> None:
        super().__init__()
        self.auto_model = transformers.BertModel(config, add_pooling_layer=False)
        self.pooling, self.normalize = Pooling(config.hidden_size, pooling_mode="mean"), Normalize()

    def forward(self, attention_mask: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
        """Return hidden states, attention, and the embedding before and after normalisation, (B, D)."""
        result = self.auto_model(
            attention_mask=attention_mask, **inputs, output_hidden_states=True, output_attentions=True
        )
        pooled = self.pooling(
            {"token_embeddings": result.last_hidden_state, "attention_mask": attention_mask}
        )
        mean = pooled["sentence_embedding"]
        return {
            "hidden_states": result.hidden_states,
            "attentions": result.attentions,
            "mean": mean,
            "embedding": self.normalize(pooled)["sentence_embedding"],
        }


def config_of(source: str) -> transformers.PretrainedConfig:
    """Return a small configuration of a source's model."""
    common = {"num_labels": LABELS, "attn_implementation": "eager", "initializer_range": 0.02}
    if source.startswith("roberta"):
        return transformers.RobertaConfig(
            **SIZES, **common, type_vocab_size=1, pad_token_id=1, layer_norm_eps=1e-5
        )
    if source.startswith("distilbert"):
        ours = dict(zip(("dim", "n_heads", "hidden_dim", "n_layers"), list(SIZES.values())[2:], strict=True))
        return transformers.DistilBertConfig(
            **ours,
            **common,
            vocab_size=SIZES["vocab_size"],
            max_position_embeddings=SIZES["max_position_embeddings"],
        )
    return transformers.BertConfig(**SIZES, **common)


MODELS = {
    "bert-hugging-face": transformers.BertForSequenceClassification,
    "roberta-hugging-face": transformers.RobertaForSequenceClassification,
    "distilbert-hugging-face": transformers.DistilBertForSequenceClassification,
    "sentence-bert-hugging-face": SentenceEmbedder,
}
STATED = (
    "vocab_size",
    "max_position_embeddings",
    "type_vocab_size",
    "hidden_size",
    "dim",
    "num_attention_heads",
    "n_heads",
    "intermediate_size",
    "hidden_dim",
    "num_hidden_layers",
    "n_layers",
    "num_labels",
    "pad_token_id",
    "layer_norm_eps",
    "hidden_act",
    "activation",
)


def drawn(model: nn.Module, seed: int) -> dict[str, np.ndarray]:
    """Random float32 weights that hide no errors."""
    generator, weights = np.random.default_rng(seed), {}
    for name, parameter in model.named_parameters():
        normal = generator.standard_normal(tuple(parameter.shape))
        if "embeddings" in name and parameter.ndim == 2:
            values = 0.7 * normal
        elif parameter.ndim == 2:
            values = normal / np.sqrt(parameter.shape[1])
        else:
            values = (
                (1 + 0.25 * normal) if "norm" in name.lower() and name.endswith("weight") else 0.2 * normal
            )
        weights[name] = values.astype(np.float32)
    return weights


def inputs_of(
    source: str, rows: list[str], config: transformers.PretrainedConfig, seed: int
) -> dict[str, np.ndarray]:
    """Return random inputs: ids (B, T), and labels (B,) or a cotangent (B, D)."""
    generator = np.random.default_rng(seed)
    real = np.array([[mark == "1" for mark in row] for row in rows])
    words = generator.integers(0, config.vocab_size - 1, real.shape)
    inputs = {"input_ids": np.where(real, words + (words >= config.pad_token_id), config.pad_token_id)}
    if not source.startswith("distilbert"):
        inputs["token_type_ids"] = np.where(
            real, generator.integers(0, config.type_vocab_size, real.shape), 0
        )
    if source.startswith("sentence"):
        inputs["cotangent"] = generator.standard_normal((len(rows), config.hidden_size)).astype(np.float32)
    else:
        inputs["labels"] = (np.arange(len(rows)) + 1) % LABELS
    return inputs


def computed(model: nn.Module, inputs: dict[str, Tensor], pad_id: int) -> dict[str, Tensor]:
    """Run a model with gradients and return its tensors."""
    arguments = {**inputs, "attention_mask": (inputs["input_ids"] != pad_id).long()}
    cotangent = arguments.pop("cotangent", None)
    if cotangent is None:
        result = model(**arguments, output_hidden_states=True, output_attentions=True)
        loss, outputs = result.loss, {"logits": result.logits, "loss": result.loss}
    else:
        result = model(**arguments)
        loss = (result["embedding"] * cotangent).sum()
        outputs = {"mean": result["mean"], "sentence_embedding": result["embedding"], "loss": loss}
    loss.backward()
    outputs["embedding"], *blocks = result["hidden_states"]
    for i, (block, attention) in enumerate(zip(blocks, result["attentions"], strict=True)):
        outputs |= {f"block{i}/output": block, f"block{i}/attention": attention}
    return outputs


def write(folder: Path, source: str, case: str, dtype: str) -> None:
    """Write one golden file below a folder."""
    config, number = config_of(source), 1 + list(ROWS).index(case)
    model = MODELS[source](config).eval().to(PRECISIONS[dtype])
    weights, inputs = drawn(model, number), inputs_of(source, ROWS[case], config, 100 + number)
    names = {name.removeprefix("auto_model."): name for name in weights}
    model.load_state_dict(
        {name: torch.tensor(array, dtype=PRECISIONS[dtype]) for name, array in weights.items()}, strict=True
    )
    tensors = {
        name: torch.tensor(array, dtype=PRECISIONS[dtype] if array.dtype.kind == "f" else torch.int64)
        for name, array in inputs.items()
    }
    outputs, parameters = computed(model, tensors, config.pad_token_id), dict(model.named_parameters())
    arrays = {f"weights/{name}": parameters[full].detach() for name, full in names.items()}
    arrays |= {f"inputs/{name}": tensor for name, tensor in tensors.items()} | {
        f"outputs/{name}": tensor.detach() for name, tensor in outputs.items()
    }
    arrays |= {
        f"grads/{name}": torch.zeros_like(parameters[full])
        if parameters[full].grad is None
        else parameters[full].grad
        for name, full in names.items()
    }
    settings = {name: getattr(config, name) for name in STATED if hasattr(config, name)}
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    metadata = {
        "source": source,
        "case": case,
        "dtype": dtype,
        "framework": versions,
        "config": json.dumps(settings, sort_keys=True),
    }
    path = folder / source / f"{case}{'.f64' if dtype == 'float64' else ''}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: np.asarray(tensor.numpy(), order="C") for name, tensor in arrays.items()}, path, metadata
    )


if __name__ == "__main__":
    for source in MODELS:
        for case in ROWS if source.startswith(("roberta", "sentence")) else ["b_ragged"]:
            for dtype in PRECISIONS if case == "b_ragged" else ["float64"]:
                write(Path(sys.argv[1]), source, case, dtype)
