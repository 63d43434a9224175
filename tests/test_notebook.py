import ast
import json

import pytest

import concord
from tests.toys.surroundings import ROOT, python

NOTEBOOK = json.loads((ROOT / "examples/notebook.ipynb").read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def shown(source):
    # Print what a notebook would display.
    tree = ast.parse(source)
    if isinstance(tree.body[-1], ast.Expr):
        tree.body[-1] = ast.parse(f"print(str({ast.unparse(tree.body[-1].value)})[:2000])").body[0]
    return ast.unparse(tree)


def test_notebook_runs_from_its_first_cell_to_its_last(tmp_path, open_worker):
    open_worker("torch")  # skips where it is not installed
    cells = "\n".join(map(shown, CODE))
    done = python("-c", cells, folder=tmp_path, patience=180, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert "diverges" in done.stdout
    assert "`0.activation.approximate` is tanh instead of none" in done.stdout
    assert "agrees" in done.stdout


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
