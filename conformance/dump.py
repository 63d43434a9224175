"""Joining by files alone: cases out, runs in (docs/guides/joining.md)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from concord.backends.interface import Request, Run
from concord.backends.wire import SETTINGS, check_info, decode_request, encode_request, split_gradients
from concord.conformance.campaign import Job, Report, Result, Settings
from concord.conformance.judging import judge
from concord.spec.cases.files import read_arrays, read_object, section
from concord.spec.errors import BatchError, SpecError, WeightsError
from concord.spec.parameters import trainable
from concord.spec.tensors import output_name, taps

FORMAT = "concord.case/1"


def export_cases(folder: Path, jobs: Sequence[Job]) -> list[Path]:
    """Write each job as a folder with ``case.json`` and ``case.safetensors``.

    ``case.json`` holds the configuration, the part, the precision, and the name of every tensor that has to come back;
    ``case.safetensors`` holds ``weights/…`` and ``inputs/…``.

    Raises:
        SpecError: if the folder cannot be written, or holds a case already.
    """
    taken = [folder / job.name for job in jobs if (folder / job.name).exists()]
    if taken:
        raise SpecError(f"{taken[0]}: exists already; export into an empty folder")
    written = []
    try:
        for job in jobs:
            target = folder / job.name
            target.mkdir(parents=True)
            request = Request(job.config, job.weights, job.batch, job.part, job.dtype)
            header, arrays = encode_request(request)
            (target / "case.safetensors").write_bytes(arrays)
            (target / "case.json").write_text(json.dumps(_manifest(job, json.loads(header)), indent=1) + "\n")
            written.append(target)
    except OSError as error:
        raise SpecError(f"{folder}: cannot be written: {error.strerror}") from None
    return written


def _manifest(job: Job, header: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "group": job.group,
        "case": job.case,
        **header,
        "wanted": {
            "output": output_name(job.config, job.part),
            "taps": list(taps(job.config, job.part, job.batch.arrays())),
            "gradients": trainable(job.config, job.part),
        },
    }


def read_exported(folder: Path) -> tuple[Request, dict[str, Any]]:
    """Read a case.

    Returns:
        The request and the manifest.

    Raises:
        SpecError: if a file is missing or corrupt; each problem names it.
    """
    manifest = read_object(folder / "case.json")
    if manifest.get("format") != FORMAT:
        raise SpecError(f"{folder / 'case.json'}: has format {manifest.get('format')!r} but must have {FORMAT!r}")
    arrays = folder / "case.safetensors"
    read_arrays(arrays)  # a corrupt file is reported by name
    try:
        missing = [key for key in ("group", "case", "config", *SETTINGS) if key not in manifest]
        if missing:
            raise SpecError(f"lacks {', '.join(map(repr, missing))}")
        request = decode_request((json.dumps(manifest), arrays.read_bytes()))
        request.validate()
    except (WeightsError, BatchError) as error:
        raise SpecError([f"{arrays}: {problem}" for problem in error.problems]) from None
    except SpecError as error:
        raise SpecError([f"{folder / 'case.json'}: {problem}" for problem in error.problems]) from None
    return request, manifest


def read_run(folder: Path, dtype: str) -> Run:
    """Read the run that came back for a case.

    Args:
        dtype: the precision that it was to be made in.

    Raises:
        SpecError: if a file is missing or corrupt.
    """
    path, about_path = folder / "run.safetensors", folder / "run.json"
    arrays = read_arrays(path)
    missing = [name for name in ("output", "loss") if name not in arrays]
    if missing:
        raise SpecError(f"{path}: lacks {', '.join(map(repr, missing))}")
    about = read_object(about_path) if about_path.exists() else {}
    backend, info = about.get("backend", "dump"), about.get("info", {})
    if not isinstance(backend, str):
        raise SpecError(f"{about_path}: 'backend' is {backend!r} but must be a string")
    try:
        check_info(info)
    except SpecError as error:
        raise SpecError(f"{about_path}: {error}") from None
    # Whatever else it left out, a dump is judged on everything that its case wanted.
    taps, (gradients, tap_gradients) = section(arrays, "taps/"), split_gradients(section(arrays, "gradients/"))
    return Run(arrays["output"], arrays["loss"], taps, gradients, backend, dtype, info, tap_gradients=tap_gradients)


def judge_dumps(folder: Path) -> Report:
    """Judge every run that came back under a folder; a case without one is ``missing``.

    Raises:
        SpecError: if there is no case in the folder, or a file is corrupt; every such file is listed.
    """
    cases = sorted(path.parent for path in folder.rglob("case.json"))
    if not cases:
        raise SpecError(f"{folder}: holds no case.json; export cases with 'concord export-case'")
    results, environments, problems = [], {}, []
    for case in cases:
        try:
            result, info = _judge_dump(case)
        except SpecError as error:
            problems += error.problems
            continue
        environments[result.backend] = info
        results.append(result)
    if problems:
        raise SpecError(problems)
    return Report(results, environments, Settings())


def _judge_dump(folder: Path) -> tuple[Result, dict[str, Any]]:
    request, manifest = read_exported(folder)
    group, case, path = str(manifest["group"]), str(manifest["case"]), folder / "run.safetensors"
    if not path.is_file():
        return Result("dump", group, case, request.dtype, "missing", f"{path}: no such file", part=request.part), {}
    run = read_run(folder, request.dtype)
    verdict = judge(request.config, request.weights, request.batch, run, request.part)
    return Result(run.backend, group, case, run.dtype, verdict.status, verdict=verdict, part=request.part), run.info
