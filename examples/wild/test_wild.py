"""`concord compare` gives the verdicts that the guide shows."""

import importlib
import json
import re
from pathlib import Path

import pytest

from tests.toys.surroundings import ROOT, concord

HERE = Path(__file__).parent
COMPARISON = (HERE / "concord.toml").read_text()
GUIDE = (ROOT / "docs/guides/found-in-the-wild.md").read_text()
SHOWN = dict(re.findall(r"^\| ([^|]+) \| (\w+) \|", GUIDE.partition("<!-- end compare -->")[0], re.MULTILINE))


def test_the_guide_shows_every_candidate():
    names = re.findall(r'^\[candidates\."?(.*?)"?\]$', COMPARISON, re.MULTILINE)
    assert [name for name in SHOWN if name != "candidate"] == names


@pytest.mark.slow
def test_verdicts_are_those_of_the_guide(tmp_path):
    pytest.importorskip("transformers")
    out = tmp_path / "compare.json"
    done = concord(f"compare --json {out}", folder=HERE, patience=3000, PYTHONPATH=str(ROOT))
    assert done.returncode in (0, 1, 3), done.stderr  # 1: one diverges, 3: one is missing
    judged = {result["backend"]: result["status"] for result in json.loads(out.read_text())["results"]}
    differing = {
        name: status
        for name, status in judged.items()
        # A processor without products in bfloat16 leaves nothing to accept.
        if status not in ("missing", SHOWN[name]) and (SHOWN[name], status) != ("accepted", "agrees")
    }
    assert not differing


def test_the_fast_path_of_pytorch_does_not_compute_padding(monkeypatch):
    torch = pytest.importorskip("torch")
    from concord.conformance.compare import compare, prepare

    monkeypatch.chdir(HERE)  # where the candidate's process finds its module
    monkeypatch.syspath_prepend(HERE)
    encoder = importlib.import_module("wild").encoder
    try:
        comparison = prepare(encoder(), "wild:fast")
        assert "only padding rows differ" in str(comparison.verdict().explained())
        assert compare(encoder(), comparison.tensors, declared=["uncomputed_padding"]).passed
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
