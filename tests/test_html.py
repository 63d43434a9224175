"""The page: it says everything, needs nothing else, and escapes whatever a backend says."""

import base64
import hashlib
import html
import io
import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from rich.console import Console

from concord import writing
from concord.conformance import record
from concord.conformance.campaign import Report, Setup
from concord.conformance.drawing import FOLDER
from concord.conformance.html import FINDINGS, OPEN, headline, page
from concord.conformance.mutants.matrix import Finding, Matrix
from concord.conformance.report import failures
from tests.toys import reports
from tests.toys.surroundings import ROOT, concord, options, toy

VOID = {"meta", "link", "br", "img", "input", "hr", "wbr"}
MOST = 3 * 2**20


class Outline(HTMLParser):
    """The structure of a page.

    What is not balanced, every tag with its attributes, and the text of each kind of element.
    """

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.wrong = []
        self.tags = []
        self.texts = []
        self.feed(text)
        self.close()
        self.wrong += [f"{tag} is never closed" for tag in self.open]

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()
        else:
            self.wrong.append(f"line {self.getpos()[0]}: </{tag}> in {self.open[-3:]}")

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def attributes(self, name):
        return [
            value
            for _, attributes in self.tags
            for key, value in attributes.items()
            if key == name and value is not None
        ]


def said(text):
    """Return what a page says, without markup, in one line."""
    body = re.sub(r"<style>.*?</style>|<script>.*?</script>|<wbr>", "", text, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def script_of(outline):
    """Return the one script of a page, which its own policy lets run, and nothing else."""
    (attributes,) = [attributes for tag, attributes in outline.tags if tag == "script"]
    assert attributes == {}
    script = "".join(text for tag, text in outline.texts if tag == "script")
    (policy,) = [
        attributes["content"]
        for tag, attributes in outline.tags
        if tag == "meta" and "http-equiv" in attributes
    ]
    seal = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{seal}'"
    return script


def page_of(report, kind="check", title="what was run"):
    return page(record.made(report, kind, title))


@pytest.fixture(scope="module")
def mixed():
    return page_of(reports.mixed())


REPORTS = {
    "everything": reports.mixed,
    "agreement": reports.agreeing,
    "nothing": lambda: Report([], {}, Setup()),
    "only failures": lambda: Report(
        [reports.result("tf", "missing", detail="No module named 'tf'")], {}, Setup()
    ),
    "a case that diverges in every run": lambda: reports.large(wrong=3, cases=2),
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_is_well_formed_and_needs_nothing_else(name):
    text = page_of(REPORTS[name](), "golden" if name == "agreement" else "check")
    outline = Outline(text)
    assert outline.wrong == []
    tags = {tag for tag, _ in outline.tags}
    assert not tags & {"link", "img", "iframe", "object", "embed", "base", "form"}
    assert script_of(outline) == (FOLDER / "page.js").read_text()
    for attribute in ("src", "href", "xlink:href", "action", "data", "srcset"):
        assert all(value.startswith("#") for value in outline.attributes(attribute))
    assert not re.search(r"https?://|@import|url\(|javascript:", text)
    identities = outline.attributes("id")
    assert len(identities) == len(set(identities))
    assert {value.removeprefix("#") for value in outline.attributes("href")} <= set(identities)
    assert not [key for _, attributes in outline.tags for key in attributes if key.startswith("on")]


def test_a_page_can_be_read_without_eyes_for_colour_or_at_all(mixed):
    outline = Outline(mixed)
    assert dict(outline.tags)["html"] == {"lang": "en"}
    assert all(
        attributes.get("aria-label") or attributes.get("aria-hidden")
        for tag, attributes in outline.tags
        if tag == "svg"
    )
    assert all(attributes.get("scope") in ("col", "row") for tag, attributes in outline.tags if tag == "th")
    headings = [int(tag[1]) for tag, _ in outline.tags if re.fullmatch("h[1-6]", tag)]
    assert headings.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(headings))
    assert {"0.10 ✓ agrees", "1e9 ✗ diverges", "inf ✗ diverges"} <= set(
        re.findall(r"[\w.]+ [✓✗] (?:agrees|diverges)", said(mixed))
    )


TOLD = (
    # Every backend, case and status.
    *("torch", "my.plugin:Backend", "half", "bert-ragged", "bert-full", "what was run"),
    "12 runs: 3 agree, 1 absent, 1 unsupported, 1 undetermined, 2 crashed, 4 diverge",
    # First divergences.
    "my.plugin:Backend diverges first at layers.1.attention.scores (SPEC ATT-2)",
    "float32: element (0, 1)",
    "500 tolerances (largest error 8e+03 σ of 16 allowed, RMS 1e+03 of 4); 1 of 6 elements lie beyond.",
    "first at layers.1.attention.scores (SPEC ATT-2), element (0, 1) : 1e+09, oracle 0.5, tolerance ±1. "
    "1e9 tolerances; 1 of 11 tensors lie beyond their tolerance. Told above.",
    "End to end it is 250 tolerances. At the logits, end to end, it is 250 tolerances; 1 of 11 tensors "
    "lie beyond",
    "Likely cause: The scores are too large by a factor of 1.001. [scale]",
    "jax diverges first at layers.0.attention.weights (SPEC ATT-2)",
    "has shape (2, 3) but must be (3, 2)",
    # What failed.
    "tf: crashed killed by SIGSEGV bert-ragged, float32, and 1 more run The last lines of its process "
    "first words last words",
    "paddle absent, and not asked for: No module named 'paddle'",
    "jax unsupported: no such precision",
    "half , float16: undetermined: the precision determines none of its tensors",
    # Environments and notes.
    "precision switches matmul: highest; tf32: off",
    "peak memory 256 MiB",
    "Declared deviation from SPEC ATT-5: softmax_floor = -64.0 the kernel clips",
    "It never came to describing itself.",
    "not compared, 3 x lr: belongs to the optimizer",
    # A tensor that diverges, to be opened, and the table of all.
    "1 tensor beyond its tolerance, each to be opened ✗ layers.1.attention.scores : 1e9 tolerances, "
    "local error, 1 of 6 elements beyond",
    "batch ↓ 2 × classes → 3 0 1 beyond at batch 0; classes 1",
    "batch classes Backend oracle tolerance error in tolerances 0 1 500.5 0.5 1 500",
    "tensor clause torch f32 torch f64 Backend f32 Backend f64 jax f32 half f16",
    "layers.1.attention.scores ATT-2 0.10 0.10 500 ✗ 1e9 ✗ not exposed undetermined",
)
ONCE = ("Exit code 3", "The scores are too large", "Declared deviation from")


def test_a_page_tells_everything_once(mixed):
    words = said(mixed)
    assert [one for one in TOLD if one not in words] == []
    assert [words.count(one) for one in ONCE] == [1] * len(ONCE)
    assert "published" not in words
    # Two findings of numbers, and each of the three runs once more with its case.
    assert mixed.count('<svg class="heat"') == 2 + 3
    assert Outline(mixed).attributes("data-find") == ["a tensor"] * 2


def test_parts_of_a_case_are_apart_and_golden_pages_speak_of_published_tensors():
    wrong = reports.verdict(wrong=2)
    results = [reports.result(judged=wrong, part=part) for part in ("model", "stack", "model")]
    text = page_of(Report(results, {}, Setup()), "golden")
    assert text.count('<details id="case-') == 2
    assert "torch diverges from the published tensors in 3 of 3 runs." in said(text)


def test_grave_cases_come_first_and_open_and_agreeing_ones_folded(mixed):
    details = re.findall(r'<details id="case-(\d+)"( open)?>', mixed)
    assert details == [("1", " open"), ("2", " open")]
    folded = re.findall(r'<details id="case-(\d+)"( open)?>', page_of(reports.agreeing()))
    assert folded == [("1", ""), ("2", "")]
    runs = [("torch", "a", 0.1), ("torch", "b", 500.0), ("torch", "c", 0.1), ("tf", "c", None)]
    results = [
        reports.result(
            name,
            "crashed" if ratio is None else None,
            None if ratio is None else reports.verdict(wrong=2 if ratio > 1 else None),
            case=case,
        )
        for name, case, ratio in runs
    ]
    text = page_of(Report(results, {}, Setup()))
    assert re.findall(r'<details id="case-\d+"( open)?>\n<summary>.*?<h3>(\w)</h3>', text) == [
        (" open", "b"),
        (" open", "c"),
        ("", "a"),
    ]


@pytest.mark.parametrize("wrong", [None, 3])
def test_the_page_of_a_whole_check_stays_small(wrong):
    report = reports.large(wrong)
    assert len(report.results) == 352
    text = page_of(report)
    assert len(text.encode()) < MOST
    assert len(re.findall(r"<[a-z]", text)) < 50_000
    if wrong:  # of many grave cases only some are open
        assert text.count('<details id="case-') == 44
        assert len(re.findall(r'<details id="case-\d+" open>', text)) == OPEN
        assert text.count('<article class="card finding">') <= FINDINGS


def test_the_same_finding_is_told_once():
    names = [f"layers.{layer}.attention.scores" for layer in range(2)]
    results = [
        reports.result(
            "torch",
            judged=reports.verdict(
                wrong=layer, cause=reports.CAUSE, tensors=[(name, "ATT-4") for name in names]
            ),
            case=f"case-{layer}",
        )
        for layer in range(2)
    ]
    report = Report(results, {}, Setup())
    text = page_of(report)
    assert text.count('<article class="card finding"') == 1
    assert said(text).count(reports.CAUSE.text) == 1
    assert "The same tensor comes first in 1 more run" in said(text)
    console = Console(width=200, file=io.StringIO(), color_system=None)
    console.print(failures(report))
    told = console.file.getvalue()
    assert told.count("torch diverges:") == 1
    assert told.count(reports.CAUSE.text) == 1
    assert "likewise in case-1 f32 (500)" in told


def test_every_kind_of_record_has_a_page():
    kinds = {}
    for path in sorted((ROOT / "conformance/results").glob("*.json")):
        made, text = writing.read_page(path)
        outline = Outline(text)
        assert outline.wrong == []
        script_of(outline)
        kinds[made.kind] = said(text)
    assert kinds.keys() == {"fuzz", "speed", "lockstep", "mutants"}
    found = Finding(
        "gelu_quick",
        "torch",
        "found",
        "logits",
        500.0,
        "bert-ragged",
        "float64",
        row=reports.row("logits", "HED-3", 500.0),
    )
    kinds["mutants"] = said(page(record.made(Matrix([found], (), {"torch": "2.0"}), "mutants")))
    for name, sentence in (
        ("fuzz", "nothing was found in 500 random cases."),
        ("mutants", "Injected bugs that were found: torch 1 of 1."),
        ("speed", "all of programs that conformed"),
        ("lockstep", "torch, tf, paddle and jax agree with the oracle at each of 200 steps."),
    ):
        assert sentence in kinds[name]
        assert "Compared: " in kinds[name]
    assert "torch gelu_quick: logits , 500 tolerances (bert-ragged, float64)" in kinds["mutants"]
    assert "beyond at batch 0; classes 1" in kinds["mutants"]


# Whatever a backend says.

HOSTILE = (
    '<script>alert("1")</script>&amp;\'"--><svg/onload=x>\x1b[31m\x00\u202e{{ 7919 * 7907 }}{% raw %}\ud800'
)


def poisoned(value, keys=False):
    """Return data with every text that the schema leaves free made hostile."""
    if isinstance(value, dict):
        return {key + HOSTILE if keys else key: poisoned(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [poisoned(entry) for entry in value]
    return value + HOSTILE if isinstance(value, str) else value


def free(entry, *keys):
    """Make hostile what may be any text."""
    entry.update({key: poisoned(entry[key]) for key in keys if key in entry})


def test_whatever_a_backend_says_is_only_text():
    data = json.loads(record.text(record.made(reports.mixed(), "check", "title")))
    for key in ("title", "machine", "settings", "written", "conclusions"):
        data[key] = poisoned(data[key])
    data["notes"], data["environments"] = poisoned(data["notes"], True), poisoned(data["environments"], True)
    for result in data["results"]:
        free(result, "backend", "group", "case", "part", "dtype", "detail", "stderr")
        free(result.get("verdict", {}), "diagnosis")
        for row in result.get("verdict", {}).get("table", []):
            free(row, "tensor", "clause", "note", "axes")
    text = page(record.parsed(record.lines(data).encode()))
    outline = Outline(text)
    assert outline.wrong == []
    assert not {tag for tag, _ in outline.tags} & {"img", "iframe"}
    assert script_of(outline) == (FOLDER / "page.js").read_text()
    assert not [key for _, attributes in outline.tags for key in attributes if key.startswith("on")]
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e\ud800]", text)
    assert text.encode()
    words = said(text)
    assert words.count("{{ 7919 * 7907 }}") > 50
    assert "62615533" not in words  # their product: nothing was computed
    assert words.count('torch<script>alert("1")</script>&amp;') > 3


# Words and drawings.


@pytest.mark.parametrize(
    ("statuses", "sentence"),
    [
        (
            {"torch": "agrees"},
            "torch agrees with the oracle to within rounding, in every tensor of every run that was judged.",
        ),
        (
            {"torch": "agrees", "jax": "diverges"},
            "jax diverges from the oracle in 1 of 1 run; torch agrees with the oracle.",
        ),
        (
            {"a": "crashed", "b": "missing", "c": "agrees"},
            "a and b gave no result in 2 of 2 runs; c agrees with the oracle.",
        ),
        ({"a": "unsupported", "b": "absent", "c": "undetermined"}, "Nothing was judged."),
    ],
)
def test_the_headline_says_it_in_a_sentence(statuses, sentence):
    results = [
        reports.result(name, None, reports.verdict(wrong=2))
        if status == "diverges"
        else reports.result(name, *([status] if status != "agrees" else []))
        for name, status in statuses.items()
    ]
    assert headline(results) == sentence


# The command line.


def test_the_command_line_writes_the_page_and_makes_it_again(tmp_path):
    first, again, data = (tmp_path / name for name in ("first.html", "again.html", "out.json"))
    names = [toy("NumpyBackend"), toy("WrongAfterTheFirstLayer"), toy("KillsItself"), "no.such:Backend"]
    done = concord(
        "check",
        *options("--backend", names),
        "--case",
        "bert-ragged",
        "--dtype",
        "float64",
        "--json",
        data,
        "--html",
        first,
    )
    assert done.returncode == 3, done.stderr
    assert f"written: {first}" in done.stdout
    assert Outline(first.read_text()).wrong == []
    words = said(first.read_text())
    assert f"{names[1]} diverges first at layers.1.attention.scores (SPEC ATT-4)" in words
    assert f"{names[2]}: crashed" in words
    assert "Conformance: model, explicit, eager, cpu" in words
    done = concord(f"show report {data} --html {again}")
    assert (done.returncode, done.stderr) == (3, "")  # as the run did
    assert again.read_text() == first.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.html", "first.html", "out.json"]
