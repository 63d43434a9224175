"""How kinds of files name parameters: by the table of a source, or by canonical names."""

from __future__ import annotations

from collections.abc import Mapping

from concord.porting.matching import Names
from concord.spec.config import EncoderConfig
from concord.spec.parameters import parameters, shape_of
from concord.spec.sources.layouts import WEIGHT_LAYOUTS
from concord.spec.sources.schema import Table
from concord.spec.sources.table import Binding, bindings
from concord.spec.tensors import PARTS

LAYOUTS = {"table": "table", "positions": "table", "kernel": "in_out", "bias": "vector", "gain": "vector", "offset": "vector"}
"""The canonical layout of each kind of parameter."""


def of_table(table: Table) -> Names:
    """Return how a source names parameters."""

    def places(config: EncoderConfig, part: str) -> Mapping[str, Binding]:
        return bindings(table.parts[part], config)

    return Names(table.source, tuple(table.parts), places, {name: part.checkpoint for name, part in table.parts.items()})


def canonical() -> Names:
    """Return how this project's own checkpoints name parameters: as the specification does (SPEC WGT-1)."""

    def places(config: EncoderConfig, part: str) -> Mapping[str, Binding]:
        found = {}
        for name, parameter in parameters(config, part).items():
            layout = LAYOUTS[parameter.kind]
            found[name] = Binding((name,), layout, WEIGHT_LAYOUTS[layout].shape(shape_of(config, parameter), config.num_heads))
        return found

    return Names("concord", tuple(PARTS), places)
