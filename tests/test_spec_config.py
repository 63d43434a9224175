"""Configurations, weights and precisions: CFG, WGT, PRC."""

import numpy as np
import pytest
from ml_dtypes import bfloat16, finfo

from concord import spec
from concord.spec.errors import UnknownNameError
from concord.spec.masks import mask_constant
from tests.toys.surroundings import refusal


@pytest.mark.clause("CFG-1")
def test_config_round_trips_through_toml(variant_config):
    assert spec.from_toml(variant_config.to_toml()) == variant_config


@pytest.mark.clause("CFG-1")
def test_config_reports_every_problem_at_once(small):
    problems = refusal(small, d_model=11, mask_value=1.0, norm_epsilon=-1.0)
    assert len(problems) == 3
    assert "'d_model' is 11 but must be divisible by 'num_heads', which is 2 [clause=ATT-2]" in problems


@pytest.mark.clause("CFG-1")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": True}, "'num_layers' is True (bool) but must be int"),
        ({"activation": "swish"}, "'activation' is 'swish' but must be one of relu, gelu_erf, gelu_tanh"),
        ({"length_epsilon": 0.0}, "'length_epsilon' is 0.0 but must be finite and positive"),
        ({"token_padding_row": None}, "'token_padding_forward' is 'zero' but 'token_padding_row' is absent"),
        ({"positions": "learned"}, "must be absent with it"),
        (
            {"position_of_padding": "pad_row", "pad_id": 3, "position_start": 3},
            "'position_start' is 3 but must be 4 when 'position_of_padding' is 'pad_row'",
        ),
        ({"mask_assignment": "batch_major", "head_computation": "looped"}, "it must be 'batched'"),
        ({"ignore_label": 3}, "'ignore_label' is 3 but must be a label below"),
    ],
)
def test_config_refuses_what_describes_no_model(small, fields, message):
    assert message in refusal(small, **fields)[0]


@pytest.mark.clause("CFG-1")
def test_config_from_mapping_names_unknown_and_missing_fields(small):
    fields = small().as_dict()
    del fields["d_ff"]
    unknown, missing = refusal(spec.from_mapping, {**fields, "d_modle": 3})
    assert "d_model" in unknown
    assert "'d_ff' is missing" in missing


def test_unknown_names_are_refused_with_those_that_exist(small):
    config = small()
    for call in (
        lambda: spec.variant("nndl-padle"),
        lambda: config.replace(d_modle=3),
        lambda: spec.initialize(config, profile="pekaed"),
        lambda: spec.example_batch(config, padding="raged"),
        lambda: spec.inputs(config, "encoders"),
        lambda: spec.precision("float23"),
    ):
        with pytest.raises(UnknownNameError, match="did you mean"):
            call()


@pytest.mark.clause("WGT-1", "WGT-2", "WGT-3")
def test_weights_problems_are_all_listed(small):
    config = small()
    weights = spec.initialize(config)
    assert weights["layers.1.feed_forward.inner.weight"].shape == (10, 17)
    weights["extra"] = weights.pop("classifier.weight")
    weights["pooler.weight"] = weights["pooler.weight"][:, :3]
    weights["pooler.bias"] = weights["pooler.bias"].astype(int)
    weights["classifier.bias"] = np.array([0.0, np.nan, 1.0])
    assert refusal(spec.validate_weights, config, weights, where="backend=paddle") == [
        "'classifier.weight' is missing but is required [backend=paddle, clause=WGT-1]",
        "'pooler.weight' has shape (10, 3) but must be (10, 10) [backend=paddle, clause=WGT-2]",
        "'pooler.bias' has dtype int64 but must be a floating-point type [backend=paddle, clause=WGT-3]",
        "'classifier.bias' is nan at (1,) but must be finite [backend=paddle, clause=WGT-3]",
        "'extra' is unexpected: the configuration has no such parameter [backend=paddle, clause=WGT-1]",
    ]


@pytest.mark.clause("WGT-5")
@pytest.mark.parametrize("profile", spec.PROFILES)
def test_initialize_hides_nothing(variant_config, profile):
    for name, array in spec.initialize(variant_config, seed=3, profile=profile).items():
        assert array.dtype == np.float64
        assert (array == array.astype(np.float32)).all()
        if spec.parameters(variant_config)[name].kind in ("gamma", "bias", "beta"):
            assert not np.isin(array, (0.0, 1.0)).any()


@pytest.mark.clause("WGT-5")
def test_initialize_profiles_do_what_they_say(small):
    config = small("bert-pytorch")
    batch = spec.example_batch(config, 7, 11)

    def row_peak(profile):
        return (
            spec.reference(config, spec.initialize(config, profile=profile), batch)
            .taps["layers.0.attention.weights"][0]
            .max(-1)
            .mean()
        )

    assert row_peak("peaked") > 0.9 > 0.6 > row_peak("generic")
    tiny = spec.reference(config, spec.initialize(config, profile="tiny"), batch).taps["layers.0.residual1"]
    assert 0.1 * config.norm_epsilon < tiny.std(-1).mean() < 10 * config.norm_epsilon


@pytest.mark.clause("PRC-1")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("float64", np.float64), ("float32", np.float32), ("float16", np.float16), ("bfloat16", bfloat16)],
)
def test_precision_rounds_as_its_type_does(name, dtype):
    target, about = spec.precision(name), finfo(dtype)
    assert (target.unit_roundoff, target.largest) == (float(about.eps) / 2, float(about.max))
    half = target.unit_roundoff
    values = np.random.default_rng(5).standard_normal(997) * 10.0 ** np.arange(-6, 991).clip(-6, 4)
    ties = [1 + half, 1 + 3 * half, 1 + half * 1.01, np.nan, np.inf, -np.inf, -0.0]
    values = np.concatenate([values, ties])
    # In one step, since rounding through float32 would turn the last number into a tie.
    expected = values.astype(dtype).astype(np.float64)
    np.testing.assert_array_equal(target.round(values), expected)
    assert np.signbit(target.round(values)[-1])
    assert spec.precision("bfloat16").round(np.float64(1 + 2.0**-8 + 2.0**-40)) == 1 + 2.0**-7


@pytest.mark.clause("PRC-2")
def test_reference_rounds_weights_and_inputs_once(small):
    config = small()
    weights = {name: array * (1 + 1e-9) for name, array in spec.initialize(config).items()}
    batch = spec.example_batch(config, 7, 11)
    rounded = {name: array.astype(np.float32).astype(np.float64) for name, array in weights.items()}
    for dtype, same in (("float32", True), ("float64", False)):
        actual, expected = (spec.reference(config, w, batch, dtype=dtype).logits for w in (weights, rounded))
        assert (actual == expected).all() == same


@pytest.mark.clause("MSK-2", "MSK-6")
@pytest.mark.parametrize(
    ("name", "dtype", "constant"),
    [
        ("nndl-paddle", "float32", -1e9),
        ("tf1-text-classifier", "float64", -4294967295.0),
        ("tf1-text-classifier", "float32", -4294967296.0),
        ("nndl-paddle", "float16", -65504.0),
        ("bert", "bfloat16", -(2 - 2**-7) * 2.0**127),
    ],
)
def test_mask_constant_is_what_the_precision_holds(small, name, dtype, constant):
    assert mask_constant(small(name), dtype) == constant
