"""Ordinary training: step after step in a worker, evaluated, logged and saved.

A run that was killed goes on with the same bits: what comes next follows from the checkpoint and the samples
alone, which are weights, optimizer state, number of the step, epoch and position in it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.backends.interface import Request
from concord.backends.worker import Worker
from concord.spec import runs
from concord.spec.batch import Batch
from concord.spec.errors import SpecError
from concord.spec.files import section
from concord.spec.parameters import parameters
from concord.spec.training.optimizers import batch_weights
from concord.spec.training.schedules import learning_rate
from concord.spec.training.trajectory import Training, counts
from concord.training import checkpoint, log
from concord.training.checkpoint import Best, TrainingCheckpoint
from concord.training.data import Corpus, batches
from concord.training.metrics import measure
from concord.training.plan import PAD_TO

NumberedBatch = tuple[NDArray[np.int64], Batch]
"""A batch, and the ids of its samples."""

StepCallback = Callable[[int, str], None]
"""Called with how many steps have been made, and what is to be said of the last."""


EVALUATED = 128
"""Samples in a batch of an evaluation."""

Corpora = Mapping[str, Corpus]
"""Samples to train on, ``train``, and to evaluate on, ``dev``, if there are any."""


def accumulations(start: TrainingCheckpoint, train: Corpus, epoch: int) -> Iterator[list[NumberedBatch]]:
    """Yield the batches of each step of an epoch, the same ones each time; the last step may have fewer."""
    plan, together = start.progress.plan, start.recipe.accumulation
    every = batches(
        train, start.config, plan.batch, plan.seed, epoch, bucketed=True, multiple=PAD_TO, together=together
    )
    while accumulation := list(islice(every, together)):
        yield accumulation


class Fitting:
    """A run that is under way.

    Args:
        worker: of the backend.
        start: where it begins or goes on.
        corpora: the samples.
        run: the folder of the run.
    """

    def __init__(self, worker: Worker, start: TrainingCheckpoint, corpora: Corpora, run: Path) -> None:
        self.worker, self.start, self.corpora, self.run = worker, start, corpora, run
        self.recipe, self.plan, self.progress = start.recipe, start.progress.plan, start.progress
        (_, first), *_ = next(accumulations(start, corpora["train"], 0))
        training = Training(self.recipe, [], seed=self.plan.seed, dropout_by=self.plan.dropout_by)
        request = Request(
            start.config, start.weights, first, **vars(self.plan.settings), taps=False, training=training
        )
        self.session = worker.train(request)
        trained = [name for name, entry in parameters(start.config).items() if entry.trainable]
        weights = {f"parameters.{name}": start.weights[name] for name in trained}
        self.session.load(weights | dict(start.state), self.progress.step)
        self.saved = self.progress.step
        self.began = time.perf_counter() - self.progress.seconds

    def go(self, halted: Callable[[], bool], callback: StepCallback) -> TrainingCheckpoint:
        """Train until the plan is fulfilled, or training is halted; return the last checkpoint."""
        train, together = self.corpora["train"], self.recipe.accumulation
        while not self.progress.ended:
            rest = accumulations(self.start, train, self.progress.epoch)
            for accumulation in islice(rest, self.progress.position // together, None):
                self.step(accumulation)
                stop = halted()
                callback(self.progress.step, said(self.settle(stop)))
                if self.progress.ended or stop:
                    return self.checkpoint()
        return self.checkpoint()

    def step(self, accumulation: Sequence[NumberedBatch]) -> None:
        """Make a step."""
        before, done, config = time.perf_counter(), self.progress, self.start.config
        batches = [batch for _, batch in accumulation]
        found = self.session.step(batches)
        weights = batch_weights(self.recipe, [counts(config, batch) for batch in batches])
        loss = math.fsum(weight * float(found[f"losses.{number}"]) for number, weight in enumerate(weights))
        if not math.isfinite(loss):
            raise SpecError(
                f"the loss of step {done.step + 1} is {loss}: training has diverged at a learning rate of "
                f"{learning_rate(self.recipe, done.step):.3g}; "
                f"the last checkpoint is {runs.step_folder(self.run, self.saved)}"
            )
        tokens = sum(int((batch.required("input_ids") != config.pad_id).sum()) for batch in batches)
        now, position = time.perf_counter(), done.position + len(accumulation)
        last = position * self.plan.batch >= len(self.corpora["train"])
        self.progress = replace(
            done,
            step=done.step + 1,
            epoch=done.epoch + last,
            position=0 if last else position,
            recent=[*done.recent, [loss, float(found.get("norm", 0.0)), tokens, now - before]],
            seconds=now - self.began,
        )
        self.has_norm = "norm" in found

    def summary(self) -> dict[str, Any]:
        """Return what the log says of the steps since its last line."""
        losses, norms, tokens, seconds = zip(*self.progress.recent, strict=True)
        self.progress = replace(self.progress, recent=[])
        return {
            "loss": math.fsum(losses) / len(losses),
            "learning_rate": learning_rate(self.recipe, self.progress.step - 1),
            **({"norm": math.fsum(norms) / len(norms)} if self.has_norm else {}),
            "tokens_per_second": round(sum(tokens) / max(sum(seconds), 1e-9)),
            "memory_mib": round(self.worker.size / 2**20),
        }

    def settle(self, halted: bool) -> dict[str, Any]:
        """Do what is due after a step: evaluate, log, and keep a checkpoint; return what the log says."""
        plan, step = self.plan, self.progress.step
        row = {} if step % plan.log_every else self.summary()
        due = step % plan.evaluate_every == 0 if plan.evaluate_every else not self.progress.position
        ended = self.ended()
        if "dev" in self.corpora and (due or ended):
            row |= self.evaluated()
            ended = ended or self.ended()
        done = self.progress = replace(self.progress, ended=ended)
        if row:
            epoch = done.epoch + (done.position > 0)
            log.add(self.run, step=step, epoch=epoch, seconds=round(done.seconds, 1), **row)
        if due or ended or halted or (plan.save_every and step % plan.save_every == 0):
            self.save()
        return row

    def evaluated(self) -> dict[str, Any]:
        """Evaluate the model, and note whether it is the best so far."""
        config = self.start.config
        dev = batches(self.corpora["dev"], config, EVALUATED, bucketed=True, multiple=PAD_TO)
        said = measure(self.session.predict, config, dev)
        loss = math.nan if said.loss is None else said.loss  # no sample counts
        found, best = Best(self.progress.step, loss, said.accuracy or 0.0), self.progress.best
        if best is None or (found.accuracy, -found.loss) > (best.accuracy, -best.loss):
            self.progress = replace(self.progress, best=found, unimproved=0)
        else:
            self.progress = replace(self.progress, unimproved=self.progress.unimproved + 1)
        return {"dev_loss": found.loss, "dev_accuracy": found.accuracy}

    def ended(self) -> str:
        """Return why training is over, if it is."""
        plan, done = self.plan, self.progress
        if plan.steps is not None and done.step >= plan.steps:
            return f"{plan.steps} steps"
        if plan.epochs is not None and done.epoch >= plan.epochs:
            return f"{plan.epochs} epochs"
        if plan.patience is not None and done.unimproved >= plan.patience:
            return f"no improvement in {plan.patience} evaluations"
        return ""

    def save(self) -> None:
        """Keep a checkpoint, and remove those that are no longer needed."""
        if self.saved == self.progress.step:
            return
        self.progress = replace(self.progress, log=(self.run / log.FILE).stat().st_size)
        checkpoint.write(runs.step_folder(self.run, self.progress.step), self.checkpoint())
        self.saved = self.progress.step
        checkpoint.tidy(self.run, {self.saved, *([self.progress.best.step] if self.progress.best else [])})

    def checkpoint(self) -> TrainingCheckpoint:
        """Return where training has come to."""
        state = self.session.state()
        trained = section(state, "parameters.")
        return replace(
            self.start,
            weights={name: trained.get(name, array) for name, array in self.start.weights.items()},
            state={name: array for name, array in state.items() if not name.startswith("parameters.")},
            progress=self.progress,
        )


def fit(
    worker: Worker,
    start: TrainingCheckpoint,
    corpora: Corpora,
    run: Path,
    halted: Callable[[], bool] = lambda: False,
    callback: StepCallback = lambda step, now: None,
) -> TrainingCheckpoint:
    """Train a model from a checkpoint on, until its plan is fulfilled or it is halted; return the last one.

    Args:
        worker: of the backend that the plan names.
        start: with recipe and plan; a run that begins is at step 0.
        corpora: the samples.
        run: the folder of the run; its log is cut to what the checkpoint knows.
        halted: asked after each step; once it says True, a checkpoint is kept and training stops.

    Raises:
        SpecError: if a loss is not finite, or something cannot be written; the last checkpoint is whole.
        WorkerFailure, Unsupported: as :meth:`concord.backends.worker.Worker.train` and its session do.
    """
    checkpoint.tidy(run, set(runs.steps(run)))
    if not start.progress.step and not runs.steps(run):
        checkpoint.write(runs.step_folder(run, 0), start)
    log.cut(run, start.progress.log)
    return Fitting(worker, start, corpora, run).go(halted, callback)


def said(row: dict[str, Any]) -> str:
    """Return in short what the log says of a step."""
    names = {
        "loss": "loss {:.4f}",
        "dev_loss": "dev loss {:.4f}",
        "dev_accuracy": "dev accuracy {:.2%}",
        "tokens_per_second": "{:,} tokens/s",
    }
    return ", ".join(text.format(row[name]) for name, text in names.items() if name in row)
