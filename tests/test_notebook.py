import ast
import json
import runpy

import pytest

import concord
from tests.toys.surroundings import ROOT, needs

NOTEBOOK = json.loads((ROOT / "examples/notebook.ipynb").read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def shown(source):
    # Print what a notebook would display.
    tree = ast.parse(source)
    if isinstance(tree.body[-1], ast.Expr):
        tree.body[-1] = ast.parse(f"print(str({ast.unparse(tree.body[-1].value)})[:2000])").body[0]
    return ast.unparse(tree)


def test_notebook_runs_from_its_first_cell_to_its_last(tmp_path, capsys):
    needs("torch")
    cells = tmp_path / "cells.py"
    cells.write_text("\n".join(map(shown, CODE)))
    runpy.run_path(str(cells))
    output = capsys.readouterr().out
    assert "diverges" in output
    assert "`0.activation.approximate` is tanh instead of none" in output
    assert "agrees" in output


def test_a_verdict_is_a_page_in_a_notebook():
    modules = pytest.importorskip("tests.toys.modules")
    verdict = concord.compare(modules.encoder(), modules.encoder(modules.Fused), modules.texts())
    assert verdict._repr_html_().startswith("<pre>agrees")
    page = concord.show(verdict, title="Fused")
    assert page.startswith("<!doctype html>")
    assert "Fused" in page
    frame = page._repr_html_()
    assert frame.startswith("<iframe")
    assert "<!doctype" not in frame  # it is escaped
