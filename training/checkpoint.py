"""Checkpoints: a model with all that it takes to use it, and to go on training it with the same bits.

A checkpoint is a folder, written whole or not at all and never changed. A run is a folder of checkpoints,
``step-<number>``; a kill at any moment leaves those that are whole, and what is left of another is not taken
for one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from concord.backends.wire import in_order, pack
from concord.spec.checkpoints import CONFIG, CONTENTS, FORMAT, WEIGHTS, Contents, corrupt, read_contents
from concord.spec.config import EncoderConfig, from_toml
from concord.spec.errors import collecting, refuse
from concord.spec.fields import to_toml
from concord.spec.files import TEMPORARY, parse_toml, read_arrays, read_as, read_text
from concord.spec.folders import write_folder
from concord.spec.parameters import Weights, validate_weights
from concord.spec.runs import PROGRESS, STEP, place, step_folder
from concord.spec.training.optimizers import state_shapes
from concord.spec.training.recipe import Recipe, recipe_from_mapping
from concord.training.data import Labels, TextEncoder, unfit
from concord.training.data.encoder import TEXT_FILE
from concord.training.plan import TrainingPlan

LABELS, RECIPE, STATE = "labels.json", "recipe.toml", "state.safetensors"


@dataclass(frozen=True)
class Best:
    """The evaluation that was the best so far."""

    step: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Progress:
    """How far training has come: with the recipe and the plan it decides all that follows.

    Attributes:
        step: how many steps have been made.
        epoch: which one is under way, from 0.
        position: how many batches of it have been used.
        seconds: that training has taken.
        best: the best evaluation, if there was one.
        unimproved: evaluations since then.
        log: bytes that the log had.
        recent: loss, norm, tokens and seconds of each step since the last line of the log.
        plan: what was asked for.
        ended: why training is over; empty: it is not.
    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    seconds: float = 0.0
    best: Best | None = None
    unimproved: int = 0
    log: int = 0
    recent: list[list[float]] = field(default_factory=list)
    plan: TrainingPlan = field(default_factory=TrainingPlan)
    ended: str = ""


@dataclass(frozen=True)
class TrainingCheckpoint:
    """A model, and how it came to be.

    Attributes:
        config: the member of the family.
        weights: by canonical name, in the shapes of :func:`concord.spec.parameters.shape_of` (SPEC WGT-1,
            WGT-2); the dtype is that of training.
        labels: the names of the classes.
        encoder: how texts are encoded.
        recipe: of the optimizer.
        state: what the optimizer keeps, as ``first_moment.<canonical name>`` and so on
            (:func:`concord.spec.training.optimizers.moments`).
        progress: how far training has come.
    """

    config: EncoderConfig
    weights: Weights
    labels: Labels
    encoder: TextEncoder
    recipe: Recipe
    state: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)

    def validate(self, where: str = "") -> None:
        """Refuse a checkpoint whose parts do not fit together.

        Raises:
            SpecError: listing everything that is wrong with weights, labels, state and encoder (SPEC WGT-1
            to WGT-3).
        """
        problems: list[str] = []
        with collecting(problems):
            validate_weights(self.config, self.weights, where=where)
        context = f" [{where}]" if where else ""
        apart = (*unfit(self.config, self.encoder, self.labels), *self._state_problems())
        problems += [f"{problem}{context}" for problem in apart]
        refuse(problems)

    def _state_problems(self) -> Iterator[str]:
        known = state_shapes(self.config, self.recipe)
        yield from (
            f"{name!r} is unexpected: the recipe keeps no such state"
            for name in self.state
            if name not in known
        )
        missing = [name for name in known if name not in self.state] if self.progress.step else []
        yield from (
            f"{name!r} is missing but is required after {self.progress.step} steps" for name in missing
        )
        for name, array in self.state.items():
            if name in known and (array.shape != known[name] or not np.issubdtype(array.dtype, np.floating)):
                yield (
                    f"{name!r} has shape {array.shape} and dtype {array.dtype} "
                    f"but must be {known[name]}, of a floating-point type"
                )


def write(folder: Path, checkpoint: TrainingCheckpoint) -> None:
    """Write a new checkpoint, whole or not at all.

    Raises:
        FileExistsError: if there is something of that name.
        SpecError: if its parts do not fit together, or it cannot be written.
    """
    checkpoint.validate()
    files = {
        CONFIG: checkpoint.config.to_toml().encode(),
        WEIGHTS: pack(checkpoint.weights),
        PROGRESS: _json(asdict(checkpoint.progress)),
        LABELS: checkpoint.labels.to_json().encode(),
        RECIPE: to_toml(checkpoint.recipe.as_dict()).encode(),
        STATE: pack(checkpoint.state),
        **{name: text.encode() for name, text in checkpoint.encoder.files().items()},
    }
    contents = Contents(
        FORMAT, {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())}
    )
    write_folder(folder, {**files, CONTENTS: _json(asdict(contents))})


def _json(data: Any) -> bytes:
    return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode("utf-8", errors="backslashreplace")


def read(folder: Path, which: Literal["best", "last"] = "best") -> TrainingCheckpoint:
    """Read a checkpoint.

    Args:
        folder: a checkpoint, or a run.
        which: of a run's checkpoints.

    Raises:
        SpecError: listing what is missing, corrupt, or does not fit.
    """
    folder = place(folder, which)
    contents = read_contents(folder)
    files, problems = contents.sha256, corrupt(folder, contents)
    readers: dict[str, tuple[str, Callable[[Path], Any]]] = {
        CONFIG: ("config", lambda path: from_toml(read_text(path), str(path))),
        WEIGHTS: ("weights", read_arrays),
        PROGRESS: ("progress", lambda path: read_as(path, Progress)),
        LABELS: ("labels", Labels.read),
        RECIPE: ("recipe", read_recipe),
        STATE: ("state", read_arrays),
        TEXT_FILE: ("encoder", lambda path: TextEncoder.read(path.parent)),
    }
    problems += [f"{folder}: lacks {name}" for name in readers if name not in files]
    refuse(problems)
    found: dict[str, Any] = {}
    for name, (part, reading) in readers.items():
        with collecting(problems):
            found[part] = reading(folder / name)
    refuse(problems)
    read_in = TrainingCheckpoint(**{**found, "weights": in_order(found["weights"], found["config"])})
    read_in.validate(where=str(folder))
    return read_in


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from a TOML file.

    Raises:
        SpecError: if it cannot be read, or describes no training.
    """
    return recipe_from_mapping(parse_toml(read_text(path), str(path)), str(path))


# Runs: folders of checkpoints.


def tidy(run: Path, keep: set[int]) -> None:
    """Remove what is left of checkpoints that a kill kept from being whole, and whole ones but for some.

    Args:
        keep: the steps whose checkpoints stay.
    """
    kept = {step_folder(run, step).name for step in keep}
    for path in run.iterdir() if run.is_dir() else ():
        if (
            not path.is_dir()
            or path.name in kept
            or not (STEP.fullmatch(path.name) or path.name.startswith(TEMPORARY))
        ):
            continue
        # Without its table of contents it is none any more, whenever the rest is interrupted.
        (path / CONTENTS).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
