"""The formats, as a table of container, naming and weight file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from concord.backends.weights import NAMINGS
from concord.porting import containers
from concord.porting.containers.container import Container
from concord.porting.folder import CARRIED, CONFIG, SENTENCES
from concord.spec.config import EncoderConfig
from concord.spec.errors import unknown
from concord.spec.files import parse_toml, read_text
from concord.spec.parameters import parameters, shape_of
from concord.spec.sources import source_tables as tables
from concord.spec.sources.layouts import WEIGHT_LAYOUTS
from concord.spec.sources.schema import CheckpointTable, Ignored, Table
from concord.spec.sources.source_tables import Binding, bindings
from concord.spec.tensors import OF_IDS

LAYOUTS = {  # the canonical layout of each kind of parameter
    "embedding": "table",
    "positions": "table",
    "kernel": "in_out",
    "bias": "vector",
    "gamma": "vector",
    "beta": "vector",
}

PARTS = ("model", "encoder", "pooled", "stack", "attention")  # the most complete first

# Files of backends' models may contain more than parameters.
OPTIMIZER = CheckpointTable(
    ignored={
        "optimizer*": Ignored(reason="belongs to the optimizer"),
        "_metadata*": Ignored(reason="belongs to the format"),
    }
)


def keras_path(name: str, config: EncoderConfig) -> str:
    """A parameter's path in an HDF5 file of this project's Keras model."""
    path, _, leaf = name.rpartition(".")
    # Keras names layers in a list by class (PostNormLayer or PreNormLayer), and numbers all but the first.
    path = re.sub(
        r"^layers\.(\d+)",
        lambda match: f"blocks.{config.norm_placement}_norm_layer{'' if match[1] == '0' else f'_{match[1]}'}",
        path,
    )
    # ``output`` is a property of every Keras layer, so the model's attribute has a different name.
    path = re.sub(r"(^|\.)attention\.output$", r"\1attention.projection", path)
    return f"{path.replace('.', '/')}/vars/{int(leaf in ('bias', 'beta'))}"


def tensorflow_key(name: str, config: EncoderConfig) -> str:  # noqa: ARG001 - as keras_path
    """A parameter's key in a ``tf.train.Checkpoint`` of a ``model``."""
    return f"model/{name.replace('.', '/')}/.ATTRIBUTES/VARIABLE_VALUE"


# Functions that spell a backend's names for each container.
SPELLED: dict[str, Callable[[str, EncoderConfig], str]] = {
    "": lambda name, _: name,
    "keras": keras_path,
    "tensorflow": tensorflow_key,
}


@dataclass(frozen=True)
class Format:
    """A checkpoint format; ``formats.toml`` explains the fields."""

    name: str
    meaning: str
    container: Container
    weights: tuple[str, ...]
    source: str = ""
    backend: str = ""
    spelled: str = ""
    configuration: str = CONFIG
    modules: bool = False
    also: Sequence[str] = ()
    loading: str = ""

    own: Table | None = None  # the user's table, instead of the source's

    @cached_property
    def table(self) -> Table | None:
        """The table that names the tensors, or None if a backend names them."""
        return self.own or (tables.load(self.source) if self.source else None)

    @property
    def title(self) -> str:
        """The owner of the tensors' names, for messages."""
        return self.table.source if self.table else self.backend or OWN

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that it can contain, the most complete first."""
        if self.name == ONNX:
            return OF_IDS
        return tuple(self.table.parts) if self.table else PARTS

    @property
    def home(self) -> str:
        """The backend that runs such checkpoints."""
        return self.backend or self.container.backend

    def rules(self, part: str) -> CheckpointTable:
        """Rules for file contents other than parameters."""
        if self.table and part in self.table.parts:
            return self.table.parts[part].checkpoint
        return OPTIMIZER if self.backend else CheckpointTable()

    def places(self, config: EncoderConfig, part: str) -> Mapping[str, Binding]:
        """Each parameter's place, by canonical name."""
        if self.table:
            return bindings(self.table.parts[part], config)
        naming, places = NAMINGS.get(self.backend), {}
        for name, parameter in parameters(config, part).items():
            turned = naming is not None and naming.transposed and parameter.kind == "kernel"
            layout = "out_in" if turned else LAYOUTS[parameter.kind]
            native = naming.native_name(name, parameter.kind) if naming else name
            shape = WEIGHT_LAYOUTS[layout].shape(shape_of(config, parameter), config.num_heads)
            places[name] = Binding((SPELLED[self.spelled](native, config),), layout, shape)
        return places

    @property
    def carried(self) -> tuple[str, ...]:
        """Accompanying files that are copied unchanged."""
        # Other projects' folders have no place for files of sentence-transformers.
        return (*CARRIED, *(SENTENCES if self.modules or not self.source else ()))


OWN, KERAS, ONNX = "concord", "keras", "onnx"  # formats with their own way of writing

TABLE = Path(__file__).with_name("formats.toml")

FORMATS = {
    name: Format(
        name,
        **{
            **entry,
            "container": getattr(containers, entry["container"].upper()),
            "weights": (*entry["weights"],),
        },
    )
    for name, entry in parse_toml(read_text(TABLE), TABLE.name).items()
}


def formats() -> tuple[str, ...]:
    """Names of all formats."""
    return tuple(FORMATS)


def find_format(name: str) -> Format:
    """Return a format by its name or that of its framework.

    Raises:
        UnknownNameError: with the nearest names.
    """
    names = {other: form for form in FORMATS.values() for other in (*form.also, form.name)}
    if name not in names:
        raise unknown("format", name, list(names))
    return names[name]
