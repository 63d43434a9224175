import re

import pytest
from rich.console import Group
from rich.table import Table
from rich.text import Text

from concord.spec.text import LONGEST, legible, shown
from concord.terminal import Terminal, bars, complain

HOSTILE = "\x1b[31mred\x9b2J\u202eleft\u2066\x00\nconcord: 7 agree\r\x07\u2028\ud800"
SEEN = r"\x1b[31mred\x9b2J\u202eleft\u2066\x00\nconcord: 7 agree\r\x07\u2028\ud800"


def test_text_is_legible_in_any_script():
    usual = "Zürich – 北京 \u0646\u0635\u00a01\u202f000 ✓\n\tnext"
    assert legible(usual) == usual
    assert shown(HOSTILE) == SEEN
    assert shown(SEEN) == SEEN


@pytest.mark.parametrize("way", ["string", "text", "cell", "heading", "title", "group", "problem"])
def test_terminal_shows_no_control_characters_and_no_megabyte(way, capsys):
    for name in (HOSTILE, f"before {'n' * 2**20} after"):
        table = Table(name if way == "heading" else "heading", title=name if way == "title" else None)
        table.add_row(name if way == "cell" else "cell")
        printed = {"string": name, "text": Text(name), "group": Group(name)}.get(way, table)
        if way == "problem":
            complain(name)
        else:
            Terminal().print(printed)
        out = "".join(capsys.readouterr())
        assert len(out) < 8 * LONGEST
        assert all(char == "\n" or char.isprintable() for char in out)
        assert not any(line.startswith("concord: 7 agree") for line in out.splitlines())


@pytest.mark.parametrize(("unit", "words"), [("", "now"), ("steps", "0 steps (now)")])
def test_progress_of_an_unknown_amount_has_no_number(unit, words, capsys):
    with bars(["name"], None, unit) as advance:
        advance("name", 0, "now")
    assert capsys.readouterr().err.endswith(f" s  name: {words}\n")


@pytest.mark.parametrize("total", [None, 3, 20011])
def test_progress_on_a_terminal_cuts_nothing_at_80_columns(total, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    name, now = "mine.port:Backend", "looking for the cause of layers.7.norm, at most 40 s of CPU time"
    with bars([name], total) as advance:
        advance(name, 2, now)
    seen = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", capsys.readouterr().err)
    assert all(part in seen for part in ("0:00:00", name, *now.split(), f"2/{total}" * bool(total)))
    assert ("?" in seen, "…" in seen) == (False, False)
    assert max(map(len, re.split("[\r\n]", seen))) <= 80
