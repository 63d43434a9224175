"""The reference against formulas written out anew, each step from the tensors before it."""

import math

import numpy as np
import pytest

from concord import spec
from concord.spec.pooling import least_squares
from concord.spec.reference import reference

CLOSE = 1e-12  # of float64 arithmetic on numbers of order one
PARTS = ("query", "key", "value")
ACTIVATIONS = {
    "none": lambda z: z,
    "relu": lambda z: max(z, 0.0),
    "tanh": math.tanh,
    "gelu_erf": lambda z: z / 2 * (1 + math.erf(z / math.sqrt(2))),
    "gelu_tanh": lambda z: z / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
}


def near(a, b):
    b = np.asarray(b)
    return a.shape == b.shape and (abs(a - b) <= CLOSE * np.maximum(abs(b).max(-1, keepdims=True), 1.0)).all()


def compute(config, batch=None, part="model", **changed):
    weights = spec.initialize(config, part=part) | changed
    batch = batch or spec.example_batch(config, 7, 11, part=part)
    return weights, batch, reference(config, weights, batch, part=part)


def activated(kind, x):
    return np.vectorize(ACTIVATIONS[kind], otypes=[float])(x)


def linear(weights, name, x):
    return x @ weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0.0)


def normed(config, weights, name, x):
    unbiased = config.norm_variance == "unbiased"
    variance, epsilon = x.var(-1, keepdims=True, ddof=int(unbiased)), config.norm_epsilon
    inside = config.norm_epsilon_placement == "inside"
    deviation = np.sqrt(variance + epsilon) if inside else np.sqrt(variance) + epsilon
    scaled = (x - x.mean(-1, keepdims=True)) / deviation * weights[f"{name}.weight"]
    return scaled + weights[f"{name}.bias"]


def embeddings(config, weights, ids, segments, taps):
    token = weights["embeddings.token.weight"][ids]
    if config.token_padding_forward == "zero":
        token[ids == config.token_padding_row] = 0.0
    yield "token", token * (math.sqrt(config.d_model) if config.embedding_scale == "sqrt_d_model" else 1.0)
    places = np.zeros(ids.shape, int)
    for place, number in np.ndenumerate(ids):
        before = ids[place[0], : place[1]]
        if config.position_of_padding == "pad_row":
            own = (before != config.pad_id).sum() + config.position_start
            places[place] = config.pad_id if number == config.pad_id else own
        elif config.position_of_padding == "counted" or number != config.pad_id:
            places[place] = len(before) + config.position_start
    yield "position", weights["embeddings.position.weight"][places]
    if config.num_segments:
        yield "segment", weights["embeddings.segment.weight"][segments]
    yield (
        "sum",
        sum(
            taps[f"embeddings.{kind}"]
            for kind in ("token", "position", "segment")[: 2 + bool(config.num_segments)]
        ),
    )
    if config.embedding_norm:
        yield "norm", normed(config, weights, "embeddings.norm", taps["embeddings.sum"])


def attention(config, weights, name, taps, given, key_mask, query_mask):
    """Yield the taps of attention on queries, keys and values; ``key_mask`` (B, S)."""
    for role, x in zip(PARTS, given, strict=True):
        projected = activated(config.qkv_activation, linear(weights, f"{name}.{role}", x))
        assert (f"{name}.{role}.bias" in weights) == config.qkv_bias
        yield role, np.stack(np.split(projected, config.num_heads, -1), 2)
    q, k, v = (taps[f"{name}.{role}"] for role in PARTS)
    yield "scores", (q[:, :, None] * k[:, None]).sum(-1).transpose(0, 3, 1, 2) / math.sqrt(config.head_dim)
    scores, hidden = taps[f"{name}.scores"], np.zeros(taps[f"{name}.scores"].shape, bool)
    for sample, head in np.ndindex(scores.shape[:2]):
        place = (head * len(q) + sample) // config.num_heads
        own = place if config.mask_assignment == "batch_major" else sample
        hidden[sample, head] = ~key_mask[own]
    added = scores if config.mask_fill == "add" else 0.0
    yield "masked_scores", np.where(hidden, added + config.mask_value, scores)
    powers = np.exp(taps[f"{name}.masked_scores"] - taps[f"{name}.masked_scores"].max(-1, keepdims=True))
    yield "weights", powers / powers.sum(-1, keepdims=True)
    used = taps[f"{name}.weights"]
    if config.query_mask == "overwrite":
        yield "masked_weights", np.where(query_mask[:, None, :, None], used, config.mask_value)
        used = taps[f"{name}.masked_weights"]
    context = [used[:, head] @ v[:, :, head] for head in range(config.num_heads)]
    yield "context", np.concatenate(context, -1)
    if config.output_projection:
        yield "output", linear(weights, f"{name}.output", taps[f"{name}.context"])


def layer(config, weights, name, taps, x, real):
    pre, shared = config.norm_placement == "pre", config.norm_sharing == "shared"
    steps = [1, 2]
    for number in steps:
        norm = f"{name}.norm" if shared else f"{name}.norm{number}"
        if pre:
            yield f"norm{number}", normed(config, weights, norm, x)
        h = taps[f"{name}.norm{number}"] if pre else x
        if number == 1:
            inner = attention(config, weights, f"{name}.attention", taps, (h, h, h), real, real)
            yield from ((f"attention.{step}", value) for step, value in inner)
            result = taps[f"{name}.attention.{'output' if config.output_projection else 'context'}"]
        else:
            yield "feed_forward.inner", linear(weights, f"{name}.feed_forward.inner", h)
            inner = taps[f"{name}.feed_forward.inner"]
            yield "feed_forward.activation", activated(config.activation, inner)
            active = taps[f"{name}.feed_forward.activation"]
            yield "feed_forward.outer", linear(weights, f"{name}.feed_forward.outer", active)
            result = taps[f"{name}.feed_forward.outer"]
        yield f"residual{number}", x + result
        x = taps[f"{name}.residual{number}"]
        if not pre:
            yield f"norm{number}", normed(config, weights, norm, x)
            x = taps[f"{name}.norm{number}"]


def head(config, weights, batch, taps, x, real):
    means = [rows[seen].mean(0) if seen.any() else 0 * rows[0] for rows, seen in zip(x, real, strict=True)]
    yield (
        "pooling",
        {"first": x[:, 0], "flatten": x.reshape(len(x), -1), "mean": np.array(means)}[config.pooling],
    )
    pooled = taps["pooling"]
    if config.pooler != "none":
        yield "pooler.dense", linear(weights, "pooler", pooled)
        yield "pooler.output", activated(config.pooler, taps["pooler.dense"])
        pooled = taps["pooler.output"]
    if config.length_epsilon is not None:
        lengths = np.linalg.norm(pooled, axis=1, keepdims=True)
        yield "normalized", pooled / np.maximum(lengths, config.length_epsilon)
        pooled = taps["normalized"]
    yield "logits", linear(weights, "classifier", pooled)
    logits, labels = taps["logits"], batch.labels
    if config.num_classes > 1:
        yield "log_probabilities", np.log(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True))
        yield "losses", -taps["log_probabilities"][np.arange(len(labels)), labels]
    else:
        probability = 1 / (1 + np.exp(-logits[:, 0]))
        yield "losses", -np.log(np.where(labels == 1, probability, 1 - probability))
    counted = (
        taps["losses"][labels != config.ignore_label] if config.ignore_label is not None else taps["losses"]
    )
    squares = sum((weights[f"classifier.{leaf}"] ** 2).sum() for leaf in ("weight", "bias"))
    yield "loss", np.array([counted.mean() + config.l2_weight * squares / 2])


def whole(config, weights, batch, taps):
    """Yield every tap of the model, as its clause says."""
    ids = batch.input_ids
    real = ids != config.pad_id
    for name, value in embeddings(config, weights, ids, batch.segment_ids, taps):
        yield f"embeddings.{name}", value
    x = taps["embeddings.norm" if config.embedding_norm else "embeddings.sum"]
    for i in range(config.num_layers):
        for name, value in layer(config, weights, f"layers.{i}", taps, x, real):
            yield f"layers.{i}.{name}", value
        x = taps[f"layers.{i}.{'norm2' if config.norm_placement == 'post' else 'residual2'}"]
    if config.final_norm:
        yield "final_norm", normed(config, weights, "final_norm", x)
        x = taps["final_norm"]
    yield from head(config, weights, batch, taps, x, real)


OPTIONS = [
    *({"name": name} for name in spec.variants()),
    *(
        {"norm_epsilon": 0.3, "norm_epsilon_placement": placement, "norm_variance": variance}
        for placement in ("inside", "outside")
        for variance in ("biased", "unbiased")
    ),
    *({"activation": kind} for kind in ("relu", "gelu_erf", "gelu_tanh")),
    {"name": "keras-attention", "mask_assignment": "per_sample", "head_computation": "looped"},
    {"name": "bert-pytorch", "final_norm": True, "ignore_label": 1, "position_start": 1},
    {"name": "tf1-text-classifier", "num_classes": 1, "l2_weight": 0.1},
    {"name": "sentence-bert", "length_epsilon": 3.0},
    {"token_padding_forward": "zero", "score_scale": "multiply_query"},
]


@pytest.mark.clause("EMB-1", "EMB-2", "EMB-3", "EMB-5", "EMB-6", "POS-1", "POS-5", "POS-6")
@pytest.mark.clause("MSK-1", "MSK-3", "MSK-4", "MSK-7", "MSK-8", "ATT-1", "ATT-2", "ATT-3", "ATT-4", "ATT-5")
@pytest.mark.clause(
    "ATT-6", "ATT-7", "NRM-1", "NRM-2", "NRM-3", "NRM-4", "NRM-5", "NRM-6", "RES-1", "FFN-1", "FFN-2"
)
@pytest.mark.clause("HED-1", "HED-2", "HED-3", "HED-5", "LOS-1", "LOS-2", "LOS-3", "LOS-4")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_tap_is_what_its_clause_says(small, options):
    config = small(**options)
    weights, batch, truth = compute(config)
    found = {name: np.atleast_1d(value) for name, value in truth.taps.items()}
    computed = [name for name, value in whole(config, weights, batch, found) if near(found[name], value)]
    assert computed == list(truth.taps)
    assert truth.output is truth.taps["logits"]


@pytest.mark.clause("LOS-5", "PRT-1")
@pytest.mark.parametrize("part", ["pooled", "encoder", "stack", "attention", "dot_product"])
def test_parts_have_the_cotangent_loss(small, part):
    _, batch, truth = compute(small(), part=part)
    assert abs(truth.loss - (truth.output * batch.cotangent).sum()) < 1e-11


@pytest.mark.clause("MSK-5")
def test_fully_masked_row_depends_on_fill_and_precision(small):
    def row(name, dtype):
        config = small(name)
        batch = spec.example_batch(config, 7, 11)
        taps = reference(config, spec.initialize(config), batch, dtype=dtype).taps
        return abs(taps["layers.0.attention.weights"][3] - 1 / 11).max()

    for dtype in ("float64", "float32"):
        assert row("vanilla-encoder", dtype) < CLOSE
    assert row("nndl-paddle", "float32") < CLOSE
    assert row("nndl-paddle", "float64") > 0.01


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


@pytest.mark.clause("HED-5")
def test_a_precision_that_cannot_hold_the_square_of_epsilon_has_a_larger_one(small):
    config = small("sentence-bert")
    squares = [least_squares(config, dtype) for dtype in ("float64", "float32", "bfloat16", "float16")]
    assert squares == [1e-24, 1e-24, 1e-24, 2.0**-14]


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
    assert np.isfinite(truth.loss)
    assert all(np.isfinite(gradient).all() for gradient in truth.gradients.values())


@pytest.mark.clause("LOS-3")
def test_labels_that_are_all_ignored_are_refused(small):
    config = small(ignore_label=0)
    batch = spec.example_batch(config, 7, 11)
    with pytest.raises(spec.BatchError, match="at least one must count"):
        spec.validate_batch(config, spec.from_arrays({**batch.arrays(), "labels": np.zeros(7, int)}))


# Gradients against central differences.

STEP = 1e-6  # small enough that hardly any ReLU changes sides, large enough that rounding stays below 1e-9


def differentiable(name, small):
    """Return a configuration whose loss is smooth where it is differentiated.

    No constant that swallows the values.
    """
    return small(name, query_mask="none", mask_value=-20.0)


@pytest.mark.clause("GRD-1", "GRD-5")
@pytest.mark.parametrize("part", spec.PARTS)
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
