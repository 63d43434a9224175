import re
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from concord import DISTRIBUTION, spec
from concord.backends.cores import available_cores
from concord.conformance.run import record
from tests.toys.disturbed import name_of
from tests.toys.surroundings import commands, hide_frameworks, offer, options, program, toy

RIGHT = toy("NumpyBackend")
ONE = "--case bert-single --dtype float32"


def test_a_check_takes_precision_and_repetition(entered, tmp_path):
    path, name = tmp_path / "out.json", toy("MultipliesInTf32")
    asked = f"--backend {name} --precision tf32 --repeat 2 --threads 1 --time-limit 59 --json {path}"
    output, errors = entered(f"check {ONE} {asked}")
    assert not errors
    assert "Conformance: model, explicit, eager, cpu, precision tf32" in " ".join(output.split())
    assert f"{name}: 2 runs of 1 job: the same bits" in output
    settings = record.read(path).outcome.settings
    assert (settings.precision, settings.repeat, settings.threads, settings.time_limit) == ("tf32", 2, 1, 59)
    assert settings.asked == (name,)


def test_the_installed_entrance_gives_the_same_exit_code():
    done = program(Path(sys.executable).with_name("concord"), "show", "variants", "brt")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("concord: error: unknown variant 'brt': did you mean 'bert'")


# Refusals.

REFUSED = {
    "check --repeat 0 --precision no": ("unknown precision 'no'", "--repeat is 0 but must be at least 1"),
    "speed --batch 99999999999999": ("--batch is 99999999999999 but must be at least 1 and at most",),
    "check --device cuda:x": ("--device is 'cuda:x' but must be",),
    "check --threads -1 --time-limit nan --memory-limit nan --python x": (
        "--python is 'x' but must be BACKEND=PATH",
        "--time-limit is nan but must be at least 0 and at most",
        "--memory-limit is nan but must be at least 1 and at most",
        "--threads is -1",
    ),
    "check --backend tests.toys.numpy_backend": (
        "unknown backend 'tests.toys.numpy_backend': it must be one of torch, tf, paddle, jax "
        "(a class of your own: package.module:Class)",
    ),
    "case export .": (f"{Path.cwd()} is not empty; export into an empty folder",),
    "show report /dev/zero --html page.html": (
        "/dev/zero: cannot be read: it is a device but must be a regular file",
    ),
    "check --backend torch --python jax=/usr/bin/python3": (
        "--python names 'jax', which is not among the backends to run; add --backend jax",
    ),
    "golden docs/guides": ("docs/guides holds no golden files (*.safetensors)",),
    "fuzz --out /dev/null/x": ("/dev/null/x: cannot be written: Not a directory",),
    "fuzz --backend troch --dtype float46 --part modle --cases 0": (
        "unknown backend 'troch': did you mean 'torch'?",
        "unknown dtype 'float46': did you mean 'float64'",
        "unknown part 'modle': did you mean 'model'",
        "--cases is 0 but must be at least 1",
    ),
    "demo --backend tests.toys.numpy_backend:Right": ("unknown backend 'tests.toys.numpy_backend:Right'",),
    "check --case nosuch": ("unknown case 'nosuch': it must be one of",),
    "speed --preset nosuch": ("unknown preset 'nosuch': it must be one of",),
    "port none -o new --to jaxx": ("unknown format 'jaxx': did you mean 'jax'",),  # before SRC is read
    "port none -o docs --to jax": ("docs has neither config.toml nor config.json nor",),
    "port /none -o . --to jax": (". is the current folder, which cannot be replaced",),
    "mutants --backend torsh --mutant mask_mising --threads 0": (
        "--threads is 0",
        "unknown backend 'torsh': did you mean 'torch'?",
        "unknown mutant 'mask_mising': did you mean 'mask_missing'",
    ),
    "speed --kind infer --budget -1": ("unknown kind 'infer'", "--budget is -1"),
    "lockstep --batch 3 --recipe adamw": (
        "--recipe is given but neither --variant nor CHECKPOINT is: the standard case has its own batches",
        "--batch is given but neither --variant nor CHECKPOINT is",
    ),
    "lockstep --variant bert --steps 0 --dtype float31": (
        "--steps is 0 but must be at least 1",
        "unknown dtype 'float31'",
    ),
}


def own_options(command):
    return [
        option
        for option in command.params
        if option.param_type_name == "option" and not option.name.startswith("help")
    ]


@pytest.mark.parametrize("line", ["", "show", "case"])
def test_without_a_command_the_help_is_shown_and_no_empty_error(entered, line):
    output, errors = entered(line, ends=2)
    assert f"Usage: {' '.join(['concord', line]).strip()} [OPTIONS] COMMAND" in output
    assert not errors


def test_the_help_fits_a_screen(entered):
    output, errors = entered("--help", columns=80)
    assert not errors
    assert len(output.splitlines()) <= 40
    assert "For maintainers" in output


@pytest.mark.parametrize("line", [*commands()])
def test_the_help_of_a_command_is_a_screen_and_names_every_option(entered, line):
    screen, errors = entered(f"{line} --help", columns=80)
    full, _ = entered(f"{line} --help-all", columns=80)
    assert not errors
    assert len(screen.splitlines()) <= 24
    assert max(map(len, screen.splitlines())) <= 80
    assert "…" not in screen
    assert "--help-all" in screen
    for option in own_options(commands()[line]):
        assert option.opts[0] in screen
        assert option.opts[0] in full


def test_options_are_few_and_those_that_commands_share_stand_last():
    declared = set()
    for name, command in commands().items():
        parameters = own_options(command)
        shared = [option.rich_help_panel in ("Workers", "Output") for option in parameters]
        assert shared == sorted(shared), name
        assert len(parameters) <= 23, name
        declared |= {(option.opts[0], option.help) for option in parameters}
    assert len(declared) <= 90


def test_version_is_that_of_the_package(invoke):
    assert invoke("--version") == (0, f"concord {metadata.version(DISTRIBUTION)}\n", [])


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_done_is_refused_in_a_line_for_each_problem(refused, line):
    errors = refused(line)
    assert len(errors) == len(REFUSED[line])
    for error, expected in zip(errors, REFUSED[line], strict=True):
        assert error.startswith(expected)


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("check --json ''", "a name is required"),
        ("check --threads many", "--threads"),
        ("case export", "DIR is not given but is required"),
        ("port checkpoint", "--output is not given but is required"),
        ("chekc", "chekc"),
    ],
)
def test_what_cannot_be_parsed_is_refused_and_named(refused, line, option):
    (error,) = refused(line)
    assert option in error


def test_a_markdown_file_gets_the_table_between_its_markers(entered, refused, tmp_path):
    path, json_ = tmp_path / "README.md", tmp_path / "out.json"
    entered(f"check --backend {RIGHT} {ONE} --json {json_}")
    line = f"show report {json_} --markdown {path}"
    path.write_text("text\n")
    lacks = f"{path} lacks the lines '<!-- begin check -->' and '<!-- end check -->'"
    assert refused(line) == [lacks]
    assert path.read_text() == "text\n"
    path.write_text("before\n<!-- begin check -->\nold\n<!-- end check -->\nafter\n")
    entered(line)
    before, begin, header, _, row, _, under, end, after = path.read_text().splitlines()
    assert (before, begin, end, after) == ("before", "<!-- begin check -->", "<!-- end check -->", "after")
    assert header == f"| variant | {RIGHT} |"
    assert re.fullmatch(r"\| `bert` \| f32 .* ✓ \|", row)
    assert under == f"1 run: 1 agrees; {RIGHT} {np.__version__}."


# Printed output.


def test_a_variant_is_printed_as_toml_that_reads_back(entered):
    output, errors = entered("show variants roberta")
    assert not errors
    assert spec.from_toml(output) == spec.variant("roberta")


def test_the_scenarios_of_each_variant_are_listed(entered):
    assert re.search("bert-pytorch  .* equal, ignored-label\n", entered("show variants")[0])


@pytest.fixture
def without_frameworks(tmp_path, monkeypatch):
    # Two backends are on offer, one of which cannot be imported.
    packages = offer(hide_frameworks(tmp_path), ghost="no_such_package.backend:Ghost", numpy=RIGHT)
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("PYTHONPATH", str(packages))


@pytest.mark.usefixtures("without_frameworks")
def test_a_backend_that_is_absent_is_missing_only_if_it_was_asked_for(entered):
    output, _ = entered(f"check --backend ghost --backend torch {ONE}", ends=3)
    assert "ghost missing: No module named 'no_such_package'" in output
    assert "torch missing: No module named 'torch'; install it with: pip install" in output
    output, _ = entered(f"check {ONE}")
    assert "ghost absent (not requested): No module named 'no_such_package'" in output
    assert "torch absent (not requested): No module named 'torch'" in output
    assert "1 agrees, 5 absent" in output


@pytest.mark.usefixtures("without_frameworks")
def test_doctor_tells_what_a_backend_is_and_what_is_wrong(entered):
    broken = name_of("lacks a library", "found")
    names = options("--backend", [RIGHT, "ghost", broken, "torch"])
    output, _ = entered("doctor --threads 1", *names, ends=3)
    assert f"{RIGHT}: ready" in output
    facts = dict(words for line in output.splitlines() if len(words := line.strip().split(maxsplit=1)) > 1)
    assert (facts["cores"], facts["threads"], facts["devices"]) == (str(available_cores()), "1", "cpu")
    assert "ghost: absent" in output
    assert f"{broken}: broken" in output
    assert "ImportError: libtoy.so.1: cannot open shared object file" in output
    assert "pip install -e '.[torch]' -c constraints/py311.txt" in output
