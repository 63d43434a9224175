"""What is measured: models of a size that is in use, on batches of a size that is in use."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from concord.backends.interface import WORKLOAD_KINDS, Request
from concord.spec.batch import Batch, example_batch
from concord.spec.config import EncoderConfig, from_toml, variant, variants
from concord.spec.errors import collect, located, refuse, unknown, unknowns
from concord.spec.files import read_text
from concord.spec.training.recipe import Recipe
from concord.spec.training.trajectory import Training

LENGTHS = ("full", "ragged")
"""``full``: no padding. ``ragged``: the lengths of real texts, which are close to log-normal."""

MEDIAN, SIGMA = 0.4, 0.6
"""Of ragged lengths: the median as a share of T, and the standard deviation of their logarithm.

A sixteenth is cut off at T.
"""

STEPS = 2
"""Of training that are checked, on other inputs each: a moment that is not kept, or not as it should be,
shows in the second."""

SEED = 0
"""Of weights and inputs; each step of training that is checked has inputs of another."""

RECIPE = Recipe(
    algorithm="adam",
    learning_rate=4e-4,
    beta1=0.9,
    beta2=0.98,
    epsilon=1e-6,
    epsilon_placement="corrected",
    weight_decay=0.01,
    decay_form="times_rate",
    undecayed=("bias", "gamma", "beta"),
)
"""How a model is trained that is timed: AdamW with the numbers of RoBERTa (large.

Liu et al. 2019, table 9), at the height of its schedule and
without dropout. Its epsilon is large enough, beside gradients, for its place to show, and its second beta far
enough from 1 for bfloat16.
"""


@dataclass(frozen=True)
class Preset:
    """A model and a batch.

    Attributes:
        name: what it is called.
        source: where the sizes come from.
        config: the model.
        batch, tokens: B and T.
        ragged: the lengths of its samples where they are ragged; by default those of real texts in general.
    """

    name: str
    source: str
    config: EncoderConfig
    batch: int
    tokens: int
    ragged: tuple[int, ...] = ()


@dataclass(frozen=True)
class Workload:
    """What is timed: a preset, inference or training, with full or ragged lengths.

    Attributes:
        kind: one of :data:`concord.backends.interface.WORKLOAD_KINDS`.
        padding: one of :data:`LENGTHS`.
    """

    preset: Preset
    kind: str = "inference"
    padding: str = "full"
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """A name for tables and records."""
        return f"{self.preset.name} {self.kind} {self.padding}" + (
            "" if self.dtype == "float32" else f" {self.dtype}"
        )

    @functools.cached_property
    def lengths(self) -> list[int]:
        """The number of real tokens of each sample."""
        preset = self.preset
        return (
            list(preset.ragged) or ragged(preset.batch, preset.tokens)
            if self.padding == "ragged"
            else [preset.tokens] * preset.batch
        )

    @property
    def key(self) -> str:
        """A digest of all that its result follows from, but for the number of times it is run."""
        plain = [
            self.preset.config.as_dict(),
            self.kind,
            self.lengths,
            self.preset.tokens,
            self.dtype,
            SEED,
            *([self.recipe.as_dict()] if self.recipe else []),
        ]
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def recipe(self) -> Recipe | None:
        """How the model is trained, if it is."""
        return RECIPE if self.kind == "training" else None

    @property
    def batches(self) -> list[Batch]:
        """What the model is given: one batch, or if it is trained one for each of :data:`STEPS`."""
        lengths, count = self.lengths, STEPS if self.recipe else 1
        sizes = self.preset.config, len(lengths), self.preset.tokens
        return [example_batch(*sizes, SEED + step, lengths) for step in range(count)]

    def request(self, **settings: str) -> Request:
        """Return what is asked of a backend, but for the weights.

        Args:
            settings: fields of :class:`concord.backends.interface.Settings`.
        """
        batches = self.batches
        training = Training(self.recipe, [[batch] for batch in batches]) if self.recipe else None
        how: dict[str, Any] = {**settings, "dtype": self.dtype, "training": training}
        trained = training is not None
        return Request(self.preset.config, {}, batches[0], taps=False, gradients=trained, **how)


def ragged(batch: int, tokens: int) -> list[int]:
    """Return realistic lengths, none of them drawn at random.

    Evenly spaced quantiles of a log-normal distribution, cut off at T.
    """
    normal = statistics.NormalDist()
    quantiles = [normal.inv_cdf((i + 0.5) / batch) for i in range(batch)]
    return [max(1, min(tokens, round(MEDIAN * tokens * math.exp(SIGMA * z)))) for z in quantiles]


@functools.cache
def presets() -> Mapping[str, Preset]:
    """Return the presets by name."""
    nndl, tf1 = variant("nndl-paddle-api", num_layers=1), variant("tf1-text-classifier")
    minilm = variant("bert", num_layers=6, d_model=384, num_heads=12, d_ff=1536)
    large = variant("bert", num_layers=24, d_model=1024, num_heads=16, d_ff=4096)
    found = (
        Preset("nndl", "NNDL practice 8.4: one layer, batches of 32 x 52", nndl, 32, 52),
        Preset("tf1", "TF1 text classifier: batches of 128 x 100", tf1, 128, 100),
        Preset("minilm", "MiniLM, 6 layers of width 384", minilm, 8, 128),
        Preset("bert-base", "BERT base", variant("bert"), 8, 128),
        Preset("bert-large", "BERT large, at a size for accelerators", large, 64, 512),
    )
    return {preset.name: preset for preset in found}


BATCH, TOKENS = 8, 128
"""Of a model that is no preset, unless its configuration has room for fewer tokens."""


def own(name: str, source: str, config: EncoderConfig) -> Preset:
    """Return a model that is no preset, with a batch of the usual size."""
    room = config.max_positions - config.position_start
    return Preset(name, source, config, BATCH, room if config.pooling == "flatten" else min(room, TOKENS))


def of_size(preset: Preset, batch: int | None, tokens: int | None) -> Preset:
    """Return a preset with another batch.

    Raises:
        SpecError: if the model has no room for so many tokens.
    """
    sizes: dict[str, Any] = {"batch": batch, "tokens": tokens}
    for axis, size in sizes.items():
        if size is not None:
            preset = replace(preset, name=f"{preset.name} {axis}={size}", **{axis: size})
    with located(preset.name):
        example_batch(preset.config, 1, preset.tokens)
    return preset


def named(name: str) -> Preset:
    """Return a preset, a variant as it was published, or the model that a TOML file describes.

    Raises:
        UnknownNameError: with the nearest names.
        SpecError: if the file cannot be read, or describes no model.
    """
    if name.endswith(".toml"):
        return own(Path(name).stem, name, from_toml(read_text(Path(name)), name))
    if name in variants():
        return own(name, "as published", variant(name))
    known = presets()
    if name not in known:
        raise unknown("preset", name, [*known, *variants()])
    return known[name]


def workload(
    preset: str | Preset, kind: str = "inference", padding: str = "full", dtype: str = "float32"
) -> Workload:
    """Return a workload, of a preset or of one by name.

    Raises:
        SpecError: listing every unknown name, with the nearest.
    """
    problems = unknowns("kind", [kind], WORKLOAD_KINDS) + unknowns("lengths", [padding], LENGTHS)
    model, _ = collect(lambda: named(preset) if isinstance(preset, str) else preset, lambda: refuse(problems))
    return Workload(model, kind, padding, dtype)
