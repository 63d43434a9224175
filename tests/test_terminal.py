"""What the terminal shows."""

from __future__ import annotations

import pytest

from concord.terminal import Terminal, figures

HEADINGS = ("run", "parameters", "best dev accuracy", "ended by")
ROWS = [["first", "527 042", "71.69 %", "2 epochs"], ["second", "11", "–", "not over"]]


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (80, ["run     parameters  best dev accuracy  ended by", "first      527 042            71.69 %  2 epochs", "second          11                  –  not over"]),
        (40, ["                    best dev", "run     parameters  accuracy  ended by", "first      527 042   71.69 %  2 epochs", "second          11         –  not over"]),
        (30, ["                    best dev", "run     parameters  accuracy", "first      527 042   71.69 %", "second          11         –"]),
    ],
)
def test_table_of_figures_has_the_columns_that_fit_and_breaks_no_word(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int, shown: list[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    figures(Terminal(), HEADINGS, ROWS, ("ended by",), ("run", "ended by"))
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == shown
