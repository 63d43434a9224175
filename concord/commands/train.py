"""``concord train``: a model trained in one framework."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from concord import options
from concord.commands.show import compare
from concord.ending import halting
from concord.model import reader
from concord.options import Named, Written
from concord.progress import bars
from concord.spec import runs
from concord.spec.config import FIELDS, EncoderConfig
from concord.spec.errors import SpecError, optional, refuse, unknown
from concord.spec.files import parse_toml
from concord.spec.training.recipe import Recipe, recipe, rounded_hyperparameters
from concord.terminal import Terminal

if TYPE_CHECKING:
    from concord.conformance.campaign import Setup
    from concord.training.checkpoint import TrainingCheckpoint
    from concord.training.data import Corpus
    from concord.training.plan import TrainingPlan
    from concord.training.prediction import TextModel


@dataclass(frozen=True)
class ModelOptions(options.OptionGroup):
    """The model and the recipe.

    Attributes:
        variant (V): A variant, or a model of your own as a TOML file; --set changes its sizes.
        checkpoint ([CHECKPOINT]): Go on from the weights of a checkpoint of any format, or a run,
            with its tokenizer.
        changes (NAME=VALUE, --set): Another value for a field of the configuration or the recipe;
            may be repeated.
        recipe (R): A known recipe, or a TOML file. Default: adamw; with CHECKPOINT hugging-face.
        learning_rate: At its height.
        schedule (S): constant, linear, cosine or inverse_square_root.
        warmup: Steps until the learning rate is at its height.
        dropout: The rate of embeddings, attention and its weights, feed-forward, and before the
            classifier.
        dropout_by (G): spec: the same elements are dropped in every framework; native: by the
            framework's own dropout, which is faster.
        accumulation: Batches for each step.
        seed: What weights, order and dropout follow from.
    """

    panel = "Model and recipe"

    variant: Named | None = None
    checkpoint: Path | None = None
    changes: list[str] | None = None
    recipe: Named | None = None
    learning_rate: float | None = None
    schedule: str | None = None
    warmup: int | None = None
    dropout: float | None = None
    dropout_by: str = "spec"
    accumulation: int | None = None
    seed: int = 0

    def described(self, pretrained: EncoderConfig | None = None) -> tuple[EncoderConfig, Recipe]:
        """Return the model and the recipe that the options describe.

        Args:
            pretrained: the model of the checkpoint; then ``--set`` is for the recipe alone.

        Raises:
            SpecError: listing what is unknown or wrong.
        """
        from concord.training.checkpoint import read_recipe
        from concord.training.plan import changed_recipe

        if (self.variant is None) == (pretrained is None):
            raise SpecError("give either --variant or CHECKPOINT")
        model = pretrained or options.model(self.variant or "")
        name = self.recipe or ("adamw" if pretrained is None else "hugging-face")
        how = read_recipe(Path(name)) if name.endswith(".toml") else recipe(name)
        own, of_recipe = dict[str, Any](), dict[str, Any]()
        fields = [*FIELDS, *(field.name for field in dataclasses.fields(Recipe))]
        for change in self.changes or ():
            name, equals, value = change.partition("=")
            if not equals or name not in fields:
                raise unknown("field in --set NAME=VALUE:", name, fields)
            (own if name in FIELDS else of_recipe)[name] = _value(value)
        if own and pretrained is not None:
            raise SpecError(f"--set {next(iter(own))} is given but CHECKPOINT is too, which says it")
        changed = changed_recipe(
            how.replace(**of_recipe),
            self.learning_rate,
            self.schedule,
            self.warmup,
            self.dropout,
            self.accumulation,
        )
        return model.replace(**own), changed


@dataclass(frozen=True)
class SampleOptions(options.Lines):
    """The samples.

    Attributes:
        data (PATH): Training samples, or a folder with train and dev.
        dev (PATH): Samples to evaluate on.
        tokenization (T): characters or words.
        vocabulary: Tokens that are learnt at most. Default: as many as the model has.
        tokens: Tokens of a sample; longer ones are cut. Default: as many as the model has
            positions for.
        batch: Samples in a batch. Default: 32.
    """

    panel = "Samples"

    data: Path | None = None
    dev: Path | None = None
    tokenization: str = "characters"
    vocabulary: int | None = None
    tokens: int | None = None
    batch: int | None = None


@dataclass(frozen=True)
class RunOptions(options.OptionGroup):
    """How long a run takes, and what is kept of it.

    Attributes:
        epochs: Default: 3, if nothing else ends the run.
        steps: End after so many steps.
        patience: End after so many evaluations without improvement.
        log_every: Steps between two lines of the log.
        evaluate_every: Steps between two evaluations. Default: after each epoch.
        save_every: Steps between two checkpoints besides those at evaluations.
        out (DIR, --out, -o): The folder of the run.
        resume (DIR): Go on with the run in DIR; only its limits can be changed.
    """

    panel = "Run"

    epochs: int | None = None
    steps: int | None = None
    patience: int | None = None
    log_every: int = 20
    evaluate_every: int | None = None
    save_every: int | None = None
    out: Written = Path("concord-run")
    resume: Path | None = None


def train(
    *,
    context: typer.Context,
    workers: options.Runs,
    start: ModelOptions,
    samples: SampleOptions,
    run: RunOptions,
    dtype: str = "float32",
) -> None:
    """Train a model in one framework."""
    _refuse_misplaced(context, start, samples, run)
    settings, folder = workers.settings(), run.resume or run.out
    if run.resume is not None:
        begun, corpora = _resumed(run, workers)
    else:
        backend = workers.one("one framework trains the model")
        if runs.steps(folder):
            raise SpecError(
                f"{folder}: holds a run already; --resume {folder} goes on with it, "
                "--out names another folder"
            )
        plan = _plan(32, samples, start, run, settings, backend=backend, dtype=dtype)
        begun, corpora = _begun(start, plan)
    _fit(begun, corpora, folder, settings)
    compare([folder])
    from concord.porting.folder import folder_of  # what reads checkpoints need not be loaded before

    console = Terminal()
    console.tell(f"the best checkpoint: {folder_of(folder)}")
    console.tell(f'next: concord predict {folder} "a text"; concord port {folder} -o DST --to FORMAT')


def _refuse_misplaced(
    context: typer.Context, start: ModelOptions, samples: SampleOptions, run: RunOptions
) -> None:
    """Refuse options that mean nothing beside others.

    Raises:
        SpecError: listing each, and why.
    """
    no_data = samples.data is None
    if no_data and (start.checkpoint is not None or not run.resume):
        raise SpecError(
            "--data is not given: what is the model to be trained on? (--resume DIR goes on with a run)"
        )
    rules = (
        (
            start.checkpoint is not None,
            "variant tokenization vocabulary",
            "CHECKPOINT is too, which has a model and a tokenizer",
        ),
    )
    refuse(
        [
            f"{name} is given but {why}"
            for wrong, names, why in rules
            if wrong
            for name in options.typed(context, names.split())
        ]
    )


def _plan(batch: int, samples: SampleOptions, *groups: object, **more: Any) -> TrainingPlan:
    """Return the plan that options describe, which have the names of its fields.

    Args:
        batch: samples in a batch, unless something else is asked for.
        groups: whose options say besides what is to be done.
        more: fields of the plan.
    """
    from concord.training.plan import TrainingPlan

    fields = [field.name for field in dataclasses.fields(TrainingPlan)]
    planned = {
        name: getattr(group, name) for group in (samples, *groups) for name in fields if hasattr(group, name)
    }
    data, dev = (None if path is None else str(path.absolute()) for path in (samples.data, samples.dev))
    size = batch if samples.batch is None else samples.batch
    own = {"data": data, "dev": dev, "columns": samples.names, "batch": size}
    return TrainingPlan(**{**planned, **own, **more})


def _begun(start: ModelOptions, plan: TrainingPlan) -> tuple[TrainingCheckpoint, dict[str, Corpus]]:
    """Return a run on samples before its first step, and these."""
    with optional("concord train", "training"):
        from concord.training.beginning import begin
    pretrained = None if start.checkpoint is None else reader(start.checkpoint, spelled=False)
    model, how = start.described(pretrained.config if pretrained else None)
    begun, corpora = begin(model, how, plan, pretrained)
    if pretrained is not None:
        _tell(start.checkpoint, pretrained, begun)
    return begun, corpora


def _tell(path: Path | None, pretrained: TextModel, start: TrainingCheckpoint) -> None:
    """Print what training begins with: what of the weights is the checkpoint's, and what was drawn."""
    from concord.training.beginning import kept as taken

    kept, names = taken(pretrained, start.config, start.labels), start.labels.names
    drawn = [name for name in start.weights if name not in kept]
    left = [name for name in pretrained.weights if name not in kept]
    said = f"drawn anew: {', '.join(drawn)}" if drawn else "nothing drawn anew"
    said += f"; left out: {', '.join(left)}" if left else ""
    Terminal(stderr=True).tell(
        f"{path}: part {pretrained.part}, {len(kept)} of {len(start.weights)} parameters taken; {said}; "
        f"{len(names)} classes: {', '.join(names[:20])}"
    )


def _value(text: str) -> Any:
    """Return what a value on the command line means: as in TOML, or a word."""
    try:
        value = parse_toml(f"value = {text}", "--set")["value"]
    except SpecError:
        return text
    return tuple(value) if isinstance(value, list) else value


def _resumed(asked: RunOptions, workers: options.Runs) -> tuple[TrainingCheckpoint, dict[str, Corpus]]:
    """Return the last checkpoint of a run, with limits given anew, and its samples.

    Raises:
        SpecError: if there is none, another backend is placed, or the samples are others now.
    """
    from concord.training import checkpoint
    from concord.training.beginning import again

    assert asked.resume is not None
    start = checkpoint.read(asked.resume, "last")
    plan, done = start.progress.plan, start.progress
    options.names([plan.backend], workers.python)
    named = {name: getattr(asked, name) for name in ("epochs", "steps", "patience")}
    if anew := {name: value for name, value in named.items() if value is not None}:
        done = dataclasses.replace(done, plan=dataclasses.replace(plan, **anew), ended="")
    start = dataclasses.replace(start, progress=done)
    return start, again(start)


def _warn(how: Recipe, dtype: str) -> None:
    """Say before the first step what of a recipe the precision does not hold as it is meant (SPEC OPT-11)."""
    for lost in rounded_hyperparameters(how, dtype):
        Terminal(stderr=True).tell(f"warning: {lost}", style="yellow")


def _fit(start: TrainingCheckpoint, corpora: dict[str, Corpus], folder: Path, settings: Setup) -> None:
    """Train, and say how far it has come.

    Raises:
        SpecError, WorkerFailure, Unsupported: as :func:`concord.training.ordinary.fit` does.
        KeyboardInterrupt: when interrupted, after a checkpoint was kept.
    """
    from concord.training.beginning import planned_steps
    from concord.training.ordinary import fit

    plan = start.progress.plan
    if start.progress.ended:
        return
    total = planned_steps(start.recipe, plan, corpora["train"])
    _warn(start.recipe, plan.dtype)
    place = dataclasses.replace(
        settings, device=plan.device, threads=plan.threads, deterministic=plan.deterministic
    )
    with (
        place.open(plan.backend) as worker,
        bars([plan.backend], total, "steps") as advance,
        halting() as halted,
    ):
        last = fit(worker, start, corpora, folder, halted, partial(advance, plan.backend))
        if not last.progress.ended:
            Terminal(stderr=True).tell(
                f"a checkpoint of step {last.progress.step} was kept; --resume {folder} goes on"
            )
