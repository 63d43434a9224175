"""The sources' experiments: models differ in one thing, what is finished is kept, and the result says how far seeds lie apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from concord import spec
from concord.backends import BUILT_IN
from concord.conformance import record
from concord.conformance.campaign import Settings
from concord.spec import runs
from concord.spec.errors import SpecError
from concord.spec.training.recipe import recipe
from concord.training import figures
from concord.training.beginning import Texts, files
from concord.training.checkpoint import Best
from concord.training.experiments import EXPERIMENTS, Cell, Experiment, Trained, cells, conduct, ways
from concord.training.experiments.results import HEADINGS, as_data, figure, headline, page, summaries
from concord.training.plan import Plan
from tests.conftest import small_config
from tests.test_html import Outline, said

Invoke = Callable[..., tuple[int, str, list[str]]]

STEPS = 5


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Texts of two letters, whose label says which of them comes first."""
    folder = tmp_path / "data"
    folder.mkdir()
    for split, count in (("train", 24), ("dev", 7), ("test", 5)):
        lines = [
            f"{'ab' if number % 2 else 'ba'}{'ab' * (number % 3)}\t{'yes' if number % 2 else 'no'}"
            for number in range(count)
        ]
        (folder / f"{split}.tsv").write_text("text_a\tlabel\n" + "\n".join(lines) + "\n")
    return folder


def asked(data: Path, out: Path, seeds: int = 2, steps: int = STEPS, name: str = "depth") -> Experiment:
    plan = Plan(
        backend="torch", files=files(data), batch=3, steps=steps, evaluate_every=2, log_every=1, threads=1
    )
    return Experiment(
        name,
        ways(name, small_config()),
        seeds,
        recipe("adamw").replace(warmup_steps=1),
        plan,
        Texts(tokens=11),
        out,
    )


def differing(configs: dict[str, spec.EncoderConfig]) -> set[str]:
    return {
        field
        for one in configs.values()
        for other in configs.values()
        for field in spec.FIELDS
        if getattr(one, field) != getattr(other, field)
    }


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("depth", {"num_layers"}),
        ("norm-placement", {"norm_placement", "final_norm"}),
        ("heads", {"num_heads"}),
    ],
)
def test_models_differ_in_one_thing(name: str, fields: set[str]) -> None:
    assert differing(ways(name, small_config(d_model=12))) == fields


def test_variants_are_all_there_in_the_same_sizes() -> None:
    found = ways("variants", small_config())
    assert list(found) == spec.variants()
    assert {
        (one.d_model, one.num_heads, one.num_layers, one.d_ff, one.max_positions) for one in found.values()
    } == {(10, 2, 2, 17, 13)}
    with pytest.raises(SpecError, match="unknown experiment 'dept': did you mean 'depth'"):
        ways("dept", small_config())


def test_cells_are_every_model_once_then_every_model_again(data: Path, tmp_path: Path) -> None:
    found = asked(data, tmp_path / "out").cells()
    assert [(cell.way, cell.seed) for cell in found] == [
        ("1 block", 0),
        ("2 blocks", 0),
        ("1 block", 1),
        ("2 blocks", 1),
    ]
    assert len({cell.folder for cell in found}) == 4


def test_a_folder_takes_one_experiment_and_more_seeds_of_it(data: Path, tmp_path: Path) -> None:
    asked(data, tmp_path / "out").claim()
    asked(data, tmp_path / "out", seeds=3).claim()
    with pytest.raises(SpecError, match="describes another experiment: plan differs"):
        asked(data, tmp_path / "out", steps=7).claim()


def test_an_experiment_is_trained_kept_and_goes_on(
    data: Path, tmp_path: Path, open_worker: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_worker("torch")  # skips where it is not installed
    experiment = asked(data, tmp_path / "out")
    first = experiment.cells()[0]
    with Settings().open("torch") as worker:
        cells.train(experiment, first, worker, halted=lambda: True)  # it keeps a checkpoint after one step
    begun = cells.outcome(first)
    assert begun is not None
    assert (begun.status, begun.steps) == ("halted", 1)
    found = conduct(experiment, Settings())
    assert [(one.way, one.seed, one.status, one.steps) for one in found] == [
        (cell.way, cell.seed, "done", STEPS) for cell in experiment.cells()
    ]
    assert all(one.dev and one.test and [step for step, *_ in one.curve] == [2, 4, 5] for one in found)
    assert found[0].parameters < found[1].parameters
    straight = asked(data, tmp_path / "straight", seeds=1)
    assert [replace(one, seconds=0, tokens_per_second=None) for one in conduct(straight, Settings())] == [
        replace(one, seconds=0, tokens_per_second=None) for one in found[:2]
    ]
    monkeypatch.setattr(cells, "train", lambda *_: pytest.fail("it was finished"))
    assert conduct(experiment, Settings()) == found


def test_what_is_not_begun_when_it_halts_is_said(data: Path, tmp_path: Path) -> None:
    found = conduct(asked(data, tmp_path / "out"), Settings(), halted=lambda: True)
    assert [(one.status, one.detail) for one in found] == [("halted", "not begun")] * 4


def test_cells_may_be_tasks_of_dask(data: Path, tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        processes=False, n_workers=1, threads_per_worker=2, dashboard_address=None
    ) as cluster:
        experiment = asked(data, tmp_path / "out", seeds=1)
        toy = replace(
            experiment, plan=replace(experiment.plan, backend="tests.toys.numpy_backend:NumpyBackend")
        )
        assert [one.status for one in conduct(toy, Settings(), scheduler=cluster.scheduler_address)] == [
            "unsupported"
        ] * 2


def test_a_backend_that_cannot_train_is_a_result(data: Path, tmp_path: Path) -> None:
    experiment = asked(data, tmp_path / "out", seeds=1)
    toy = replace(experiment, plan=replace(experiment.plan, backend="tests.toys.numpy_backend:NumpyBackend"))
    found = conduct(toy, Settings(), parallel=2)
    assert {one.status for one in found} == {"unsupported"}
    assert as_data(toy, found)["exit_code"] == 3


def some(shares: dict[str, list[float]]) -> list[Trained]:
    """Return runs with these accuracies."""
    runs = []
    for way, values in shares.items():
        runs += [
            Trained(
                way,
                seed,
                "done",
                "",
                1234,
                9,
                2.5,
                700.0,
                Best(9, 0.5, value),
                None,
                ((4, 0.7, value / 2), (9, 0.5, value)),
            )
            for seed, value in enumerate(values)
        ]
    return runs


def test_what_lies_within_the_spread_is_not_told_apart() -> None:
    near, far = (
        some({"one": [0.70, 0.80], "two": [0.74, 0.80]}),
        some({"one": [0.50, 0.52], "two": [0.90, 0.91]}),
    )
    assert headline(near).endswith("so that they are not told apart.")
    assert (
        headline(far)
        == "two: accuracy 90.50 %, 39.50 points before one; the spread over seeds is 1.41 points."
    )
    assert headline(some({"one": [0.5], "two": [0.75]})).endswith("one seed says nothing of the spread.")
    assert summaries(far)["one"].row("one")[:7] == [
        "one",
        "1 234",
        "2",
        "51.00 %",
        "1.41 %",
        "50.00 %",
        "52.00 %",
    ]


def test_page_record_and_figure_hold_every_run(data: Path, tmp_path: Path) -> None:
    experiment = asked(data, tmp_path / "out")
    found = [
        *some({"1 block": [0.5, 0.6], "2 blocks": [0.7]}),
        Trained("2 blocks", 1, "crashed", "it was killed"),
    ]
    kept = json.loads(record.text(as_data(experiment, found)))
    assert record.problems(kept) == []
    text = page(kept)
    assert Outline(text).wrong == []
    words = said(text)
    assert all(head in words for head in HEADINGS)
    assert "2 blocks, seed 1: crashed: it was killed" in words
    assert "num_layers 1 2" in words
    assert "var(--s0)" in text
    drawing = figures.svg(figure(found))
    assert ">1 block</text>" in drawing


def test_experiments_are_listed_and_refused_in_words(invoke: Invoke, data: Path, tmp_path: Path) -> None:
    code, _, lines = invoke(
        "experiment", "dept", "--data", data, "--backend", "torch", "--out", tmp_path / "out"
    )
    assert (code, lines) == (2, ["concord: error: unknown experiment 'dept': did you mean 'depth'?"])
    code, _, lines = invoke(
        "experiment", "depth", "--data", data / "train.tsv", "--backend", "torch", "--out", tmp_path / "out"
    )
    assert code == 2
    assert "no samples to evaluate on" in lines[0]
    assert set(EXPERIMENTS) == {"depth", "norm-placement", "heads", "variants"}
    assert set(BUILT_IN) >= {"torch"}
    assert Cell("a, b", 1, small_config(), Path()).name == "a, b, seed 1"
    assert not (tmp_path / "out").exists()
    assert runs.steps(tmp_path / "out") == []
