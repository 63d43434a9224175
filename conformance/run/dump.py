"""Exchange of cases and runs as files (docs/guides/joining.md)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from concord.backends.interface import Request, Run
from concord.backends.wire import check_info, in_order, pack, split_gradients
from concord.conformance.judging.verdict import Result
from concord.conformance.run.campaign import Job, Report, Setup
from concord.spec.batch import completed, from_arrays
from concord.spec.config import from_mapping
from concord.spec.errors import BatchError, SpecError, WeightsError, collect, located, refuse, unknowns
from concord.spec.files import find, read_arrays, read_as, read_json, section
from concord.spec.folders import write_folder
from concord.spec.parameters import trainable
from concord.spec.tensors import output_name, taps

FORMAT = "concord.case/1"

# Taps after the output, which a run without gradients does not need.
OF_THE_LOSS = ("log_probabilities", "losses", "loss")


@dataclass(frozen=True)
class Manifest:
    """The contents of ``case.json`` (docs/guides/joining.md)."""

    format: Literal["concord.case/1"]
    group: str
    case: str
    config: dict[str, Any]
    part: str
    dtype: str
    implementation: str
    execution: str
    device: str
    taps: bool
    gradients: bool
    precision: str
    deterministic: bool
    tap_gradients: bool


# Fields of ``case.json`` that define the request, except its configuration.
ASKED = [entry.name for entry in fields(Manifest) if entry.name not in ("format", "group", "case", "config")]


@dataclass(frozen=True)
class RunAbout:
    """The contents of ``run.json``."""

    backend: str = "dump"
    info: dict[str, Any] = field(default_factory=dict)


def export_cases(folder: Path, jobs: Sequence[Job]) -> list[Path]:
    """Write each job to a folder, as ``case.json`` and ``case.safetensors``.

    Raises:
        SpecError: if a folder cannot be written or exists.
    """
    written: list[Path] = []
    try:
        for job in jobs:
            write_folder(folder / job.name, case_files(job))
            written.append(folder / job.name)
    except BaseException as error:
        # All cases or none, since a partial export would look complete.
        for path in written:
            shutil.rmtree(path, ignore_errors=True)
        if isinstance(error, FileExistsError):
            raise SpecError(f"{error.filename}: already exists; export into an empty folder") from None
        raise
    return written


def case_files(job: Job) -> dict[str, bytes]:
    """A case's files by name."""
    request = Request(job.config, job.weights, job.batch, job.part, job.dtype, gradients=job.gradients)
    arrays = {f"weights/{name}": array for name, array in job.weights.items()}
    arrays |= {f"inputs/{name}": array for name, array in job.batch.arrays().items()}
    tensor_names = {
        "output": output_name(job.config, job.part),
        "taps": [
            name
            for name in taps(job.config, job.part, job.batch.arrays())
            if job.gradients or name not in OF_THE_LOSS
        ],
        "gradients": trainable(job.config, job.part) if job.gradients else [],
    }
    manifest = {
        "format": FORMAT,
        "group": job.group,
        "case": job.case,
        **{name: getattr(request, name) for name in ASKED},
        "config": job.config.as_dict(),
        "wanted": tensor_names,
    }
    return {"case.safetensors": pack(arrays), "case.json": f"{json.dumps(manifest, indent=1)}\n".encode()}


def read_jobs(folder: Path) -> list[Job]:
    """Read every case in a folder."""
    return collect(*(partial(read_job, path) for path in _cases(folder)))


def _cases(folder: Path) -> list[Path]:
    paths = find(folder, "case.json")
    if not paths:
        raise SpecError(f"{folder} holds no case.json; export cases with 'concord case export'")
    return [path.parent for path in paths]


def read_job(folder: Path) -> Job:
    """Read a case."""
    manifest, arrays = read_as(folder / "case.json", Manifest), folder / "case.safetensors"
    tensors = read_arrays(arrays)
    try:
        config, part = from_mapping(manifest.config), manifest.part
        weights, batch = (
            in_order(section(tensors, "weights/"), config, part),
            from_arrays(section(tensors, "inputs/")),
        )
        if not manifest.gradients:
            batch = completed(config, batch, part)
        Request(config, weights, batch, **{name: getattr(manifest, name) for name in ASKED}).validate()
    except (WeightsError, BatchError) as error:
        raise SpecError([f"{arrays}: {problem}" for problem in error.problems]) from None
    except SpecError as error:
        raise SpecError([f"{folder / 'case.json'}: {problem}" for problem in error.problems]) from None
    return Job(
        manifest.group,
        manifest.case,
        manifest.dtype,
        part,
        config,
        weights,
        batch,
        gradients=manifest.gradients,
    )


def read_run(folder: Path, job: Job) -> Run:
    """Read a case's run."""
    path, about_path = folder / "run.safetensors", folder / "run.json"
    arrays = read_arrays(path)
    # Gradients require their loss.
    needed = ["output", *["loss"] * job.gradients]
    if missing := [name for name in needed if name not in arrays]:
        raise SpecError(f"{path} lacks {', '.join(map(repr, missing))}")
    refuse(
        [
            f"{path}: {name!r} must be output, loss, taps/NAME or gradients/NAME"
            for name in arrays
            if name not in ("output", "loss") and not name.startswith(("taps/", "gradients/"))
        ]
    )
    about = RunAbout()
    if os.path.lexists(about_path):
        about = read_as(about_path, RunAbout)
        with located(str(about_path)):
            refuse(unknowns("key", read_json(about_path), vars(about)))
            check_info(about.info)
    # A dump is judged on all results that its case requests.
    by_name, by_taps = split_gradients(section(arrays, "gradients/"))
    return Run(
        arrays["output"],
        arrays.get("loss"),
        section(arrays, "taps/"),
        by_name,
        about.backend,
        job.dtype,
        about.info,
        ("taps", "gradients") if job.gradients else ("taps",),
        by_taps,
    )


def judge_dumps(folder: Path) -> Report:
    """Judge every run in a folder; a case without a run is ``missing``."""
    judged = collect(*(partial(_judge_dump, path) for path in _cases(folder)))
    return Report(
        [result for result, _ in judged], {outcome.backend: info for outcome, info in judged}, Setup()
    )


def _judge_dump(folder: Path) -> tuple[Result, dict[str, Any]]:
    job, path = read_job(folder), folder / "run.safetensors"
    result = Result("dump", job.group, job.case, job.dtype, "missing", part=job.part)
    if not os.path.lexists(path):
        return replace(result, detail=f"{path}: no such file"), {}
    run = read_run(folder, job)
    with located(str(path)):
        verdict = job.judge(run)
    return replace(result, backend=run.backend, status=verdict.status, verdict=verdict), run.info
