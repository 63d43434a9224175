"""Parameters: canonical name, shape, distribution, and whether they are trained."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from concord.spec import positions
from concord.spec.arrays import Array, not_finite, wrong_shape, wrong_type
from concord.spec.config import EncoderConfig
from concord.spec.errors import WeightsError, unknown
from concord.spec.tensors import POOLED, axis_sizes, check_part, differentiable_inputs, resolve

Weights = Mapping[str, Array]


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model (SPEC WGT-1, WGT-2).

    Attributes:
        shape: axis names; a linear weight is (in, out).
        kind: ``"embedding"``, ``"positions"``, ``"kernel"``, ``"bias"``, ``"gamma"`` or ``"beta"``.
        trainable: False for a fixed position table.
    """

    shape: str
    kind: str
    trainable: bool = True


def parameters(config: EncoderConfig, part: str = "model") -> dict[str, Parameter]:
    """Every parameter of a part by canonical name, in order of computation (SPEC WGT-1)."""
    return dict(_parameters(config, check_part(part)))


def trainable(config: EncoderConfig, part: str = "model") -> list[str]:
    """Parameters and ``inputs.<name>`` that get a gradient (SPEC GRD-1, GRD-3, GRD-5)."""
    names = [name for name, parameter in parameters(config, part).items() if parameter.trainable]
    return names + [f"inputs.{name}" for name in differentiable_inputs(part)]


def shape_of(config: EncoderConfig, parameter: Parameter) -> tuple[int, ...]:
    """Numeric shape of a parameter (SPEC WGT-2)."""
    return resolve(parameter.shape, axis_sizes(config))


def validate_weights(config: EncoderConfig, weights: Weights, part: str = "model", where: str = "") -> None:
    """Reject weights that do not fit (SPEC WGT-1 to WGT-3).

    Args:
        where: context of messages, such as ``"backend=paddle"``.

    Raises:
        WeightsError: listing missing, unexpected, misshapen, non-float or non-finite weights.
    """
    context = f"{where}, " if where else ""
    table = parameters(config, part)
    problems = [
        f"{name!r} is missing but is required [{context}clause=WGT-1]"
        for name in table
        if name not in weights
    ]
    for name, array in weights.items():
        if name not in table:
            problems.append(
                f"{name!r} is unexpected: the configuration has no such parameter [{context}clause=WGT-1]"
            )
            continue
        if problem := wrong_type(name, array):
            problems.append(f"{problem} [{context}clause=WGT-3]")
        elif problem := wrong_shape(name, array, shape_of(config, table[name])):
            problems.append(f"{problem} [{context}clause=WGT-2]")
        elif problem := not_finite(name, array):
            problems.append(f"{problem} [{context}clause=WGT-3]")
    if problems:
        raise WeightsError(problems)


PROFILES: dict[str, str] = {
    "generic": "random gains and biases, softmax of moderate spread",
    "peaked": (
        "query and key kernels 8 times as large in the first half of their columns, so that some softmax "
        "rows are nearly one-hot; 200 times in the second, so that some scores exceed 10000 in magnitude"
    ),
    "offset": (
        "token vectors with a mean far from zero: a variance computed as a difference of two squares loses "
        "its digits"
    ),
    "extreme": (
        "the activation sees values far into both tails, and logits of up to several hundred saturate "
        "softmax and sigmoid"
    ),
    "tiny": (
        "the standard deviation of every norm's input is close to epsilon, or to its square root, so that "
        "epsilon and its placement are visible"
    ),
}
"""Weight profiles of :func:`initialize` (SPEC WGT-5)."""


def initialize(
    config: EncoderConfig,
    seed: int = 0,
    profile: str = "generic",
    part: str = "model",
) -> dict[str, NDArray[np.float64]]:
    """Draw weights that hide no error (SPEC WGT-5).

    Args:
        profile: one of :data:`PROFILES`.

    Returns:
        float64 arrays of float32 values by canonical name.

    Raises:
        UnknownNameError: for an unknown profile or part.
    """
    if profile not in PROFILES:
        raise unknown("weights profile", profile, list(PROFILES))
    weights = {}
    for name, parameter in parameters(config, part).items():
        # A separate stream per parameter: adding one leaves all others unchanged.
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        shape = shape_of(config, parameter)
        values = _profiled(config, name, _draw(config, parameter, generator.standard_normal(shape)), profile)
        # float32 values, so that float64 and float32 runs get the same model (SPEC WGT-5).
        weights[name] = values.astype(np.float32).astype(np.float64)
    return weights


def _draw(config: EncoderConfig, parameter: Parameter, normal: NDArray[np.float64]) -> NDArray[np.float64]:
    if parameter.kind == "positions" and config.positions == "sinusoidal":
        return positions.sinusoid(config)
    scale, center = {
        # Variance 1/in keeps the size of activations. No gamma is 1 and no bias is 0, since these values
        # would hide a bug.
        "kernel": (1 / np.sqrt(normal.shape[0]), 0.0),
        "positions": (0.5, 0.0),
        "embedding": (
            0.7 / (np.sqrt(config.d_model) if config.embedding_scale == "sqrt_d_model" else 1.0),
            0.0,
        ),
        "gamma": (0.3, 1.0),
        "bias": (0.4, 0.0),
        "beta": (0.4, 0.0),
    }[parameter.kind]
    values: NDArray[np.float64] = center + scale * normal
    return values


def _profiled(
    config: EncoderConfig, name: str, values: NDArray[np.float64], profile: str
) -> NDArray[np.float64]:
    if profile == "peaked" and name.endswith(("query.weight", "key.weight")):
        values = values * np.where(np.arange(config.d_model) < config.d_model // 2, 8.0, 200.0)
    if profile == "offset" and name == "embeddings.token.weight":
        values = values + OFFSET * np.sqrt(np.mean(np.square(values)))
    if profile == "extreme":
        values = values * next((factor for part, factor in EXTREME.items() if part in name), 1.0)
    if profile == "tiny":
        # Every norm input gets a deviation near epsilon, or near its root if epsilon is inside the root.
        deviation = (
            config.norm_epsilon
            if config.norm_epsilon_placement == "outside"
            else np.sqrt(config.norm_epsilon)
        )
        last_of_attention = "attention.output." if config.output_projection else "attention.value."
        into_a_norm = (
            name.startswith("embeddings.")
            or ".norm" in name
            or last_of_attention in name
            or "feed_forward.outer." in name
        )
        values = values * (deviation if into_a_norm else 1.0)
    return values


# Factors of the profile ``extreme``, by a part of the parameter's name.
EXTREME = {
    "feed_forward.inner.": 5.0,
    "feed_forward.outer.weight": 0.3,
    "pooler.": 2.0,
    "classifier.weight": 150.0,
}

# Mean of the token vectors in the profile ``offset``, in units of their standard deviation.
OFFSET = 40.0


def _linear(name: str, inward: str, outward: str, bias: bool = True) -> Iterator[tuple[str, Parameter]]:
    yield f"{name}.weight", Parameter(f"{inward} {outward}", "kernel")
    if bias:
        yield f"{name}.bias", Parameter(outward, "bias")


def _norm(name: str) -> Iterator[tuple[str, Parameter]]:
    yield f"{name}.weight", Parameter("d_model", "gamma")
    yield f"{name}.bias", Parameter("d_model", "beta")


def _attention(config: EncoderConfig, name: str) -> Iterator[tuple[str, Parameter]]:
    for projection in ("query", "key", "value"):
        yield from _linear(f"{name}.{projection}", "d_model", "d_model", bias=config.qkv_bias)
    if config.output_projection:
        yield from _linear(f"{name}.output", "d_model", "d_model")


def _layer(config: EncoderConfig, name: str) -> Iterator[tuple[str, Parameter]]:
    yield from _attention(config, f"{name}.attention")
    yield from _linear(f"{name}.feed_forward.inner", "d_model", "d_ff")
    yield from _linear(f"{name}.feed_forward.outer", "d_ff", "d_model")
    for norm in ("norm1", "norm2") if config.norm_sharing == "separate" else ("norm",):
        yield from _norm(f"{name}.{norm}")


def _parameters(config: EncoderConfig, part: str) -> Iterator[tuple[str, Parameter]]:
    if part == "dot_product":
        return
    if part == "attention":
        yield from _attention(config, "attention")
        return
    if part != "stack":
        yield "embeddings.token.weight", Parameter("vocab d_model", "embedding")
        yield (
            "embeddings.position.weight",
            Parameter("positions d_model", "positions", trainable=config.positions == "learned"),
        )
        if config.num_segments:
            yield "embeddings.segment.weight", Parameter("segments d_model", "embedding")
        if config.embedding_norm:
            yield from _norm("embeddings.norm")
    for i in range(config.num_layers):
        yield from _layer(config, f"layers.{i}")
    if config.final_norm:
        yield from _norm("final_norm")
    if part in POOLED and config.pooler != "none":
        yield from _linear("pooler", "d_model", "d_model")
    if part == "model":
        yield from _linear("classifier", "features", "classes")
