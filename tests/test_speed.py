import dataclasses
import itertools
import json
import runpy

import numpy as np
import pytest

from concord import spec
from concord.backends.bench import Bench
from concord.backends.interface import Unsupported
from concord.commands import speed as command
from concord.conformance.run import record as files
from concord.conformance.run.campaign import Setup
from concord.output_files import KINDS
from concord.spec.cases import build_case
from concord.speed import (
    Mode,
    SpeedPlan,
    SpeedRecord,
    Workload,
    measure,
    measurement,
    presets,
    statistics,
    truth,
    workload,
)
from concord.speed.measurement import takes_part
from concord.speed.peers import PEERS, Peer
from concord.speed.presets import RECIPE, Preset
from concord.speed.table import greedy
from concord.speed.work import flops
from tests.toys.measurable import (
    SECONDS,
    EachStepTheFirst,
    Measurable,
    OneGradientTwice,
    OneParameterAsItWas,
    Program,
    WithADevice,
    WithoutItsState,
    running,
)
from tests.toys.surroundings import ROOT, toy

EXPLICIT = Mode("explicit", "eager")
RIGHT, SLOW, WRONG, DYING = (
    toy(name, "measurable") for name in ("Measurable", "Slow", "WrongLogits", "DiesInTheSecondStep")
)
NARROW = {"d_model": 14, "num_heads": 2, "d_ff": 23, "num_layers": 2, "vocab_size": 31, "max_positions": 13}


@pytest.fixture(autouse=True)
def small_products(monkeypatch):
    # Toys multiply a part; drawing matrices of a GPU's size takes seconds.
    monkeypatch.setattr(measurement, "SQUARE", {"cpu": (61, 67, 71), "cuda": (73, 79, 83)})
    monkeypatch.setattr(measurement, "PRODUCT_SECONDS", 0.01)


def small_preset(name="small", variant="bert", **fields):
    return Preset(name, "a test", spec.variant(variant, **{**NARROW, **fields}), 5, 11)


def small(kind="inference", padding="ragged"):
    return Workload(small_preset(), kind, padding)


def plan_of(*names, works=None, asked=(), **fields):
    fields = {"modes": ((EXPLICIT,),), "turns": 3, "patience": 1, "slice": 0.02, **fields}
    return SpeedPlan(names, works or (small(),), settings=Setup(threads=1, asked=asked), **fields)


def measured(plan):
    kept = SpeedRecord(plan)
    measure(plan, kept.add)
    kept.complete = True
    return json.loads(files.text(kept.record()))


# Measurements.


def test_operations_are_those_of_the_products():
    work = small()
    layer = [(55, 14, 14)] * 4 + [(55, 14, 23), (55, 23, 14), (110, 7, 11), (110, 11, 7)]
    head = [(5, 14, 14), (5, 14, work.preset.config.num_classes)]
    assert flops(work) == sum(2 * m * k * n for m, k, n in 2 * layer + head)
    assert flops(small("training")) == 3 * flops(work)


# The results that are required.


def test_what_is_kept_belongs_to_the_presets_as_they_are():
    stored = {path.stem: json.loads(path.read_text())["key"] for path in truth.EXPECTED.glob("*.json")}
    works = [truth.program(workload(*fields)) for fields in truth.KEPT]
    keys = {f"{work.task.replace(' ', '-')}-{work.dtype}": work.key for work in works}
    assert stored == keys, "run 'python -m concord.speed.truth'"
    usual = itertools.product(command.PRESETS, presets.LENGTHS)
    assert {f"{preset}-inference-{lengths}-float32" for preset, lengths in usual} <= stored.keys()


@pytest.mark.parametrize("kind", ["inference", "training"])
def test_samples_one_by_one_are_the_batch(kind, monkeypatch):
    apart = truth.derive(small(kind))
    monkeypatch.setattr(truth, "samples", lambda config, batch, most: [batch])
    together = truth.derive(small(kind))
    assert truth.judge(together, apart.values).worst < 1 / 256
    shares = [together.sigmas[name] / sigma for name, sigma in apart.sigmas.items()]
    assert all((share > 0.1).all() and (share < 10).all() for share in shares)


def test_what_is_missing_misshapen_or_not_finite_is_wrong():
    expected = truth.derive(small())
    logits = expected.values["logits"]
    for wrong in ({}, {"logits": logits[:1]}, {"logits": np.full_like(logits, np.nan)}):
        verdict = truth.judge(expected, wrong)
        assert (verdict.first, verdict.worst) == ("logits", float("inf"))


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("kind", ["inference", "training"])
def test_a_backend_computes_in_a_program_what_the_reference_says(worker, kind):
    case = build_case("bert", "ragged")  # JAX has compiled for these sizes in other tests
    batch, tokens = case.batch.required("input_ids").shape
    work = Workload(Preset("case", "a test", case.config, batch, tokens), kind, "ragged")
    _, results = worker.bench("prepare", request=work.request())
    verdict = truth.judge(truth.expected(work), results)
    assert verdict.passed, verdict.nearest
    worker.bench("product", sizes=(7, 11, 13), dtype="float32", device="cpu", precision="strict")
    assert len(worker.bench("repeat", count=3, seconds=60.0)["seconds"]) == 3
    worker.bench("release")


# Turns.


def test_backends_have_their_turns_and_what_one_cannot_do_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("TOY_NOTES", str(tmp_path))
    missing, unsupported = "torch_is_not_here:Backend", toy("NumpyBackend")
    data = measured(plan_of(RIGHT, SLOW, DYING, unsupported, missing, asked=(missing,)))
    statuses = {entry["backend"]: entry["status"] for entry in data["entries"]}
    assert statuses == {
        **dict.fromkeys((RIGHT, SLOW), "measured"),
        DYING: "crashed",
        unsupported: "unsupported",
        missing: "missing",
    }
    assert data["exit_code"] == 3
    steps = [name for name in (tmp_path / "turns").read_text().split() if name in ("Measurable", "Slow")]
    assert [name for name, _ in itertools.groupby(steps)] == ["Measurable", "Slow"] * 4  # warm-up, then 3
    summary = data["entries"][0]["summary"]
    assert summary["share_of_best_product"]


def test_a_large_workload_is_checked_by_a_few_samples(monkeypatch):
    large, usual = workload("bert-large"), workload("bert-base")
    assert truth.judged_samples(usual) == usual.preset.batch
    assert truth.judged_samples(large) == truth.PROBE
    assert truth.program(large) == large, "the timed program itself is judged"
    assert truth.program(workload("bert-large", "training")).preset.batch == truth.PROBE
    monkeypatch.setattr(truth, "LARGE", 0.0)
    for work in (small(), small("training")):
        right, wrong = measured(plan_of(RIGHT, WRONG, works=(work,)))["entries"]
        assert (right["status"], right["checked_samples"]) == ("measured", truth.PROBE)
        assert (wrong["status"], wrong["turns"], wrong["summary"]) == ("withheld", [], None)


def test_nothing_is_begun_beyond_the_budget_and_turns_are_added_while_it_is_unsteady(monkeypatch):
    monkeypatch.setattr(statistics, "STEADY", 0.0)  # no timing is that steady
    plan, kept = plan_of(RIGHT, budget=0.0, patience=3), []
    assert not measure(plan, kept.append)
    assert not kept
    assert measure(dataclasses.replace(plan, budget=None), kept.append)
    assert [(entry["status"], len(entry["turns"])) for entry in kept[-1:]] == [("measured", 9)]


def test_cores_are_counted_and_not_believed():
    data = files.data(files.read(ROOT / "conformance/results/speed/amd-epyc-26-2/forward.json", KINDS))
    *others, last = [entry for entry in data["entries"] if entry["summary"]]
    for entry in others:
        entry["summary"]["busy_cores"] = 1.0
    last["summary"]["busy_cores"] = data["settings"]["threads"] + 0.9
    assert greedy(data) == [last]


def test_an_implementation_of_its_own_is_asked_of_its_backend_alone():
    offered = {"torch": ["library:onednn"], "jax": ["library"]}
    for mode, expected in (
        (Mode("library:onednn"), ["torch", "unknown"]),
        (Mode("library", "eager"), ["torch", "jax", "unknown", "hf"]),
        (Mode("library", "compiled"), ["torch", "jax", "unknown", "hf", "ort"]),
    ):
        names = ("torch", "jax", "unknown", "hf", "ort")
        assert [name for name in names if takes_part(name, mode, offered)] == expected


# Reports of timings.


def test_the_first_step_of_a_turn_warms_up():
    turns = [[9.0, 1.0, 2.0], [9.0, 2.0, 3.0], [9.0, 3.0, 4.0]]
    assert (statistics.median(turns), *statistics.interval(turns)) == (2.5, 1.5, 3.5)
    assert not statistics.settled(turns)
    assert statistics.settled([[1.0], [1.0], [1.02], [0.98], [1.01], [5.0], [1.0], [0.99]])
    assert not statistics.settled([[0.859], [0.894]]), "two steps are no spread"


# `concord speed`: what it prints, writes, refuses and resumes.


@pytest.fixture
def small_presets(monkeypatch):
    monkeypatch.setattr(presets, "presets", lambda: {"nndl": small_preset("nndl")})


SMALL = "speed --preset nndl --implementation explicit --execution eager --quick --threads 1"


@pytest.mark.usefixtures("small_presets")
def test_the_command_measures_prints_and_writes(entered, tmp_path):
    (tmp_path / "a.md").write_text("before\n<!-- begin speed -->\n<!-- end speed -->\nafter\n")
    written = ("--json", tmp_path / "a.json", "--html", tmp_path / "a.html")
    out, _ = entered(f"{SMALL} --backend {RIGHT} --backend {WRONG}", *written, ends=1)
    assert f"{WRONG} withheld: its results are wrong: logits" in " ".join(out.split())
    entered(f"show report {tmp_path / 'a.json'} --markdown {tmp_path / 'a.md'}", ends=1)
    assert f"| {RIGHT} | explicit eager |" in (tmp_path / "a.md").read_text()
    assert files.data(files.read(tmp_path / "a.json", KINDS))["complete"]
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")


@pytest.mark.usefixtures("small_presets")
def test_an_interrupted_run_keeps_what_it_has(entered, tmp_path, monkeypatch):
    path, right = tmp_path / "a.json", command.measure

    def interrupted(plan, keep, tell):
        def once(entry):
            keep(entry)
            raise KeyboardInterrupt

        right(plan, once, tell)

    monkeypatch.setattr(command, "measure", interrupted)
    both = f"{SMALL} --backend {RIGHT} --backend {SLOW}"
    _, errors = entered(f"{both} --json {path}", ends=130)
    assert errors[-1] == "concord: interrupted"
    kept = files.data(files.read(path, KINDS))
    assert not kept["complete"]
    assert [entry["backend"] for entry in kept["entries"]] == [RIGHT]


def test_the_page_of_fastest_modes_is_generated():
    page = runpy.run_path(ROOT / "docs/fastest_modes.py")["page"]()
    assert page == (ROOT / "docs/guides/speed-modes.md").read_text()


# Speed on a GPU, with a simulated clock, memory and precision.


def test_on_a_device_no_step_waits_for_the_last_and_the_clock_and_memory_are_the_devices():
    bench, work = Bench(WithADevice()), small()
    bench.prepare(work.request(device="cuda:1"))
    steps = bench.steps
    steps.said.clear()
    answer = bench.repeat(60.0, 4)
    assert answer.pop("busy_cores") > 0
    assert answer == {"seconds": [SECONDS] * 4, "peak_memory_bytes": WithADevice.held}
    one, four = (["synchronize", *["step"] * count, "synchronize"] for count in (1, 4))
    assert steps.said == one + four  # one to estimate the time, then all in a row
    bench.prepare(work.request())
    assert len(bench.repeat(60.0, 2)["seconds"]) == 2


def test_tf32_is_float32_judged_by_its_own_rounding():
    work = dataclasses.replace(small(), dtype="tf32")
    assert (work.request().dtype, work.request().precision) == ("float32", "tf32")
    assert truth.derive(work).sigmas["logits"][0, 0] > 64 * truth.derive(small()).sigmas["logits"][0, 0]


def test_modes_of_a_group_are_prepared_before_their_turns_alternate():
    plan = plan_of(RIGHT, SLOW, modes=((EXPLICIT, Mode("explicit", "compiled")),))
    for device in ("cpu", "cuda"):
        each = dataclasses.replace(plan, settings=Setup(threads=1, device=device))
        entries = measured(each)["entries"]
        assert [entry["execution"] for entry in entries] == ["eager", "eager", "compiled", "compiled"]
        assert {len(entry["turns"]) for entry in entries} == {3}


def test_the_fastest_peer_takes_turns_with_every_mode(monkeypatch):
    compiled = Mode("explicit", "compiled")
    monkeypatch.setitem(PEERS, "toy", Peer(RIGHT, (compiled.name,)))
    entries = measured(plan_of(SLOW, "toy", modes=((EXPLICIT,), (compiled,))))["entries"]
    assert entries[-1]["execution"] == "eager"
    assert [entry["summary"]["of_best_peer"] > 1 for entry in entries] == [True, False, True]


# A timed training step has to be AdamW's; every other is refused.


def prepared(backend, work):
    return Bench(backend).prepare(work.request())[1]


WRONG_STEPS = [
    running(Program, **fields)
    for fields in (
        {"learning_rate": 1.01 * RECIPE.learning_rate},
        {"epsilon_placement": "uncorrected"},
        {"bias_correction": False},
        {"decay_form": "alone"},
        {"undecayed": ("bias",)},
        {"beta2": 0.999},
    )
] + [running(program) for program in (EachStepTheFirst, OneGradientTwice, OneParameterAsItWas)]


def test_a_right_optimizer_is_measured_and_a_wrong_one_refused():
    work = small("training")
    assert truth.judge(truth.expected(work), prepared(Measurable(), work)).passed
    for wrong in WRONG_STEPS:
        verdict = truth.judge(truth.expected(work), prepared(wrong(), work))
        assert verdict.worst > 3, (wrong.program, wrong.fields, verdict.nearest)


def test_a_session_that_does_not_show_its_optimizer_is_not_measured():
    with pytest.raises(
        Unsupported, match="numpy cannot be measured in training: its session has no method 'state'"
    ):
        prepared(running(WithoutItsState)(), small("training"))
