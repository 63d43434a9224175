"""Open training sessions: the bits of a run, resuming, and refusals."""

import dataclasses

import numpy as np
import pytest

from concord import spec
from concord.backends.interface import Request, Unsupported
from concord.spec.errors import SpecError
from concord.spec.files import section
from concord.spec.training.recipe import Recipe
from concord.spec.training.trajectory import Training
from tests.test_training import CONFIG, RECIPES

WEIGHTS = spec.initialize(CONFIG, seed=3)
DROPOUT = {"dropout_embeddings": 0.1, "dropout_weights": 0.2, "dropout_activation": 0.2, "dropout_head": 0.3}
SIZES = (5, 2, 5, 2, 5, 2, 5)
BATCHES = [
    spec.example_batch(CONFIG, batch=size, tokens=5, seed=number, padding="ragged")
    for number, size in enumerate(SIZES)
]
STEPS = [BATCHES[:2], BATCHES[2:4], BATCHES[4:6], BATCHES[6:]]


def recipe_of(name):
    fields = RECIPES[name] if name != "adamw" else {**RECIPES[name], **DROPOUT}
    return Recipe(learning_rate=0.01, accumulation=2, accumulation_mean="samples", **fields)


def request_of(recipe="adamw", steps=(), reported=(), seed=2**40 + 3, **settings):
    training = Training(recipe_of(recipe), steps, seed, reported)
    return Request(CONFIG, WEIGHTS, BATCHES[0], training=training, **settings)


def the_same(actual, expected):
    return actual.keys() == expected.keys() and all(
        np.array_equal(actual[name], expected[name], equal_nan=True) for name in actual
    )


@pytest.mark.in_turn
@pytest.mark.parametrize("recipe", ["adamw", "coupled", "lazy", "momentum", "centered"])
def test_training_goes_on_from_a_state_with_the_bits_that_it_had(worker, recipe):
    with worker.train(request_of(recipe)) as session:
        for batches in STEPS[:2]:
            session.step(batches)
        halfway = session.state()
        expected = [session.step(batches, report=True) for batches in STEPS[2:]]
        end = session.state()
    assert any(not name.startswith("parameters.") for name in halfway)
    assert len([name for name in end if np.array_equal(end[name], expected[-1].get(name))]) > 10
    with worker.train(request_of(recipe)) as another:
        for _ in range(2):  # a new session, and one that has gone on meanwhile
            another.load(halfway, 2)
            assert the_same(another.state(), halfway)
            actual = [another.step(batches, report=True) for batches in STEPS[2:]]
            assert all(the_same(step, reference) for step, reference in zip(actual, expected, strict=True))
            assert the_same(another.state(), end)


def test_session_predicts_without_dropout_what_a_run_computes(worker):
    with worker.train(request_of()) as session:
        session.step(STEPS[0])
        state = session.state()
        expected = session.step(STEPS[1])
        session.load(state, 1)
        trained = section(state, "parameters.")
        logits = session.predict(BATCHES[1])
        assert np.array_equal(session.predict(BATCHES[1]), logits)
        unlabelled = dataclasses.replace(BATCHES[1], labels=None)
        assert np.array_equal(session.predict(unlabelled), logits)
        assert the_same(session.step(STEPS[1]), expected)
    assert np.array_equal(worker.run(CONFIG, trained, BATCHES[1], gradients=False).output, logits)


def test_steps_that_do_not_fit_are_refused_before_anything_changes(open_worker):
    worker = open_worker("torch")
    with worker.train(request_of()) as session, worker.train(request_of()) as other:
        state = session.state()
        other.step(STEPS[0])  # sessions of one worker are independent
        with pytest.raises(SpecError, match="has 3 batches but must have from 1 to 2"):
            session.step(BATCHES[:3])
        with pytest.raises(SpecError, match=r"'labels'.*backend=torch"):
            session.step([dataclasses.replace(BATCHES[0], labels=np.array([0, 1, 3, 0, 2]))])
        assert the_same(session.state(), state)


def test_backend_that_holds_no_training_says_so(open_worker):
    with pytest.raises(Unsupported, match="cannot hold a training session: it has no method 'train'"):
        open_worker("tests.toys.numpy_backend:NumpyBackend").train(request_of())
    with pytest.raises(SpecError, match="'training' is missing"):
        open_worker("torch").train(Request(CONFIG, WEIGHTS, BATCHES[0]))
