"""A small BERT, and what other engines and ports make of it: the functions that concord.toml names.

`python wild.py` installs the packages of some candidates, each into a folder of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

BUILD = Path(__file__).parent / "build"
CHECKPOINT = str(BUILD / "bert")
PACKAGES = {
    "ctranslate2": ["ctranslate2==4.8.5"],
    "keras-hub": ["keras-hub==0.32.0", "kagglehub", "kagglesdk"],
    "transformers-4": ["transformers==4.57.6", "huggingface_hub<1", "tokenizers<=0.23.0", "tf-keras==2.21.0"],
}


def large(model: nn.Module) -> nn.Module:
    # With fresh weights, which are small, and trivial norms, many wrong steps would not show.
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model.eval()


def bert() -> nn.Module:
    """The reference: 3 layers of width 132, with random weights, saved for the other engines."""
    from transformers import BertConfig, BertModel, logging

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=997,
        hidden_size=132,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=260,
        max_position_embeddings=64,
        attn_implementation="eager",
        position_embedding_type="absolute",  # CTranslate2 requires this key, which transformers 5 leaves out
    )
    model = large(BertModel(config))
    logging.disable_progress_bar()
    model.save_pretrained(CHECKPOINT)
    return model


def openvino_default(**inputs: np.ndarray) -> dict[str, np.ndarray]:
    """OpenVINO without settings; the graph's modules are results."""
    import onnx
    import openvino

    from concord.conformance.compare.candidates import show

    model, path = bert(), str(BUILD / "bert.onnx")
    tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
    torch.onnx.export(model, (), path, kwargs=tensors, dynamo=True, verbose=False)
    graph = onnx.load(path)
    names = show(graph.graph, [name for name, _ in model.named_modules() if name])
    core = openvino.Core()
    results = core.compile_model(core.read_model(graph.SerializeToString()), "CPU")(inputs)
    outputs = {"output[last_hidden_state]": results[0], "output[pooler_output]": results[1]}
    return {path: results[name] for path, name in names.items()} | outputs


def torchao_int8() -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = bert()
    quantize_(model, Int8WeightOnlyConfig())
    return model


def dynamic_int8() -> nn.Module:
    warnings.simplefilter("ignore")  # PyTorch announces the end of this function
    return torch.ao.quantization.quantize_dynamic(bert(), {nn.Linear}, dtype=torch.qint8)


def ctranslate2(input_ids: np.ndarray, attention_mask: np.ndarray) -> dict[str, np.ndarray]:
    """CTranslate2, which skips padding."""
    sys.path.insert(0, str(BUILD / "ctranslate2"))
    from ctranslate2 import Encoder
    from ctranslate2.converters import TransformersConverter
    from transformers import BertTokenizer

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: i for i, word in enumerate([*special, *map(str, range(992))])}
    BertTokenizer(vocabulary).save_pretrained(CHECKPOINT)
    converted = TransformersConverter(CHECKPOINT).convert(str(BUILD / "converted"), force=True)
    texts = [ids[mask == 1].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]
    results = Encoder(converted, device="cpu", compute_type="float32").forward_batch(texts)
    return {
        "output[last_hidden_state]": np.array(results.last_hidden_state),
        "output[pooler_output]": np.array(results.pooler_output),
    }


def transformers_4(results: Any) -> dict[str, np.ndarray]:
    return {
        **{f"encoder.layer.{i}.output.LayerNorm": x for i, x in enumerate(results.hidden_states[1:])},
        **{f"encoder.layer.{i}.attention.self[1]": x for i, x in enumerate(results.attentions)},
        "embeddings.LayerNorm": results.hidden_states[0],
        "output[last_hidden_state]": results.last_hidden_state,
        "output[pooler_output]": results.pooler_output,
    }


def flax(**inputs: np.ndarray) -> dict[str, np.ndarray]:
    sys.path.insert(0, str(BUILD / "transformers-4"))
    from transformers import FlaxBertModel

    model = FlaxBertModel.from_pretrained(CHECKPOINT, from_pt=True)
    return transformers_4(model(**inputs, output_hidden_states=True, output_attentions=True))


def tensorflow(**inputs: np.ndarray) -> dict[str, np.ndarray]:
    sys.path.insert(0, str(BUILD / "transformers-4"))
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    from transformers import TFBertModel

    model = TFBertModel.from_pretrained(CHECKPOINT, from_pt=True)
    return transformers_4(model(inputs, output_hidden_states=True, output_attentions=True))


def keras_hub(backend: str, erf: bool, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    """keras-hub's BERT, with the tanh form of GELU, or ``erf`` as in BERT."""
    sys.path.insert(0, str(BUILD / "keras-hub"))
    os.environ["KERAS_BACKEND"] = backend
    import keras
    from keras_hub.models import BertBackbone
    from safetensors.numpy import load_file

    weights = load_file(f"{CHECKPOINT}/model.safetensors")
    backbone = BertBackbone(997, 3, 4, 132, 260, 0.0, 64)

    def give(layer: Any, name: str) -> None:
        # Kernels of Keras are transposed, and those of attention have an axis of heads.
        arrays = [weights[f"{name}.{kind}"].T for kind in ("weight", "bias") if f"{name}.{kind}" in weights]
        arrays = [x.T if "embeddings" in name else x for x in arrays]
        layer.set_weights([x.reshape(own.shape) for x, own in zip(arrays, layer.weights, strict=True)])

    for own, theirs in (
        ("token_embedding", "word_embeddings"),
        ("position_embedding", "position_embeddings"),
        ("segment_embedding", "token_type_embeddings"),
        ("embeddings_layer_norm", "LayerNorm"),
    ):
        give(backbone.get_layer(own), f"embeddings.{theirs}")
    give(backbone.get_layer("pooled_dense"), "pooler.dense")
    outputs = {
        "embeddings.LayerNorm": backbone.get_layer("embeddings_layer_norm").output,
        "output[last_hidden_state]": backbone.output["sequence_output"],
        "output[pooler_output]": backbone.output["pooled_output"],
    }
    for i in range(3):
        layer, path = backbone.get_layer(f"transformer_layer_{i}"), f"encoder.layer.{i}"
        attention = layer._self_attention_layer
        for name in ("query", "key", "value"):
            give(getattr(attention, f"_{name}_dense"), f"{path}.attention.self.{name}")
        give(attention._output_dense, f"{path}.attention.output.dense")
        give(layer._self_attention_layer_norm, f"{path}.attention.output.LayerNorm")
        give(layer._feedforward_intermediate_dense, f"{path}.intermediate.dense")
        give(layer._feedforward_output_dense, f"{path}.output.dense")
        give(layer._feedforward_layer_norm, f"{path}.output.LayerNorm")
        if erf:
            layer._feedforward_intermediate_dense.activation = lambda x: keras.activations.gelu(x, False)
        outputs[f"{path}.output.LayerNorm"] = layer.output
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    features = {"token_ids": ids, "padding_mask": mask, "segment_ids": np.zeros_like(ids)}
    return keras.Model(backbone.input, outputs)(features)


keras_jax = partial(keras_hub, "jax", False)
keras_jax_erf = partial(keras_hub, "jax", True)
keras_tensorflow = partial(keras_hub, "tensorflow", False)
keras_tensorflow_erf = partial(keras_hub, "tensorflow", True)


class Encoder(nn.Module):
    """PyTorch's own encoder: ids and a mask (B, T), 1 for real tokens, to (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(997, 36)
        layer = nn.TransformerEncoderLayer(36, 4, 52, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.layers(self.token(input_ids), src_key_padding_mask=attention_mask == 0)


def encoder() -> nn.Module:
    """The encoder without its fast path, the reference of `concord compare wild:encoder wild:fast`."""
    torch.manual_seed(0)
    torch.backends.mha.set_fastpath_enabled(False)
    return large(Encoder())


def fast(**inputs: np.ndarray) -> np.ndarray:
    """The encoder with its fast path, which returns zeros for padding."""
    model = encoder()
    torch.backends.mha.set_fastpath_enabled(True)
    with torch.inference_mode():
        return model(**{name: torch.from_numpy(array) for name, array in inputs.items()}).numpy()


def main() -> None:
    for folder, requirements in PACKAGES.items():
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--upgrade", "--target"]
        subprocess.run([*command, str(BUILD / folder), *requirements], check=True)


if __name__ == "__main__":
    main()
