import contextlib
import functools
import json
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from concord import spec
from concord.backends.interface import Unsupported
from concord.conformance.fuzz.hunt import hunt
from concord.conformance.fuzz.plan import MASK_VALUES, Plan, sample
from concord.conformance.fuzz.random_cases import KEY_MASKS, FuzzCase
from concord.conformance.fuzz.summary import write_failures
from concord.conformance.run import record
from concord.conformance.run.campaign import Setup
from concord.spec.batch import validate_batch
from concord.spec.config import CHOICES
from concord.spec.files import typed
from concord.spec.parameters import validate_weights
from tests.test_wire import assert_same_bits
from tests.toys.disturbed import name_of
from tests.toys.running import Running, noted, until
from tests.toys.small import run_case
from tests.toys.surroundings import errors, toy

RIGHT, WRONG, HANGS = toy("NumpyBackend"), toy("WrongAfterTheFirstLayer"), name_of("hangs")
DIES, RAISES = name_of("SIGKILL", "alone"), name_of("raises", "alone")
GHOST = "no_such_package.backend:Ghost"


@pytest.fixture
def invoke(invoke, monkeypatch, tmp_path):
    # Findings are written to the current folder, so each test has its own.
    monkeypatch.chdir(tmp_path)
    return lambda line="", *words, columns=200, command="fuzz": invoke(
        f"{command} {line}", *words, columns=columns
    )


def hunted(*names, time_limit=60, scheduler=None, **fields):
    plan = Plan(names=names, **{"shapes": 2, "parts": ("model",), **fields})
    return hunt(plan, Setup(asked=names, threads=1, time_limit=time_limit), scheduler)


# Findings.


def test_a_sound_backend_survives_and_is_measured():
    findings = hunted(RIGHT, cases=13, dtypes=("float32", "float64"), parts=tuple(spec.PARTS), shapes=3)
    assert (findings.failures, findings.notes, findings.exit_code, findings.cases) == ([], [], 0, 13)
    assert [(name, set(of)) for name, of in findings.tallies.items()] == [(RIGHT, {"float32", "float64"})]
    # In float64 this backend is the reference itself.
    for kind, statistics in findings.tallies[RIGHT]["float32"].statistics.items():
        assert 0 < statistics.z.value < 16
        assert 0 < statistics.rms.value < 4
        assert statistics.z.tensor.startswith("gradients.") == (kind == "gradients")


def test_a_wrong_backend_is_found_and_its_smallest_case_run_again(entered, tmp_path):
    out, json_, html = (tmp_path / name for name in ("out", "out.json", "out.html"))
    text, errors = entered(
        f"--backend {RIGHT} --backend {WRONG} --cases 8 --part model --shapes 3 --out {out} "
        f"--json {json_} --html {html}",
        ends=1,
    )
    assert not errors
    (folder,) = out.iterdir()
    written = json.loads((folder / "found.json").read_text())
    case = typed(FuzzCase, json.dumps(written["case"]))
    cases = sample(Plan(names=(), parts=("model",), shapes=3), range(8))
    wrong = [candidate for candidate in cases if candidate.config.num_layers > 1]
    assert case == min(wrong, key=lambda other: other.batch * other.tokens * other.config.d_model)
    assert f"{WRONG} diverges: fuzz-0-{cases.index(case)}, float32" in text
    assert f"concord case run {folder} --backend {WRONG}" in text
    findings = record.read(json_).outcome
    (failure,) = findings.failures
    assert (failure.case, failure.times, findings.exit_code) == (case, len(wrong), 1)
    assert f"{WRONG} failed in {len(wrong)} runs of 8 random cases, in 1 way." in html.read_text()

    output, _ = entered(f"run {folder} --backend {WRONG}", command="case", ends=1)
    assert "first at layers.1.attention.scores" in output


def test_crashes_and_exceptions_are_findings_and_a_backend_that_is_missing_is_owed(tmp_path):
    findings = hunted(GHOST, DIES, RAISES, RIGHT, cases=8)
    assert findings.exit_code == 3
    assert [
        (f.result.backend, f.result.status, f.result.detail, f.case.batch) for f in findings.failures
    ] == [
        (DIES, "crashed", "killed by SIGKILL", 1),
        (RAISES, "error", "ArithmeticError: it broke", 1),
    ]
    assert "last words" in findings.failures[0].result.stderr
    assert findings.tallies[RIGHT]["float32"].statuses == {"agrees": 8}
    assert findings.notes[0].startswith(
        f"{GHOST} is missing: No module named 'no_such_package'; Concord searches for"
    )
    assert write_failures(tmp_path / "found", findings, Setup()) == []
    assert all(Path(failure.folder, "found.json").is_file() for failure in findings.failures)
    for names, cases in (((GHOST,), 0), ((GHOST, RIGHT), 2)):
        findings = hunted(*names, cases=2)
        assert (findings.exit_code, findings.cases, findings.failures) == (3, cases, [])


def test_a_hang_is_found_once_and_ends_the_chunk_of_its_backend():
    findings = hunted(HANGS, RIGHT, cases=4, chunk=4, time_limit=7)
    (failure,) = findings.failures
    assert (failure.result.status, failure.times, findings.exit_code) == ("timed out", 1, 3)
    assert {name: tally.cases for name, _, tally in findings.each()} == {HANGS: 1, RIGHT: 4}
    assert findings.notes == [
        f"{HANGS}: timed out: no answer within 7 s; it was stopped; the rest of its 4 cases were skipped"
    ]


def test_different_failures_are_kept_apart_and_the_same_ones_counted():
    findings = hunted(toy("ReturnsNaN"), cases=8, parts=("model", "dot_product"))
    names = [failure.result.verdict.first for failure in findings.failures]
    assert sorted(names) == ["attention.context", "logits"]
    assert sum(failure.times for failure in findings.failures) == 8


def test_a_hunt_without_a_number_of_cases_ends_when_its_time_is_over():
    findings = hunted(RIGHT, cases=None, until=time.time() - 1, chunk=4)
    assert (findings.cases, findings.interrupted) == (0, False)


def test_a_hunt_that_could_not_be_judged_does_not_pass(monkeypatch):
    monkeypatch.setattr("concord.conformance.run.campaign.judge", lambda *arguments, **more: 1 / 0)
    findings = hunted(RIGHT, cases=2)
    assert (findings.failures, len(findings.notes), findings.exit_code) == ([], 1, 3)


# Workers.


@pytest.mark.filterwarnings("ignore")
def test_the_chunks_may_be_tasks_of_dask():
    distributed = pytest.importorskip("distributed", reason="distributed is not installed")

    def comparable(findings):
        failures = [(failure.signature, failure.times) for failure in findings.failures]
        kept = [record.plain(findings).get(key) for key in ("cases", "tallies", "notes")]
        return findings.exit_code, failures, kept

    options = {"cases": 5, "chunk": 2}
    with distributed.LocalCluster(
        processes=False, n_workers=1, threads_per_worker=2, dashboard_address=None
    ) as cluster:
        findings = hunted(RIGHT, RAISES, scheduler=cluster.scheduler_address, **options)
    assert comparable(findings) == comparable(hunted(RIGHT, RAISES, **options))


def test_without_dask_the_extra_is_named(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert refused(f"--backend {RIGHT} --scheduler tcp://localhost:1") == [
        "--scheduler needs distributed, which is not installed: pip install -e "
        "'.[dask]' -c constraints/py311.txt"
    ]


@pytest.mark.filterwarnings("ignore")
def test_a_scheduler_that_is_not_there_is_named_soon(refused, monkeypatch):
    pytest.importorskip("distributed", reason="distributed is not installed")
    monkeypatch.setattr("concord.conformance.fuzz.hunt.PATIENCE", 0.5)
    (error,) = refused(f"--backend {RIGHT} --scheduler tcp://127.0.0.1:9")
    assert error.startswith(
        "--scheduler is 'tcp://127.0.0.1:9' but no scheduler answers there within 0.5 s: "
    )


# The command line.


def test_a_folder_without_cases_cannot_be_run_again(refused, tmp_path):
    (line,) = refused(f"run {tmp_path}", command="case")
    assert line == f"{tmp_path} holds no case.json; export cases with 'concord case export'"


def test_a_device_that_is_not_there_is_said_in_a_line_with_what_is_seen(entered):
    output, _ = entered(f"--backend {RIGHT} --device cuda:3 --cases 100000", ends=3)
    assert f"{RIGHT} does not see cuda:3: its devices are cpu" in output
    assert "1 unsupported" in output  # the others would be too, and are not run


def test_an_interrupt_keeps_what_was_found(tmp_path):
    line = f"fuzz --backend {RAISES} --part model --cases 100000 --shapes 2 --out {tmp_path / 'out'}"
    command = Running(tmp_path, line, "--json", tmp_path / "out.json")
    assert until(lambda: len(noted(command.notes, "ran")) >= 20)
    command.process.send_signal(signal.SIGINT)
    assert command.end() == 130
    assert errors(command.said()).endswith("\nconcord: interrupted\n")
    assert "1 failure found" in command.said()
    assert len(list((tmp_path / "out").iterdir())) == 1
    assert len(record.read(tmp_path / "out.json").outcome.failures) == 1


# The four backends.


def assert_agrees(worker, case):
    job = case.job("random")
    with contextlib.suppress(Unsupported):
        run = run_case(worker, job, job.dtype, tap_gradients=True)
        verdict = job.judge(run)
        assert verdict.status != "diverges", f"{case}: {verdict}"


@pytest.mark.in_turn
@pytest.mark.parametrize("index", range(4))
def test_random_case_agrees(worker, index):
    for dtype in ("float64", "float32"):  # one tuple of sizes, since JAX compiles for each
        (case,) = sample(Plan(names=(), shapes=1, dtypes=(dtype,)), [index])
        assert_agrees(worker, case)


@pytest.mark.slow
def test_thousands_of_random_cases_agree(worker):
    for case in sample(Plan(names=(), seed=1, shapes=12), range(2000)):
        assert_agrees(worker, case)


# Random cases.


@functools.cache
def drawn_cases():
    return tuple(sample(Plan(names=(), dtypes=tuple(spec.PRECISIONS)), range(300)))


def test_every_case_is_one_that_the_specification_takes():
    assert len(set(drawn_cases())) == len(drawn_cases())
    for case in drawn_cases()[::7]:
        config, weights, batch = case.build()
        validate_weights(config, weights, case.part)
        validate_batch(config, batch, case.part)
        for array in [*weights.values(), *batch.arrays().values()]:
            assert array.dtype.kind != "f" or (array == array.astype(np.float32)).all()


def test_the_whole_option_space_is_drawn():
    configs = [case.config for case in drawn_cases()]
    for name in spec.FIELDS:
        values = {getattr(config, name) for config in configs}
        assert values >= {*CHOICES.get(name, ())}, name
        assert len(values) > 1, name
    assert set(MASK_VALUES) < {config.mask_value for config in configs}
    drawn = {"part": spec.PARTS, "profile": spec.PROFILES, "padding": PADDED, "key_mask": KEY_MASKS}
    for name, choices in {**drawn, "dtype": spec.PRECISIONS}.items():
        assert {getattr(case, name) for case in drawn_cases()} == set(choices), name


# Where rows may have padding, by the padding of the case.
PADDED = {
    "none": {"full"},
    "tail": {"full", "behind"},
    "inside": {"full", "behind", "in front", "around", "inside"},
    "front": {"full", "in front"},
    "left": {"full", "in front"},
    "rows": {"full", "empty"},
    "all": {"empty"},
}


def where_padded(real):
    (places,) = np.nonzero(real)
    if len(places) in (0, len(real)):
        return "full" if len(places) else "empty"
    if places[-1] - places[0] >= len(places):
        return "inside"
    return {0: "behind", len(real) - len(places): "in front"}.get(places[0], "around")


def texts_of(padding, batch, tokens, **sizes):
    # Options that leave room for texts of any length and vocabulary.
    (usual,) = sample(Plan(names=(), parts=("encoder",)), [0])
    none = ("segment_padding_row", "token_padding_row", "position_padding_row")
    config = usual.config.replace(
        pad_id=3,
        num_segments=0,
        position_of_padding="counted",
        position_start=0,
        token_padding_forward="stored",
        **dict.fromkeys(none),
        **sizes,
    )
    case = replace(usual, config=config, batch=batch, tokens=tokens, padding=padding)
    return case.build()[2].required("input_ids")


@pytest.mark.parametrize("padding", PADDED)
def test_padding_is_what_it_is_called(padding):
    real = texts_of(padding, 512, 9, vocab_size=19, max_positions=40) != 3
    assert {where_padded(row) for row in real} == PADDED[padding]
    assert padding != "left" or sum(not row[0] for row in real) == 1


def test_a_large_table_is_used_to_its_end_and_often():
    ids = texts_of("none", 2, 290, vocab_size=70_001, max_positions=300)
    assert {255, 256, 257, 65_535, 65_536, 65_537, 70_000} <= set(ids.ravel().tolist())
    assert np.unique(ids, return_counts=True)[1].max() > 9


def test_a_case_follows_from_seed_and_number_alone():
    plan = Plan(names=(), seed=4)
    _, first, second = sample(plan, range(3))
    assert sample(replace(plan, chunk=3, cases=7, names=("x",)), [2, 1]) == [second, first]
    assert sample(replace(plan, seed=5), [2]) != [second]
    (_, weights, batch), (_, expected, inputs) = (
        case.build() for case in (typed(FuzzCase, json.dumps(record.plain(second))), second)
    )
    assert_same_bits({**weights, **batch.arrays()}, {**expected, **inputs.arrays()})
