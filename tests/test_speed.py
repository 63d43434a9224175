"""Speed: backends have their turns, what is wrong is withheld, and only what exceeds the noise is called a
change.
"""

import copy
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from concord import options, spec
from concord.backends.bench import Bench
from concord.backends.interface import Unsupported
from concord.backends.machine import wait_for_rest
from concord.commands import speed as command
from concord.commands.speed import Models, Modes
from concord.conformance import record as files
from concord.conformance.campaign import Setup
from concord.conformance.estimate import Z
from concord.spec.cases import build_case
from concord.speed import (
    Mode,
    SpeedPlan,
    SpeedRecord,
    Workload,
    measure,
    presets,
    statistics,
    truth,
    workload,
)
from concord.speed.measure import takes_part
from concord.speed.page import page
from concord.speed.peers import PEERS
from concord.speed.presets import RECIPE, Preset
from concord.speed.record import described
from concord.speed.table import fastest_first, greedy, show, size_of, to_deploy
from concord.speed.team import busy_cores, rules_of
from concord.speed.work import flops
from concord.terminal import Terminal
from concord.writing import KINDS
from tests.toys.devices import SECONDS, WithADevice
from tests.toys.measurable import (
    EachStepTheFirst,
    Measurable,
    OneGradientTwice,
    Program,
    WithoutItsState,
    running,
)
from tests.toys.surroundings import ROOT, toy

EXPLICIT = Mode("explicit", "eager")
RIGHT, SLOW, WRONG, DYING, THREADED = (
    toy(name, "measurable")
    for name in ("Measurable", "Slow", "WrongLogits", "DiesInTheSecondStep", "Threaded")
)
NARROW = {"d_model": 14, "num_heads": 2, "d_ff": 23, "num_layers": 2, "vocab_size": 31, "max_positions": 13}


def small_preset(name="small", variant="bert", **fields):
    return Preset(name, "a test", spec.variant(variant, **{**NARROW, **fields}), 5, 11)


def small(kind="inference", padding="ragged"):
    return Workload(small_preset(), kind, padding)


def plan_of(
    *names,
    works=None,
    modes=(EXPLICIT,),
    **settings,
):
    given = {"turns": 3, "patience": 1, "slice": 0.02, "threads": 1, **settings}
    where = {field.name: given.pop(field.name) for field in dataclasses.fields(Setup) if field.name in given}
    return SpeedPlan(names, works or (small(),), modes, Z, Setup(**where), **given)


def measured(plan):
    kept = SpeedRecord(plan)
    measure(plan, kept.add)
    kept.complete = True
    return json.loads(files.text(kept.record()))


# What is measured.


@pytest.mark.parametrize("variant", ["bert", "tf1-text-classifier"])
def test_operations_are_those_of_the_products(variant):
    config = small_preset(variant=variant, max_positions=11).config
    work = Workload(Preset("x", "", config, 5, 11))
    width, rows = 14, 5 * 11
    products = [(rows, width, width)] * (4 if config.output_projection else 3) + [
        (rows, width, 23),
        (rows, 23, width),
    ]
    products += [(5 * 2 * 11, 7, 11), (5 * 2 * 11, 11, 7)]
    head = [(5, width * (11 if config.pooling == "flatten" else 1), config.num_classes)] + (
        [(5, width, width)] if config.pooler != "none" else []
    )
    assert flops(work) == sum(2 * m * k * n for m, k, n in 2 * products + head)
    assert flops(dataclasses.replace(work, kind="training")) == 3 * flops(work)


# What it has to compute.


@pytest.mark.parametrize("path", sorted(truth.EXPECTED.glob("*.json")), ids=lambda path: path.stem)
def test_what_is_kept_belongs_to_the_preset_as_it_is(path):
    stored = json.loads(path.read_text())
    name, kind, padding, dtype = re.fullmatch(
        r"(.+)-(inference|training)-(full|ragged)-(.+)\.json", path.name
    ).groups()
    assert stored["key"] == truth.probe(workload(name, kind, padding, dtype)).key, (
        "run 'python -m concord.speed.truth'"
    )


def test_every_preset_of_a_usual_run_has_its_expectations():
    wanted = {
        f"{name}-inference-{padding}-float32" for name in command.PRESETS for padding in presets.LENGTHS
    }
    assert {path.stem for path in truth.EXPECTED.glob("*-float32.json")} >= wanted


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["inference", "training"])
def test_what_is_kept_is_what_is_derived(kind):
    work = workload("nndl", kind, "ragged")
    kept, derived = truth.expected(work), truth.derive(work)
    assert derived.worst(kept.values, 1 / 64)[0] <= 1
    assert {round(kept.sigmas[name] / sigma, 6) for name, sigma in derived.sigmas.items()} == {1.0}


def test_what_is_missing_misshapen_or_not_finite_is_wrong():
    expected = truth.derive(small())
    logits = expected.values["logits"]
    assert expected.worst({"logits": logits.astype(np.float32)}, Z)[0] < 1
    assert expected.worst({}, Z) == (float("inf"), "logits")
    assert expected.worst({"logits": logits[:1]}, Z) == (float("inf"), "logits")
    assert expected.worst({"logits": np.full_like(logits, np.nan)}, Z) == (float("inf"), "logits")


@pytest.mark.parametrize("kind", ["inference", "training"])
def test_every_backend_computes_in_a_program_what_the_oracle_says(worker, kind):
    case = build_case("bert", "ragged")  # its sizes are those of other tests, for which JAX has compiled
    batch, tokens = case.batch.required("input_ids").shape
    work = Workload(Preset("case", "a test", case.config, batch, tokens), kind, "ragged")
    _, results = worker.bench(
        "prepare",
        **work.request(),
        weights=None,
        implementation="explicit",
        execution="eager",
        device="cpu",
        precision="strict",
    )
    worst, tensor = truth.expected(work).worst(results, Z)
    assert worst < 1, tensor
    worker.bench("release")
    worker.bench("product", sizes=(7, 11, 13), dtype="float32", device="cpu", precision="strict")
    assert len(worker.bench("repeat", count=3, seconds=60.0)[0]["seconds"]) == 3
    worker.bench("release")


# The measurement.


def test_backends_have_their_turns_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.setenv("TOY_NOTES", str(tmp_path))
    data = measured(plan_of(RIGHT, SLOW))
    steps = (tmp_path / "turns").read_text().split()
    turns = [name for i, name in enumerate(steps) if i == 0 or steps[i - 1] != name]
    assert turns == [
        "Measurable",
        "Slow",
        *["Measurable", "Slow"] * 3,
    ]  # the first step of each, then three turns
    assert [entry["status"] for entry in data["entries"]] == ["measured"] * 2
    assert all(
        entry["summary"][name] is not None
        for entry in data["entries"]
        for name in ("gflops", "share_of_best_product", "real_tokens_per_second")
    )


@pytest.mark.parametrize(
    ("name", "kind", "tensor"),
    [
        ("WrongLogits", "training", "loss"),
        ("WrongUpdate", "training", "updates/classifier.bias"),
    ],
)
def test_what_is_wrong_is_withheld(name, kind, tensor):
    (entry,) = measured(plan_of(toy(name, "measurable"), works=(small(kind),)))["entries"]
    assert entry["status"] == "withheld"
    assert tensor in entry["detail"]
    assert not entry["turns"]
    assert entry["summary"] is None


def test_what_a_backend_cannot_do_is_said_and_the_others_go_on():
    wanted = plan_of(
        RIGHT,
        DYING,
        toy("NumpyBackend"),
        "torch_is_not_here:Backend",
        works=(small(), small(padding="full")),
        asked=("torch_is_not_here:Backend",),
    )
    data = measured(wanted)
    found = {(entry["backend"], entry["workload"]): entry["status"] for entry in data["entries"]}
    for work in wanted.workloads:
        assert found[RIGHT, work.name] == "measured"
        assert found[DYING, work.name] == "crashed"
        assert found[toy("NumpyBackend"), work.name] == "unsupported"
        assert found["torch_is_not_here:Backend", work.name] == "missing"
    assert data["exit_code"] == 3


def test_cores_are_counted_and_not_believed(record):
    assert busy_cores(10.0, 11.5, 1.0) == 1.5
    assert busy_cores(None, None, 1.0) is None
    new = copy.deepcopy(record)
    found = [entry for entry in new["entries"] if entry["summary"]]
    for entry in found:
        entry["summary"]["busy_cores"] = 1.0
    assert not greedy(new)
    entry = found[-1]
    entry["summary"]["busy_cores"] = 1.9  # with one thread
    assert greedy(new) == [entry]


def test_a_process_at_rest_is_told_from_one_that_computes():
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time; print(flush=True); end = time.time() + 1; any(time.time() > end for _ in "
            "iter(int, 1)); time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        started = time.perf_counter()
        wait_for_rest(process.pid, 0.1)
        hurried = time.perf_counter() - started
        wait_for_rest(process.pid, 60.0)
        rested = time.perf_counter() - started
        process.kill()
    assert 0.1 <= hurried < 0.9 < rested < 30


def test_what_the_budget_has_no_time_for_is_not_begun():
    plan = plan_of(RIGHT, works=(small(), small(padding="full")), budget=0.0)
    kept = SpeedRecord(plan)
    assert not measure(plan, kept.add)
    assert not kept.entries
    assert measure(dataclasses.replace(plan, budget=None), kept.add)
    assert [entry["status"] for entry in kept.entries] == ["measured"] * 2


def test_turns_are_added_while_a_measurement_is_unsteady_and_time_is_left(
    monkeypatch,
):
    monkeypatch.setattr(statistics, "STEADY", 0.0)  # nothing is so steady

    def turns(**settings):
        return len(measured(plan_of(SLOW, patience=3, **settings))["entries"][0]["turns"])

    assert turns() == 9
    assert turns(turns=2, budget=3.0) <= turns(turns=2)


def test_as_shipped_is_measured_only_where_it_makes_a_difference(monkeypatch):
    shipped = Mode("explicit", "eager", "as shipped")
    data = measured(plan_of(RIGHT, THREADED, modes=(EXPLICIT, shipped)))
    found = {(entry["backend"], entry["profile"]): entry["status"] for entry in data["entries"]}
    assert found == {
        (RIGHT, "tuned"): "measured",
        (RIGHT, "as shipped"): "measured",
        (THREADED, "tuned"): "measured",
        (THREADED, "as shipped"): "as tuned",
    }
    assert data["exit_code"] == 0
    assert measured(plan_of(THREADED, modes=(shipped,)))["entries"][0]["status"] == "measured"


def test_an_implementation_of_its_own_is_asked_of_its_backend_alone():
    own, offered = Mode("library:onednn"), {"torch": ["library:onednn"], "jax": ["library"]}
    for mode, expected in (
        (own, ["torch", "unknown"]),
        (Mode("library", "eager"), ["torch", "jax", "unknown", "hf"]),
        (Mode("library", "compiled"), ["torch", "jax", "unknown", "hf", "ort"]),
    ):
        asked = ("torch", "jax", "unknown", "hf", "ort")
        assert [name for name in asked if takes_part(name, mode, offered)] == expected


# What timings say.


def test_the_first_step_of_a_turn_warms_up():
    turns = [[5.0, 1.0, 1.0, 1.0], [5.0, 2.0, 2.0, 2.0], [5.0, 3.0, 3.0, 3.0]]
    assert statistics.median(turns) == 2.0
    assert statistics.interval(turns) == (1.0, 3.0)
    assert statistics.spread(turns) == 1.0
    assert not statistics.settled(turns)
    assert statistics.settled([[1.0], [1.0], [1.02], [0.98], [1.01], [5.0], [1.0], [0.99]])
    assert not statistics.settled([[0.859], [0.894]]), "two steps are no spread"


# Records.


def page_of(data):
    return page(files.parsed(files.lines(data).encode(), KINDS))


@pytest.fixture(scope="module")
def record():
    return measured(plan_of(RIGHT, SLOW, WRONG, modes=(EXPLICIT, Mode("library", "eager"))))


@pytest.mark.parametrize("columns", [100, 140, 170])
def test_a_table_breaks_no_word(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    show(files.data(files.read(ROOT / "conformance/results/speed-forward.json", KINDS)), Terminal())
    assert "…" not in capsys.readouterr().out


def test_steps_are_multiples_of_the_fastest_peer_and_a_mode_is_named_for_each_framework():
    data = files.data(files.read(ROOT / "conformance/results/speed-forward.json", KINDS))
    deployed = to_deploy(data)
    assert list(deployed) == list(data["workloads"])
    for name, sentence in deployed.items():
        rows = fastest_first(data, name)
        seconds = min(one["summary"]["median_seconds"] for one, _ in rows if one["backend"] in PEERS)
        assert all(found["of peer"][0] == one["summary"]["median_seconds"] / seconds for one, found in rows)
        assert f"{rows[0][0]['backend']} {rows[0][0]['mode']} ({rows[0][1]['step'][1]})" in sentence


def test_a_page_of_a_busy_machine_says_so_first_and_no_page_of_times_is_a_judgement(
    record,
):
    measured = [entry for entry in record["entries"] if entry["status"] == "measured"]

    def shown(busy):
        settings = {**record["settings"], "cores_busy_before": busy}
        return page_of({**record, "exit_code": 0, "entries": measured, "settings": settings})

    assert 'class="seal' not in shown(0.0)
    assert re.search(r"<h1>Other processes kept 1\.3 of \d+ cores busy, so these times say", shown(1.3))
    assert '<span class="seal broken"' in shown(1.3)


def test_bars_of_very_different_lengths_are_all_seen(record):
    entries = copy.deepcopy([entry for entry in record["entries"] if entry["status"] == "measured"])
    whole = page_of(record)
    assert all(words in whole for words in ("withheld", "toys are explicit", "Slow explicit eager"))
    assert "open end" not in page_of({**record, "exit_code": 0, "entries": entries[:1]})
    entries[-1]["summary"] |= dict.fromkeys(("low_seconds", "median_seconds", "high_seconds"), 1000.0)
    html = page_of({**record, "exit_code": 0, "entries": entries})
    assert "a bar with an open end is longer" in html
    widths = [float(width) for width in re.findall(r'class="f\d(?: open)?" style="width:([\d.]+)%"', html)]
    assert min(widths) >= 5.0
    assert max(widths) == 100.0


@pytest.mark.parametrize("kind", ["inference", "training"])
def test_samples_one_by_one_are_the_batch(kind, monkeypatch):
    apart = truth.derive(small(kind))
    monkeypatch.setattr(truth, "samples", lambda config, batch, most: [batch])
    together = truth.derive(small(kind))
    assert together.worst(apart.values, 1 / 1024)[0] < 1
    assert all(0.1 < together.sigmas[name] / sigma < 10 for name, sigma in apart.sigmas.items())


# Models of one's own.


def test_a_model_of_ones_own_is_measured_as_it_is_configured(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        spec.variant(
            "bert", num_layers=1, d_model=14, num_heads=2, d_ff=17, vocab_size=23, max_positions=13
        ).to_toml()
    )
    (mine,) = (work.preset for work in Models(preset=[str(path)], batch=3).workloads("cpu", None))
    assert (mine.name, mine.source, mine.batch, mine.tokens, mine.config.d_model) == (
        "mine batch=3",
        str(path),
        3,
        13,
        14,
    )
    works = Models(preset=["nndl", "bert", "tf1-text-classifier"]).workloads("cpu", None)
    assert [work.preset.name for work in works] == ["nndl", "bert", "tf1-text-classifier"]


def test_a_busy_machine_is_said_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr("concord.backends.machine.cores_busy", lambda: 1.3)
    assert command._measure(plan_of(RIGHT), options.Outputs(), None) == 0
    assert capsys.readouterr().err.startswith(
        f"warning: other processes keep 1.3 of {os.cpu_count()} cores busy; "
    )


# ``concord speed`` as a command: what it prints, writes, refuses, and goes on from.


@pytest.fixture
def small_presets(monkeypatch):
    monkeypatch.setattr(presets, "presets", lambda: {"nndl": small_preset("nndl")})


SMALL = "speed --preset nndl --implementation explicit --execution eager --quick --threads 1"


@pytest.mark.usefixtures("small_presets")
def test_the_command_measures_prints_and_writes(entered, tmp_path):
    columns = 80
    (tmp_path / "a.md").write_text("before\n<!-- begin speed -->\n<!-- end speed -->\nafter\n")
    written = ("--json", tmp_path / "a.json", "--html", tmp_path / "a.html", "--markdown", tmp_path / "a.md")
    out, _ = entered(f"{SMALL} --backend {RIGHT} --backend {WRONG}", *written, columns=columns, ends=1)
    assert f"{WRONG} withheld: what it computed is wrong: logits" in " ".join(out.split())
    assert f"| {RIGHT} | explicit eager |" in (tmp_path / "a.md").read_text()
    assert "nndl inference full" in out
    assert max(len(line) for line in out.splitlines() if not line.startswith("written: ")) <= columns
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


# Speed on a GPU, which is made up here: its clock, its memory, its precision.


def test_on_a_device_no_step_waits_for_the_last_and_the_clock_and_memory_are_the_devices():
    bench, work = Bench(WithADevice()), small()
    asked = {
        **work.request(),
        "weights": None,
        "implementation": "explicit",
        "execution": "eager",
        "precision": "strict",
    }
    bench.prepare(**{**asked, "device": "cuda:1"})
    steps = bench.steps
    steps.said.clear()
    answer, _ = bench.repeat(4, 60.0)
    assert answer == {"seconds": [SECONDS] * 4, "peak_memory_bytes": WithADevice.held}
    one, four = (["synchronize", *["step"] * count, "synchronize"] for count in (1, 4))
    assert steps.said == one + four  # one to see how long it takes, then all in a row
    bench.prepare(**{**asked, "device": "cpu"})
    assert len(bench.repeat(2, 60.0)[0]["seconds"]) == 2


def test_a_gpu_gets_large_models_in_two_precisions():
    works = Models().workloads("cuda", None)
    chosen = Modes().modes(False, "cuda")
    assert {(work.preset.name, work.kind, work.dtype) for work in works} == set(
        itertools.product(("bert-base", "bert-large"), ("inference", "training"), ("float32", "bfloat16"))
    )
    assert len({work.name for work in works}) == len(works)
    assert {mode.execution for mode in chosen} == {"eager", "compiled"}


def test_a_large_workload_is_checked_by_a_few_samples(monkeypatch):
    assert truth.probe(workload("bert-base")) == workload("bert-base")
    few = truth.probe(workload("bert-large"))
    assert (few.preset.batch, few.preset.tokens, few.preset.config) == (
        truth.PROBE,
        512,
        workload("bert-large").preset.config,
    )
    monkeypatch.setattr(truth, "LARGE", 0.0)
    right, wrong = measured(plan_of(RIGHT, WRONG))["entries"]
    assert (right["status"], right["checked_samples"], wrong["status"]) == (
        "measured",
        truth.PROBE,
        "withheld",
    )
    assert right["turns"]


@pytest.mark.parametrize(
    ("precision", "dtype", "device", "rules"),
    [
        ("strict", "float32", "cuda", None),
        ("tf32", "float32", "cuda", "tf32"),
        ("tf32", "bfloat16", "cuda", None),
        ("default", "float32", "cuda", "tf32"),
        ("default", "float32", "cpu", None),
    ],
)
def test_results_are_judged_by_the_arithmetic_that_was_asked_for(precision, dtype, device, rules):
    about = {"precision_defaults": {"products": {"cpu": "float32", "cuda": "tf32"}}}
    settings = Setup(precision=precision, device=device)
    assert rules_of(Workload(small_preset(), dtype=dtype), settings, about) == rules


# What a training step that is timed has to be: AdamW's, and every other is refused.


def prepared(made, work):
    """Return what a backend computes before it is timed."""
    return Bench(made).prepare(**work.request())[1]


WRONG_STEPS = [
    (
        Program,
        {"learning_rate": 1.01 * RECIPE.learning_rate},
        {"epsilon_placement": "uncorrected"},
        {"bias_correction": False},
        {"decay_form": "alone"},
        {"undecayed": ("bias",)},
        {"beta2": 0.999},
    ),
    (EachStepTheFirst, {}),
    (OneGradientTwice, {}),
]


def test_a_right_optimizer_is_measured_and_a_wrong_one_refused():
    work = small("training")
    assert truth.expected(work).worst(prepared(Measurable(), work), Z)[0] < 1
    for program, *recipes in WRONG_STEPS:
        for fields in recipes:
            worst, tensor = truth.expected(work).worst(prepared(running(program, **fields)(), work), Z)
            assert worst > 3, (program, fields, tensor)


def test_a_session_that_does_not_show_its_optimizer_is_not_measured():
    with pytest.raises(
        Unsupported, match="numpy cannot be measured in training: its session has no method 'state'"
    ):
        prepared(running(WithoutItsState)(), small("training"))


def test_the_size_of_training_says_its_optimizer():
    assert size_of(described(small("training"))).endswith(" a step; updated by AdamW, rate 0.0004")
    assert size_of(described(small())).endswith(" a step")
