"""The specification in NumPy: configurations, shapes, masks, reference, cases."""

from concord.spec.batch import PADDINGS, Batch, example_batch, from_arrays, validate_batch
from concord.spec.config import FIELDS, EncoderConfig, from_mapping, from_toml, variant, variants
from concord.spec.errors import BatchError, ConfigError, SpecError, UnknownNameError, WeightsError
from concord.spec.parameters import (
    PROFILES,
    Parameter,
    initialize,
    parameters,
    shape_of,
    trainable,
    validate_weights,
)
from concord.spec.precision import PRECISIONS, Precision, precision
from concord.spec.reference import Truth, predict, reference
from concord.spec.tensors import PARTS, clause_of, differentiable_inputs, inputs, output_name, taps

__all__ = [
    "FIELDS",
    "PADDINGS",
    "PARTS",
    "PRECISIONS",
    "PROFILES",
    "Batch",
    "BatchError",
    "ConfigError",
    "EncoderConfig",
    "Parameter",
    "Precision",
    "SpecError",
    "Truth",
    "UnknownNameError",
    "WeightsError",
    "clause_of",
    "differentiable_inputs",
    "example_batch",
    "from_arrays",
    "from_mapping",
    "from_toml",
    "initialize",
    "inputs",
    "output_name",
    "parameters",
    "precision",
    "predict",
    "reference",
    "shape_of",
    "taps",
    "trainable",
    "validate_batch",
    "validate_weights",
    "variant",
    "variants",
]
