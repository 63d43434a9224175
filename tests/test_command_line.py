"""The command line: exit codes, refusals in one line each, what is printed and what is written."""

import io
import json
import os
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from concord import DISTRIBUTION, backends, spec
from concord.conformance import record, report
from concord.conformance.estimate import Z, rms_limit
from concord.conformance.report import within
from tests.toys.disturbed import name_of
from tests.toys.surroundings import (
    ROOT,
    commands,
    concord,
    errors,
    hide,
    hide_frameworks,
    offer,
    options,
    program,
    toy,
)

RIGHT, WRONG = toy("NumpyBackend"), toy("WrongAfterTheFirstLayer")
ONE = "--case bert-single --dtype float32"
RAGGED = "--case bert-ragged --dtype float64"


def test_a_check_takes_precision_and_repetition(entered, tmp_path):
    path, name = tmp_path / "out.json", toy("MultipliesInTf32")
    output, errors = entered(f"check --backend {name} {ONE} --precision tf32 --repeat 2 --json {path}")
    assert not errors
    assert "Conformance: model, explicit, eager, cpu, precision tf32" in " ".join(output.split())
    assert f"{name}: 2 runs each of 1 job: bit-equal" in output
    settings = record.read(path).outcome.settings
    assert (settings.precision, settings.repeat) == ("tf32", 2)


def test_a_check_needs_only_what_a_check_needs(tmp_path):
    """Pages, speed and random cases need more; a plain checkout may lack it."""
    names = ("jinja2", "markupsafe", "hypothesis", "distributed", "matplotlib", "keras")
    path = os.pathsep.join([str(hide(tmp_path, *names)), str(ROOT)])
    for line in (
        f"check --backend {RIGHT} {ONE}",
        f"doctor --backend {RIGHT}",
        "show variants bert",
    ):
        done = concord(line, PYTHONPATH=path)
        assert (done.returncode, errors(done.stderr)) == (0, ""), line


def test_the_installed_entrance_gives_the_same_exit_code():
    done = program(Path(sys.executable).with_name("concord"), "show", "variants", "brt")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("concord: error: unknown variant 'brt': did you mean 'bert'")


# Refusals.

REFUSED = {
    "check --backend troch --backend padle": (
        "unknown backend 'troch': did you mean 'torch'?",
        "unknown backend 'padle': did you mean 'paddle'?",
    ),
    "check --implementation explict": ("unknown implementation 'explict': did you mean 'explicit'?",),
    "check --repeat 0 --precision no": ("unknown precision 'no'", "--repeat is 0 but must be at least 1"),
    "speed --batch 99999999999999": ("--batch is 99999999999999 but must be at least 1 and at most",),
    "check --device gpu": ("--device is 'gpu' but must be",),
    "check --device cuda:x": ("--device is 'cuda:x' but must be",),
    "check --python troch=/usr/bin/python3": (
        "--python is 'troch=/usr/bin/python3': unknown backend 'troch': did you mean 'torch'?",
    ),
    "check --time-limit nan --memory-limit nan": (
        "--time-limit is nan but must be at least 0 and at most",
        "--memory-limit is nan but must be at least 1 and at most",
    ),
    "check --backend tests.toys.numpy_backend": (
        "unknown backend 'tests.toys.numpy_backend': must be a name, or a class as package.module:Class; "
        "its module is looked for in the current folder, in PYTHONPATH",
    ),
    "fuzz --shapes 99999999": ("--shapes is 99999999 but must be at least 1 and at most 10000",),
    "case export .": (f"{Path.cwd()}: holds something already; export into an empty folder",),
    "show report /dev/zero --html page.html": (
        "/dev/zero: cannot be read: is a device but must be a regular file",
    ),
    "check --threads -1 --python x": (
        "--python is 'x' but must be BACKEND=PATH",
        "--threads is -1",
    ),
    "check --backend torch --python jax=/usr/bin/python3": (
        "'jax' is given an interpreter but does not run; add --backend jax",
    ),
    "check --json /no/such/folder/out.json": (
        "/no/such/folder/out.json: cannot be written: No such file or directory",
    ),
    "golden docs/guides": ("docs/guides: holds no golden files (*.safetensors)",),
    "fuzz --time inf": ("--time is inf but must be at least 0 and at most",),
    "fuzz --out /dev/null/x": ("/dev/null/x: cannot be written: Not a directory",),
    "fuzz --backend troch --dtype float46 --part modle --cases 0": (
        "unknown backend 'troch': did you mean 'torch'?",
        "unknown dtype 'float46': did you mean 'float64'",
        "unknown part 'modle': did you mean 'model'",
        "--cases is 0 but must be at least 1",
    ),
    "mutants --backend torsh --mutant mask_mising --threads 0": (
        "--threads is 0",
        "unknown backend 'torsh': did you mean 'torch'?",
        "unknown mutant 'mask_mising': did you mean 'mask_missing'",
    ),
    "speed --kind infer --profile fast --budget -1": (
        "unknown kind 'infer'",
        "unknown profile 'fast'",
        "--budget is -1",
    ),
    "speed --markdown pyproject.toml": ("pyproject.toml: lacks the lines '<!-- begin speed -->'",),
    "train --lockstep --batch 3 --recipe adamw": (
        "--recipe is given but --variant is not: the standard case has batches and a recipe of its own",
        "--batch is given but --variant is not",
    ),
    "train --lockstep --variant bert --steps 0 --dtype float31": (
        "--steps is 0 but must be at least 1",
        "unknown dtype 'float31'",
    ),
    "train --lockstep --variant bert --set depth=3": ("unknown field in --set NAME=VALUE: 'depth'",),
}


def test_help_is_in_panels(entered):
    output, errors = entered("check -h")
    assert not errors
    assert "Usage: concord check [OPTIONS]" in output
    assert all(f"─ {panel} ─" in output for panel in ("Workers", "Cases", "A model of your own", "Output"))


def test_the_help_fits_a_screen(entered):
    output, errors = entered("--help", columns=80)
    assert not errors
    assert len(output.splitlines()) <= 40
    assert len({name.split()[0] for name in commands()}) <= 15


def test_version_is_that_of_the_package(invoke):
    assert invoke("--version") == (0, f"concord {metadata.version(DISTRIBUTION)}\n", [])


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_done_is_refused_in_a_line_for_each_problem(refused, line):
    narrowed = line.startswith("check") and not {"--variant", "--case", "--dtype", "--part"} & set(
        line.split()
    )
    errors = refused(f"{line} {ONE if narrowed else ''}")
    assert len(errors) == len(REFUSED[line])
    for error, expected in zip(errors, REFUSED[line], strict=True):
        assert error.startswith(expected)


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("check --json ''", "a name is required"),
        ("golden ''", "a name is required"),
        ("check --threads many", "--threads"),
        ("case export", "DIR"),
        ("chekc", "chekc"),
    ],
)
def test_what_cannot_be_parsed_is_refused_and_named(refused, line, option):
    errors = refused(line)
    (error,) = [error for error in errors if error.startswith("Error: ")]
    assert option in error


def test_markers_are_found_and_lines_kept_where_they_end_as_on_windows(tmp_path):
    page = tmp_path / "README.md"
    page.write_bytes(b"a\r\n<!-- begin check -->\r\nold\r\n<!-- end check -->\r\nb\r\n")
    assert (
        within(page, "check", "x\ny\n")
        == "a\r\n<!-- begin check -->\r\nx\r\ny\r\n<!-- end check -->\r\nb\r\n"
    )


def test_a_markdown_file_gets_the_table_between_its_markers(entered, refused, tmp_path):
    path, asked = tmp_path / "README.md", f"check --backend {RIGHT} {ONE} --markdown"
    path.write_text("text\n")
    lacks = f"{path}: lacks the lines '<!-- begin check -->' and '<!-- end check -->'"
    assert refused(f"{asked} {path} --json {tmp_path / 'out.json'}") == [lacks]
    assert [entry.read_text() for entry in tmp_path.iterdir()] == ["text\n"]
    path.write_text("before\n<!-- begin check -->\nold\n<!-- end check -->\nafter\n")
    entered(asked, path)
    before, begin, header, _, row, blank, under, end, after = path.read_text().splitlines()
    assert blank == ""
    assert under == f"1 run: 1 agrees; {RIGHT} {np.__version__}."
    assert (before, begin, end, after) == ("before", "<!-- begin check -->", "<!-- end check -->", "after")
    assert header == f"| variant | {RIGHT} |"
    assert row.startswith("| `bert` | f32 ")
    assert row.endswith(" ✓ |")


# What is printed.


@pytest.mark.parametrize("columns", [60, 200])
def test_variants_fit_the_terminal_and_nothing_is_cut_off(entered, columns):
    output, errors = entered("show variants", columns=columns)
    assert not errors
    assert max(map(len, output.splitlines())) <= columns
    assert "…" not in output
    assert all(name in output for name in spec.variants())
    assert "norm_placement" in output
    assert "tanh" in output
    assert output.count("norm_placement") == 1


def test_a_variant_is_printed_as_toml_that_reads_back(entered):
    output, errors = entered("show variants roberta")
    assert not errors
    assert spec.from_toml(output) == spec.variant("roberta")


def test_the_table_shows_every_variant_and_backend_in_any_width(tmp_path):
    packages = offer(hide_frameworks(tmp_path), alpha=RIGHT, omega=toy("ReturnsNaN"))
    cases = options("--case", [f"{name}-single" for name in spec.variants()])
    words = ["check", *cases, "--dtype", "float32", "--json", tmp_path / "out.json"]
    done = concord(*words, PYTHONPATH=str(packages), COLUMNS="60")
    assert (done.returncode, errors(done.stderr)) == (1, "")
    assert max(map(len, done.stdout.partition("A cell is")[0].splitlines())) <= 60
    wide = Console(width=200, file=io.StringIO())
    report.show(record.read(tmp_path / "out.json").outcome, wide, "")
    lines = wide.file.getvalue().splitlines()
    header = zip(*(line.split("┃")[1:-1] for line in lines if line.startswith("┃")), strict=True)
    names = [*backends.BUILT_IN, "alpha", "omega"]
    assert ["".join(cells).strip() for cells in header] == ["variant", *names]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [row[0] for row in rows] == spec.variants()
    for row in rows:
        *absent, right, wrong = row[-6:]
        assert (absent, right[-1], wrong) == (["f32 absent"] * 4, "✓", "f32 inf ✗")


def test_a_divergence_is_told_with_place_values_and_clause(entered):
    output, _ = entered(f"check --backend {WRONG} --case bert-ragged", ends=1)
    assert f"{WRONG} diverges: bert-ragged, float64" in output
    assert "\\n" not in output
    assert "first at layers.1.attention.scores (SPEC ATT-4), element (" in output
    told = " ".join(output.split())
    assert "tolerances, local error; " in told
    assert "at logits, end to end: " in told


def test_a_backend_that_is_absent_is_missing_only_if_it_was_asked_for(tmp_path):
    packages = offer(hide_frameworks(tmp_path), ghost="no_such_package.backend:Ghost", numpy=RIGHT)
    asked = concord(f"check --backend ghost --backend numpy {ONE}", PYTHONPATH=str(packages))
    assert (asked.returncode, errors(asked.stderr)) == (3, "")
    assert "ghost missing: No module named 'no_such_package'" in asked.stdout
    assert "1 agrees" in asked.stdout
    assert "1 missing" in asked.stdout
    everything = concord(f"check {ONE}", PYTHONPATH=str(packages))
    assert (everything.returncode, errors(everything.stderr)) == (0, "")
    assert "ghost absent (not asked for): No module named 'no_such_package'" in everything.stdout
    assert "torch absent (not asked for): No module named 'torch'" in everything.stdout
    assert "1 agrees, 5 absent" in everything.stdout


def test_doctor_tells_what_a_backend_is_and_runs_on(entered):
    output, errors = entered(f"doctor --backend {RIGHT} --threads 1")
    assert not errors
    assert f"{RIGHT}: ready" in output
    facts = dict(words for line in output.splitlines() if len(words := line.strip().split(maxsplit=1)) > 1)
    assert (facts["python"], facts["cores"]) == (sys.version.split()[0], str(os.cpu_count()))
    assert (facts["threads"], facts["devices"]) == ("1", "cpu")
    assert {"system", "memory", "version", "import_seconds"} <= facts.keys()
    assert "advice" not in output


def test_doctor_tells_what_is_wrong(tmp_path):
    packages = offer(hide_frameworks(tmp_path), ghost="no_such_package.backend:Ghost")
    broken = name_of("lacks a library", "found")
    asked = concord(
        f"doctor --backend ghost --backend {broken} --backend torch",
        PYTHONPATH=str(packages),
    )
    assert (asked.returncode, errors(asked.stderr)) == (3, "")
    assert "ghost: absent" in asked.stdout
    assert f"{broken}: broken" in asked.stdout
    assert "ImportError: libtoy.so.1: cannot open shared object file" in asked.stdout
    assert "pip install -e '.[torch]' -c constraints/py311.txt" in asked.stdout
    assert concord("doctor", PYTHONPATH=str(packages)).returncode == 0


# What is written.


def test_results_are_written_as_strict_json(invoke, tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")
    names = [RIGHT, WRONG, toy("ReturnsNaN")]
    code, _, _ = invoke(f"check {RAGGED} --threads 1 --json {path}", *options("--backend", names))
    data = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]
    assert (data["schema"], data["kind"], data["exit_code"], code) == ("concord.report/5", "check", 1, 1)
    settings = record.read(path).outcome.settings
    assert (settings.execution, settings.threads, settings.asked) == ("eager", 1, tuple(names))
    right, wrong, nan = (result["verdict"] for result in data["results"])
    assert 0 <= right["worst"] <= 1 < wrong["worst"]
    row, broken = (next(row for row in said["table"] if row["status"] != "agrees") for said in (wrong, nan))
    local = row["local"]
    ratio = max(local["z"] / Z, local["rms"] / rms_limit(local["independent"]))
    assert (wrong["first"], row["clause"]) == (row["tensor"], "ATT-4")
    assert row["ratio"] == float(f"{ratio:.4g}") > 1
    assert (nan["worst"], broken["ratio"], broken["local"]["actual"]) == ("inf", "inf", "nan")
    about = data["environments"][RIGHT]
    assert (about["threads"], about["devices"]) == (1, ["cpu"])
