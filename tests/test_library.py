import pytest

from concord import spec
from concord.backends.interface import Request, Unsupported
from concord.backends.library_support import padding_reasons
from concord.conformance.run.campaign import deviations_of
from concord.spec.cases import build_case
from tests.test_conforming import LIBRARY, Asked, each, run_of
from tests.toys.rounded import verdict_of
from tests.toys.small import run_case
from tests.toys.surroundings import EACH_BACKEND_ANEW

INSIDE_THE_KERNEL = [
    f"layers.{i}.attention.{step}" for i in range(2) for step in ("scores", "masked_scores", "weights")
]

# Missing tensors and declared deviations.


@pytest.mark.clause("PRC-4")
def test_library_layers_alone_declare_their_deviations_and_hide_what_is_inside_a_kernel(worker):
    own = {"tf": ["gelu_constant_bits"], "paddle": ["norm_epsilon_bits"]}
    case, names = build_case("bert", "ragged"), {}
    for implementation in ("explicit", "library"):
        declared = deviations_of(worker.description, "cpu", implementation)
        names[implementation] = [entry["name"] for entry in declared]
        run = run_case(worker, case, implementation=implementation)
        assert [entry["name"] for entry in run.info["deviations"]] == names[implementation]
        hidden = [row.tensor for row in verdict_of(case, run).table if row.status == "not exposed"]
        assert hidden == (INSIDE_THE_KERNEL if implementation == "library" else [])
    assert names["library"] == names["explicit"] + own.get(worker.name.rpartition(":")[2], [])


@pytest.mark.clause("PRC-4", "FFN-2", "NRM-2")
@pytest.mark.parametrize(
    ("backend", "name", "tensor"),
    [
        pytest.param(
            "tf", "gelu_constant_bits", "feed_forward.activation", marks=pytest.mark.xdist_group("tf")
        ),
        pytest.param("paddle", "norm_epsilon_bits", "norm", marks=pytest.mark.xdist_group("paddle")),
    ],
)
def test_without_its_declaration_a_deviation_is_found(open_worker, backend, name, tensor):
    worker = open_worker(backend)
    case = build_case("bert", "tiny", options={"norm_epsilon": 1e-5})
    run = run_case(worker, case, "float64", implementation="library")
    assert verdict_of(case, run).passed
    run.info["deviations"] = [entry for entry in run.info["deviations"] if entry["name"] != name]
    assert tensor in verdict_of(case, run).first_divergence.tensor


# Refusals name every reason.

KEPT = "computes padding rows in its implementation 'explicit'; 'library' can leave them out"


def refused(*words, variant="bert", scenario="single", **fields):
    return Asked(variant, scenario, **{"settings": LIBRARY, **fields}, words=words)


REFUSED = [
    refused("mask_fill='replace': ", "query_mask='overwrite': ", variant="tf1-text-classifier"),
    refused(
        "mask_fill='replace': ",
        "norm_epsilon_placement='outside': ",
        "norm_variance='unbiased': ",
        variant="bert-pytorch",
    ),
    refused(
        "has no implementation 'library:fused'",
        settings={"implementation": "library:fused"},
        only=("paddle", "jax", "tf"),
    ),
    refused(
        "norm_epsilon=0.01: nn.LayerNorm accepts none above 0.001",
        options={"norm_epsilon": 0.01},
        only=("paddle",),
    ),
    refused(
        "a query sees no key: the fused kernel differentiates its weights as if each were 1",
        variant="nndl-paddle",
        scenario="ragged",
        settings={"implementation": "library:fused"},
        only=("torch",),
    ),
    refused(
        "torch keeps weights in a kernel-specific layout in its implementation 'library:onednn'",
        settings={"implementation": "stepped::library:onednn", "gradients": False},
        only=("torch",),
    ),
    refused(KEPT, settings={"execution": "unpadded"}),
    refused("a sample has no real token, ", scenario="ragged", settings={**LIBRARY, "execution": "unpadded"}),
]


@pytest.mark.clause("PRC-3", "MSK-5", "WGT-4")
@pytest.mark.parametrize(("backend", "asked"), each(REFUSED), ids=str)
def test_what_cannot_be_expressed_is_refused_in_one_line_with_every_reason(backend, asked, open_worker):
    _, run = run_of(asked, backend, asked.dtypes[0], open_worker)
    with pytest.raises(Unsupported) as refusal:
        run()
    message = str(refusal.value)
    assert [words for words in asked.words if words not in message] == []
    assert "\n" not in message
    who, _, reasons = message.partition(" cannot express this with its library layers: ")
    if reasons:
        parts = reasons.split("; ")
        assert (who, len(parts)) == (backend, len(asked.words))
        assert all(reason.endswith(")") for reason in parts)


# Runs without padding.


@pytest.mark.parametrize("worker", EACH_BACKEND_ANEW, indirect=True)
def test_only_what_follows_the_encoder_is_delivered(worker):
    case = build_case("bert", "equal")
    run = run_case(worker, case, implementation="library", execution="unpadded")
    assert list(run.taps) == [
        "pooling",
        "pooler.dense",
        "pooler.output",
        "logits",
        "log_probabilities",
        "losses",
        "loss",
    ]
    rows = verdict_of(case, run).table
    rest = {row.tensor: row.status for row in rows if row.tensor not in run.taps}
    assert {rest[name] for name in rest if not name.startswith("gradients.")} == {"not exposed"}


# What the host computes.


FLAT = {"pooling": "flatten", "pooler": "none", "max_positions": 11}


@pytest.mark.parametrize(
    ("variant", "options", "part", "dtype", "reason"),
    [
        ("bert", {}, "encoder", "float32", "part='encoder'"),
        ("bert", FLAT, "model", "float32", "pooling='flatten'"),
        ("bert", {"mask_assignment": "batch_major"}, "model", "float32", "mask_assignment='batch_major'"),
        ("bert", {"mask_value": -10000.0}, "model", "float32", "mask_value=-10000.0: in float32"),
        # A mask constant is judged as the precision holds it.
        ("nndl-paddle", {}, "model", "float16", "mask_value=-1000000000.0: in float16"),
        ("nndl-paddle", {}, "model", "bfloat16", ""),
    ],
)
def test_what_needs_its_padding_is_said(variant, options, part, dtype, reason):
    case = build_case(variant, "full", part, options)
    settings = {"implementation": "library", "execution": "unpadded", "dtype": dtype}
    reasons = padding_reasons(Request(case.config, case.weights, case.batch, part, **settings))
    assert len(reasons) == bool(reason)
    assert not reason or reasons[0].startswith(reason)


@pytest.mark.clause("PRC-4", "ATT-5")
def test_floor_of_a_softmax_reaches_no_key_that_was_left_out():
    # Only padding reaches this row of the position table, so its gradient shows whether padding takes part.
    case = build_case("bert", "equal")
    floor = {"softmax_floor": -64.0}
    gradients = [
        spec.reference(
            case.config, case.weights, case.batch, gradients=True, deviations=deviations
        ).gradients["embeddings.position.weight"][10]
        for deviations in ({}, floor, {**floor, "padding_left_out": 1.0})
    ]
    assert not gradients[0].any()
    assert gradients[1].all()
    assert not gradients[2].any()
