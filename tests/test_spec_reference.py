"""The reference against formulas written out anew: EMB, MSK, ATT, NRM, RES, FFN, HED, LOS."""

import math

import numpy as np
import pytest

from concord import spec
from concord.spec.pooling import least_squares
from concord.spec.reference import reference

CLOSE = 1e-12  # of float64 arithmetic on numbers of order one


def near(a, b):
    return np.max(abs(np.asarray(a) - np.asarray(b))) <= CLOSE * max(1.0, np.max(abs(np.asarray(b))))


def compute(config, batch=None, part="model", **changed):
    weights = spec.initialize(config, part=part)
    weights.update(changed)
    batch = batch or spec.example_batch(config, 7, 11, part=part)
    return weights, batch, reference(config, weights, batch, part=part)


@pytest.mark.clause("EMB-1", "EMB-2", "EMB-5", "EMB-6", "POS-1", "POS-5")
@pytest.mark.parametrize(
    ("name", "scale"), [("nndl-paddle", math.sqrt(10)), ("bert", 1.0), ("bert-pytorch", 1.0)]
)
def test_embedding_is_the_sum_of_scaled_token_position_and_segment(small, name, scale):
    weights, batch, truth = compute(small(name))
    table, positions, segments = (
        weights[f"embeddings.{kind}.weight"] for kind in ("token", "position", "segment")
    )
    token = table[batch.input_ids] * scale
    if name == "nndl-paddle":
        token[batch.input_ids == 0] = 0.0
    total = token + positions[np.arange(11)] + segments[batch.segment_ids]
    assert near(truth.taps["embeddings.token"], token)
    assert near(truth.taps["embeddings.sum"], total)
    if name != "bert-pytorch":
        assert near(truth.taps["embeddings.norm"].mean(0).shape, (11, 10))


@pytest.mark.clause("EMB-3")
def test_padding_row_is_used_as_stored_or_as_zero(small):
    for forward, expected in (("zero", 0.0), ("stored", 1.0)):
        config = small(token_padding_forward=forward)
        weights = spec.initialize(config)
        weights["embeddings.token.weight"][0] = 1.0 / math.sqrt(10)
        batch = spec.example_batch(config, 7, 11)
        token = reference(config, weights, batch).taps["embeddings.token"]
        assert near(token[batch.input_ids == 0], expected)


@pytest.mark.clause("POS-6")
def test_padding_takes_the_zero_row_of_positions(small):
    _, batch, truth = compute(small("keras-attention"))
    assert (truth.taps["embeddings.position"][batch.input_ids == 0] == 0).all()
    _, batch, truth = compute(small("tf1-text-classifier"))
    assert (truth.taps["embeddings.position"][batch.input_ids == 0] != 0).any()


@pytest.mark.clause("MSK-1", "MSK-3")
@pytest.mark.parametrize("name", ["nndl-paddle", "vanilla-encoder"])
def test_mask_replaces_or_adds_by_id(small, name):
    config = small(name)
    _, batch, truth = compute(config)
    scores, masked = (truth.taps[f"layers.0.attention.{step}"] for step in ("scores", "masked_scores"))
    hidden = np.broadcast_to((batch.input_ids == config.pad_id)[:, None, None, :], scores.shape)
    assert (masked[~hidden] == scores[~hidden]).all()
    assert (masked[hidden] == (scores[hidden] + -1e9 if config.mask_fill == "add" else -10000.0)).all()
    assert near(truth.taps["layers.0.attention.weights"][:3][hidden[:3]], 0.0)


@pytest.mark.clause("MSK-4")
def test_padded_queries_keep_being_computed(small):
    _, _, truth = compute(small("bert-pytorch"))
    assert (abs(truth.taps["layers.1.residual2"][3]).max(-1) > 0.1).all()


@pytest.mark.clause("MSK-5")
def test_fully_masked_row_depends_on_fill_and_precision(small):
    def row(name, dtype):
        config = small(name)
        batch = spec.example_batch(config, 7, 11)
        return reference(config, spec.initialize(config), batch, dtype=dtype).taps[
            "layers.0.attention.weights"
        ][3]

    for dtype in ("float64", "float32"):
        assert near(row("vanilla-encoder", dtype), 1 / 11)
    assert near(row("nndl-paddle", "float32"), 1 / 11)
    assert abs(row("nndl-paddle", "float64") - 1 / 11).max() > 0.01


@pytest.mark.clause("MSK-8")
def test_padded_queries_weights_are_overwritten(small):
    _, batch, truth = compute(small("tf1-text-classifier"))
    weights, masked = (truth.taps[f"layers.0.attention.{step}"] for step in ("weights", "masked_weights"))
    padded = np.broadcast_to((batch.input_ids == 0)[:, None, :, None], weights.shape)
    assert (masked[padded] == -4294967295.0).all()
    assert (masked[~padded] == weights[~padded]).all()
    context, value = truth.taps["layers.0.attention.context"], truth.taps["layers.0.attention.value"]
    assert near(context[3, 5], -4294967295.0 * value[3].sum(0).reshape(-1))


@pytest.mark.clause("MSK-7")
def test_batch_major_assignment_changes_results_only_where_masks_differ(small):
    published = small("keras-attention")
    right = published.replace(mask_assignment="per_sample")
    for padding, same in (("equal", True), ("none", True), ("ragged", False)):
        batch = spec.example_batch(published, 7, 11, padding=padding)
        _, _, wrong = compute(published, batch)
        _, _, good = compute(right, batch)
        assert (wrong.logits == good.logits).all() == same


@pytest.mark.clause("ATT-1", "ATT-2")
@pytest.mark.parametrize(
    ("name", "relu", "bias"),
    [("tf1-text-classifier", True, True), ("keras-attention", False, False), ("bert", False, True)],
)
def test_projection_and_head_order(small, name, relu, bias):
    weights, batch, truth = compute(small(name), part="attention")
    projected = batch.query @ weights["attention.query.weight"] + (
        weights["attention.query.bias"] if bias else 0.0
    )
    assert ("attention.query.bias" in weights) == bias
    projected = np.maximum(projected, 0) if relu else projected
    for head in range(2):
        assert near(truth.taps["attention.query"][:, :, head], projected[:, :, 5 * head : 5 * (head + 1)])


@pytest.mark.clause("ATT-3", "ATT-4", "ATT-5", "ATT-6")
@pytest.mark.parametrize("name", ["bert", "nndl-paddle", "tf1-text-classifier"])
def test_attention_by_loops(small, name):
    config = small(name, query_mask="none")
    weights, batch, truth = compute(config, part="attention")
    taps = truth.taps
    q, k, v = (taps[f"attention.{step}"] for step in ("query", "key", "value"))
    assert q.shape[1] != k.shape[1], "queries and keys differ in number"
    context = np.zeros((7, 6, 10))
    for b in range(3):  # the fully masked row has a test of its own
        for h in range(2):
            for i in range(6):
                scores = np.array([q[b, i, h] @ k[b, s, h] for s in range(11)]) / math.sqrt(5)
                assert near(taps["attention.scores"][b, h, i], scores)
                exponentials = np.where(batch.key_mask[b], np.exp(scores), 0.0)
                assert near(taps["attention.weights"][b, h, i], exponentials / exponentials.sum())
                context[b, i, 5 * h : 5 * h + 5] = exponentials / exponentials.sum() @ v[b, :, h]
    assert near(taps["attention.context"][:3], context[:3])
    if config.output_projection:
        output = context @ weights["attention.output.weight"] + weights["attention.output.bias"]
        assert near(truth.output[:3], output[:3])
    else:
        assert truth.output is taps["attention.context"]


@pytest.mark.clause("ATT-4")
def test_scaling_the_query_or_the_scores_rounds_differently(small):
    batch = spec.example_batch(small(), 7, 11, part="dot_product")
    scores = [
        reference(
            small(score_scale=scale), {}, batch, part="dot_product", dtype="float32", arithmetic="float32"
        ).taps["attention.scores"]
        for scale in ("multiply_query", "divide_scores")
    ]
    assert (scores[0] != scores[1]).any()
    assert abs(scores[0] - scores[1]).max() < 1e-5


@pytest.mark.clause("ATT-7")
@pytest.mark.parametrize("part", ["model", "attention", "dot_product"])
def test_looped_heads_agree_with_batched(small, part):
    batched = small("keras-attention", mask_assignment="per_sample")
    weights, batch = spec.initialize(batched, part=part), spec.example_batch(batched, 7, 11, part=part)
    results = [
        reference(batched.replace(head_computation=way), weights, batch, gradients=True, part=part)
        for way in ("batched", "looped")
    ]
    for name, array in results[0].taps.items():
        assert near(results[1].taps[name], array), name
    for name, array in results[0].gradients.items():
        assert near(results[1].gradients[name], array), name


@pytest.mark.clause("MSK-4")
@pytest.mark.parametrize("mask", ["none", "two-dimensional", "three-dimensional"])
def test_masks_of_attention_alone(small, mask):
    config = small("keras-attention", mask_assignment="per_sample")
    keys = spec.example_batch(config, 3, 11, part="dot_product", padding="ragged")
    full = {name: array for name, array in keys.arrays().items() if name not in ("key_mask", "query_mask")}
    two = keys.key_mask.copy()
    three = np.broadcast_to(two[:, None, :], (3, 6, 11))
    given = {"none": {}, "two-dimensional": {"key_mask": two}, "three-dimensional": {"key_mask": three}}[mask]
    truth = reference(config, {}, spec.from_arrays({**full, **given}), part="dot_product")
    assert ("attention.masked_scores" in truth.taps) == (mask != "none")
    weights = truth.taps["attention.weights"]
    hidden = np.broadcast_to(~two[:, None, None, :], weights.shape)
    assert (weights[hidden] > 0).all() if mask == "none" else (weights[hidden] == 0).all()


@pytest.mark.clause("NRM-2", "NRM-3", "NRM-4")
@pytest.mark.parametrize("placement", ["inside", "outside"])
@pytest.mark.parametrize("variance", ["biased", "unbiased"])
def test_norm_forms(small, placement, variance):
    config = small(norm_epsilon=0.3, norm_epsilon_placement=placement, norm_variance=variance)
    weights, _, truth = compute(config)
    x = truth.taps["layers.1.residual1"]
    variances = x.var(-1, keepdims=True, ddof=0 if variance == "biased" else 1)
    deviation = np.sqrt(variances + 0.3) if placement == "inside" else np.sqrt(variances) + 0.3
    normed = (x - x.mean(-1, keepdims=True)) / deviation * weights["layers.1.norm1.weight"] + weights[
        "layers.1.norm1.bias"
    ]
    assert near(truth.taps["layers.1.norm1"], normed)


@pytest.mark.clause("NRM-1", "RES-1")
def test_norm_placement_and_residual(small):
    _, _, post = compute(small("bert"))
    assert near(
        post.taps["layers.0.residual1"], post.taps["embeddings.norm"] + post.taps["layers.0.attention.output"]
    )
    assert near(
        post.taps["layers.0.residual2"],
        post.taps["layers.0.norm1"] + post.taps["layers.0.feed_forward.outer"],
    )
    _, _, pre = compute(small("bert-pytorch"))
    assert near(
        pre.taps["layers.0.residual1"], pre.taps["embeddings.sum"] + pre.taps["layers.0.attention.output"]
    )
    assert near(
        pre.taps["layers.0.residual2"],
        pre.taps["layers.0.residual1"] + pre.taps["layers.0.feed_forward.outer"],
    )


@pytest.mark.clause("NRM-5")
def test_shared_norm_serves_both_sublayers(small):
    config = small("nndl-paddle")
    weights = spec.initialize(config)
    assert "layers.0.norm.weight" in weights
    assert "layers.0.norm1.weight" not in weights
    separate = config.replace(norm_sharing="separate")
    doubled = {
        name.replace(".norm.", f".{norm}."): array
        for name, array in weights.items()
        for norm in ("norm1", "norm2")
        if not name.startswith("embeddings.norm")
    }
    doubled |= {name: array for name, array in weights.items() if name.startswith("embeddings.norm")}
    batch = spec.example_batch(config, 7, 11)
    shared, twice = (
        reference(c, w, batch, gradients=True) for c, w in ((config, weights), (separate, doubled))
    )
    assert (shared.logits == twice.logits).all()
    both = twice.gradients["layers.0.norm1.weight"] + twice.gradients["layers.0.norm2.weight"]
    assert near(shared.gradients["layers.0.norm.weight"], both)


@pytest.mark.clause("NRM-6")
def test_final_norm_is_an_option_that_no_source_has(small):
    assert not any(spec.variant(name).final_norm for name in spec.variants())
    _, _, truth = compute(small("bert-pytorch", final_norm=True), part="encoder")
    assert spec.output_name(small("bert-pytorch", final_norm=True), "encoder") == "final_norm"
    assert truth.output is truth.taps["final_norm"]


@pytest.mark.clause("NRM-7")
@pytest.mark.parametrize(("placement", "finite"), [("inside", True), ("outside", False)])
def test_norm_of_a_constant_row(small, placement, finite):
    config = small(norm_epsilon_placement=placement)
    weights, batch = spec.initialize(config), spec.example_batch(config, 7, 11)
    for name in ("token", "position", "segment"):
        weights[f"embeddings.{name}.weight"][:] = 0.5
    truth = reference(config, weights, batch, gradients=True)
    assert (truth.taps["embeddings.norm"][0] == weights["embeddings.norm.bias"]).all()
    assert (
        np.isfinite(
            truth.gradients[
                "embeddings.position.weight" if config.positions == "learned" else "embeddings.segment.weight"
            ]
        ).all()
        == finite
    )


@pytest.mark.clause("FFN-1", "FFN-2")
@pytest.mark.parametrize("activation", ["relu", "gelu_erf", "gelu_tanh"])
def test_feed_forward_and_activation(small, activation):
    weights, _, truth = compute(small(activation=activation))
    name = "layers.0.feed_forward"
    x = truth.taps["layers.0.norm1"]
    inner = x @ weights[f"{name}.inner.weight"] + weights[f"{name}.inner.bias"]
    function = {
        "relu": lambda z: max(z, 0.0),
        "gelu_erf": lambda z: z / 2 * (1 + math.erf(z / math.sqrt(2))),
        "gelu_tanh": lambda z: z / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    }[activation]
    assert near(truth.taps[f"{name}.inner"], inner)
    active = np.vectorize(function)(inner)
    assert near(truth.taps[f"{name}.activation"], active)
    assert near(
        truth.taps[f"{name}.outer"], active @ weights[f"{name}.outer.weight"] + weights[f"{name}.outer.bias"]
    )


@pytest.mark.clause("HED-1", "HED-2", "HED-3")
def test_head(small):
    weights, _, truth = compute(small("bert"))
    first = truth.taps["layers.1.norm2"][:, 0]
    pooled = np.tanh(first @ weights["pooler.weight"] + weights["pooler.bias"])
    assert near(truth.logits, pooled @ weights["classifier.weight"] + weights["classifier.bias"])
    weights, _, truth = compute(small("distilbert"))
    rectified = np.maximum(
        truth.taps["layers.1.norm2"][:, 0] @ weights["pooler.weight"] + weights["pooler.bias"], 0
    )
    assert (rectified == 0).any()
    assert near(truth.logits, rectified @ weights["classifier.weight"] + weights["classifier.bias"])
    weights, _, truth = compute(small("tf1-text-classifier"))
    flat = truth.taps["layers.1.norm2"].reshape(7, 110)
    assert near(truth.logits, flat @ weights["classifier.weight"] + weights["classifier.bias"])


@pytest.mark.clause("HED-1", "HED-5", "PRT-1")
def test_a_sentence_embedding_is_the_mean_of_real_tokens_at_length_one(small):
    config = small("sentence-bert")
    batch = spec.example_batch(config, 7, 11, part="pooled")
    truth = reference(config, spec.initialize(config, part="pooled"), batch, part="pooled")
    last, real = truth.taps["layers.1.norm2"], batch.input_ids != config.pad_id
    means = np.array(
        [rows[seen].mean(0) if seen.any() else 0 * rows[0] for rows, seen in zip(last, real, strict=True)]
    )
    assert near(truth.taps["pooling"], means)
    lengths = np.linalg.norm(truth.output, axis=1)
    assert near(lengths, [1, 1, 1, 0, 1, 1, 1])
    assert near(truth.output * np.linalg.norm(means, axis=1)[:, None], means)
    assert near(truth.loss, (truth.output * batch.cotangent).sum())
    short = float(np.linalg.norm(means, axis=1).max()) * 2
    assert near(
        compute(small("sentence-bert", length_epsilon=short))[2].taps["normalized"],
        compute(small("sentence-bert", length_epsilon=None))[2].taps["pooling"] / short,
    )


@pytest.mark.clause("HED-5")
def test_a_precision_that_cannot_hold_the_square_of_epsilon_has_a_larger_one(small):
    config = small("sentence-bert")
    assert [least_squares(config, dtype) for dtype in ("float64", "float32", "bfloat16", "float16")] == [
        1e-24,
        1e-24,
        1e-24,
        2.0**-14,
    ]


@pytest.mark.clause("HED-4")
def test_predictions(small):
    assert spec.predict(small(), np.array([[0.1, 0.3, -1.0], [2.0, 0.0, 1.0]])).tolist() == [1, 0]
    assert spec.predict(small(num_classes=1), np.array([[0.0], [-1e-9], [3.0]])).tolist() == [1, 0, 1]


@pytest.mark.clause("LOS-1", "LOS-2")
def test_softmax_loss(small):
    _, batch, truth = compute(small())
    exponentials = np.exp(truth.logits)
    losses = -np.log((exponentials / exponentials.sum(-1, keepdims=True))[np.arange(7), batch.labels])
    assert near(truth.taps["losses"], losses)
    assert near(truth.loss, losses.mean())


@pytest.mark.clause("LOS-1", "LOS-2", "LOS-4")
def test_sigmoid_loss_with_l2(small):
    weights, batch, truth = compute(small("tf1-text-classifier", num_classes=1, l2_weight=0.1))
    probability = 1 / (1 + np.exp(-truth.logits[:, 0]))
    losses = np.where(batch.labels == 1, -np.log(probability), -np.log(1 - probability))
    l2 = 0.1 * ((weights["classifier.weight"] ** 2).sum() + (weights["classifier.bias"] ** 2).sum()) / 2
    assert near(truth.taps["losses"], losses)
    assert near(truth.loss, losses.mean() + l2)


@pytest.mark.clause("LOS-1")
@pytest.mark.parametrize("classes", [1, 3])
def test_loss_does_not_overflow(small, classes):
    config = small(num_classes=classes)
    weights = spec.initialize(config)
    weights["classifier.weight"] *= 1e6
    truth = reference(
        config,
        weights,
        spec.example_batch(config, 7, 11),
        gradients=True,
        dtype="float32",
        arithmetic="float32",
    )
    assert np.isfinite(truth.loss)
    assert all(np.isfinite(gradient).all() for gradient in truth.gradients.values())


@pytest.mark.clause("LOS-3")
def test_ignored_labels_leave_sum_and_count(small):
    config = small(ignore_label=0)
    _, batch, truth = compute(config)
    counted = batch.labels != 0
    assert 0 < counted.sum() < 7
    assert near(truth.loss, truth.taps["losses"][counted].mean())
    with pytest.raises(spec.BatchError, match="at least one must count"):
        spec.validate_batch(config, spec.from_arrays({**batch.arrays(), "labels": np.zeros(7, int)}))


@pytest.mark.clause("LOS-5")
@pytest.mark.parametrize("part", ["encoder", "stack", "attention", "dot_product"])
def test_parts_have_the_cotangent_loss(small, part):
    _, batch, truth = compute(small(), part=part)
    assert near(truth.loss, (truth.output * batch.cotangent).sum())
