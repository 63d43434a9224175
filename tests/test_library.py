"""Library layers: what they express conforms by the same judge, and what they cannot is refused with every
reason.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from concord import spec
from concord.backends.interface import Run, Unsupported
from concord.backends.worker import Worker
from concord.conformance.campaign import Report, Settings, deviations_of
from concord.conformance.judging import judge
from concord.conformance.report import failures
from concord.conformance.verdict import Result
from concord.spec.cases import Case, build_case

INNER = ("scores", "masked_scores", "weights")
HAS_A_LAYER = ("torch", "paddle")


def run_of(worker: Worker, case: Case, dtype: str, implementation: str = "library", **settings: Any) -> Run:
    return worker.run(
        case.config,
        case.weights,
        case.batch,
        part=case.part,
        dtype=dtype,
        implementation=implementation,
        **settings,
    )


def assert_conforms(
    worker: Worker,
    case: Case,
    dtypes: Iterable[str] = ("float64", "float32"),
    implementation: str = "library",
    **settings: Any,
) -> None:
    for dtype in dtypes:
        if (worker.name, dtype) == ("jax", "float64"):
            with pytest.raises(Unsupported, match="softmax in float32"):
                run_of(worker, case, dtype, implementation, **settings)
            continue
        run = run_of(worker, case, dtype, implementation, **settings)
        verdict = judge(case.config, case.weights, case.batch, run, case.part)
        assert verdict.passed, f"{dtype}: {verdict.first_divergence}"


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in HAS_A_LAYER])
def layered(request: pytest.FixtureRequest, open_worker: Callable[[str], Worker]) -> Worker:
    """Each backend whose framework has an encoder layer."""
    return open_worker(request.param)


# What is expressed conforms.


@pytest.mark.in_turn(2)
@pytest.mark.clause("MSK-3", "MSK-5", "ATT-4", "NRM-2", "FFN-2", "PRT-1")
@pytest.mark.parametrize(
    ("name", "scenario", "part", "options"),
    [
        *(
            (name, scenario, "model", {})
            for name in ("bert", "nndl-paddle")
            for scenario in ("ragged", "peaked", "tiny", "offset", "single")
        ),
        *(
            ("bert", "ragged", "model", options)
            for options in (
                {"activation": "gelu_tanh", "norm_placement": "pre", "final_norm": True},
                {"activation": "relu", "qkv_activation": "relu", "score_scale": "multiply_query"},
                {"qkv_bias": False, "output_projection": False, "head_computation": "looped"},
                {"mask_assignment": "batch_major", "norm_epsilon": 1e-3},
            )
        ),
        ("bert", "ragged", "encoder", {}),
        ("nndl-paddle", "ragged", "stack", {}),
    ],
)
def test_library_conforms(
    worker: Worker, name: str, scenario: str, part: str, options: dict[str, Any]
) -> None:
    assert_conforms(worker, build_case(name, scenario, part, options))


@pytest.mark.clause("PRT-1", "MSK-4")
@pytest.mark.parametrize(("name", "part"), [("keras-attention", "attention"), ("bert", "dot_product")])
def test_attention_conforms_alone_with_every_mask(worker: Worker, name: str, part: str) -> None:
    case = build_case(name, "ragged", part)
    arrays = {name: array for name, array in case.batch.arrays().items() if not name.endswith("_mask")}
    three = np.random.default_rng(3).random((5, arrays["query"].shape[1], 11)) > 0.4
    for batch in (case.batch, *(spec.from_arrays({**arrays, **mask}) for mask in ({}, {"key_mask": three}))):
        assert_conforms(worker, replace(case, batch=batch))


def test_compiled_library_conforms(worker: Worker) -> None:
    assert_conforms(worker, build_case("bert", "ragged"), ("float32",), execution="compiled")


@pytest.mark.clause("MSK-5")
@pytest.mark.xdist_group("torch")
def test_fused_kernel_conforms_where_each_query_sees_a_key(open_worker: Callable[[str], Worker]) -> None:
    torch = open_worker("torch")
    for scenario in ("equal", "full", "single"):
        assert_conforms(torch, build_case("bert", scenario), implementation="library:fused")
    case = build_case("nndl-paddle", "ragged")
    assert_conforms(torch, case, implementation="library:fused", gradients=False)
    with pytest.raises(
        Unsupported,
        match="a query sees no key: the fused kernel differentiates its weights as if each were 1",
    ):
        run_of(torch, case, "float32", "library:fused")


@pytest.mark.parametrize(
    ("name", "scenario", "part", "options", "gradients"),
    [
        *(
            (name, scenario, "model", {}, True)
            for name in ("bert", "nndl-paddle-api")
            for scenario in ("ragged", "peaked", "tiny")
        ),
        *(
            (
                "bert",
                "ragged",
                part,
                {"norm_placement": "pre", "activation": "relu", "final_norm": True},
                True,
            )
            for part in ("model", "encoder", "stack")
        ),
        ("bert", "ragged", "model", {}, False),  # a fast path without gradients has other rules for masks
    ],
)
def test_whole_layer_conforms(
    layered: Worker, name: str, scenario: str, part: str, options: dict[str, Any], gradients: bool
) -> None:
    case = build_case(name, scenario, part, options)
    assert_conforms(layered, case, implementation="library:layer", gradients=gradients)


@pytest.mark.clause("WGT-4")
def test_weights_come_back_from_library_layers(worker: Worker) -> None:
    case = build_case("bert", "ragged")
    for implementation in ("library", *(["library:layer"] if worker.name in HAS_A_LAYER else [])):
        returned = worker.round_trip(case.config, case.weights, case.batch, implementation=implementation)
        assert returned.keys() == case.weights.keys()
        assert all(np.array_equal(returned[name], case.weights[name]) for name in returned)


@pytest.mark.clause("PRC-3")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_conforms_or_is_unsupported(worker: Worker, dtype: str) -> None:
    case = build_case("bert", "full")
    if worker.name == "paddle" or (worker.name, dtype) == ("torch", "float16"):
        with pytest.raises(Unsupported, match=dtype):
            run_of(worker, case, dtype)
        return
    assert_conforms(worker, case, (dtype,))
    with pytest.raises(Unsupported, match=r"float32 scores, where .* \(MSK-5\)"):
        run_of(worker, build_case("nndl-paddle", "ragged"), dtype)


# What is not delivered, and what is declared.


def test_taps_inside_the_kernel_are_not_exposed_and_no_others(worker: Worker) -> None:
    case = build_case("bert", "ragged")
    run = run_of(worker, case, "float32")
    verdict = judge(case.config, case.weights, case.batch, run)
    not_exposed = [row.tensor for row in verdict.table if row.status == "not exposed"]
    assert not_exposed == [f"layers.{i}.attention.{step}" for i in range(2) for step in INNER]
    assert run_of(worker, case, "float32", "explicit").info["not_exposed"] == []


def test_whole_layer_delivers_its_result(layered: Worker) -> None:
    for placement, result in (("post", "norm2"), ("pre", "residual2")):
        case = build_case("bert", "ragged", options={"norm_placement": placement})
        run = run_of(layered, case, "float32", "library:layer")
        assert [name for name in run.taps if name.startswith("layers.")] == [
            f"layers.0.{result}",
            f"layers.1.{result}",
        ]


@pytest.mark.clause("PRC-4")
def test_deviations_of_library_layers_are_declared_for_them_alone(worker: Worker) -> None:
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
def test_without_its_declaration_a_deviation_is_found(
    open_worker: Callable[[str], Worker], backend: str, name: str, tensor: str
) -> None:
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
def test_what_library_layers_cannot_express_is_refused_in_one_line(worker: Worker, name: str) -> None:
    with pytest.raises(Unsupported) as refusal:
        run_of(worker, build_case(name, "single"), "float32")
    said, _, reasons = str(refusal.value).partition(": ")
    assert said == f"{worker.name} cannot express this by its library layers"
    found = reasons.split("; ")
    assert [reason.startswith(start) for reason, start in zip(found, REASONS[name], strict=True)] == [
        True
    ] * len(found)
    assert all(reason.endswith(")") for reason in found)


def test_report_has_a_line_for_each_reason_and_not_for_each_run(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_whole_layer_refuses_what_it_has_not(worker: Worker) -> None:
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
def test_what_only_paddle_cannot_express(open_worker: Callable[[str], Worker]) -> None:
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
