"""The formats, as a table: a container, names, and the file of weights in its folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from concord.porting.containers import (
    HDF5,
    HDF5_MODELS,
    MSGPACK,
    ORBAX,
    PADDLE,
    SAFETENSORS,
    TENSORFLOW,
    TORCH,
    Container,
)
from concord.porting.containers import KERAS as KERAS_ARCHIVE
from concord.porting.containers import ONNX as ONNX_GRAPH
from concord.porting.containers.container import INDEX
from concord.porting.folder import CARRIED, CONFIG, SENTENCES
from concord.porting.matching import Names
from concord.porting.naming import canonical, keras_path, of_backend, of_table, tensorflow_key
from concord.spec import checkpoints
from concord.spec.errors import unknown
from concord.spec.sources import table as tables
from concord.spec.sources.schema import Table

Spelled = Callable[[str], str]


@dataclass(frozen=True)
class Format:
    """A kind of checkpoint: a folder with weights, configuration and what is carried over.

    Attributes:
        name: by which it is asked for.
        meaning: in words.
        container: of the weights.
        weights: what the file of weights may be called; the first name is written.
        source: whose table names its tensors, and whose words ``config.json`` has; empty: ``config.toml`` has
            the family's.
        backend: whose model names its tensors; empty, without a source too: the specification does.
        spelled: what the container makes of a backend's name.
        configuration: the file with the configuration in a source's words.
        modules: whether the folder is one of sentence-transformers, which lists modules
            (:mod:`concord.porting.sentences`).
    """

    name: str
    meaning: str
    container: Container
    weights: tuple[str, ...]
    source: str = ""
    backend: str = ""
    spelled: Spelled = str
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
    def carried(self) -> tuple[str, ...]:
        """Files beside the weights that it takes as they are: the tokenizer and labels.

        What other projects' folders have no place for only if it is none.
        """
        return (*CARRIED, *(SENTENCES if self.modules or not self.source else ()))


OWN, KERAS, ONNX = "concord", "keras", "onnx"
"""The format whose folder says itself what it is, the one whose file says how its model is made, and the one
that is a graph."""

BERT = "bert-hugging-face"

SENTENCES_OF = {"": "a BERT", "-roberta": "a RoBERTa or XLM-R", "-distilbert": "a DistilBERT"}
MODELS_OF = {**SENTENCES_OF, "-electra": "an ELECTRA, without its heads"}
"""What folders of sentence-transformers and of Hugging Face hold, by what their formats are called."""

IN_FILES = {
    "": (SAFETENSORS, "model.safetensors", "safetensors in one file or several"),
    "-bin": (TORCH, "pytorch_model.bin", "PyTorch's own file or files"),
}


def _of_hub(kind: str, end: str, modules: bool) -> Format:
    """Return a format of Hugging Face's hub."""
    container, name, files = IN_FILES[end]
    begin = "sentence-transformers" if modules else "hugging-face"
    meaning = (
        f"{'sentence-transformers' if modules else 'Hugging Face on PyTorch'} with {MODELS_OF[kind]}, {files}"
    )
    source = f"{'sentence-' * modules}{kind.removeprefix('-') or 'bert'}-hugging-face"
    return Format(
        f"{begin}{kind}{end}", meaning, container, (name, f"{name}{INDEX}"), source, modules=modules
    )


def _native(
    name: str, meaning: str, container: Container, weights: str, backend: str, spelled: Spelled = str
) -> Format:
    """Return a format that is the state of a backend's model."""
    return Format(name, f"this project's {meaning}", container, (weights,), backend=backend, spelled=spelled)


FORMATS = {
    form.name: form
    for form in (
        Format(
            OWN,
            "this project's own checkpoint, as 'concord train' writes it",
            SAFETENSORS,
            (checkpoints.WEIGHTS,),
        ),
        _native("torch-safetensors", "PyTorch model, its state", SAFETENSORS, "model.safetensors", "torch"),
        _native("torch", "PyTorch model, its state in PyTorch's own file", TORCH, "model.pt", "torch"),
        _native("paddle", "PaddlePaddle model, its state", PADDLE, "model.pdparams", "paddle"),
        _native(
            "keras-h5", "Keras model, as save_weights writes it", HDF5, "model.weights.h5", "tf", keras_path
        ),
        _native(KERAS, "Keras model, as save writes it", KERAS_ARCHIVE, "model.keras", "tf", keras_path),
        _native(
            "tensorflow",
            "Keras model, in a checkpoint of TensorFlow",
            TENSORFLOW,
            "model.ckpt.index",
            "tf",
            tensorflow_key,
        ),
        _native("jax-msgpack", "Flax model, its state in Flax' own file", MSGPACK, "model.msgpack", "jax"),
        _native("jax-orbax", "Flax model, its state in a folder of Orbax", ORBAX, "model.orbax", "jax"),
        Format(ONNX, "an ONNX graph, written alone", ONNX_GRAPH, ("model.onnx",), backend="torch"),
        *(_of_hub(kind, end, True) for end in IN_FILES for kind in SENTENCES_OF),
        *(_of_hub(kind, end, False) for kind in MODELS_OF for end in IN_FILES),
        Format(
            "hugging-face-tf", "Hugging Face BERT on TensorFlow", HDF5_MODELS, ("tf_model.h5",), f"{BERT}-tf"
        ),
        Format(
            "hugging-face-flax", "Hugging Face BERT on Flax", MSGPACK, ("flax_model.msgpack",), f"{BERT}-flax"
        ),
        Format("paddlenlp", "PaddleNLP's BERT", PADDLE, ("model_state.pdparams",), "bert-paddlenlp"),
        Format(
            "google-bert",
            "Google's BERT on TensorFlow 1",
            TENSORFLOW,
            ("bert_model.ckpt.index",),
            "bert-google",
            configuration="bert_config.json",
        ),
        *(
            Format(source, meaning, container, (weights,), source)
            for source, meaning, container, weights in (
                (
                    "tf1-text-classifier",
                    "the text classifier on TensorFlow 1",
                    TENSORFLOW,
                    "model.ckpt.index",
                ),
                (
                    "bert-pytorch",
                    "codertimo's BERT-pytorch with its sentence head, a state_dict",
                    TORCH,
                    "model.pt",
                ),
                (
                    "vanilla-encoder",
                    "the encoder of hyunwoongko's transformer, a state_dict",
                    TORCH,
                    "model.pt",
                ),
                ("nndl-paddle", "Model_Transformer of the book on PaddlePaddle", PADDLE, "model.pdparams"),
                (
                    "nndl-paddle-api",
                    "Model_Transformer_v1 of the book on PaddlePaddle",
                    PADDLE,
                    "model.pdparams",
                ),
                (
                    "keras-attention",
                    "the encoder of attention-is-all-you-need-keras, its weights by the names of layers",
                    HDF5,
                    "model.weights.h5",
                ),
            )
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
