"""``concord speed``: compare the speed of conforming backends."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from concord import options, output_files
from concord.backends import machine
from concord.backends.cores import available_cores
from concord.backends.interface import WORKLOAD_KINDS
from concord.conformance.run import record as files
from concord.exit_codes import Halt
from concord.own_model import OwnModel
from concord.spec.errors import collect, collecting, refuse, unknowns
from concord.spec.precision import PRECISIONS
from concord.speed import Mode, SpeedPlan, SpeedRecord, Workload, measure, workload
from concord.speed.peers import PEERS
from concord.speed.presets import GPU_WORKLOADS, LENGTHS, Preset, named, of_size, own
from concord.speed.table import NOISE, show
from concord.terminal import Terminal, telling

# Defaults that a machine without accelerators measures in minutes.
PRESETS = ("minilm", "bert-base")

MODES = (  # by default
    Mode("library", "compiled"),
    Mode("library", "eager"),
    Mode("library:onednn", "compiled"),
)

# Seconds after which a default run starts no new measurement, for slow or busy machines.
BUDGET = 300.0

# Groups of modes on GPUs by default: the ones of which each needs little time first.
GPU_MODES = (
    (
        Mode("library", "compiled"),
        Mode("library:fused", "compiled"),
        Mode("library:cudnn", "compiled"),
    ),
    (Mode("library:max-autotune", "compiled"), Mode("library", "eager")),
)

# Limit of samples in a batch and of tokens in a sample; more do not fit in any memory.
MOST = 10**6

UNPADDED = (Mode("library", "unpadded"), Mode("library", "unpadded-compiled"))  # with ragged lengths

Names = list[str] | None


@dataclass(frozen=True)
class Timed(options.Workers):
    """Backends and peers."""

    def names(self) -> list[str]:
        """Requested backends and peers, or all backends."""
        peers = [name for name in self.backend or () if name in PEERS]
        own = [name for name in self.backend or () if name not in PEERS]
        if peers and not own:
            return peers
        return [*options.Workers.names(replace(self, backend=own)), *peers]


@dataclass(frozen=True)
class Models(options.OptionGroup):
    """Options for the workloads to measure.

    Attributes:
        preset (P): nndl, tf1, minilm, bert-base, bert-base-64 or bert-large; a variant; a model of your own
            as a TOML file ('concord show variants NAME' prints one); may be repeated. Default:
            minilm and bert-base; on a GPU bert-base-64 and bert-large.
        batch: Samples in a batch. Default: the preset's, else 8.
        tokens: Tokens in a sample. Default: the preset's, else 128 or as many as fit.
        kind (K): inference or training; may be repeated. Default: inference; on a GPU both,
            if no workload is given.
        dtype (D): {values}, or tf32 (float32 with products in TF32); may be repeated.
        lengths (L): Lengths of the samples; may be repeated. full (the default): no padding; ragged: the
            lengths of real texts.
    """

    panel = "Models"

    preset: options.NamedList = None
    batch: int | None = None
    tokens: int | None = None
    kind: Names = None
    lengths: Names = None
    dtype: Names = None

    def workloads(self, device: str, own: Preset | None) -> tuple[Workload, ...]:
        """Workloads of presets, or of a checkpoint with the lengths of its texts."""
        if device != "cpu" and not own and not any(vars(self).values()):
            return tuple(workload(*fields) for fields in GPU_WORKLOADS)
        problems = [
            *unknowns("kind", self.kind or (), WORKLOAD_KINDS),
            *unknowns("lengths", self.lengths or (), LENGTHS),
            *unknowns("dtype", self.dtype or (), (*PRECISIONS, "tf32")),
            *options.outside(("batch", self.batch, 1, MOST), ("tokens", self.tokens, 1, MOST)),
        ]
        presets = [own] if own else []
        usual = PRESETS if device == "cpu" else dict.fromkeys(preset for preset, *_ in GPU_WORKLOADS)
        for name in () if own else self.preset or usual:
            with collecting(problems):
                presets.append(of_size(named(name), self.batch, self.tokens))
        refuse(problems)
        axes = (
            presets,
            self.kind or ("inference",),
            self.lengths or (("ragged",) if own and own.ragged else ("full",)),
            self.dtype or ("float32",),
        )
        return tuple(Workload(*choice) for choice in itertools.product(*axes))


@dataclass(frozen=True)
class Modes(options.OptionGroup):
    """Options for the modes of measurement.

    Attributes:
        implementation (I): explicit, library, or a backend's own; may be repeated.
        execution (E): eager, compiled, unpadded or unpadded-compiled; may be repeated.
        quick: Measure only library layers, in two turns; time no large matrix product.
        budget (SECONDS): Start no new measurement after this many seconds. Default: {BUDGET:g} if no
            option is given, else no limit.
    """

    panel = "Measurement"

    implementation: Names = None
    execution: Names = None
    quick: bool = False
    budget: float | None = None

    def modes(self, ragged: bool, device: str) -> tuple[tuple[Mode, ...], ...]:
        """Requested modes, or the default ones, in groups to measure together."""
        refuse(options.outside(("budget", self.budget, 0, options.MOST_SECONDS)))
        groups: tuple[tuple[Mode, ...], ...]
        if self.implementation or self.execution:
            pairs = itertools.product(
                self.implementation or ("explicit", "library"),
                self.execution or ("eager", "compiled"),
            )
            groups = (tuple(itertools.starmap(Mode, pairs)),)
        else:
            usual = GPU_MODES if device != "cpu" else (MODES,)
            groups = (*((MODES[:2],) if self.quick else usual), *((UNPADDED,) if ragged else ()))
        # On a CPU one after the other: programs that are built at once share cores and memory.
        return tuple((mode,) for group in groups for mode in group) if device == "cpu" else groups


def speed(
    checkpoint: Path | None = None,
    *,
    texts: Path | None = None,
    models: Models,
    modes: Modes,
    workers: Timed,
    outputs: options.Outputs,
) -> None:
    """Measure conforming backends side by side, in alternating turns.

    Args:
        checkpoint ([CHECKPOINT]): A checkpoint in any format, in place of presets.

    Examples: concord speed --preset minilm --backend torch --backend jax
    """
    outputs.check()
    own_model = OwnModel(checkpoint, texts=texts)
    sizes = {"batch": models.batch, "tokens": models.tokens} if texts else {}
    own_preset = _own(own_model, models) if own_model.check(preset=models.preset, **sizes) else None
    device = workers.device
    settings, names, works, selection = collect(
        workers.settings,
        workers.names,
        lambda: models.workloads(device, own_preset),
        lambda: modes.modes("ragged" in (models.lengths or []), device),
    )
    if not workers.backend and any(_known(work) for work in works):
        names = [*names, *PEERS]
    # Only the default run has a time limit; explicit requests are measured completely.
    usual = not any((*vars(models).values(), checkpoint, *vars(modes).values()))
    plan = SpeedPlan(
        names,
        works,
        selection,
        replace(settings, threads=settings.threads or available_cores()),
        budget=BUDGET if usual else modes.budget,
    )
    if modes.quick:
        plan = replace(plan, turns=2, patience=1, square=False)
    raise typer.Exit(_measure(plan, outputs))


def _own(model: OwnModel, models: Models) -> Preset:
    loaded = model.load(gradients=False, size=MOST)
    (batch,) = loaded.batches.values()
    preset = own(loaded.name, str(model.checkpoint), loaded.config)
    if model.texts is None:
        return of_size(preset, models.batch, models.tokens)
    ids = batch.required("input_ids")
    padding = (ids[:, ::-1] != loaded.config.pad_id).argmax(axis=1)  # at the end of each row
    ragged = tuple((ids.shape[1] - padding).tolist())
    return replace(preset, batch=len(ragged), tokens=ids.shape[1], ragged=ragged)


def _known(work: Workload) -> bool:
    config = work.preset.config
    # The peers are Hugging Face's BERT, which supports only these poolers and positions.
    return (config.pooler, config.positions, config.position_of_padding) == ("tanh", "learned", "counted")


def _measure(plan: SpeedPlan, outputs: options.Outputs) -> int:
    record = SpeedRecord(plan)
    record.settings["cores_busy_before"] = busy = machine.cores_busy()
    if busy > NOISE:
        Terminal(stderr=True).tell(
            f"warning: other processes keep {busy:.1f} of {os.cpu_count()} cores busy; the measurements will "
            "be unreliable",
            style="yellow",
        )
    json = outputs.json

    def keep(entry: dict[str, Any]) -> None:
        record.add(entry)
        if json is not None:  # after each entry, so that an interrupted run keeps its entries
            files.write(json, record.record())

    try:
        record.complete = measure(plan, keep, telling())
    finally:
        record.signalled = Halt.code
        last = record.record()
        data = files.data(last)
        output_files.write(
            (json, lambda: files.text(last)),
            (outputs.html, lambda: output_files.page(last)),
            show=lambda: show(data, Terminal()) if record.entries else None,
        )
    return last.exit_code
