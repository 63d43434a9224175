"""The four backends beyond the standard cases."""

import dataclasses
import functools
from dataclasses import dataclass, field

import numpy as np
import pytest

from concord import spec
from concord.backends import BUILT_IN
from concord.backends.interface import Unsupported
from concord.spec.cases import build_case
from tests.toys.rounded import verdict_of
from tests.toys.small import run_case
from tests.toys.surroundings import toy

BOTH = ("float64", "float32")
HALVES = ("bfloat16", "float16")
PADDING = "unpadded"
EVERYWHERE = len(BUILT_IN)


@dataclass(eq=False)
class Asked:
    """A case and how to run it. `turns` backends run it in turn; `words` are those of an expected refusal."""

    variant: str
    scenario: str = "ragged"
    part: str = "model"
    options: dict = field(default_factory=dict)
    dtypes: tuple = ("float32",)
    settings: dict = field(default_factory=dict)
    turns: int = EVERYWHERE
    only: tuple = tuple(sorted(BUILT_IN))
    changed: functools.partial = lambda case: case
    words: tuple = ()

    def __str__(self):
        parts = (self.variant, self.scenario, self.part, *self.options, *map(str, self.settings.values()))
        return "-".join((*parts, *self.dtypes))


def with_masks(case, mask):
    arrays = {name: array for name, array in case.batch.arrays().items() if not name.endswith("_mask")}
    if mask == "three-dimensional":
        shape = (len(arrays["query"]), arrays["query"].shape[1], arrays["key"].shape[1])
        arrays["key_mask"] = np.random.default_rng(2).random(shape) > 0.4
    return dataclasses.replace(case, batch=spec.from_arrays(arrays))


def without_empty_samples(case):
    # One sample also gets padding in front, where pooling takes its token.
    ids = case.batch.required("input_ids").copy()
    ids[(ids == case.config.pad_id).all(axis=1), 2] = 5
    ids[2, 0] = case.config.pad_id
    return dataclasses.replace(case, batch=spec.from_arrays({**case.batch.arrays(), "input_ids": ids}))


def refusal(backend, variant, dtype, implementation="explicit"):
    # An empty text means that the backend supports the precision.
    if backend == "paddle" and dtype in HALVES:
        return f"no {dtype} matrix product on cpu"
    if not implementation.startswith("library"):
        return ""
    if (backend, dtype) == ("torch", "float16"):
        return dtype
    if dtype in HALVES and variant == "nndl-paddle":
        return r"in float32, so a row without a visible key keeps score digits .* \(MSK-5\)"
    return "softmax in float32" if (backend, dtype) == ("jax", "float64") else ""


LIBRARY, FUSED, STEPPED = (
    {"implementation": name} for name in ("library", "library:fused", "stepped::explicit")
)
PREDICTOR = {"implementation": "library:onednn", "gradients": False}
KEPT_OUT = {**LIBRARY, "execution": PADDING}
OTHER_LAYERS = (
    {"activation": "gelu_tanh", "norm_placement": "pre", "final_norm": True},
    {"activation": "relu", "qkv_activation": "relu", "score_scale": "multiply_query"},
    {"qkv_bias": False, "output_projection": False, "head_computation": "looped"},
    {"mask_assignment": "batch_major", "norm_epsilon": 1e-3},
)
PRE = {"norm_placement": "pre", "final_norm": True, "activation": "relu"}
ZEROED = {"position_start": 1, "position_of_padding": "zero_row"}
POSITIONS = {"position_start": 3, "position_of_padding": "pad_row", "position_padding_row": 2, "pad_id": 2}

# PyTorch compiles for minutes. Rows are ordered so that in the quick suite mostly other backends get them.
ASKED = [
    *(
        Asked(name, part=part, dtypes=BOTH, settings={"tap_gradients": True}, turns=1)
        for name in ("tf1-text-classifier", "bert-pytorch", "nndl-paddle", "keras-attention")
        for part in ("encoder", "stack", "attention", "dot_product")
    ),
    *(
        Asked(
            "keras-attention",
            part="attention",
            options={"head_computation": heads, "mask_assignment": masks},
            dtypes=("float64",),
            turns=1,
            changed=functools.partial(with_masks, mask=mask),
        )
        for heads, masks in (("batched", "batch_major"), ("batched", "per_sample"), ("looped", "per_sample"))
        for mask in ("none", "three-dimensional")
    ),
    Asked("bert", dtypes=HALVES),
    Asked("nndl-paddle", dtypes=HALVES, turns=1),
    *(
        Asked(name, "peaked", options={"num_layers": 1}, settings={"execution": "compiled"}, turns=1)
        for name in ("keras-attention", "nndl-paddle")
    ),
    # Library layers.
    *(
        Asked(name, scenario, dtypes=BOTH, settings={**LIBRARY, "tap_gradients": True}, turns=1)
        for name in ("bert", "nndl-paddle")
        for scenario in ("ragged", "peaked", "tiny", "offset", "single")
    ),
    *(Asked("bert", options=options, dtypes=BOTH, settings=LIBRARY, turns=1) for options in OTHER_LAYERS),
    *(
        Asked(name, part=part, dtypes=BOTH, settings=LIBRARY, turns=1)
        for name, part in (("bert", "encoder"), ("nndl-paddle", "stack"))
    ),
    *(
        Asked(name, part=part, settings=LIBRARY, turns=1, changed=functools.partial(with_masks, mask=mask))
        for name, part in (("keras-attention", "attention"), ("bert", "dot_product"))
        for mask in ("none", "three-dimensional")
    ),
    *(
        Asked(name, scenario, dtypes=HALVES, settings=LIBRARY, turns=2)
        for name, scenario in (("bert", "full"), ("nndl-paddle", "ragged"))
    ),
    *(
        Asked("bert", scenario, dtypes=BOTH, settings=FUSED, only=("torch",))
        for scenario in ("equal", "full", "single")
    ),
    Asked("nndl-paddle", dtypes=BOTH, settings={**FUSED, "gradients": False}, only=("torch",)),
    Asked("bert", settings={**LIBRARY, "execution": "compiled", "tap_gradients": True}, turns=1),
    # The whole model in Paddle Inference, with and without padding.
    Asked("bert", settings={**PREDICTOR, "execution": "eager"}, only=("paddle",)),
    Asked("bert", settings={**PREDICTOR, "execution": "compiled"}, only=("paddle",)),
    Asked(
        "bert",
        settings={**PREDICTOR, "execution": PADDING},
        changed=without_empty_samples,
        only=("paddle",),
    ),
    # Without padding.
    *(
        Asked(name, dtypes=(dtype,), settings=KEPT_OUT, turns=1, changed=without_empty_samples)
        for name in ("bert", "nndl-paddle")
        for dtype in BOTH
    ),
    *(
        Asked("bert", scenario, dtypes=(dtype,), settings=KEPT_OUT, turns=1)
        for scenario in ("equal", "single")
        for dtype in BOTH
    ),
    *(
        Asked("bert", options=options, settings=KEPT_OUT, turns=2, changed=without_empty_samples)
        for options in (
            {**PRE, "qkv_activation": "relu"},
            {**POSITIONS, "max_positions": 17, "pooling": "mean", "length_epsilon": 1e-12},
            {**ZEROED, "head_computation": "looped", "num_segments": 0},
        )
    ),
    Asked("bert", "equal", settings={**FUSED, "execution": PADDING}, only=("torch",)),
    Asked(
        "nndl-paddle",
        options={"num_layers": 1},
        settings={**LIBRARY, "execution": "unpadded-compiled"},
        turns=1,
        changed=without_empty_samples,
    ),
    # Sessions: after loading, feeding and stepping, a model computes what a new one does.
    Asked("bert", options={"num_layers": 1}, settings={**STEPPED, "tap_gradients": True}),
    Asked(
        "tf1-text-classifier",
        options={"num_layers": 1},
        settings={**STEPPED, "execution": "compiled", "gradients": False},
        turns=3,
    ),
]


def each(table):
    return [
        pytest.param(name, entry, marks=[pytest.mark.xdist_group(name), pytest.mark.in_turn(entry.turns)])
        for entry in table
        for name in entry.only
    ]


def run_of(entry, backend, dtype, open_worker):
    implementation = entry.settings.get("implementation", "explicit")
    worker = open_worker(toy(backend, "built_in") if "stepped" in implementation else backend)
    case = entry.changed(build_case(entry.variant, entry.scenario, entry.part, entry.options))
    return case, functools.partial(run_case, worker, case, dtype, **entry.settings)


@pytest.mark.clause("PRT-1", "GRD-1", "GRD-2", "GRD-5", "MSK-1", "MSK-3", "MSK-4", "MSK-5", "MSK-7", "ATT-3")
@pytest.mark.clause("ATT-4", "ATT-7", "NRM-2", "FFN-2", "PRC-2", "PRC-3")
@pytest.mark.parametrize(("backend", "asked"), each(ASKED), ids=str)
def test_backend_conforms(backend, asked, open_worker):
    for dtype in asked.dtypes:
        case, run = run_of(asked, backend, dtype, open_worker)
        implementation = asked.settings.get("implementation", "explicit")
        if words := refusal(backend, asked.variant, dtype, implementation):
            with pytest.raises(Unsupported, match=words):
                run()
            continue
        result = run()
        verdict = verdict_of(case, result)
        assert verdict.passed, f"{dtype}: {verdict.first_divergence}"
        assert bool(result.gradients) == asked.settings.get("gradients", True)
        assert bool(result.tap_gradients) == asked.settings.get("tap_gradients", False)


@pytest.mark.clause("MSK-6")
def test_mask_constants_survive_in_float64(worker):
    # A framework that passes constants through float32 turns -2^32 + 1 into -2^32.
    for fill in ("replace", "add"):
        options = {"mask_fill": fill, "query_mask": "none"}
        case = build_case("tf1-text-classifier", "ragged", "attention", options)
        run = run_case(worker, case, dtype="float64")
        hidden = ~case.batch.key_mask[3]
        assert (run.taps["attention.masked_scores"][3][..., hidden] != -4294967296.0).all()
        assert verdict_of(case, run).passed


def test_run_without_taps_or_gradients_delivers_output_and_loss(worker):
    case = build_case("bert", "ragged")
    run = run_case(worker, case, dtype="float64", taps=False, gradients=False)
    assert (run.taps, run.gradients) == ({}, {})
    verdict = verdict_of(case, run)
    assert verdict.passed
    assert [row.tensor for row in verdict.table] == ["logits", "loss"]
