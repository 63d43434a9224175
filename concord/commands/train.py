"""``concord train``: a model trained in one framework, or in lockstep in several."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from concord import options, spec, writing
from concord.commands.show import compare
from concord.conformance.expectation import JudgedTraining
from concord.conformance.lockstep.cases import STEPS as STANDARD_STEPS
from concord.conformance.lockstep.cases import example, standard
from concord.conformance.lockstep.outcome import MODES
from concord.conformance.lockstep.report import show
from concord.conformance.lockstep.running import conduct
from concord.ending import halting
from concord.model import reader
from concord.options import Written
from concord.progress import bars
from concord.spec import runs
from concord.spec.config import FIELDS, EncoderConfig, from_toml
from concord.spec.errors import SpecError, collect, optional, refuse, unknown, unknowns
from concord.spec.files import parse_toml, read_text
from concord.spec.precision import PRECISIONS
from concord.spec.training.recipe import Recipe, recipe, rounded_hyperparameters
from concord.spec.training.trajectory import Training
from concord.terminal import Terminal

if TYPE_CHECKING:
    from concord.conformance.campaign import Setup
    from concord.training.checkpoint import TrainingCheckpoint
    from concord.training.data import Corpus
    from concord.training.prediction import TextModel

STEPS, BATCH, TOKENS = 20, 4, 11
"""How much is trained in lockstep unless something else is asked for."""

OF_DATA = "without --data it trains on batches of its own, which need no samples"
OF_RECIPE = "without --data, --set NAME=VALUE changes the recipe there"
OF_RUNS = "it leaves no run that is evaluated, kept or gone on with"


def _each(names: str, why: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


ORDINARY = {
    **_each("dev patience log_every evaluate_every save_every out resume", OF_RUNS),
    "dropout_by": "what a framework's own dropout drops cannot be known to the oracle",
    "epochs": "--steps ends it",
}
"""Options of ordinary training that lockstep has no use for, and why."""

WITH_DATA = {
    **_each("layout columns on_error tokenization vocabulary", OF_DATA),
    **_each("learning_rate schedule warmup dropout accumulation", OF_RECIPE),
}
"""Options of ordinary training that lockstep takes with ``--data`` alone, and why."""

OF_CHECKPOINT = {
    **_each("variant config", "the checkpoint says what the model is"),
    **_each("tokenization vocabulary", "the checkpoint has a tokenizer"),
}
"""Options that a checkpoint leaves no room for, and why."""


def named_recipe(text: str) -> str:
    """Take the name of a recipe; one that is a file is read."""
    return str(writing.path(text)) if text.endswith(".toml") else text


@dataclass(frozen=True)
class Trainers(options.Runs):
    """The backends that train.

    Attributes:
        deterministic: Only kernels that give the same bits each time.
    """

    deterministic: bool = False


@dataclass(frozen=True)
class LockstepOptions(options.OptionGroup):
    """Training in every framework.

    Attributes:
        lockstep: Train the same batches in every framework instead, and judge each step. Without
            a model: the standard case, with batches and a recipe of its own.
        free_running: Each backend goes on from its own step, not from the oracle's.
    """

    panel = "Lockstep"

    lockstep: bool = False
    free_running: bool = False


@dataclass(frozen=True)
class ModelOptions(options.OptionGroup):
    """The model and the recipe.

    Attributes:
        variant (V): A variant; --set changes its sizes.
        config: Instead: a model of your own, as TOML.
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

    variant: str | None = None
    config: Path | None = None
    checkpoint: Path | None = None
    changes: list[str] | None = None
    recipe: Annotated[str, named_recipe] | None = None
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
        if (self.variant is not None) + (self.config is not None) + (pretrained is not None) != 1:
            raise SpecError("give one of --variant, --config and CHECKPOINT")
        if self.variant is not None:
            model = spec.variant(self.variant)
        elif self.config is not None:
            model = from_toml(read_text(self.config), str(self.config))
        else:
            assert pretrained is not None
            model = pretrained
        of_recipe = [field.name for field in dataclasses.fields(Recipe)]
        chosen: dict[str, Any] = {}
        for change in self.changes or ():
            name, equals, value = change.partition("=")
            if not equals or name not in (*FIELDS, *of_recipe):
                raise unknown("field in --set NAME=VALUE:", name, [*FIELDS, *of_recipe])
            chosen[name] = _value(value)
        of_model = {name: chosen.pop(name) for name in list(chosen) if name in FIELDS}
        if pretrained is not None:
            refuse(
                [
                    f"--set {name} is given but CHECKPOINT is too: the checkpoint says what the model is"
                    for name in of_model
                ]
            )
        return model.replace(**of_model), self._recipe().replace(**chosen)

    def _recipe(self) -> Recipe:
        from concord.training.checkpoint import read_recipe

        name = self.recipe or ("adamw" if self.checkpoint is None else "hugging-face")
        return read_recipe(Path(name)) if name.endswith(".toml") else recipe(name)


@dataclass(frozen=True)
class SampleOptions(options.Lines):
    """The samples.

    Attributes:
        data (PATH): Training samples, or a folder with train and dev.
        dev (PATH): Samples to evaluate on.
        tokenization (T): characters, wordpiece or words.
        vocabulary: Tokens that are learnt at most. Default: as many as the model has.
        tokens: Tokens of a sample; longer ones are cut. Default: as many as the model has
            positions for.
        batch: Samples in a batch. Default: 32; in lockstep 4.
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
    workers: Trainers,
    start: ModelOptions,
    samples: SampleOptions,
    run: RunOptions,
    lockstep: LockstepOptions,
    outputs: options.Outputs,
    dtype: str = "float32",
) -> None:
    """Train a model in one framework, or in lockstep in several."""
    if start.checkpoint is not None:
        problems = _beside(context, "CHECKPOINT", OF_CHECKPOINT)
        if samples.data is None:
            problems.insert(0, "CHECKPOINT is given but --data is not: what is the model to be trained on?")
        refuse(problems)
    if lockstep.lockstep:
        refuse(_beside(context, "--lockstep", ORDINARY if samples.data else {**WITH_DATA, **ORDINARY}))
        _in_lockstep(workers, start, samples, run, lockstep, outputs, dtype)
    alone = options.typed(context, _each("free_running json html", ""))
    refuse([f"{name} is given but --lockstep is not: it is for that alone" for name, _ in alone])
    settings = workers.settings()
    if run.resume is not None:
        begun, corpora = _resumed(run.resume, run, workers)
    else:
        name = workers.one("one framework trains the model")
        if samples.data is None:
            raise SpecError(
                "--data is not given: what is the model to be trained on? (--resume DIR goes on with a run)"
            )
        if runs.steps(run.out):
            raise SpecError(
                f"{run.out}: holds a run already; --resume {run.out} goes on with it, "
                "--out names another folder"
            )
        size = 32 if samples.batch is None else samples.batch
        begun, corpora = _begun(start, samples, settings, run, backend=name, batch=size, dtype=dtype)
    folder = run.resume or run.out
    from concord.porting.folder import folder_of  # what reads checkpoints need not be loaded before

    _fit(begun, corpora, folder, settings)
    compare([folder])
    console = Terminal()
    console.tell(f"the best checkpoint: {folder_of(folder)}")
    console.tell(f'next: concord predict {folder} "a text"; concord port {folder} -o DST --to FORMAT')


def _beside(context: typer.Context, option: str, among: Mapping[str, str]) -> list[str]:
    """Return what is wrong with options that stand beside one that leaves no room for them."""
    found = options.typed(context, among)
    return [f"{name} is given but {option} is too: {why}" for name, why in found]


def _begun(
    start: ModelOptions, samples: SampleOptions, *groups: Any, **more: Any
) -> tuple[TrainingCheckpoint, dict[str, Corpus]]:
    """Return a run on samples before its first step, and these.

    Args:
        groups: whose options say besides how it is trained, by the names of the plan.
        more: of the plan.
    """
    with optional("concord train", "training"):
        from concord.training import beginning
        from concord.training.plan import TrainingPlan
    assert samples.data is not None
    files = beginning.files(
        samples.data,
        samples.dev,
        layout=samples.layout,
        columns=samples.names,
        on_error=samples.on_error,
    )
    fields = [field.name for field in dataclasses.fields(TrainingPlan)]
    planned = {
        name: getattr(group, name)
        for group in (start, samples, *groups)
        for name in fields
        if hasattr(group, name)
    }
    plan = TrainingPlan(**{**planned, **more, "files": files})
    pretrained = None if start.checkpoint is None else reader(start.checkpoint, spelled=False)
    model, recipe = start.described(pretrained.config if pretrained else None)
    changes = (start.learning_rate, start.schedule, start.warmup, start.dropout, start.accumulation)
    recipe = beginning.changed_recipe(recipe, *changes)
    texts = beginning.Texts(
        tokenization=samples.tokenization,
        vocabulary=samples.vocabulary,
        tokens=samples.tokens,
    )
    begun, corpora = beginning.begin(model, recipe, plan, texts, start.seed, pretrained)
    if pretrained is not None:
        _tell(start.checkpoint, pretrained, begun)
    return begun, corpora


def _tell(path: Path | None, pretrained: TextModel, start: TrainingCheckpoint) -> None:
    """Print what training begins with: what of the weights is the checkpoint's, and what was drawn."""
    from concord.training.beginning import kept as taken

    assert start.labels is not None
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


def _resumed(
    folder: Path, limits: RunOptions, workers: Trainers
) -> tuple[TrainingCheckpoint, dict[str, Corpus]]:
    """Return the last checkpoint of a run, with limits given anew, and its samples.

    Raises:
        SpecError: if there is none, another backend is placed, or the samples are others now.
    """
    from concord.training import checkpoint
    from concord.training.beginning import again

    start = checkpoint.read(folder, "last")
    named = {name: getattr(limits, name) for name in ("epochs", "steps", "patience")}
    plan, anew = start.progress.plan, {name: value for name, value in named.items() if value is not None}
    if plan is not None:
        options.names([plan.backend], workers.python)
        if anew:
            progress = dataclasses.replace(start.progress, plan=dataclasses.replace(plan, **anew), ended="")
            start = dataclasses.replace(start, progress=progress)
    return start, again(start)


def _warn(recipe: Recipe, dtype: str) -> None:
    """Say before the first step what of a recipe the precision does not hold as it is meant (SPEC OPT-11)."""
    for lost in rounded_hyperparameters(recipe, dtype):
        Terminal(stderr=True).tell(f"warning: {lost}", style="yellow")


def _fit(start: TrainingCheckpoint, corpora: dict[str, Corpus], folder: Path, settings: Setup) -> None:
    """Train, and say how far it has come.

    Raises:
        SpecError, WorkerFailure, Unsupported: as :func:`concord.training.ordinary.fit` does.
        KeyboardInterrupt: when interrupted, after a checkpoint was kept.
    """
    from concord.training.beginning import planned_steps, source
    from concord.training.ordinary import fit

    plan, recipe = start.progress.plan, start.recipe
    assert plan is not None
    assert recipe is not None
    if start.progress.ended:
        return
    total = planned_steps(recipe, plan, corpora["train"])
    _warn(recipe, plan.dtype)
    place = dataclasses.replace(
        settings, device=plan.device, threads=plan.threads, deterministic=plan.deterministic
    )
    with (
        place.open(plan.backend) as worker,
        bars([plan.backend], total, "steps") as advance,
        halting() as halted,
    ):
        last = fit(worker, start, source(start, corpora), folder, halted, partial(advance, plan.backend))
        if not last.progress.ended:
            Terminal(stderr=True).tell(
                f"a checkpoint of step {last.progress.step} was kept; --resume {folder} goes on"
            )


# Lockstep.


def _in_lockstep(
    workers: Trainers,
    start: ModelOptions,
    samples: SampleOptions,
    run: RunOptions,
    how: LockstepOptions,
    outputs: options.Outputs,
    dtype: str,
) -> None:
    """Train in lockstep, print what came of it, write it, and leave with its exit code.

    Raises:
        SpecError: for options that describe no training, and if something cannot be written.
    """

    def made() -> JudgedTraining:
        if samples.data is None:
            return _chosen(start, samples, run.steps, dtype)
        size = {"batch": samples.batch or BATCH, "steps": run.steps or STEPS, "dtype": dtype}
        return on_samples(*_begun(start, samples, backend="", **size))

    outputs.check()
    settings, names, case = collect(workers.settings, workers.names, made)
    mode, count = MODES[how.free_running], len(case.training.steps)
    _warn(case.training.recipe, case.dtype)
    with bars(names, count, "steps") as advance:
        found = conduct(case, names, settings, mode, callback=lambda name, done: advance(name, done, ""))
    title = f"Lockstep: {count} steps, {case.dtype}, {mode}, seed {case.training.seed}"
    raise typer.Exit(outputs.finish(found, "lockstep", title, lambda: show(found, Terminal(), title)))


def on_samples(start: TrainingCheckpoint, corpora: Mapping[str, Corpus]) -> JudgedTraining:
    """Return the training that a run begins with: as many steps, on its own batches, as its plan says."""
    from concord.training import beginning

    plan, recipe = start.progress.plan, start.recipe
    assert plan is not None
    assert recipe is not None
    steps = list(islice(beginning.accumulations(start, corpora), plan.steps))
    training = Training(recipe, steps, start.progress.seed)
    return JudgedTraining(start.config, start.weights, training, dtype=plan.dtype)


def _chosen(start: ModelOptions, samples: SampleOptions, steps: int | None, dtype: str) -> JudgedTraining:
    """Return the training of a model and a recipe on random batches; without a model the standard case.

    Raises:
        SpecError: listing what is unknown, wrong or missing.
    """
    batch, tokens, seed = samples.batch, samples.tokens, start.seed
    problems = options.too_small(
        ("steps", steps, 1), ("batch", batch, 1), ("tokens", tokens, 1), ("seed", seed, 0)
    )
    problems += unknowns("dtype", [dtype], PRECISIONS)
    no_model = start.variant is None and start.config is None
    if no_model and (batch is not None or tokens is not None or start.changes or start.recipe):
        problems.append(
            "--batch, --tokens, --set and --recipe are for --variant and --config: the standard case has "
            "batches and a recipe of its own"
        )
    refuse(problems)
    if no_model:
        return standard(steps or STANDARD_STEPS, seed, dtype)
    model, recipe = start.described()
    longest = model.max_positions - model.position_start
    if tokens is not None and tokens > longest:
        raise SpecError(
            f"--tokens is {tokens} but must be at most {longest}: the model has no positions for more"
        )
    tokens = tokens or min(TOKENS, longest)
    return example(model, recipe, steps or STEPS, batch or BATCH, tokens, seed, dtype)
