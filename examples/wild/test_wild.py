"""`concord compare` gives the verdicts that the guide shows."""

import json
import re
from pathlib import Path

import pytest

from tests.toys.surroundings import ROOT, concord

HERE = Path(__file__).parent
COMPARISON = (HERE / "concord.toml").read_text()
GUIDE = (ROOT / "docs/guides/found-in-the-wild.md").read_text()
SHOWN = dict(re.findall(r"^\| ([^|]+) \| (\w+) \|", GUIDE.partition("<!-- end compare -->")[0], re.MULTILINE))


def verdicts(folder, out):
    pytest.importorskip("transformers")
    done = concord(f"compare --json {out}", folder=folder, patience=3000, PYTHONPATH=str(ROOT))
    assert done.returncode in (0, 1, 3), done.stderr  # 1: one diverges, 3: one is missing
    return {result["backend"]: result["status"] for result in json.loads(out.read_text())["results"]}


def test_the_guide_shows_every_candidate():
    names = re.findall(r'^\[candidates\."?(.*?)"?\]$', COMPARISON, re.MULTILINE)
    assert [name for name in SHOWN if name != "candidate"] == names


def test_ways_agree_and_a_package_that_is_not_installed_is_a_row(tmp_path):
    (tmp_path / "wild.py").write_text((HERE / "wild.py").read_text())
    head, *candidates = re.split(r"\n(?=\[candidates)", COMPARISON)
    chosen = [text for text in candidates if re.match(r'\[candidates\."?(sdpa|bfloat16|CTranslate2\])', text)]
    (tmp_path / "concord.toml").write_text("\n".join([head, *chosen]))
    judged = verdicts(tmp_path, tmp_path / "compare.json")
    assert judged.pop("CTranslate2") in ("missing", "accepted")
    assert judged == {name: SHOWN[name] for name in ("sdpa", "bfloat16, sdpa")}
    page = tmp_path / "page.md"
    page.write_text("<!-- begin compare -->\n<!-- end compare -->\n")
    concord("show report compare.json --markdown page.md", folder=tmp_path, PYTHONPATH=str(ROOT))
    assert "\n| sdpa | agrees | 0." in page.read_text()


@pytest.mark.slow
def test_verdicts_are_those_of_the_guide(tmp_path):
    judged = verdicts(HERE, tmp_path / "compare.json")
    differing = {
        name: status
        for name, status in judged.items()
        # A processor without products in bfloat16 leaves nothing to accept.
        if status not in ("missing", SHOWN[name]) and (SHOWN[name], status) != ("accepted", "agrees")
    }
    assert not differing


@pytest.mark.parametrize(
    ("declared", "code", "says"),
    [("", 1, "only padding rows differ"), ("--declare uncomputed_padding", 0, "1 run: 1 agrees")],
)
def test_the_fast_path_of_pytorch_does_not_compute_padding(declared, code, says):
    pytest.importorskip("torch")
    done = concord(f"compare wild:encoder wild:fast {declared}", folder=HERE, PYTHONPATH=str(ROOT))
    assert done.returncode == code, done.stderr
    assert says in done.stdout
