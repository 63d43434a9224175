"""Library layers: what they deliver and declare, and what they cannot express is refused with every reason.

That the rest conforms: ``tests/test_conforming.py``.
"""

import numpy as np
import pytest
from rich.console import Console

from concord.backends.interface import Unsupported
from concord.conformance.campaign import Report, Settings, deviations_of
from concord.conformance.judging import judge
from concord.conformance.report import failures
from concord.conformance.verdict import Result
from concord.spec.cases import build_case

INNER = ("scores", "masked_scores", "weights")
HAS_A_LAYER = ("torch", "paddle")


def run_of(worker, case, dtype, implementation="library", **settings):
    return worker.run(
        case.config,
        case.weights,
        case.batch,
        part=case.part,
        dtype=dtype,
        implementation=implementation,
        **settings,
    )


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in HAS_A_LAYER])
def layered(request, open_worker):
    """Each backend whose framework has an encoder layer."""
    return open_worker(request.param)


@pytest.mark.clause("WGT-4")
def test_weights_come_back_from_library_layers(worker):
    case = build_case("bert", "ragged")
    for implementation in ("library", *(["library:layer"] if worker.name in HAS_A_LAYER else [])):
        returned = worker.round_trip(case.config, case.weights, case.batch, implementation=implementation)
        assert returned.keys() == case.weights.keys()
        assert all(np.array_equal(returned[name], case.weights[name]) for name in returned)


# What is not delivered, and what is declared.


def test_taps_inside_the_kernel_are_not_exposed_and_no_others(worker):
    case = build_case("bert", "ragged")
    run = run_of(worker, case, "float32")
    verdict = judge(case.config, case.weights, case.batch, run)
    not_exposed = [row.tensor for row in verdict.table if row.status == "not exposed"]
    assert not_exposed == [f"layers.{i}.attention.{step}" for i in range(2) for step in INNER]
    assert run_of(worker, case, "float32", "explicit").info["not_exposed"] == []


def test_whole_layer_delivers_its_result(layered):
    for placement, result in (("post", "norm2"), ("pre", "residual2")):
        case = build_case("bert", "ragged", options={"norm_placement": placement})
        run = run_of(layered, case, "float32", "library:layer")
        assert [name for name in run.taps if name.startswith("layers.")] == [
            f"layers.0.{result}",
            f"layers.1.{result}",
        ]


@pytest.mark.clause("PRC-4")
def test_deviations_of_library_layers_are_declared_for_them_alone(worker):
    own = {"tf": ["gelu_constant_bits"], "paddle": ["norm_epsilon_bits"]}.get(worker.name, [])
    names = {
        implementation: [entry["name"] for entry in deviations_of(worker.description, "cpu", implementation)]
        for implementation in ("explicit", "library")
    }
    assert names["library"] == names["explicit"] + own
    case = build_case("bert", "ragged")
    for implementation, expected in names.items():
        assert [
            entry["name"] for entry in run_of(worker, case, "float32", implementation).info["deviations"]
        ] == expected


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
    run = run_of(worker, case, "float64")
    assert judge(case.config, case.weights, case.batch, run).passed
    run.info["deviations"] = [entry for entry in run.info["deviations"] if entry["name"] != name]
    first = judge(case.config, case.weights, case.batch, run).first_divergence
    assert first is not None
    assert tensor in first.tensor


# What cannot be expressed is refused, with every reason.

REASONS = {
    "tf1-text-classifier": ["mask_fill='replace': ", "query_mask='overwrite': "],
    "bert-pytorch": [
        "mask_fill='replace': ",
        "norm_epsilon_placement='outside': ",
        "norm_variance='unbiased': ",
    ],
    "vanilla-encoder": ["mask_fill='replace': "],
    "keras-attention": ["norm_epsilon_placement='outside': "],
}


@pytest.mark.clause("PRC-3")
@pytest.mark.parametrize("name", REASONS)
def test_what_library_layers_cannot_express_is_refused_in_one_line(worker, name):
    with pytest.raises(Unsupported) as refusal:
        run_of(worker, build_case(name, "single"), "float32")
    said, _, reasons = str(refusal.value).partition(": ")
    assert said == f"{worker.name} cannot express this by its library layers"
    found = reasons.split("; ")
    assert [reason.startswith(start) for reason, start in zip(found, REASONS[name], strict=True)] == [
        True
    ] * len(found)
    assert all(reason.endswith(")") for reason in found)


def test_report_has_a_line_for_each_reason_and_not_for_each_run(capsys):
    head = "torch cannot express this by its library layers: "
    details = [
        f"{head}mask: only added (MSK-3); norm: only inside (NRM-3)",
        f"{head}norm: only inside (NRM-3)",
        "sees 0 devices; none is there",
    ]
    results = [
        Result("torch", "bert", f"bert-{i}", "float32", "unsupported", detail)
        for i, detail in enumerate(details)
    ]
    Console(width=200).print(failures(Report(results, {}, Settings())))
    assert capsys.readouterr().out.splitlines() == [
        "torch unsupported: mask: only added (MSK-3) [bert-0]",
        "torch unsupported: norm: only inside (NRM-3) [bert-0 and 1 more runs]",
        "torch unsupported: sees 0 devices; none is there [bert-2]",
    ]


def test_whole_layer_refuses_what_it_has_not(worker):
    options = {
        "qkv_bias": False,
        "qkv_activation": "relu",
        "output_projection": False,
        "norm_sharing": "shared",
        "mask_assignment": "batch_major",
    }
    case = build_case("bert", "single", options=options)
    if worker.name not in HAS_A_LAYER:
        with pytest.raises(Unsupported, match="has no implementation 'library:layer'"):
            run_of(worker, case, "float32", "library:layer")
        return
    with pytest.raises(Unsupported) as refusal:
        run_of(worker, case, "float32", "library:layer")
    assert all(f"{name}={value!r}: " in str(refusal.value) for name, value in options.items())
    with pytest.raises(Unsupported, match="has no part 'attention' in its implementation 'library:layer'"):
        run_of(worker, build_case("bert", "single", "attention"), "float32", "library:layer")


@pytest.mark.xdist_group("paddle")
def test_what_only_paddle_cannot_express(open_worker):
    paddle = open_worker("paddle")
    with pytest.raises(Unsupported, match=r"norm_epsilon=0\.01: nn\.LayerNorm takes none above 0\.001"):
        run_of(paddle, build_case("bert", "single", options={"norm_epsilon": 0.01}), "float32")
    with pytest.raises(Unsupported, match="activation='gelu_tanh'"):
        run_of(
            paddle,
            build_case("bert", "single", options={"activation": "gelu_tanh"}),
            "float32",
            "library:layer",
        )
    with pytest.raises(Unsupported, match=r"rounds 1 / sqrt\(K\) to float32"):
        run_of(paddle, build_case("bert", "single"), "float64", "library:layer", execution="compiled")


@pytest.mark.clause("MSK-5", "WGT-4")
@pytest.mark.xdist_group("torch")
def test_what_kernels_of_torch_alone_refuse(open_worker):
    torch, case = open_worker("torch"), build_case("nndl-paddle", "ragged")
    words = "a query sees no key: the fused kernel differentiates its weights as if each were 1"
    with pytest.raises(Unsupported, match=words):
        run_of(torch, case, "float32", "library:fused")
    words = "torch keeps weights in a layout of a kernel's own in its implementation 'library:onednn'"
    with pytest.raises(Unsupported, match=words):
        run_of(
            open_worker("tests.toys.built_in:torch"),
            build_case("bert", "full", options={"num_layers": 1}),
            "float32",
            "stepped::library:onednn",
            gradients=False,
        )
