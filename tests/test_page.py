import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser

from concord import output_files
from concord.conformance.run import record
from concord.conformance.run.page import FOLDER
from concord.output_files import page
from tests.toys import reports
from tests.toys.surroundings import ROOT, options, toy

VOID = {"meta", "link", "br", "img", "input", "hr", "wbr"}


class Outline(HTMLParser):
    """Tags of a page, and unbalanced ones."""

    def __init__(self, text):
        super().__init__()
        self.open, self.wrong, self.tags = [], [], []
        self.feed(text)
        self.close()
        self.wrong += [f"{tag} is never closed" for tag in self.open]

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()
        else:
            self.wrong.append(f"line {self.getpos()[0]}: </{tag}> in {self.open[-3:]}")

    def attributes(self, name):
        return [attributes[name] for _, attributes in self.tags if attributes.get(name) is not None]


def said(text):
    # The text of a page, on one line.
    body = re.sub(r"<style>.*?</style>|<script>.*?</script>|<wbr>", "", text, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def page_of(report, kind="check"):
    return page(record.make_record(report, kind, "what was run"))


def assert_whole(text):
    # Every page is well-formed, loads nothing, and has one script, its own.
    outline = Outline(text)
    assert outline.wrong == []
    tags = {tag for tag, _ in outline.tags}
    assert not tags & {"link", "img", "iframe", "object", "embed", "base", "form"}
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert [about for tag, about in outline.tags if tag == "script"] == [{}]
    (policy,) = [about["content"] for _, about in outline.tags if "http-equiv" in about]
    seal = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{seal}'"
    assert script == (FOLDER / "page.js").read_text()
    for attribute in ("src", "href", "xlink:href", "action", "data", "srcset"):
        assert all(value.startswith("#") for value in outline.attributes(attribute))
    assert not re.search(r"https?://|@import|url\(|javascript:", text)
    identities = outline.attributes("id")
    assert len(identities) == len(set(identities))
    assert {value.removeprefix("#") for value in outline.attributes("href")} <= set(identities)
    assert not [key for _, attributes in outline.tags for key in attributes if key.startswith("on")]


def test_a_page_tells_everything_once():
    text, verdicts = page_of(reports.mixed()), reports.verdicts()
    assert_whole(text)
    words = said(text)
    bug, nothing = (verdicts[name].first_divergence for name in ("bug", "no number"))
    sentences = (
        "11 runs: 3 agree, 1 absent, 1 unsupported, 1 undetermined, 2 crashed, 3 diverge",
        # First divergences, and every tensor beyond its tolerance in a section that can be opened.
        f"{reports.WRONG} diverges first at {bug.tensor} (SPEC FFN-2)",
        f"{bug.deciding.beyond} of {bug.size} elements lie beyond.",
        "activation = gelu_tanh instead of gelu_erf (FFN-2) [activation]",
        "The same tensor is the first to diverge in 1 more run",
        f"{reports.WRONG} diverges first at {nothing.tensor} (SPEC NRM-2)",
        "batch, tokens, d_model error in tolerances Backend reference tolerance 2, 3, 5 inf nan",
        # Failures.
        "tf: crashed killed by SIGSEGV bert-ragged, float32, and 1 more run The last lines of its output "
        "first words last words",
        "paddle absent, and not requested: No module named 'paddle'",
        "jax unsupported: no such precision",
        "half , bfloat16: undetermined: logits not judged (accumulated rounding",
        # Environments, notes, and the table of all tensors.
        "Declared deviation from SPEC ATT-5: softmax_floor = -64.0 the kernel clips",
        "not compared, 3 x lr: belongs to the optimizer",
        "tensor clause torch f32 torch f64 Backend f32 half bf16",
        "not exposed",
    )
    assert [sentence for sentence in sentences if sentence not in words] == []
    for once in ("Exit code 3", "Likely cause: ", "Declared deviation from"):
        assert words.count(once) == 1


def test_every_record_of_the_repository_is_read_back_and_has_a_page():
    paths = {}
    results = ROOT / "conformance/results"
    for path in sorted([*results.glob("*.json"), *results.glob("speed/*/*.json")]):
        document = record.read(path, output_files.KINDS)
        assert json.loads(record.text(document)) == json.loads(path.read_text())
        paths.setdefault(document.kind, path)
    said_of = {}
    for kind, path in paths.items():
        _, text = output_files.read_page(path)
        assert_whole(text)
        said_of[kind] = said(text)
        assert re.search("compared with the|were measured in turn", said_of[kind])
    for kind, sentence in (
        ("fuzz", ": nothing was found in "),
        ("mutants", "Injected bugs that were found: "),
        ("speed", "all of programs that conformed"),
        ("lockstep", "torch, tf, paddle and jax agree with the reference at each of "),
    ):
        assert sentence in said_of[kind]


# Hostile text from a backend.

HOSTILE = (
    '<script>alert("1")</script>&amp;\'"--><svg/onload=x>\x1b[31m\x00\u202e{{ 7919 * 7907 }}{% raw %}\ud800'
)


def poisoned(value, keys=False):
    # Append hostile text to every string.
    if isinstance(value, dict):
        return {key + HOSTILE if keys else key: poisoned(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [poisoned(entry) for entry in value]
    return value + HOSTILE if isinstance(value, str) else value


def free(entry, *keys):
    # Only where the schema allows any text.
    entry.update({key: poisoned(entry[key]) for key in keys if key in entry})


def test_whatever_a_backend_says_is_only_text():
    data = json.loads(record.text(record.make_record(reports.mixed(), "check", "title")))
    free(data, "title", "machine", "settings", "written", "conclusions")
    data["notes"], data["environments"] = poisoned(data["notes"], True), poisoned(data["environments"], True)
    for result in data["results"]:
        free(result, "backend", "group", "case", "part", "dtype", "detail", "stderr")
        free(result.get("verdict", {}), "explanation")
        for row in result.get("verdict", {}).get("table", []):
            free(row, "tensor", "clause", "note", "axes")
    text = page(record.parsed(record.lines(data).encode()))
    assert_whole(text)
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e\ud800]", text)
    assert text.encode()
    words = said(text)
    assert words.count("{{ 7919 * 7907 }}") > 50
    assert "62615533" not in words  # their product: the template was not evaluated
    assert words.count('torch<script>alert("1")</script>&amp;') > 3


def test_the_command_line_writes_the_page_and_makes_it_again(entered, tmp_path):
    first, again, data = (tmp_path / name for name in ("first.html", "again.html", "out.json"))
    wrong = toy("WrongAfterTheFirstLayer")
    line = f"check --case bert-ragged --dtype float64 --json {data} --html {first}"
    output, _ = entered(line, *options("--backend", [wrong, "no.such:Backend"]), ends=3)
    assert f"written: {first}" in output
    words = said(first.read_text())
    assert f"{wrong} diverges first at layers.1.attention.scores (SPEC ATT-4)" in words
    assert "Concord · Conformance: model, explicit, eager, cpu" in words
    entered(f"show report {data} --html {again}", ends=3)  # like the run
    # A record has fewer digits, so a number may be rounded differently.
    assert re.sub(r"\d+", "#", again.read_text()) == re.sub(r"\d+", "#", first.read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.html", "first.html", "out.json"]
