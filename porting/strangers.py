"""What a checkpoint is that the family does not have.

The kind that its configuration names, the nearest of the family, and what differs.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from concord.porting.matching import renamed
from concord.porting.stored import StoredTensor
from concord.spec.sources.names import fill
from concord.spec.sources.schema import PartTable, Table
from concord.spec.sources.table import part_of
from concord.spec.text import first_of

KIND, CLASSES = "model_type", "architectures"
"""The keys of a configuration by which Hugging Face knows what a model is, and of which classes it was
saved."""

MOST = 3
"""Differences that are told."""

FEW = 2
"""Names that are told, of those that are missing and of those that are left over."""

BEGINNINGS = 20
"""Ways in which the names of a file begin that are tried, the most frequent ones."""

LONGEST = 80
"""Characters of a name, or of a word of a configuration."""

NEUTRAL: tuple[Any, ...] = (None, False, 0, "", [], {}, "none", "absolute")
"""Values of a key that say that a model has nothing of it."""

WORDS = {
    r"relative_(attention|position)|^relative_|pos_att_type|position_buckets|^bi_data$": "relative positions",
    r"^(embedding_size|emb_dim)$": "factorised embeddings",
    r"rope|rotary": "rotary positions",
    r"alibi": "biases by distance in place of positions",
    r"^is_encoder_decoder$": "a decoder besides the encoder",
    r"^is_decoder$": "a decoder",
    r"^(image_size|patch_size|num_mel_bins|conv_dim|conv_stride|feature_size)$": "inputs that are no text",
    r"^(attention_window|sliding_window|local_attention|block_size|axial_pos_shape)$": "attention in windows",
    r"^block_sizes$": "tokens that are pooled between layers",
    r"^(num_hidden_groups|inner_group_num)$": "layers that share their weights",
    r"^num_(key_value|kv)_heads$": "heads of keys of their own number",
    r"rms_norm": "RMS norm",
    r"experts": "experts",
    r"^(conv_kernel_size|conv_kernel)$": "convolutions",
    r"bottleneck": "bottlenecks in its layers",
    r"^(q|k|v|post_attention|intermediate|output)_groups$": "convolutions in groups in place of linear "
    "layers",
    r"fourier|^use_tpu_fourier": "Fourier transforms in place of attention",
    r"^quantization_config$": "quantised weights",
}
"""What keys of a configuration mean that no model of the family has."""

CAUSAL = re.compile(r"CausalLM|LMHead|DoubleHeads")
"""Classes whose tokens attend to those before them alone."""


def named(stated: Mapping[str, Any]) -> str:
    """Return the kind of a model, and its classes, as a configuration names them; empty: it does not."""
    classes = stated.get(CLASSES)
    listed = (
        [one if str(one).isidentifier() else _shown(one) for one in classes[:MOST]]
        if isinstance(classes, list)
        else []
    )
    kind = f"{KIND} {_shown(stated[KIND])}" if KIND in stated else f"no {KIND}" if stated else ""
    return f"{kind} ({_cut(', '.join(listed))})" if listed else kind


def described(found: Mapping[str, StoredTensor], stated: Mapping[str, Any], tables: Iterable[Table]) -> str:
    """Return the nearest of the family, and what differs, in a line.

    Args:
        found: the tensors of the file.
        stated: the configuration beside it; empty: there is none.
        tables: of the formats that the file could be one of.
    """
    near = max(
        (Nearness(table, found, stated, _beginnings(found)) for table in tables),
        key=lambda one: (one.share, *one.further()),
        default=None,
    )
    if near is None:
        return ""
    meanings: dict[str, str] = {}
    for meaning, detail in _mechanisms(stated, near.part):
        meanings.setdefault(meaning, detail)
    said = [
        f"{meaning} ({detail})" if detail else meaning for meaning, detail in list(meanings.items())[:MOST]
    ]
    said += near.names()
    return (
        f"nearest is the variant {near.table.variant}: "
        f"{'; '.join(said) or 'the names of its tensors are the same'}"
    )


def _beginnings(found: Iterable[str]) -> list[str]:
    """Return how the names of a file may begin, nothing first."""
    parts = [name.split(".", 2) for name in found]
    counted = Counter(f"{'.'.join(one[:depth])}." for one in parts for depth in (1, 2) if len(one) > depth)
    return ["", *(prefix for prefix, _ in counted.most_common(BEGINNINGS))]


class Nearness:
    """A table, held to a file and its configuration.

    Args:
        prefixes: how the names of the file may begin; by default as the table says.
    """

    def __init__(
        self,
        table: Table,
        found: Mapping[str, StoredTensor],
        stated: Mapping[str, Any] | None = None,
        prefixes: Sequence[str] = (),
    ) -> None:
        self.table, self.found, self.stated = table, found, stated or {}
        self.part = table.parts.get("encoder") or part_of(table)  # heads left out
        self.wanted = self._named(self.part)
        self.prefix = max(
            prefixes or self.part.checkpoint.prefixes or ("",),
            key=lambda prefix: sum(prefix + name in found for name in self.wanted),
        )
        self.there = {name for name in self.wanted if self.prefix + name in found}
        self.share = len(self.there) / max(len(self.wanted), 1)

    def further(self) -> tuple[float, ...]:
        """Return what decides between tables whose names are there as often."""
        heads = sum(name in self.found for name in self._named(part_of(self.table)))  # these have no prefix
        keys = set(self.part.fields.values())
        return heads, _alike(self.wanted, self.found), len(keys & set(self.stated)) / max(len(keys), 1)

    def _named(self, part: PartTable) -> dict[str, None]:
        """Return the names of a part's first layer, without prefix, in order."""
        first = part.checkpoint.prefixes[:1] or ("",)
        names = (fill(native.name, {"i": 0, "h": 0, "n": 1}) for native in part.weights.values())
        return dict.fromkeys(renamed(name, first, "") for name in names)

    def names(self) -> Iterator[str]:
        """Yield which names are missing, and which are left over."""
        plain = {re.sub(r"(?<=\.)\d+(?=\.)", "0", name.removeprefix(self.prefix)) for name in self.found}
        known = {name for part in self.table.parts.values() for name in self._named(part)}
        ignored = [
            renamed(pattern, part.checkpoint.prefixes, "")
            for part in self.table.parts.values()
            for pattern in part.checkpoint.ignored
        ]
        yield from _listed("lacks", [name for name in self.wanted if name not in self.there])
        yield from _listed(
            "has",
            sorted(
                name for name in plain - known if not any(fnmatchcase(name, pattern) for pattern in ignored)
            ),
        )


def _alike(wanted: Collection[str], found: Collection[str]) -> float:
    """Return which share of the words of a table's names are those of a file's names."""
    mine, theirs = (
        {word for name in names for word in re.split(r"[._/]", name) if not word.isdigit()}
        for names in (wanted, found)
    )
    return len(mine & theirs) / max(len(mine), 1)


def _listed(what: str, names: list[str]) -> list[str]:
    return [f"it {what} {first_of([*map(_shown, names)], FEW)}"] if names else []


def _mechanisms(stated: Mapping[str, Any], part: PartTable) -> Iterator[tuple[str, str]]:
    """Yield what a configuration says of what the family does not have, and where it says so."""
    classes = stated.get(CLASSES)
    if isinstance(classes, list) and (causal := [str(one) for one in classes if CAUSAL.search(str(one))]):
        yield "causal attention", _shown(causal[0])
    for pattern, meaning in WORDS.items():
        keys = [key for key in stated if re.search(pattern, key) and stated[key] not in NEUTRAL]
        if keys:
            yield meaning, _cut(keys[0])
    for key, allowed in part.checkpoint.requires.items():
        known = key == KIND or any(re.search(pattern, key) for pattern in WORDS)
        if not known and stated.get(key) is not None and stated[key] not in allowed:
            yield f"{key} is {_shown(stated[key])}", ""
    for option in part.options.values():
        if isinstance(word := stated.get(option.key), str) and word not in option.words:
            yield f"{option.key} is {_shown(word)}", ""


def _shown(value: Any) -> str:
    """Return a value in a line, its beginning if it is long."""
    return _cut(repr(value) if isinstance(value, str) else json.dumps(value))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
