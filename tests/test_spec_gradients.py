"""Gradients of the reference against central differences: GRD."""

import numpy as np
import pytest

from concord import spec
from concord.spec.reference import reference

PARTS = ["model", "pooled", "encoder", "stack", "attention", "dot_product"]


STEP = 1e-6  # small enough that hardly any ReLU changes sides, large enough that rounding stays below 1e-9


def differentiable(name, small):
    """Return a configuration whose loss is smooth where it is differentiated.

    No constant that swallows the values.
    """
    return small(name, query_mask="none", mask_value=-20.0)


@pytest.mark.clause("GRD-1", "GRD-5")
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", spec.variants())
def test_gradients_agree_with_central_differences(small, name, part):
    config = differentiable(name, small)
    weights, batch = spec.initialize(config, part=part), spec.example_batch(config, 5, 11, part=part)
    truth = reference(config, weights, batch, gradients=True, part=part)
    generator = np.random.default_rng(1)
    steepest = max(abs(gradient).max() for gradient in truth.gradients.values())
    assert sorted(truth.gradients) == sorted(spec.trainable(config, part))
    for parameter, gradient in truth.gradients.items():
        direction = generator.standard_normal(gradient.shape)
        row = {
            "embeddings.token.weight": config.token_padding_row,
            "embeddings.segment.weight": config.segment_padding_row,
            "embeddings.position.weight": config.position_padding_row,
        }.get(parameter)
        if row is not None:
            direction[row] = 0.0  # its gradient is withheld on purpose

        def loss(step, parameter=parameter, direction=direction):
            given = parameter.removeprefix("inputs.")
            if given != parameter:
                moved = spec.from_arrays({**batch.arrays(), given: batch.arrays()[given] + step * direction})
                return float(reference(config, weights, moved, part=part).loss)
            return float(
                reference(
                    config, {**weights, parameter: weights[parameter] + step * direction}, batch, part=part
                ).loss
            )

        numeric = (loss(STEP) - loss(-STEP)) / (2 * STEP)
        assert abs(numeric - (gradient * direction).sum()) <= 1e-7 * steepest * direction.size**0.5, parameter


@pytest.mark.clause("GRD-2", "EMB-4", "EMB-5", "POS-7")
@pytest.mark.parametrize(
    ("name", "options", "table", "none", "some"),
    [
        ("bert-pytorch", {}, "token", 0, 2),
        ("bert-pytorch", {}, "segment", 0, 1),
        ("nndl-paddle", {}, "token", 0, 2),
        ("vanilla-encoder", {}, "token", 1, 2),
        ("vanilla-encoder", {"pad_id": 0}, "token", 1, 0),  # the row need not be that of the pad id
        ("tf1-text-classifier", {}, "token", None, 0),
        ("roberta", {}, "position", 1, 2),
        ("roberta", {"position_padding_row": None}, "position", None, 1),
    ],
)
def test_padding_rows_get_exactly_no_gradient_and_others_some(small, name, options, table, none, some):
    config = small(name, **options)
    truth = reference(config, spec.initialize(config), spec.example_batch(config, 7, 11), gradients=True)
    gradient = truth.gradients[f"embeddings.{table}.weight"]
    assert none is None or (gradient[none] == 0).all()
    assert (gradient[some:] != 0).any()
    assert (gradient[some] != 0).any() or table == "token"


@pytest.mark.clause("GRD-3", "POS-1")
def test_only_a_learned_position_table_is_trained(small):
    assert "embeddings.position.weight" in spec.trainable(small("bert"))
    assert "embeddings.position.weight" not in spec.trainable(small("nndl-paddle"))
    assert "embeddings.position.weight" in spec.parameters(small("nndl-paddle"))


@pytest.mark.clause("GRD-4")
def test_key_bias_gradient_is_zero_for_affine_keys_alone(small):
    for name, zero in (("bert", True), ("tf1-text-classifier", False)):
        config = small(name, query_mask="none")
        batch = spec.example_batch(config, 7, 11, padding="none")
        gradients = reference(config, spec.initialize(config), batch, gradients=True).gradients
        share = (
            abs(gradients["layers.0.attention.key.bias"]).max()
            / abs(gradients["layers.0.attention.query.bias"]).max()
        )
        assert (share < 1e-10) == zero
