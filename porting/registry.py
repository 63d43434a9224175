"""The formats, as a table: a container, names, and the file of weights in its folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from concord.porting.containers import (
    Container,
    bundle,
    h5,
    h5_weights,
    keras,
    msgpack,
    onnx,
    orbax,
    paddle,
    safetensors,
    torch,
)
from concord.porting.folder import CARRIED, CONFIG, SENTENCES
from concord.porting.matching import Names
from concord.porting.naming import canonical, keras_path, of_backend, of_table, tensorflow_key
from concord.spec import checkpoints
from concord.spec.errors import unknown
from concord.spec.sources import table as tables
from concord.spec.sources.schema import Table


@dataclass(frozen=True)
class Format:
    """A kind of checkpoint: a folder with weights, configuration and what is carried over.

    Attributes:
        name: by which it is asked for.
        meaning: in words.
        container: of the weights.
        weights: what the file of weights may be called; the first name is written.
        source: whose table names its tensors, and whose words ``config.json`` has; empty: ``config.toml`` has the family's.
        backend: whose model names its tensors; empty, without a source too: the specification does.
        spelled: what the container makes of a backend's name.
        configuration: the file with the configuration in a source's words.
        modules: whether the folder is one of sentence-transformers, which lists modules (:mod:`concord.porting.sentences`).
    """

    name: str
    meaning: str
    container: Container
    weights: tuple[str, ...]
    source: str = ""
    backend: str = ""
    spelled: Callable[[str], str] = lambda name: name
    configuration: str = CONFIG
    modules: bool = False

    @cached_property
    def table(self) -> Table | None:
        """The table of its source."""
        return tables.load(self.source) if self.source else None

    @cached_property
    def names(self) -> Names:
        """How it names and lays out tensors."""
        if self.table is not None:
            return of_table(self.table)
        return of_backend(self.backend, self.spelled) if self.backend else canonical()

    @property
    def companions(self) -> tuple[str, ...]:
        """Files beside the weights that it takes as they are: the tokenizer and labels; what other projects' folders have no place for only if it is none."""
        return (*CARRIED, *(SENTENCES if self.modules or not self.source else ()))


OWN, KERAS, ONNX = "concord", "keras", "onnx"
"""The format whose folder says itself what it is, the one whose file says how its model is made, and the one that is a graph."""

BERT = "bert-hugging-face"

FORMATS = {
    form.name: form
    for form in (
        Format(
            OWN,
            "this project's own checkpoint, as 'concord train' writes it",
            safetensors,
            (checkpoints.WEIGHTS,),
        ),
        Format(
            "torch-safetensors",
            "the state of this project's PyTorch model",
            safetensors,
            ("model.safetensors",),
            backend="torch",
        ),
        Format(
            "torch",
            "the state of this project's PyTorch model, in PyTorch's own file",
            torch,
            ("model.pt",),
            backend="torch",
        ),
        Format(
            "paddle",
            "the state of this project's PaddlePaddle model",
            paddle,
            ("model.pdparams",),
            backend="paddle",
        ),
        Format(
            "keras-h5",
            "the weights of this project's Keras model, as save_weights writes them",
            h5,
            ("model.weights.h5",),
            backend="tf",
            spelled=keras_path,
        ),
        Format(
            KERAS,
            "this project's Keras model, as save writes it",
            keras,
            ("model.keras",),
            backend="tf",
            spelled=keras_path,
        ),
        Format(
            "tensorflow",
            "a checkpoint of TensorFlow with this project's Keras model",
            bundle,
            ("model.ckpt.index",),
            backend="tf",
            spelled=tensorflow_key,
        ),
        Format(
            "jax-msgpack",
            "the state of this project's Flax model, in Flax' own file",
            msgpack,
            ("model.msgpack",),
            backend="jax",
        ),
        Format(
            "jax-orbax",
            "the state of this project's Flax model, in a folder of Orbax",
            orbax,
            ("model.orbax",),
            backend="jax",
        ),
        Format(ONNX, "an ONNX graph, written alone", onnx, ("model.onnx",)),
        Format(
            "sentence-transformers",
            "a folder of sentence-transformers with a BERT in it",
            safetensors,
            ("model.safetensors", safetensors.INDEX),
            f"sentence-{BERT}",
            modules=True,
        ),
        Format(
            "sentence-transformers-roberta",
            "the same with a RoBERTa or XLM-R",
            safetensors,
            ("model.safetensors", safetensors.INDEX),
            "sentence-roberta-hugging-face",
            modules=True,
        ),
        Format(
            "sentence-transformers-distilbert",
            "the same with a DistilBERT",
            safetensors,
            ("model.safetensors", safetensors.INDEX),
            "sentence-distilbert-hugging-face",
            modules=True,
        ),
        Format(
            "sentence-transformers-bin",
            "a folder of sentence-transformers with a BERT in PyTorch's own file or files",
            torch,
            ("pytorch_model.bin", torch.INDEX),
            f"sentence-{BERT}",
            modules=True,
        ),
        Format(
            "sentence-transformers-roberta-bin",
            "the same with a RoBERTa or XLM-R",
            torch,
            ("pytorch_model.bin", torch.INDEX),
            "sentence-roberta-hugging-face",
            modules=True,
        ),
        Format(
            "sentence-transformers-distilbert-bin",
            "the same with a DistilBERT",
            torch,
            ("pytorch_model.bin", torch.INDEX),
            "sentence-distilbert-hugging-face",
            modules=True,
        ),
        Format(
            "hugging-face",
            "Hugging Face BERT on PyTorch, safetensors in one file or several",
            safetensors,
            ("model.safetensors", safetensors.INDEX),
            BERT,
        ),
        Format(
            "hugging-face-bin",
            "Hugging Face BERT on PyTorch, in PyTorch's own file or files",
            torch,
            ("pytorch_model.bin", torch.INDEX),
            BERT,
        ),
        Format(
            "hugging-face-roberta",
            "Hugging Face RoBERTa or XLM-R on PyTorch, safetensors in one file or several",
            safetensors,
            ("model.safetensors", safetensors.INDEX),
            "roberta-hugging-face",
        ),
        Format(
            "hugging-face-roberta-bin",
            "the same in PyTorch's own file or files",
            torch,
            ("pytorch_model.bin", torch.INDEX),
            "roberta-hugging-face",
        ),
        Format(
            "hugging-face-distilbert",
            "Hugging Face DistilBERT on PyTorch, safetensors in one file or several",
            safetensors,
            ("model.safetensors", safetensors.INDEX),
            "distilbert-hugging-face",
        ),
        Format(
            "hugging-face-distilbert-bin",
            "the same in PyTorch's own file or files",
            torch,
            ("pytorch_model.bin", torch.INDEX),
            "distilbert-hugging-face",
        ),
        Format(
            "hugging-face-electra",
            "Hugging Face ELECTRA on PyTorch, without its heads, safetensors in one file or several",
            safetensors,
            ("model.safetensors", safetensors.INDEX),
            "electra-hugging-face",
        ),
        Format(
            "hugging-face-electra-bin",
            "the same in PyTorch's own file or files",
            torch,
            ("pytorch_model.bin", torch.INDEX),
            "electra-hugging-face",
        ),
        Format(
            "hugging-face-tf", "Hugging Face BERT on TensorFlow", h5_weights, ("tf_model.h5",), f"{BERT}-tf"
        ),
        Format(
            "hugging-face-flax", "Hugging Face BERT on Flax", msgpack, ("flax_model.msgpack",), f"{BERT}-flax"
        ),
        Format("paddlenlp", "PaddleNLP's BERT", paddle, ("model_state.pdparams",), "bert-paddlenlp"),
        Format(
            "google-bert",
            "Google's BERT on TensorFlow 1",
            bundle,
            ("bert_model.ckpt.index",),
            "bert-google",
            configuration="bert_config.json",
        ),
        Format(
            "tf1-text-classifier",
            "the text classifier on TensorFlow 1",
            bundle,
            ("model.ckpt.index",),
            "tf1-text-classifier",
        ),
        Format(
            "bert-pytorch",
            "codertimo's BERT-pytorch with its sentence head, a state_dict",
            torch,
            ("model.pt",),
            "bert-pytorch",
        ),
        Format(
            "vanilla-encoder",
            "the encoder of hyunwoongko's transformer, a state_dict",
            torch,
            ("model.pt",),
            "vanilla-encoder",
        ),
        Format(
            "nndl-paddle",
            "Model_Transformer of the book on PaddlePaddle",
            paddle,
            ("model.pdparams",),
            "nndl-paddle",
        ),
        Format(
            "nndl-paddle-api",
            "Model_Transformer_v1 of the book on PaddlePaddle",
            paddle,
            ("model.pdparams",),
            "nndl-paddle-api",
        ),
        Format(
            "keras-attention",
            "the encoder of attention-is-all-you-need-keras, its weights by the names of layers",
            h5,
            ("model.weights.h5",),
            "keras-attention",
        ),
    )
}
"""Every format by name."""


def formats() -> tuple[str, ...]:
    """Return the names of all formats."""
    return tuple(FORMATS)


def known(name: str) -> Format:
    """Return a format.

    Raises:
        UnknownNameError: with the nearest names.
    """
    if name not in FORMATS:
        raise unknown("format", name, list(FORMATS))
    return FORMATS[name]
