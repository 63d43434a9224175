"""``concord train`` and ``concord show curves``: a model is trained in one framework, and what came of it is shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from concord import fitting, lockstepping, options, pretrained, spec, writing
from concord.spec.errors import SpecError, optional
from concord.spec.training.dropout import GENERATORS
from concord.spec.training.recipe import recipes

if TYPE_CHECKING:
    from concord.conformance.expectation import JudgedTraining
    from concord.training.checkpoint import Checkpoint
    from concord.training.data import Corpus

Lockstep = Annotated[
    bool,
    typer.Option(
        "--lockstep",
        help="Train the same batches in every framework instead, and judge each step against the oracle.",
    ),
]
Case = Annotated[
    str | None,
    typer.Option(
        "--case",
        metavar="C",
        autocompletion=options.among(lambda: lockstepping.CASES),
        help="With --lockstep: model, recipe and batches by name: standard.",
    ),
]
FreeRunning = Annotated[
    bool,
    typer.Option(
        "--free-running",
        help="With --lockstep: each backend goes on from its own step, not from the oracle's.",
    ),
]
StopFirst = Annotated[
    bool,
    typer.Option("--stop-first", help="With --lockstep: leave a backend out after its first divergence."),
]
Variant = Annotated[
    str | None,
    typer.Option(
        "--variant",
        metavar="V",
        autocompletion=options.among(spec.variants),
        help="The member of the family; --set changes its sizes.",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", parser=writing.path, help="Instead: a model of your own, as TOML."
    ),
]
Pretrained = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        metavar="PATH",
        parser=writing.path,
        help="Instead: go on from the weights of a checkpoint of any format, or of a run, and with its tokenizer.",
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Another value for a field of the configuration or the recipe; may be repeated.",
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="PATH",
        parser=writing.path,
        help="Training samples, or a folder with train, dev and test.",
    ),
]
Dev = Annotated[
    Path | None, typer.Option("--dev", metavar="PATH", parser=writing.path, help="Samples to evaluate on.")
]
Test = Annotated[
    Path | None,
    typer.Option(
        "--test",
        metavar="PATH",
        parser=writing.path,
        help="Samples that the best model is evaluated on in the end.",
    ),
]
Vocabulary = Annotated[
    int | None,
    typer.Option(
        "--vocabulary", metavar="N", help="Tokens that are learnt at most. Default: as many as the model has."
    ),
]
VocabFile = Annotated[
    Path | None,
    typer.Option("--vocab-file", metavar="FILE", parser=writing.path, help="A vocab.txt to take instead."),
]
Tokens = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        metavar="N",
        help="Tokens of a sample; longer ones are cut. Default: as many as the model has positions for.",
    ),
]
RecipeName = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="R",
        parser=fitting.named_recipe,
        autocompletion=options.among(recipes),
        help="A known recipe, or a TOML file. Default: adamw; with --checkpoint hugging-face.",
    ),
]
LearningRate = Annotated[float | None, typer.Option("--learning-rate", metavar="X", help="At its height.")]
Schedule = Annotated[
    str | None,
    typer.Option("--schedule", metavar="S", help="constant, linear, cosine or inverse_square_root."),
]
Warmup = Annotated[
    int | None, typer.Option("--warmup", metavar="N", help="Steps until the learning rate is at its height.")
]
Dropout = Annotated[
    float | None,
    typer.Option(
        "--dropout",
        metavar="X",
        help="The rate of embeddings, attention and its weights, feed-forward, and before the classifier.",
    ),
]
DropoutBy = Annotated[
    str,
    typer.Option(
        "--dropout-by",
        metavar="G",
        autocompletion=options.among(lambda: GENERATORS),
        help="spec: the same elements are dropped in every framework. native: by the framework's own dropout, which is faster.",
    ),
]
Accumulation = Annotated[
    int | None, typer.Option("--accumulation", metavar="N", help="Batches for each step.")
]
Batch = Annotated[
    int | None, typer.Option("--batch", metavar="N", help="Samples in a batch. Default: 32; in lockstep 4.")
]
Bucketed = Annotated[
    bool, typer.Option("--bucketed/--shuffled", help="Whether samples of like length share a batch.")
]
PadTo = Annotated[
    int,
    typer.Option(
        "--pad-to",
        metavar="N",
        help="Tokens of a batch are a multiple of N. Frameworks compile for each width: the more widths, the more often.",
    ),
]
Epochs = Annotated[
    int | None, typer.Option("--epochs", metavar="N", help="Default: 3, if nothing else ends the run.")
]
Steps = Annotated[int | None, typer.Option("--steps", metavar="N", help="End after so many steps.")]
Minutes = Annotated[float | None, typer.Option("--minutes", metavar="X", help="End after this time.")]
Patience = Annotated[
    int | None,
    typer.Option("--patience", metavar="N", help="End after so many evaluations without improvement."),
]
LogEvery = Annotated[
    int, typer.Option("--log-every", metavar="N", help="Steps between two lines of the log.")
]
EvaluateEvery = Annotated[
    int | None,
    typer.Option(
        "--evaluate-every", metavar="N", help="Steps between two evaluations. Default: after each epoch."
    ),
]
SaveEvery = Annotated[
    int | None,
    typer.Option(
        "--save-every", metavar="N", help="Steps between two checkpoints besides those at evaluations."
    ),
]
BestBy = Annotated[
    str,
    typer.Option(
        "--best-by", metavar="M", help="accuracy or loss: what the best checkpoint has most, or least, of."
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="S", help="What weights, order and dropout follow from.")
]
Out = Annotated[
    Path, typer.Option("--out", metavar="DIR", parser=writing.output, help="The folder of the run.")
]
Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="DIR",
        parser=writing.path,
        help="Go on with the run in DIR; only its limits can be changed.",
    ),
]
CurvesFile = Annotated[
    Path | None,
    typer.Option(
        "--curves",
        metavar="FILE",
        parser=writing.output,
        help="Write curves of loss and accuracy as SVG.",
    ),
]


def train(
    context: typer.Context, lockstep: Lockstep = False, case: Case = None, free_running: FreeRunning = False, stop_first: StopFirst = False, json: options.Json = None,
    backend: options.Backends = None, variant: Variant = None, config: Config = None, checkpoint: Pretrained = None, changes: Changes = None, data: Data = None, dev: Dev = None,
    test: Test = None, layout: options.Layout = None, columns: options.Columns = None, on_error: options.OnError = "fail", tokenization: options.Tokenization = "characters",
    vocabulary: Vocabulary = None, vocab_file: VocabFile = None, tokens: Tokens = None, recipe_name: RecipeName = None,
    learning_rate: LearningRate = None, schedule: Schedule = None, warmup: Warmup = None, dropout: Dropout = None, dropout_by: DropoutBy = "spec",
    accumulation: Accumulation = None, batch: Batch = None, bucketed: Bucketed = True, pad_to: PadTo = 16, epochs: Epochs = None, steps: Steps = None,
    minutes: Minutes = None, patience: Patience = None, log_every: LogEvery = 20, evaluate_every: EvaluateEvery = None,
    save_every: SaveEvery = None, best_by: BestBy = "accuracy", seed: Seed = 0, out: Out = Path("concord-run"), resume: Resume = None,
    html: options.Html = None, curves_file: CurvesFile = None, dtype: options.Dtype = "float32",
    implementation: options.Implementation = "explicit", execution: options.Execution = "eager", device: options.Device = "cpu",
    precision: options.Precision = "strict", deterministic: options.Deterministic = False, python: options.Python = None, ssh: options.Ssh = None,
    time_limit: options.TimeLimit = options.DEFAULT_TIME_LIMIT, memory_limit: options.MemoryLimit = None, threads: options.Threads = None,
) -> None:  # fmt: skip
    """Train a model in one framework, or in lockstep in several; a run that was killed goes on with the same bits."""
    recipe_name = recipe_name or ("adamw" if checkpoint is None else "hugging-face")
    how = (
        device,
        implementation,
        execution,
        python,
        ssh,
        time_limit,
        memory_limit,
        threads,
        precision,
        deterministic,
    )

    def begin(name: str, **plan: Any) -> tuple[Checkpoint, dict[str, Corpus]]:
        """Return a run on the samples before its first step, and these."""
        with optional("concord train", "training"):
            from concord.training import beginning
            from concord.training.plan import Plan
        assert data is not None
        planned = Plan(
            backend=name,
            files=beginning.files(
                data, dev, test, layout=layout, columns=options.columns_of(columns), on_error=on_error
            ),
            bucketed=bucketed,
            pad_to=pad_to,
            dtype=dtype,
            **plan,
        )
        begun = pretrained.start_of(checkpoint) if checkpoint else None
        model, recipe = fitting.described(
            variant, config, recipe_name, changes or [], begun.config if begun else None
        )
        recipe = beginning.changed_recipe(recipe, learning_rate, schedule, warmup, dropout, accumulation)
        start, corpora = beginning.begin(
            model,
            recipe,
            planned,
            beginning.Texts(tokenization=tokenization, vocabulary=vocabulary, file=vocab_file, tokens=tokens),
            seed,
            begun,
        )
        pretrained.tell(checkpoint, begun, start)
        return start, corpora

    pretrained.refuse(context, checkpoint, data)
    if lockstep:
        lockstepping.refuse_ordinary(context, data is not None)

        def made() -> JudgedTraining:
            if data is None or case is not None:
                return lockstepping.chosen(
                    case, variant, config, recipe_name, changes or [], steps, batch, tokens, seed, dtype, data
                )
            return lockstepping.on_samples(
                *begin("", batch=batch or lockstepping.BATCH, steps=steps or lockstepping.STEPS)
            )

        raise typer.Exit(lockstepping.run(made, backend, how, free_running, stop_first, json, html))
    lockstepping.refuse_alone(case, free_running, stop_first, json)
    writing.check(curves_file)
    given: dict[str, Any] = {"epochs": epochs, "steps": steps, "minutes": minutes, "patience": patience}
    settings = options.settings(backend, *how)
    if resume is not None:
        start, corpora = fitting.going_on(resume, given, python, ssh)
    else:
        name = fitting.one_backend(backend, python, ssh)
        if data is None:
            raise SpecError(
                "--data is not given: what is the model to be trained on? (--resume DIR goes on with a run)"
            )
        fitting.refuse_used(out)
        start, corpora = begin(
            name, batch=32 if batch is None else batch, dropout_by=dropout_by, log_every=log_every, evaluate_every=evaluate_every, save_every=save_every, best_by=best_by,
            threads=threads, implementation=settings.implementation, execution=settings.execution, device=settings.device, precision=precision, deterministic=deterministic, **given,
        )  # fmt: skip
    fitting.run(start, corpora, resume or out, settings)
    fitting.compare([resume or out], curves_file)


def curves(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", parser=writing.path, help="Folders of runs.")],
    picture: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", parser=writing.output, help="Write curves of loss and accuracy as SVG."
        ),
    ] = None,
) -> None:
    """Show runs of training over each other: figures, and curves of loss and accuracy."""
    writing.check(picture)
    fitting.compare(runs, picture)
