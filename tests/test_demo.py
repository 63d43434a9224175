import dataclasses

import pytest

from concord.backends.worker import Worker
from concord.commands import demo
from concord.conformance.bugs.catalogue import BUGS
from tests.toys.surroundings import needs, toy


def test_demo_names_the_bug_that_it_plants_and_ends_with_what_to_do(entered, tmp_path, monkeypatch):
    needs("torch")
    monkeypatch.chdir(tmp_path)
    output, _ = entered("demo --backend torch")
    assert "torch agrees: " in output
    assert "torch with a bug diverges: bert-ragged, float32" in output
    assert "activation = gelu_tanh instead of gelu_erf (FFN-2)" in output
    assert "concord compare" in output.partition("next, with your own model:")[2]
    page = (tmp_path / "concord-demo.html").read_text()
    assert "torch with a bug diverged from the reference" in page


@pytest.mark.xdist_group("torch")
def test_demo_fails_where_what_it_plants_is_not_named(entered, tmp_path, monkeypatch, open_worker):
    worker = open_worker(toy("torch", "built_in"))
    monkeypatch.setattr(demo, "_first", lambda names: ("torch", worker))
    monkeypatch.setattr(Worker, "__exit__", lambda *how: None)  # other tests need it
    monkeypatch.chdir(tmp_path)
    other = dataclasses.replace(BUGS["gelu_tanh_for_erf"], cause="norm_epsilon")
    monkeypatch.setattr(demo, "PLANTED", other)
    entered("demo --backend torch", ends=1)
