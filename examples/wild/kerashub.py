"""PyTorch's BERT compared with that of keras-hub, on JAX and on TensorFlow.

keras-hub's feed-forward layers use the tanh form of GELU; BERT's own code uses erf.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

REQUIREMENTS = ("keras-hub==0.32.0", "kagglehub", "regex", "requests", "tqdm", "pyyaml", "kagglesdk")
SAVED = "CONCORD_WILD_BERT"


def right(**inputs: np.ndarray) -> dict[str, np.ndarray]:
    import keras

    return keras_bert(lambda x: keras.activations.gelu(x, approximate=False), inputs)


def as_it_is(**inputs: np.ndarray) -> dict[str, np.ndarray]:
    return keras_bert(None, inputs)


def keras_bert(activation: Any, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Activations of keras-hub's BERT with a checkpoint of transformers, by the names of transformers."""
    import keras
    from keras_hub.models import BertBackbone

    weights = load_file(Path(os.environ[SAVED]) / "model.safetensors")
    weights = {name.removeprefix("bert."): array for name, array in weights.items()}
    rows, width = weights["embeddings.word_embeddings.weight"].shape
    positions = len(weights["embeddings.position_embeddings.weight"])
    inner = len(weights["encoder.layer.0.intermediate.dense.bias"])
    layers = sum(name.endswith(".intermediate.dense.bias") for name in weights)
    backbone = BertBackbone(rows, layers, 4, width, inner, 0.0, positions)

    def give(layer: Any, name: str, turned: bool = True) -> None:
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        layer.set_weights(
            [
                (weight.T if turned else weight).reshape(layer.weights[0].shape),
                bias.reshape(layer.weights[1].shape),
            ]
        )

    def row(layer: str, name: str) -> None:
        backbone.get_layer(layer).set_weights([weights[f"embeddings.{name}.weight"]])

    row("token_embedding", "word_embeddings")
    row("position_embedding", "position_embeddings")
    row("segment_embedding", "token_type_embeddings")
    give(backbone.get_layer("embeddings_layer_norm"), "embeddings.LayerNorm", False)
    outputs = {"embeddings.LayerNorm": backbone.get_layer("embeddings_layer_norm").output}
    for i in range(layers):
        layer, path = backbone.get_layer(f"transformer_layer_{i}"), f"encoder.layer.{i}"
        attention = layer._self_attention_layer
        for own, theirs in (("query", "query"), ("key", "key"), ("value", "value")):
            give(getattr(attention, f"_{own}_dense"), f"{path}.attention.self.{theirs}")
        give(attention._output_dense, f"{path}.attention.output.dense")
        give(layer._self_attention_layer_norm, f"{path}.attention.output.LayerNorm", False)
        give(layer._feedforward_intermediate_dense, f"{path}.intermediate.dense")
        give(layer._feedforward_output_dense, f"{path}.output.dense")
        give(layer._feedforward_layer_norm, f"{path}.output.LayerNorm", False)
        if activation:
            layer._feedforward_intermediate_dense.activation = activation
        outputs[f"{path}.output.LayerNorm"] = layer.output
    give(backbone.get_layer("pooled_dense"), "pooler.dense")
    outputs["output[last_hidden_state]"] = backbone.output["sequence_output"]
    outputs["output[pooler_output]"] = backbone.output["pooled_output"]
    features = {
        "token_ids": inputs["input_ids"],
        "segment_ids": inputs["token_type_ids"],
        "padding_mask": inputs["attention_mask"],
    }
    results = keras.Model(backbone.input, outputs)(features)
    return {name: np.asarray(array) for name, array in results.items()}


def main() -> None:
    from small import bert, elsewhere, judge, saved

    os.environ[SAVED] = saved()
    python = elsewhere("keras-hub", *REQUIREMENTS)
    for backend in sys.argv[1:] or ("jax", "tensorflow"):
        os.environ["KERAS_BACKEND"] = backend
        judge(f"keras-hub on {backend}", bert(), "kerashub:as_it_is", python=python)
        judge(f"keras-hub on {backend}, GELU with erf", bert(), "kerashub:right", python=python)


if __name__ == "__main__":
    main()
