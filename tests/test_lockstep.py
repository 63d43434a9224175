import gc
import io
import json
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from html import unescape
from itertools import pairwise

import numpy as np
import pytest
from rich.console import Console

from concord import backends, spec
from concord.conformance.bugs.bug import Change, rule
from concord.conformance.judging.estimate import estimate, exact
from concord.conformance.judging.expectation import Expectation, JudgedTraining
from concord.conformance.judging.scoring import judge_tensor
from concord.conformance.lockstep.envelope import in_range
from concord.conformance.lockstep.outcome import MODES, Lockstep, Track
from concord.conformance.lockstep.running import (
    Candidate,
    about,
    conduct,
    first_divergence,
    free_running,
    resynchronised,
)
from concord.conformance.lockstep.steps_report import show
from concord.conformance.lockstep.training_cases import example, standard
from concord.conformance.run import record
from concord.conformance.run.campaign import Setup
from concord.output_files import page
from concord.spec.errors import SpecError
from concord.spec.montecarlo import MonteCarlo
from concord.spec.training.recipe import RATES, Recipe, rounded_hyperparameters
from concord.spec.training.reference_optimizer import ReferenceOptimizer
from concord.spec.training.trajectory import Training
from tests.test_training import RECIPES
from tests.toys import stepping
from tests.toys.ready import hugging_face
from tests.toys.stepping import Bugged, Stepping
from tests.toys.surroundings import options, toy

CONFIG = spec.variant(
    "nndl-paddle", d_model=6, num_heads=2, d_ff=5, num_layers=1, vocab_size=17, max_positions=7, num_classes=3
)
ADAMW = {
    **RECIPES["adamw"],
    "learning_rate": 0.01,
    "clip_at": 1.0,
    "schedule": "linear",
    "warmup_steps": 2,
    "total_steps": 7,
    "accumulation": 2,
    "accumulation_mean": "samples",
    **dict.fromkeys(RATES, 0.1),
}


def case(dtype="float32", steps=5, **fields):
    # Two batches in each step, but one in the last.
    batches = [
        spec.example_batch(CONFIG, batch=3 - number % 2, tokens=5, seed=number, padding="ragged")
        for number in range(2 * steps - 1)
    ]
    steps = [batches[first : first + 2] for first in range(0, len(batches), 2)]
    return JudgedTraining(
        CONFIG,
        spec.initialize(CONFIG, seed=3),
        Training(Recipe(**{**ADAMW, **fields}), steps, seed=11),
        dtype=dtype,
    )


class Sevens(Stepping):
    """Reports sevens for all weights after a step; from step `late` on, for every tensor."""

    def step(self, batches, report=False):
        wholly = 0 < self.late <= self.steps
        results = super().step(batches, report)
        return {
            name: np.full_like(array, 7)
            if wholly or (not self.late and name.startswith("parameters."))
            else array
            for name, array in results.items()
        }


@pytest.mark.parametrize(
    ("fields", "tensor", "clause", "explained"),
    [
        ({"clip_at": 1.002}, "clipped.", "OPT-7", ("OPT-7",)),
        ({"undecayed": ()}, "parameters.", "OPT-3", ("OPT-6",)),
        ({"accumulation_mean": "batches"}, "gradients.", "GRD-1", ("OPT-10",)),
    ],
)
def test_wrong_step_shows_at_its_own_step_with_its_cause(fields, tensor, clause, explained):
    problem = case()
    (track,) = resynchronised(problem, [Candidate("toy", Stepping(case(**fields), late=2, usual=problem))])
    assert (track.first.step, track.first.row.clause, track.steps) == (2, clause, 5)
    assert track.first.tensor.startswith(tensor)
    assert track.first.row.ratio > 1
    assert track.first.cause.clauses == explained
    assert "from step 3 on" in track.first.text


def test_cause_that_steps_which_agree_contradict_is_not_named():
    problem = case(steps=3)
    (track,) = resynchronised(
        problem, [Candidate("toy", Stepping(case(steps=3, epsilon=1e-6), late=2, usual=problem))]
    )
    assert (track.first.step, track.first.cause) == (2, None)


@pytest.fixture
def unexplained(monkeypatch):
    # Searching for a cause takes longer than everything else, so tests that need none skip it.
    monkeypatch.setattr("concord.conformance.lockstep.running.cause_of", lambda first, others: None)


def test_free_running_draws_curves_and_judges_nothing():
    problem, wrong = case(steps=6), case(steps=6, epsilon=1e-6)
    tracks = free_running(
        problem,
        [Candidate("right", Stepping(problem)), Candidate("wrong", Stepping(wrong, late=3, usual=problem))],
    )
    assert {(track.status, track.first, track.steps) for track in tracks} == {("undetermined", None, 6)}
    right, drifting = (track.curve("parameters").ratio for track in tracks)
    assert drifting[:3] == right[:3]
    assert all(other > own for own, other in zip(right[3:], drifting[3:], strict=True))
    report = Lockstep(MODES[1], "float32", about(problem, Setup()), tuple(tracks))
    assert report.exit_code == 3
    assert "Nothing was judged." in page(record.make_record(report, "lockstep", "six steps"))


def test_backends_with_and_without_deviations_are_each_judged_by_their_own(unexplained):
    problem = case(steps=2)
    rounding = {"optimizer_constant_bits": 12.0}
    own = replace(problem, deviations=rounding)
    plain, declared, silent = resynchronised(
        problem,
        [
            Candidate("plain", Stepping(problem)),
            Candidate("declared", Stepping(own), rounding),
            Candidate("silent", Stepping(own)),
        ],
    )
    assert (plain.status, declared.status, silent.status) == ("agrees", "agrees", "diverges")


def flat(off):
    # A flat buffer whose squares are summed term by term; its norm is wrong by a factor 1 + off.
    def clip(m, right, gradients, squares):
        arrays = [gradient.tensor.value.reshape(-1) for gradient in gradients.values()]
        stored = arrays[0].dtype.type
        sums = np.float32 if stored == np.float16 else stored
        norm = np.sqrt(np.cumsum(np.square(np.concatenate(arrays, dtype=sums)))[-1]) * sums(1 + off)
        share = stored(min(sums(1), sums(m.limit) / norm))
        scaled = {
            name: gradient.of(gradient.like(share * gradient.tensor.value))
            for name, gradient in gradients.items()
        }
        return scaled, right[1].of(right[1].like(norm))

    return Change(clip=clip)


@pytest.mark.clause("OPT-7", "ALG-7")
@pytest.mark.parametrize(
    ("dtype", "within", "head", "clip_at"),
    [
        ("float32", 2.0**-18, 1.0, 0.25),
        ("float16", 2.0**-8, 1.0, 0.25),
        ("float16", 2.0**-8, 2.0**-7, 2.0**-8),  # gradients whose squares underflow in float16
    ],
)
def test_clipping_by_the_norm_of_one_flat_buffer_is_right_and_by_one_that_is_off_is_not(
    dtype, within, head, clip_at
):
    problem = case(dtype, steps=2, clip_at=clip_at, epsilon=1e-3)  # numbers that float16 holds
    weights = problem.weights | {"classifier.weight": problem.weights["classifier.weight"] * head}
    problem = replace(problem, weights=weights)
    right, wrong = resynchronised(
        problem, [Candidate(str(off), Bugged(problem, flat(off))) for off in (within, 0.25)]
    )
    assert (right.status, wrong.status) == ("agrees", "diverges"), right.first
    assert wrong.first.tensor == "norm"


def test_step_from_a_state_out_of_range_is_undetermined_and_not_wrong():
    plain = {"schedule": "constant", "warmup_steps": 0, "total_steps": None}
    plain |= {"weight_decay": 0.0, "decay_form": "none"}
    # After the first step, the weights exceed the range of float16.
    problem = case("float16", steps=2, algorithm="sgd", learning_rate=2.0**25, **plain)
    (track,) = resynchronised(problem, [Candidate("sevens", Sevens(problem, late=1, usual=problem))])
    assert (track.first, track.unjudged) == (None, ("rate",))  # the others were judged at one step
    (losses,) = [curve for curve in track.curves if curve.section == "losses"]
    assert losses.unjudged == 1


@pytest.mark.parametrize(("name", "value"), [("losses.0", 1e5), ("gradients.b", np.inf)])
def test_what_follows_from_numbers_out_of_range_is_undetermined(name, value):
    values = {
        f"steps.0.{key}": np.asarray(value if key == name else 1.0)
        for key in ("losses.0", "gradients.a", "gradients.b", "norm", "rate", "parameters.a")
    }
    sigmas = in_range(Expectation("float16", values, dict.fromkeys(values, np.ones(())), {}), {}).sigmas
    unjudged = {key for key, sigma in sigmas.items() if np.isnan(sigma)}
    assert unjudged == {key for key in values if not key.endswith(("losses.0", "rate"))}


NONSENSE = {
    "Right": ("agrees", 3, ""),
    "Loading": ("error", 2, "ArithmeticError: no state fits"),
    "Returning": ("error", 0, "TypeError: step() has type NoneType but must be a dict of named arrays"),
    "ReturningUnknown": (
        "broken",
        0,
        "step() returned 'velocity.pooler.bias', which this training does not have, 'loss', which this "
        "training does not have",
    ),
    "ReturningRows": (
        "broken",
        0,
        "step() returned 'losses.0' of shape (1,), which must be (), 'losses.1' of shape (1,), which "
        "must be (), 'gradients.embeddings.token.weight' of shape (1, 17, 6), which must be (17, 6) "
        "and 111 more",
    ),
    "ReturningFew": ("diverges", 3, ""),
}


def test_session_that_returns_or_raises_nonsense_is_a_row_and_the_others_go_on():
    problem = case(steps=3)
    tracks = {
        track.backend: track
        for track in resynchronised(
            problem, [Candidate(name, getattr(stepping, name).session(problem)) for name in NONSENSE]
        )
    }
    outcomes = {name: (track.status, track.steps, track.detail) for name, track in tracks.items()}
    assert outcomes == NONSENSE
    assert 0 < tracks["Right"].worst < 1
    assert all(len(curve.ratio) == 3 for curve in tracks["Right"].curves)
    first = tracks["ReturningFew"].first.row
    assert first.tensor.endswith(".gradients.embeddings.token.weight")
    assert first.note == "missing: the backend returned no such tensor"


def test_what_a_backend_does_not_keep_or_load_shows_in_its_second_or_third_step(unexplained):
    problem = case(steps=3)
    tracks = resynchronised(
        problem,
        [
            Candidate(name, getattr(stepping, name).session(problem))
            for name in ("KeepsNoState", "CountsNoSteps", "LoadsNoSteps")
        ],
    )
    assert [(track.first.step, track.diverged) for track in tracks] == [(1, 1), (1, 1), (2, 1)]


@pytest.mark.parametrize("fields", [{}, {"ignore_label": 1}, {"num_classes": 2}])
def test_consecutive_batches_of_one_size_have_different_labels(fields):
    # A loop that keeps the labels of an earlier batch diverges.
    problem = example(CONFIG.replace(**fields), Recipe(**ADAMW), 5, batch=3, tokens=5)
    for before, after in pairwise(problem.training.steps[:-1]):
        assert all((a.labels != b.labels).any() for a, b in zip(before, after, strict=True))


def test_fault_of_the_judge_is_a_row_and_is_not_the_backends(monkeypatch):
    problem = case(steps=2)
    monkeypatch.setattr("concord.conformance.lockstep.running.cause_of", lambda first, others: 1 / 0)
    tracks = resynchronised(
        problem, [Candidate("right", Stepping(problem)), Candidate("wrong", Stepping(case(epsilon=1e-6)))]
    )
    assert [(track.status, track.detail) for track in tracks] == [
        ("agrees", ""),
        ("diverges", "a bug in Concord while explaining step 1: ZeroDivisionError: division by zero"),
    ]


def test_record_of_lockstep_is_read_back_and_makes_a_page(tmp_path):
    problem, wrong = case(steps=4), case(steps=4, clip_at=1.002)
    tracks = resynchronised(problem, [Candidate("wrong", Stepping(wrong, late=1, usual=problem))])
    report = Lockstep("resynchronised", "float32", about(problem, Setup()), tuple(tracks), {}, 3.0)
    assert report.exit_code == 1
    record.write(tmp_path / "lockstep.json", record.make_record(report, "lockstep", "four steps"))
    data = record.read(tmp_path / "lockstep.json")
    assert data.outcome == report
    text = page(data)
    assert "wrong diverges first at step 2" in text
    assert "clip_at = 1.002 instead of 1" in text
    assert text.count('class="growth"') == 7


@pytest.mark.clause("OPT-11")
def test_section_that_no_step_judges_keeps_training_from_agreeing():
    problem = case("bfloat16", steps=1)  # beta2 rounds to 1, and right frameworks may divide by zero
    tracks = resynchronised(
        problem, [Candidate("right", Stepping(problem)), Candidate("sevens", Sevens(problem))]
    )
    assert [(track.status, track.unjudged) for track in tracks] == [("undetermined", ("parameters",))] * 2
    lost = rounded_hyperparameters(problem.training.recipe, "bfloat16")
    report = Lockstep("resynchronised", "bfloat16", about(problem, Setup()), tuple(tracks), lost=lost)
    assert report.exit_code == 3
    console = Console(width=200, file=io.StringIO())
    show(report, console, "one step")
    for text in (console.file.getvalue(), page(record.make_record(report, "lockstep", "one step"))):
        assert (
            "not judged: parameters at 1 of 1 steps: bfloat16 cannot represent the recipe's beta2, "
            "weight_decay (OPT-11); train with values" in " ".join(unescape(text).split())
        )
    session = Stepping(replace(problem, training=replace(problem.training, reported=(0,))))
    reported = [session.step(batches, report=True) for batches in problem.training.steps]
    with pytest.raises(SpecError, match="no step judged the parameters of this training"):
        first_divergence(session.case, reported)


def test_lockstep_passes_only_if_something_was_judged():
    for code, *statuses in ((0, "agrees", "absent"), (3,), (3, "agrees", "undetermined"), (3, "refused")):
        tracks = tuple(Track("toy", status) for status in statuses)
        assert Lockstep("resynchronised", "float32", {}, tracks).exit_code == code


def frozen(o, right, name, parameter, *arguments):
    moved = right(name, parameter, *arguments)  # the moments are updated
    return parameter if o.kinds[name] == "positions" else moved


def test_standard_case_shows_positions_that_are_not_trained(unexplained):
    problem = standard(steps=2)
    (track,) = resynchronised(problem, [Candidate("toy", Bugged(problem, rule(updated=frozen)))])
    assert track.first.tensor == "parameters.embeddings.position.weight"


DECAYS = {
    "product": lambda weights, rate: weights * np.float32(1 - rate * 0.01),
    "difference": lambda weights, rate: weights - weights * np.float32(rate * 0.01),
    "by a hundredth more": lambda weights, rate: weights - weights * np.float32(rate * 0.0101),
}


def test_decay_that_is_rounded_alike_in_every_step_stays_in_the_envelope():
    rates = [0.001 * (1 - step / 1999) for step in range(1999)]
    weights = np.random.default_rng(7).normal(0, 0.02, (3, 389)).astype(np.float32)
    # Just above a power of two a product has the largest rounding error, unlike most others of the row.
    weights[0, 0] = 0.0626
    recipe = Recipe(algorithm="sgd", learning_rate=0.001, weight_decay=0.01, decay_form="times_rate")

    def train(arithmetic, observer):
        optimizer = ReferenceOptimizer(arithmetic, recipe, {"w": "embedding"})
        still, parameters = {"w": arithmetic.leaf(np.zeros(weights.shape))}, {"w": arithmetic.leaf(weights)}
        for rate in rates:
            parameters = optimizer.update(parameters, still, rate)
        observer("w", parameters["w"].value)

    values, sigmas = estimate(train, "float32", elements=weights.size)
    ratios = {
        name: judge_tensor(reduce(decay, rates, weights), values["w"], sigmas["w"], "float32").ratio
        for name, decay in DECAYS.items()
    }
    assert {name for name, ratio in ratios.items() if ratio > 1} == {"by a hundredth more"}, ratios


# In the workers of the four frameworks.

# The sizes of the training-bug runs, so that JAX reuses what it compiled for them.
IN_WORKERS = CONFIG.replace(d_ff=11)


@pytest.mark.clause("DRP-2")
@pytest.mark.in_turn
@pytest.mark.parametrize("dtype", [pytest.param("float64", marks=pytest.mark.slow), "float32"])
def test_backend_agrees_in_lockstep(worker, dtype, monkeypatch):
    monkeypatch.setattr(Setup, "open", lambda *_, **__: nullcontext(worker))
    problem = example(IN_WORKERS, Recipe(**ADAMW), 4, batch=2, tokens=5, seed=1, dtype=dtype)
    report = conduct(problem, [worker.name], Setup(asked=(worker.name,), threads=1))
    (track,) = report.tracks
    assert (track.status, track.steps, track.detail) == ("agrees", 4, ""), track.first
    sections = "losses gradients norm clipped rate moments parameters"
    assert {curve.section for curve in track.curves} == {*sections.split()}
    assert report.exit_code == 0


def test_command_says_what_is_wrong_with_each_backend(entered, unexplained, tmp_path):
    model, recipe = tmp_path / "model.toml", tmp_path / "recipe.toml"
    model.write_text(CONFIG.replace(pooling="flatten", pooler="none").to_toml())
    recipe.write_text("algorithm = 'adam'\nlearning_rate = 0.01\naccumulation = 2\n")
    output, _ = entered(
        f"lockstep --variant {model} --recipe {recipe} --steps 3 --json {tmp_path / 'found.json'}",
        *options("--backend", [toy("Late", "stepping"), toy("NumpyBackend"), "nowhere.at_all:Its"]),
        ends=1,
    )
    assert "diverges first at step 3, parameters." in output
    data = json.loads((tmp_path / "found.json").read_text())
    assert (data["kind"], data["exit_code"], data["mode"]) == ("lockstep", 1, "resynchronised")
    late, numpy, nowhere = data["tracks"]
    assert late["first"]["step"] == 2
    assert (numpy["status"], nowhere["status"]) == ("unsupported", "missing")


def test_a_checkpoint_is_trained(entered, refused, tmp_path):
    folder, right = hugging_face(tmp_path / "bert"), toy("Right", "stepping")
    output, _ = entered(f"lockstep {folder} --steps 2 --batch 2 --tokens 5 --backend {right}")
    assert "agrees" in output
    assert refused(f"lockstep {folder} --variant bert") == [
        "--variant is given, but CHECKPOINT already determines the variant; leave one out"
    ]
    assert refused(f"lockstep {folder} --tokens 20") == [
        "--tokens is 20 but must be at most 19: the model has no more positions"
    ]


def test_a_judged_step_leaves_nothing_to_the_garbage_collector():
    problem = case(steps=1)
    gc.collect()
    gc.disable()
    try:
        trajectory = problem.trajectory(MonteCarlo("float32", samples=1))
        gone = weakref.ref(trajectory)
        trajectory.run(lambda name, array: None)
        del trajectory
        assert gone() is None
    finally:
        gc.enable()


def test_an_update_keeps_no_tape():
    problem = case(steps=1)
    trajectory = problem.trajectory(exact("float32"))
    gradients = {name.removeprefix("parameters."): array for name, array in problem.start.items()}
    updated = dict[str, np.ndarray]()
    trajectory.finish(gradients, {}, problem.training.steps[0], updated.__setitem__)
    assert {f"first_moment.{name}" for name in gradients} < set(updated)
    assert not trajectory.a._tape
    assert not any(node.operands for node in trajectory.parameters.values())


def test_a_large_model_is_judged_before_backends_go_on(monkeypatch):
    problem, events = case(steps=3), []

    class Watched(Stepping):
        def step(self, batches, report=False):
            events.append(f"step {self.steps}")
            return super().step(batches, report)

    def outcome():
        (track,) = resynchronised(
            problem, [Candidate("toy", Watched(problem))], lambda name, steps, now: events.append(steps)
        )
        return track.status, track.curves

    usual = outcome()
    events.clear()
    monkeypatch.setattr("concord.conformance.lockstep.running.WITNESSED", 0)
    assert outcome() == usual
    assert events == ["step 0", 1, "step 1", 2, *["step 2"] * 2, 3]


def test_training_that_does_not_fit_in_memory_is_refused_beforehand(monkeypatch, refused):
    monkeypatch.setattr("concord.backends.machine.memory", lambda: (2**34, 2**33))
    assert refused("lockstep --variant nndl-paddle --backend torch") == [
        "this needs about 8.9 GiB of memory, but 8.0 GiB are available: name fewer backends, "
        "or train a model with a smaller vocabulary or fewer layers"
    ]


def test_progress_begins_before_the_first_step_and_tells_its_runs(entered, monkeypatch):
    monkeypatch.setattr("concord.conformance.progress.EVERY", 0.0)
    told = []
    monkeypatch.setattr(
        "concord.commands.lockstep.bars", lambda *_: nullcontext(lambda *progress: told.append(progress))
    )
    right = toy("Right", "stepping")
    entered(f"lockstep --steps 2 --backend {right}")
    assert (told[0], told[-1]) == ((right, 0, "started"), (right, 2, ""))
    assert any(done == 1 and now.startswith("deriving tolerances: ") for _, done, now in told)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_standard_case_raises_no_false_alarm(dtype, seed):
    names = backends.BUILT_IN
    report = conduct(standard(seed=seed, dtype=dtype), names, Setup(threads=1, asked=names))
    assert [(track.backend, track.status, track.steps) for track in report.tracks] == [
        (name, "agrees", 200) for name in names
    ]
