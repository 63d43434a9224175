"""The README and the guides tell the truth."""

import csv
import importlib
import json
import re
import runpy
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from concord import DISTRIBUTION, backends, porting, spec
from concord.conformance.compare import DECLARATIONS
from tests.toys import surroundings

ROOT = Path(__file__).parent.parent
NUMBERS = dict(enumerate(["six", "seven", "eight", "nine", "ten", "eleven", "twelve"], start=6))
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs/guides/from-model-to-verdict.md").read_text()
ANY_MODEL = (ROOT / "docs/guides/any-model.md").read_text()


def blocks(text, language=""):
    return [
        body
        for tag, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        if tag == language
    ]


def commands(text):
    # In blocks of their own, and in sentences.
    shown = [
        line for block in blocks(text) for line in re.findall(r"^ *(concord [a-z-]+ .*)", block, re.MULTILINE)
    ]
    return shown + [
        " ".join(code.split())
        for code in re.findall(r"(?<!`)`(concord [a-z-]+ [^`]+)`", text)
        if "…" not in code and " ".join(code.split()[1:]) not in surroundings.commands()
    ]


def sentences(text):
    # In paragraphs, items and cells, without blocks of code.
    text = re.sub(
        r"^```.*?^```$|<!-- begin .*?<!-- end \w+ -->|^\|[ -:|]*\|$",
        "\n\n",
        text,
        flags=re.DOTALL | re.MULTILINE,
    )
    text = re.sub(r"!?\[((?:[^\[\]]|!\[[^]]*\]\([^)]*\))*)\]\([^)]*\)", r"\1", text)  # a link is its words
    text = re.sub(r"`[^`]*`", "code", text)
    for block in re.split(r"\n\s*\n|\n(?=[-*#|>]|\d+\. )|\|", text):
        yield from (
            " ".join(sentence.split()) for sentence in re.split(r"(?<=[.?!])[*)\"]*\s", block.strip("#-* \n"))
        )


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = sorted({(page.name, line) for page in PAGES for line in commands(page.read_text())})


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "decisions"], ids=str)
def test_sentences_are_short_and_have_plain_subjects(page):
    prose = list(sentences(page.read_text()))
    assert [sentence for sentence in prose if len(sentence.split()) > 25] == []
    assert [sentence for sentence in prose if sentence.startswith("What ") and sentence.endswith(".")] == []


def test_readme_is_short_and_counts_what_there_is():
    assert len(README.splitlines()) <= 120
    assert f"[{len(porting.formats())} formats]" in README
    assert f"[{NUMBERS[len(spec.variants())]} published sources]" in README
    assert re.findall(r"\| `([\w-]+)` \|", README) == list(spec.variants())


# Pages about the present; decisions describe the past.
CURRENT = [path for path in [*PAGES, *ROOT.glob("*/*/README.md")] if "decisions" not in path.parts]


@pytest.mark.parametrize("page", CURRENT, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_and_counts_are_those_of_today(page):
    text = page.read_text()
    counted = re.findall(rf"(first )?\b({'|'.join(NUMBERS.values())}) (?:variants|published sources)\b", text)
    assert {number for first, number in counted if not first} <= {NUMBERS[len(spec.variants())]}
    assert f"{DISTRIBUTION}[" not in text  # the project is on no index
    for name in re.findall(r"`concord ((?:case |show )?[a-z]+)[ `]", text):
        assert name in surroundings.commands() or name in ("case", "show")


@pytest.mark.xdist_group("paddle")
def test_examples_run_and_pass(capsys, monkeypatch, open_worker):
    worker = open_worker("paddle")
    monkeypatch.setattr(backends, "open", lambda name, device: nullcontext(worker))
    modules = pytest.importorskip("tests.toys.modules")
    namespace = {
        "model": modules.encoder(),
        "port": modules.encoder(modules.Fused),
        "inputs": modules.texts(),
    }
    for example in blocks(README, "python"):
        exec(example, namespace)
    rows = re.findall(r"│ (port|onnx|half) +│ (\w+) ", capsys.readouterr().out)
    assert {"port": "agrees", "half": "agrees"}.items() <= dict(rows).items(), "ONNX Runtime may be missing"
    assert namespace["verdict"].passed, namespace["verdict"].first_divergence
    assert len(namespace["verdict"].table) > 50


def test_every_declaration_is_in_the_guide():
    table = ANY_MODEL.partition("| declaration | meaning |")[2].partition("\n\n")[0]
    assert {*re.findall(r"`(\w+)`[,| ]", table)} - {"output", "scaled_dot_product_attention"} == {
        *DECLARATIONS
    }


def test_every_command_is_named():
    table = README.partition("## One command line")[2].partition("\nExit codes")[0]
    named = {name.removeprefix("concord ") for name in re.findall(r"`((?:concord )?[a-z ]+)`", table)}
    assert named == set(surroundings.commands())


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_commands_that_are_shown_have_the_options_that_they_show(page, line):
    words = shlex.split(line, comments=True)[1:]
    by_name = surroundings.commands()
    name = next(name for name in (" ".join(words[:2]), words[0]) if name in by_name)
    # Parsing refuses unknown options, and runs nothing.
    with by_name[name].make_context(name, words[len(name.split()) :]) as parsed:
        assert not parsed.args


def test_records_of_a_gpu_are_made_by_commands_that_exist(refused, tmp_path):
    done = surroundings.program("make", "-n", "gpu-records", "DEVICE=tpu", f"GPU={tmp_path}")
    lines = re.findall(r"timeout -k 20 120 .*? -m concord (.*?) > ", done.stdout.replace("\\\n", " "))
    assert len(lines) == 40
    assert [line.split()[0] for line in (lines[1], lines[-1])] == ["check", "speed"]
    short = {re.sub(r" --variant \S+| --json \S+", "", line).replace("jax", "torch") for line in lines}
    for line in sorted(short):
        assert refused(line) == ["--device is 'tpu' but must be cpu, cuda or cuda:N"], line


def test_tables_of_a_gpu_hold_the_runs_that_are_said():
    results = ROOT / "conformance/results"
    for row in re.findall(r"^\| (`.*\.tsv`.*) \|$", (results / "README.md").read_text(), re.MULTILINE):
        names, _, number, flagged = row.split(" | ")
        runs = []
        for name in re.findall(r"`(.*?)`", names):
            with (results / "gpu" / name).open() as table:
                runs += csv.DictReader(table, delimiter="\t")
        times, count = re.match(r"(?:(\d) x )?(\d+)", number).groups()
        assert sum(run["status"] != "not run" for run in runs) == int(times or 1) * int(count)
        assert sum(run["status"] == "diverges" for run in runs) == int(re.match(r"\d+", flagged)[0])
        assert all(float(run["tolerances"]) <= 1 for run in runs if run["status"] == "agrees")
    assert sum(path.stat().st_size for path in (results / "gpu").iterdir()) < 500_000


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


def test_guide_to_any_model_says_what_the_command_and_its_script_say(folder, entered, capsys):
    pytest.importorskip("torch")
    (folder / "mine.py").write_text(blocks(ANY_MODEL, "python")[1])
    line, verdict, script, *_ = blocks(ANY_MODEL)
    output, _ = entered(line.removeprefix("concord "), ends=1)
    assert without_numbers(verdict) in without_numbers(output)
    runpy.run_path("report.py", run_name="__main__")
    assert without_numbers(capsys.readouterr().out) == without_numbers(script)


def test_guides_to_a_verdict_and_to_speed_say_what_the_programs_say(folder, capsys, monkeypatch, entered):
    pytest.importorskip("torch")
    model = (ROOT / "examples/encoder/mine.py").read_text()
    (timed,) = blocks((ROOT / "docs/guides/speed.md").read_text(), "python")
    (folder / "verdict.py").write_text((ROOT / "examples/encoder/verdict.py").read_text())
    (folder / "timed.py").write_text(timed)
    monkeypatch.setattr(sys, "argv", ["verdict.py"])
    shown = [block for block in blocks(GUIDE) if block.startswith("generic: ")]
    for output, patch in zip(shown, ["", *blocks(GUIDE, "diff")], strict=True):
        model = fixed(model, patch)
        (folder / "mine.py").write_text(model)
        sys.modules.pop("mine", None)
        importlib.invalidate_caches()
        defined = runpy.run_path(str(folder / "verdict.py"), run_name="__main__")
        assert without_numbers(capsys.readouterr().out) == without_numbers(output)
    (folder / "mine.toml").write_text(defined["config"].to_toml())
    entered(
        "speed --backend timed:Backend --preset mine.toml --quick --implementation explicit "
        "--execution eager --kind training --threads 1 --json speed.json"
    )
    (entry,) = json.loads((folder / "speed.json").read_text())["entries"]
    assert (entry["status"], entry["checked_samples"]) == ("measured", 8)


def fixed(program, patch):
    for wrong, right in zip(
        re.findall(r"^-(.*)", patch, re.MULTILINE), re.findall(r"^\+(.*)", patch, re.MULTILINE), strict=True
    ):
        assert wrong in program
        program = program.replace(wrong, right)
    return program


def without_numbers(text):
    # Another processor or version may round the numbers differently, and so have another closest call.
    # A line may wrap elsewhere.
    text = re.sub(r"(?<=tensors is )\S+", "#", " ".join(text.split()))
    return re.sub(r"(?<![\w.-])[-±]?\d[\d.,e+-]*", "#", text)


def test_guides_and_reference_make_a_site_without_dead_links(tmp_path):
    pytest.importorskip("mkdocs")
    build = f"make tree && {sys.executable} -m mkdocs build --strict --site-dir {tmp_path}"
    done = surroundings.program("bash", "-c", build, patience=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "side-by-side" / "layers.html").is_file()
    page = (tmp_path / "reference" / "spec" / "index.html").read_text()
    assert [name for name in spec.__all__ if f'.{name}"' not in page] == []
