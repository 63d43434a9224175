"""What the terminal shows, and what is said while a command works."""

import re
import time

import pytest
from rich.console import Group
from rich.table import Table
from rich.text import Text

from concord.conformance.watching import Countdown, listening
from concord.progress import bars, counting, telling
from concord.spec.text import LONGEST, legible, shown
from concord.terminal import USUAL, Terminal, complain, figures

HOSTILE = "\x1b[31mred\x9b2J\u202eleft\u2066\x00\nconcord: 7 agree\r\x07\u2028\ud800"
SEEN = r"\x1b[31mred\x9b2J\u202eleft\u2066\x00\nconcord: 7 agree\r\x07\u2028\ud800"

HEADINGS = ("run", "parameters", "best dev accuracy", "ended by")
ROWS = [["first", "527 042", "71.69 %", "2 epochs"], ["second", "11", "–", "not over"]]


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (
            80,
            [
                "run     parameters  best dev accuracy  ended by",
                "first      527 042            71.69 %  2 epochs",
                "second          11                  –  not over",
            ],
        ),
        (
            40,
            [
                "                    best dev",
                "run     parameters  accuracy  ended by",
                "first      527 042   71.69 %  2 epochs",
                "second          11         –  not over",
            ],
        ),
        (
            30,
            [
                "                    best dev",
                "run     parameters  accuracy",
                "first      527 042   71.69 %",
                "second          11         –",
            ],
        ),
    ],
)
def test_table_of_figures_has_the_columns_that_fit_and_breaks_no_word(monkeypatch, capsys, columns, shown):
    monkeypatch.setenv("COLUMNS", str(columns))
    figures(Terminal(), HEADINGS, ROWS, ("ended by",), ("run", "ended by"))
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == shown


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


@pytest.mark.parametrize("columns", ["0", "-5", ""])
def test_terminal_of_nonsensical_size_is_readable(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", columns)
    console = Terminal()
    console.print("one line")
    assert capsys.readouterr().out == "one line\n"
    assert console.width == USUAL


# What is said while a command works, where nobody watches: plain lines.


def lines(capsys):
    captured = capsys.readouterr()
    assert not captured.out
    return [re.sub(r"^ *\d+ s  ", "", line) for line in captured.err.splitlines()]


def test_a_line_comes_first_last_and_when_seconds_have_passed(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    with counting(["torch"], 23) as progress:
        progress("torch", "started")
        for number in range(23):
            now[0] += 3
            progress("torch", f"job {number}")
    told = [f"torch: {done} of 23 (job {done - 1})" for done in (4, 8, 12, 16, 20, 23)]
    assert lines(capsys) == ["torch: 0 of 23 (started)", *told]
    with bars(["here", "there"], None, "cases") as advance:
        advance("here", 0, "")
        advance("here", 5, "")
        advance("there", 17, "")
    assert lines(capsys) == ["here: 0 cases", "there: 17 cases"]


def test_what_is_done_is_told(capsys):
    telling()("minilm: warming up " + "and up " * 30)
    assert lines(capsys) == ["minilm: warming up " + "and up " * 30]


# What is said of a judgement that takes long.


def test_each_step_says_how_many_are_left_and_how_long_they_take(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    said = []
    with listening(said.append):
        steps = Countdown("work", 7)
    for seconds in (3, 3, 1, 6, 6, 6, 6):
        now[0] += seconds
        steps.step()
    assert said == [
        "work: 2 of 7 runs, about 15 s more",
        "work: 4 of 7 runs, about 10 s more",
        "work: 5 of 7 runs, about 8 s more",
        "work: 6 of 7 runs, about 4 s more",
    ]
