"""A random case: a configuration, and seeds for weights and inputs."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from concord.conformance.record_fields import Config, Count, Number
from concord.conformance.run.campaign import Job
from concord.spec.arrays import Array, Arrays, Ids, Mask, Shape
from concord.spec.batch import Batch, from_arrays
from concord.spec.cases import LANDMARKS
from concord.spec.config import EncoderConfig
from concord.spec.parameters import initialize, parameters
from concord.spec.tensors import axis_sizes, inputs, resolve

# None; each row's end, except for one token; any token; each row's beginning; one row's beginning; whole
# rows; all tokens.
PADDINGS = ("none", "tail", "inside", "front", "left", "rows", "all")

# For parts with a key mask: none; (B, S), the same for all queries of a sample; (B, Q, S).
KEY_MASKS = ("none", "samples", "queries")

ATTENTION_PARTS = ("attention", "dot_product")


@dataclass(frozen=True, kw_only=True)
class FuzzCase:
    """A random case, which determines its arrays."""

    config: Config
    part: str
    dtype: str
    batch: Count
    tokens: Count  # keys in attention parts
    queries: Count  # in attention parts
    weights_seed: Count
    inputs_seed: Count
    profile: str  # of weights (PROFILES)
    scale: Number  # factor of every kernel
    offset: Number  # added to token table and real inputs, so that their means are not near 0
    padding: str
    key_mask: str  # from KEY_MASKS, in attention parts
    query_mask: bool
    gradients: bool = True

    def build(self) -> tuple[EncoderConfig, Arrays, Batch]:
        """Configuration, weights and inputs, exact in float32."""
        return self.config, self._weights(), self._inputs()

    def job(self, name: str) -> Job:
        """Job of this case."""
        return Job(
            "fuzz",
            name,
            self.dtype,
            self.part,
            *self.build(),
            end_to_end=False,  # the local judgement decides
            gradients=self.gradients,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        return {**vars(self), "config": self.config.as_dict()}

    def _weights(self) -> Arrays:
        weights: Arrays = initialize(self.config, self.weights_seed, self.profile, self.part)
        for name, parameter in parameters(self.config, self.part).items():
            if parameter.kind == "kernel":
                weights[name] = _single(weights[name] * self.scale)
        token = "embeddings.token.weight"
        if token in weights:
            weights[token] = _single(weights[token] + self.offset)
        return weights

    def _inputs(self) -> Batch:
        sizes = axis_sizes(
            self.config, batch=self.batch, tokens=self.tokens, key=self.tokens, query=self.queries
        )
        arrays: Arrays = {}
        for name, tensor in inputs(self.config, self.part).items():
            # Separate streams, so that changing one input does not affect others.
            generator = np.random.default_rng([self.inputs_seed, zlib.crc32(name.encode())])
            shape = resolve(tensor.shape, sizes)
            if name == "input_ids":
                arrays[name] = self._ids(generator, shape)
            elif name == "segment_ids":
                arrays[name] = generator.integers(0, self.config.num_segments, shape)
            elif name == "labels":
                arrays[name] = self._labels(generator, shape)
            elif name == "key_mask":
                if self.key_mask != "none":
                    arrays[name] = self._key_mask(generator, shape)
            elif name == "query_mask":
                if self.query_mask:
                    arrays[name] = _real(generator, shape, self.padding)
            else:
                arrays[name] = _single(
                    generator.standard_normal(shape) + (0.0 if name == "cotangent" else self.offset)
                )
        return from_arrays(arrays)

    def _ids(self, generator: np.random.Generator, shape: Shape) -> Ids:
        config, real = self.config, _real(generator, shape, self.padding)
        words = generator.integers(0, config.vocab_size, shape)
        if config.vocab_size > 2**8:
            # In a large table, half of the tokens reuse a few rows where kernels branch. These are the rows
            # at which ids need another bit, and the last row.
            rows = np.minimum(LANDMARKS, config.vocab_size - 1)
            words = np.where(generator.random(shape) < 0.5, generator.choice(rows, shape), words)
        words = np.where(words == config.pad_id, (words + 1) % config.vocab_size, words)
        return np.where(real, words, config.pad_id)

    def _labels(self, generator: np.random.Generator, shape: Shape) -> Ids:
        classes = max(self.config.num_classes, 2)
        labels = generator.integers(0, classes, shape)
        if self.config.ignore_label is not None and (labels == self.config.ignore_label).all():
            labels[-1] = (self.config.ignore_label + 1) % classes  # at least one sample must count (LOS-3)
        return labels

    def _key_mask(self, generator: np.random.Generator, shape: Shape) -> Mask:
        batch, keys = shape
        if self.key_mask == "samples":
            return _real(generator, shape, self.padding)
        return _real(generator, (batch * self.queries, keys), self.padding).reshape(batch, self.queries, keys)


def _single(values: Array) -> Array:
    # Float64 and float32 runs then see the same values (SPEC WGT-5).
    return values.astype(np.float32).astype(np.float64)


def _real(generator: np.random.Generator, shape: Shape, padding: str) -> Mask:
    rows, tokens = shape
    place = np.arange(tokens)
    if padding == "tail":
        return place < generator.integers(1, tokens + 1, (rows, 1))
    if padding == "front":
        return place >= generator.integers(0, tokens, (rows, 1))
    if padding == "left":
        mask: Mask = (np.arange(rows) != generator.integers(rows))[:, None] | (place > 0)
        return mask
    if padding == "inside":
        return generator.random(shape) < 0.6
    if padding == "rows":
        return np.broadcast_to(generator.random((rows, 1)) < 0.5, shape).copy()
    return np.full(shape, padding == "none")
