"""How kinds of files name parameters: by the table of a source, by canonical names.

Or as the model of a backend does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

from concord.backends.weights import NAMINGS, Naming
from concord.porting.matching import Names, renamed
from concord.spec.config import EncoderConfig
from concord.spec.parameters import parameters, shape_of
from concord.spec.sources.layouts import WEIGHT_LAYOUTS
from concord.spec.sources.names import fill, variables
from concord.spec.sources.schema import CheckpointTable, Ignored, PartTable, Table
from concord.spec.sources.table import Binding, bindings, part_of

LAYOUTS = {
    "embedding": "table",
    "positions": "table",
    "kernel": "in_out",
    "bias": "vector",
    "gamma": "vector",
    "beta": "vector",
}
"""The canonical layout of each kind of parameter."""

PARTS = ("model", "encoder", "pooled", "stack", "attention")
"""The parts of the model that have parameters, the most complete one first."""

OPTIMIZER = CheckpointTable(
    ignored={
        "optimizer*": Ignored(reason="belongs to the optimizer"),
        "_metadata*": Ignored(reason="belongs to the format"),
    }
)
"""What files of backends' models may have besides parameters."""


def of_table(table: Table) -> Names:
    """Return how a source names parameters."""

    def places(config: EncoderConfig, part: str) -> Mapping[str, Binding]:
        return bindings(table.parts[part], config)

    return Names(
        table.source,
        tuple(table.parts),
        places,
        {name: part.checkpoint for name, part in table.parts.items()},
    )


def canonical() -> Names:
    """Return how this project's own checkpoints name parameters: as the specification does (SPEC WGT-1)."""
    return Names("concord", PARTS, lambda config, part: _places(config, part, None, lambda name: name))


def of_backend(backend: str, spelled: Callable[[str], str] = lambda name: name) -> Names:
    """Return how the model of a backend names parameters (:data:`concord.backends.weights.NAMINGS`).

    Args:
        spelled: what a kind of file makes of such a name.
    """
    return Names(
        backend,
        PARTS,
        lambda config, part: _places(config, part, NAMINGS[backend], spelled),
        dict.fromkeys(PARTS, OPTIMIZER),
    )


def _places(
    config: EncoderConfig, part: str, naming: Naming | None, spelled: Callable[[str], str]
) -> Mapping[str, Binding]:
    found = {}
    for name, parameter in parameters(config, part).items():
        layout = (
            "out_in"
            if naming and naming.transposed and parameter.kind == "kernel"
            else LAYOUTS[parameter.kind]
        )
        native = naming.native_name(name, parameter.kind) if naming else name
        found[name] = Binding(
            (spelled(native),),
            layout,
            WEIGHT_LAYOUTS[layout].shape(shape_of(config, parameter), config.num_heads),
        )
    return found


def keras_path(name: str) -> str:
    """Return where Keras keeps a parameter of its own model in an h5 file.

    By attributes, then the number of the variable.

    A list of layers is kept by their class, numbered from the second one on.
    """
    path, _, leaf = name.rpartition(".")
    path = re.sub(
        r"^layers\.(\d+)",
        lambda match: f"blocks.encoder_layer{'' if match[1] == '0' else f'_{match[1]}'}",
        path,
    )
    # ``output`` is a property of every Keras layer.
    path = re.sub(r"(^|\.)attention\.output$", r"\1attention.projection", path)
    return f"{path.replace('.', '/')}/vars/{int(leaf in ('bias', 'beta'))}"


def tensorflow_key(name: str) -> str:
    """Return the key of a parameter in a checkpoint of TensorFlow that has a ``model``."""
    return f"model/{name.replace('.', '/')}/.ATTRIBUTES/VARIABLE_VALUE"


def likeness(table: Table, found: Collection[str]) -> float:
    """Return which share of the names of a table a file has, heads left out, 0 to 1."""
    part = without_heads(table)
    rules = part.checkpoint
    wanted = [native.name for native in part.weights.values()]
    best = 0
    for prefix in rules.prefixes or ("",):
        spelled = [renamed(name, rules.prefixes, prefix) for name in wanted]
        best = max(best, sum(any(other in found for other in _first(name)) for name in spelled))
    return best / len(wanted) if wanted else 0.0


def without_heads(table: Table) -> PartTable:
    """Return what a table says about the encoder; where it has none, about its first part."""
    return table.parts.get("encoder") or part_of(table)


def _first(name: str) -> list[str]:
    """Return what a name is for the first layer and head."""
    return [fill(name, {"i": 0, "h": 0, "n": 1}) if variables(name) else name]
