"""What ``concord speed`` does with its options."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from concord import writing
from concord.backends import machine
from concord.backends.interface import WORKLOAD_KINDS
from concord.conformance import record as files
from concord.conformance.campaign import Settings
from concord.conformance.estimate import Z
from concord.conformance.report import within
from concord.progress import telling
from concord.spec.errors import SpecError, collecting, refuse, unknowns
from concord.spec.precision import PRECISIONS
from concord.speed import Mode, Plan, Record, Workload, compare, measure, read, workload
from concord.speed.bandwidth import copy_gbytes
from concord.speed.markdown import markdown as as_markdown
from concord.speed.peers import PEERS
from concord.speed.plan import PATIENCE, PROFILES, TURNS
from concord.speed.presets import Preset, named, of_size, own, own_config, own_variant, sweep
from concord.speed.table import show, show_changes
from concord.terminal import Terminal

if TYPE_CHECKING:
    from concord.own import Given

PRESETS = ("minilm", "bert-base")
"""What is measured unless something else is asked for: what a machine without accelerators can do in minutes."""

EXPLICIT = Mode("explicit", "eager")

MODES = (
    Mode("library", "compiled"),
    Mode("library", "eager"),
    Mode("library:onednn", "compiled"),
    EXPLICIT,
    Mode("library", "eager", "as shipped"),
)
"""How it is measured unless something else is asked for."""

BUDGET = 340.0
"""Seconds that a usual run may take, on whatever machine."""

QUICK = (Mode("library", "eager"), Mode("library", "compiled"))
"""What is measured in a hurry."""

ON_DEVICES = (Mode("library", "compiled"), Mode("library:fused", "compiled"), Mode("library", "eager"))
"""How it is measured on accelerators, and what: models large enough to keep one busy."""

LARGE_PRESETS = ("bert-base", "bert-large")

MOST = 10**6
"""Samples of a batch, and tokens of a sample: what has more fits into no memory."""

UNPADDED = (Mode("library", "unpadded"), Mode("library", "unpadded-compiled"))
"""And where texts are of unequal length."""

NOISE = 0.25
"""Cores that other processes may keep busy without a warning."""

QUICK_TURNS = 2
"""Turns of a quick measurement."""


def models(
    presets: Sequence[str] | None,
    variants: Sequence[str] | None,
    configs: Sequence[Path] | None,
    batch: int | None,
    tokens: int | None,
    device: str = "cpu",
) -> list[Preset]:
    """Return the models that the options describe, each with its batch; without any, the usual presets.

    Raises:
        SpecError: listing every name that is unknown, and every file that describes no model.
    """
    usual = () if variants or configs else PRESETS if device == "cpu" else LARGE_PRESETS
    wanted: list[tuple[Callable[[Any], Preset], Any]] = [(named, name) for name in presets or usual]
    wanted += [(own_variant, name) for name in variants or ()] + [
        (own_config, path) for path in configs or ()
    ]
    found = []
    sizes = (("batch", batch), ("tokens", tokens))
    problems = [
        f"--{axis} is {size} but must be at least 1 and at most {MOST}"
        for axis, size in sizes
        if size is not None and not 1 <= size <= MOST
    ]
    asked = (None, None) if problems else (batch, tokens)
    for make, given in wanted:
        with collecting(problems):
            found.append(of_size(make(given), *asked))
    if problems:
        raise SpecError(list(dict.fromkeys(problems)))
    return found


def own_model(given: Given, batch: int | None, tokens: int | None) -> list[Preset]:
    """Return the model of a checkpoint with a batch of the usual size, or one of texts.

    Raises:
        SpecError: if the checkpoint, or a text, cannot be read.
    """
    import numpy as np

    from concord.own import load

    found = load(replace(given, batch=MOST), gradients=False)
    (drawn,) = found.batches.values()
    preset = own(found.name, str(given.checkpoint), found.config)
    if given.texts is None:
        return [of_size(preset, batch, tokens)]
    ids = drawn.required("input_ids")
    lengths = tuple((ids.shape[1] - np.argmax(ids[:, ::-1] != found.config.pad_id, axis=1)).tolist())
    return [replace(preset, batch=len(ids), tokens=ids.shape[1], ragged=lengths)]


def workloads(
    models: Sequence[Preset],
    kinds: Sequence[str] | None,
    paddings: Sequence[str] | None,
    dtypes: Sequence[str] | None,
    swept: str | None,
    device: str = "cpu",
) -> tuple[Workload, ...]:
    """Return what the options describe.

    Raises:
        SpecError: listing every name that is unknown.
    """
    refuse(unknowns("dtype", dtypes or (), PRECISIONS))
    problems: list[str] = []
    found: list[Workload] = []
    on_cpu = device == "cpu"
    dtypes = dtypes or (("float32",) if on_cpu else ("float32", "bfloat16"))
    for model, kind, padding, dtype in itertools.product(
        models, kinds or (("inference",) if on_cpu else WORKLOAD_KINDS), paddings or ("full",), dtypes
    ):
        with collecting(problems):
            work = workload(model, kind, padding, dtype)
            found += sweep(swept, work) if swept else [work]
    if problems:
        raise SpecError(list(dict.fromkeys(problems)))
    return tuple(found)


def modes(
    implementations: Sequence[str] | None,
    executions: Sequence[str] | None,
    profiles: Sequence[str] | None,
    ragged: bool,
    quick: bool,
    device: str = "cpu",
) -> tuple[Mode, ...]:
    """Return the modes that the options describe; without any, those that most will ask for.

    Raises:
        SpecError: for an unknown profile.
    """
    wrong = unknowns("profile", profiles or (), PROFILES)
    if wrong:
        raise SpecError(wrong)
    if implementations or executions:
        chosen = [
            Mode(*names)
            for names in itertools.product(
                implementations or ("explicit", "library"),
                executions or ("eager", "compiled"),
                profiles or ("tuned",),
            )
        ]
        return tuple(chosen)
    usual = [*(QUICK if quick else MODES if device == "cpu" else ON_DEVICES), *(UNPADDED if ragged else ())]
    return tuple(mode for mode in usual if mode.profile in (profiles or PROFILES))


def with_peers(names: Sequence[str], asked: Sequence[str] | None, works: Sequence[Workload]) -> list[str]:
    """Return backends and, unless some were asked for by name, the peers that know one of the models."""
    known = [
        work
        for work in works
        if work.preset.config.pooler == "tanh"
        and work.preset.config.positions == "learned"
        and work.preset.config.position_of_padding == "counted"
    ]
    return [*names, *(PEERS if known and not asked else ())]


def plan(
    names: Sequence[str],
    works: Sequence[Workload],
    chosen: Sequence[Mode],
    settings: Settings,
    turns: int | None,
    budget: float | None,
    quick: bool,
    usual: bool,
) -> Plan:
    """Return the plan.

    Args:
        usual: whether no workload and no mode was asked for. Then the explicit code, which is nobody's fastest, is
            measured on the first workload alone, and there is a limit to how long the whole may take.

    Raises:
        SpecError: if there are too few turns, or less than no time.
    """
    problems = [f"--turns is {turns} but must be at least 1"] if turns is not None and turns < 1 else []
    problems += (
        [f"--budget is {budget:g} s but must not be negative"]
        if budget is not None and not budget >= 0
        else []
    )
    if problems:
        raise SpecError(problems)
    return Plan(
        names=tuple(names),
        workloads=tuple(works),
        modes=tuple(chosen),
        limit=Z,
        asked=settings.asked,
        device=settings.device,
        precision=settings.precision,
        turns=turns or (QUICK_TURNS if quick else TURNS),
        patience=1 if quick else PATIENCE,
        budget=BUDGET if budget is None and usual else budget,
        left_out=frozenset((EXPLICIT, work) for work in works[1:]) if usual else frozenset(),
        threads=settings.threads or os.cpu_count() or 1,
        thorough=not quick,
        python=settings.python,
        ssh=settings.ssh,
        time_limit=settings.time_limit,
    )


def run(
    chosen: Plan, json: Path | None, html: Path | None, resume: Path | None, markdown: Path | None = None
) -> int:
    """Measure, print and write; return the exit code.

    Raises:
        SpecError: if a record cannot be gone on with, or something cannot be written.
        KeyboardInterrupt: when interrupted; what was measured until then has been printed and written.
    """
    kept = Record(chosen, read(resume) if resume else None)
    kept.settings["cores_busy_before"] = busy = machine.cores_busy()
    if busy > NOISE:
        Terminal(stderr=True).print(
            f"warning: other processes keep {busy:.1f} of {os.cpu_count()} cores busy; what is measured beside them says little",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )
    if chosen.device == "cpu":
        kept.settings["copy_gbytes"] = copy_gbytes(chosen.threads or 1)
    json = json or resume
    started, before, console = time.perf_counter(), kept.seconds, Terminal()

    def keep(entry: dict[str, Any]) -> None:
        kept.add(entry)
        kept.seconds = before + time.perf_counter() - started
        if json is not None:
            files.write(json, kept.record())

    try:
        with telling() as tell:
            kept.complete = measure(chosen, kept.done, keep, tell)
    finally:
        kept.seconds = before + time.perf_counter() - started
        made = kept.record()
        data = files.data(made)
        if kept.entries:
            show(data, console)
        finished = markdown if kept.complete else None
        put = partial(within, finished, "speed") if finished else str
        writing.write(
            console,
            (json, lambda: files.text(made)),
            (html, lambda: writing.page(made)),
            (finished, lambda: put(as_markdown(data))),
        )
        console.print(f"{kept.seconds:.0f} s in all", highlight=False)
    return int(data["exit_code"])


def changes(old: Path, new: Path) -> int:
    """Print what changed between two records; 1 if something became slower."""
    before, after = read(old), read(new)
    found = list(compare(before, after))
    show_changes(before, after, found, Terminal())
    return 1 if any(change.verdict == "slower" for change in found) else 0
