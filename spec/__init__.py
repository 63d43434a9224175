"""What is computed: configurations, shapes, masks, reference and cases. NumPy only; no framework."""

from spec.batch import PADDINGS, Batch, example_batch, from_arrays, validate_batch
from spec.config import FIELDS, EncoderConfig, from_mapping, from_toml, variant, variants
from spec.errors import BatchError, ConfigError, SpecError, UnknownNameError, WeightsError
from spec.parameters import PROFILES, Parameter, initialize, parameters, shape_of, trainable, validate_weights
from spec.precision import PRECISIONS, Precision, precision
from spec.reference import Truth, predict, reference
from spec.tensors import PARTS, clause_of, differentiable_inputs, inputs, output_name, taps

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
