"""The reference against formulas, where nothing else covers it."""

import numpy as np
import pytest
from scipy import special

from concord import spec
from concord.spec.pooling import least_squares
from concord.spec.reference import reference


def compute(config, batch=None, part="model", **settings):
    weights = spec.initialize(config, part=part)
    batch = batch or spec.example_batch(config, 7, 11, part=part)
    return weights, batch, reference(config, weights, batch, part=part, **settings)


def near(a, b):
    return a.shape == b.shape and abs(a - b).max() <= 1e-13 * abs(b).max()


# Options that no golden file shows; `tests/test_golden_files.py` compares the others.


@pytest.mark.clause("NRM-6")
def test_final_norm_follows_the_last_layer(small):
    config = small("bert", final_norm=True)
    weights, _, truth = compute(config)
    x = truth.taps["layers.1.norm2"]
    scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config.norm_epsilon)
    expected = scaled * weights["final_norm.weight"] + weights["final_norm.bias"]
    assert near(truth.taps["final_norm"], expected)
    assert near(truth.taps["pooling"], expected[:, 0])


@pytest.mark.clause("HED-5")
def test_a_vector_is_divided_by_its_length_or_a_larger_epsilon(small):
    taps = compute(small("sentence-bert", length_epsilon=1.0))[2].taps
    lengths = np.sqrt((taps["pooling"] ** 2).sum(1, keepdims=True))
    assert lengths.min() < 1 < lengths.max()
    assert near(taps["normalized"], taps["pooling"] / np.maximum(lengths, 1))
    # A precision that cannot hold the square of epsilon has a larger one.
    squares = [least_squares(small("sentence-bert"), dtype) for dtype in ("float32", "bfloat16", "float16")]
    assert squares == [1e-24, 1e-24, 2.0**-14]


@pytest.mark.clause("LOS-1", "LOS-2", "LOS-3", "LOS-4")
@pytest.mark.parametrize(
    "options", [{"num_classes": 1, "l2_weight": 0.1}, {"ignore_label": 1}], ids=["sigmoid", "softmax"]
)
def test_loss_is_the_mean_of_what_counts_and_a_penalty(small, options):
    config = small(**options)
    weights, batch, truth = compute(config)
    labels, losses = batch.labels, truth.taps["losses"]
    if config.num_classes == 1:
        logits = truth.output[:, 0]
        assert near(losses, np.logaddexp(0, logits) - labels * logits)
        squares = sum((weights[f"classifier.{leaf}"] ** 2).sum() for leaf in ("weight", "bias"))
        assert near(truth.loss, losses.mean() + 0.05 * squares)
    else:
        assert near(losses, -special.log_softmax(truth.output, 1)[np.arange(7), labels])
        assert near(truth.loss, losses[labels != 1].mean())


@pytest.mark.clause("MSK-5")
@pytest.mark.parametrize(
    ("name", "dtype", "uniform"),
    [
        ("vanilla-encoder", "float64", True),
        ("nndl-paddle", "float64", False),
        ("nndl-paddle", "float32", True),
    ],
)
def test_fully_masked_row_depends_on_fill_and_precision(small, name, dtype, uniform):
    taps = compute(small(name), dtype=dtype)[2].taps
    away = abs(taps["layers.0.attention.weights"][3] - 1 / 11).max()
    assert away < 1e-12 if uniform else away > 0.01


@pytest.mark.clause("NRM-7")
@pytest.mark.parametrize(("placement", "finite"), [("inside", True), ("outside", False)])
def test_norm_of_a_constant_row(small, placement, finite):
    config = small(norm_epsilon_placement=placement)
    weights, batch = spec.initialize(config), spec.example_batch(config, 7, 11)
    for name in ("token", "position", "segment"):
        weights[f"embeddings.{name}.weight"][:] = 0.5
    truth = reference(config, weights, batch, gradients=True)
    assert (truth.taps["embeddings.norm"][0] == weights["embeddings.norm.bias"]).all()
    assert np.isfinite(truth.gradients["embeddings.segment.weight"]).all() == finite


@pytest.mark.clause("HED-4")
def test_predictions(small):
    assert spec.predict(small(), np.array([[0.1, 0.3, -1.0], [2.0, 0.0, 1.0]])).tolist() == [1, 0]
    assert spec.predict(small(num_classes=1), np.array([[0.0], [-1e-9], [3.0]])).tolist() == [1, 0, 1]


@pytest.mark.clause("LOS-1")
@pytest.mark.parametrize("classes", [1, 3])
def test_loss_does_not_overflow(small, classes):
    config = small(num_classes=classes)
    weights, batch = spec.initialize(config), spec.example_batch(config, 7, 11)
    weights["classifier.weight"] *= 1e6
    truth = reference(config, weights, batch, True, dtype="float32", arithmetic="float32")
    assert all(np.isfinite(array).all() for array in (truth.loss, *truth.gradients.values()))


# Parts, and their gradients compared with central differences.

STEP = 1e-6  # few ReLUs change sides, and rounding stays below 1e-9


@pytest.mark.clause("GRD-1", "GRD-5", "LOS-5", "PRT-1")
@pytest.mark.parametrize("part", spec.PARTS)
@pytest.mark.parametrize("name", spec.variants())
def test_a_part_has_its_taps_its_loss_and_gradients_like_central_differences(small, name, part):
    # All arrays move at once, each in its own direction. A mask value of -20 absorbs no step, and without
    # padding rows every row has a gradient.
    rows = {f"{table}_padding_row": None for table in ("token", "segment", "position")}
    if small(name).token_padding_forward == "zero":  # then the loss does not depend on the row either
        del rows["token_padding_row"]
    config = small(name, query_mask="none", mask_value=-20.0, **rows)
    weights, batch, truth = compute(config, part=part, gradients=True)
    assert list(truth.taps) == list(spec.taps(config, part, batch.arrays()))
    assert truth.output is truth.taps[spec.output_name(config, part)]
    assert sorted(truth.gradients) == sorted(spec.trainable(config, part))
    if part != "model":
        assert abs(truth.loss - (truth.output * batch.cotangent).sum()) < 1e-11
    generator, arrays = np.random.default_rng(1), batch.arrays()
    directions = {key: generator.standard_normal(gradient.shape) for key, gradient in truth.gradients.items()}
    slope = sum((gradient * directions[key]).sum() for key, gradient in truth.gradients.items())

    def loss(step):
        moved = {key: array + step * directions.get(key, 0.0) for key, array in weights.items()}
        inputs = {
            key: array + step * directions[f"inputs.{key}"] if f"inputs.{key}" in directions else array
            for key, array in arrays.items()
        }
        return float(reference(config, moved, spec.from_arrays(inputs), part=part).loss)

    numeric, sizes = (loss(STEP) - loss(-STEP)) / (2 * STEP), sum(d.size for d in directions.values())
    steepest = max(abs(gradient).max() for gradient in truth.gradients.values())
    assert abs(numeric - slope) <= 1e-7 * steepest * sizes**0.5


@pytest.mark.clause("GRD-2", "EMB-4", "EMB-5", "POS-7")
@pytest.mark.parametrize(
    ("name", "options", "table", "none", "some"),
    [
        ("bert-pytorch", {}, "token", 0, 2),
        ("bert-pytorch", {}, "segment", 0, 1),
        ("vanilla-encoder", {}, "token", 1, 2),
        ("vanilla-encoder", {"pad_id": 0}, "token", 1, 0),  # the row may differ from that of the pad id
        ("tf1-text-classifier", {}, "token", None, 0),
        ("roberta", {}, "position", 1, 2),
        ("roberta", {"position_padding_row": None}, "position", None, 1),
    ],
)
def test_padding_rows_get_exactly_no_gradient_and_others_some(small, name, options, table, none, some):
    gradient = compute(small(name, **options), gradients=True)[2].gradients[f"embeddings.{table}.weight"]
    assert none is None or (gradient[none] == 0).all()
    assert (gradient[some:] != 0).any()
    assert (gradient[some] != 0).any() or table == "token"


@pytest.mark.clause("GRD-3", "POS-1")
def test_only_a_learned_position_table_is_trained(small):
    assert "embeddings.position.weight" in spec.trainable(small("bert"))
    assert "embeddings.position.weight" not in spec.trainable(small("nndl-paddle"))
    assert "embeddings.position.weight" in spec.parameters(small("nndl-paddle"))


@pytest.mark.clause("GRD-4")
@pytest.mark.parametrize(("name", "zero"), [("bert", True), ("tf1-text-classifier", False)])
def test_key_bias_gradient_is_zero_for_affine_keys_alone(small, name, zero):
    config = small(name, query_mask="none")
    batch = spec.example_batch(config, 7, 11, padding="none")
    gradients = compute(config, batch, gradients=True)[2].gradients
    key, query = (abs(gradients[f"layers.0.attention.{role}.bias"]).max() for role in ("key", "query"))
    assert (key < 1e-10 * query) == zero
