"""Record what the code says, to prove that a refactoring changes nothing else.

``python -m tests.replay record FOLDER`` writes one file for each part, and keeps existing files.
``python -m tests.replay compare BEFORE AFTER`` prints each difference, and ends with 1 if there is one. Both
recordings must come from one machine, because other processors round differently. Ratios are compared by all
their digits. Products use one thread, because several add up in varying order.
"""

import argparse
import copy
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy is imported, here and in the workers

import torch
from safetensors.numpy import load_file

from concord import backends, compare, conformance, porting, spec
from concord.backends.interface import Request
from concord.conformance.fuzz.plan import Plan, sample
from concord.spec.cases import build_case, standard_cases
from tests.toys.architectures import ARCHITECTURES, architecture, inputs_of
from tests.toys.checkpoints import CONFIG, WEIGHTS
from tests.toys.module_bugs import BUGS, instead

FRAMEWORKS = ("torch", "tf", "paddle", "jax")

SHARED = Path(__file__).resolve().parents[1].parent / "shared"

GOLDEN, GPU, CASES = SHARED / "golden", SHARED / "gpu", SHARED / "cases" / "cases.py"

FUZZ_SEED, FUZZ_CASES = 2027, 100

STEPS = 60


def of_verdict(verdict):
    first = verdict.first_divergence
    explanation = verdict.explained().explanation if first else None
    return {
        "status": verdict.status,
        "first": first and first.tensor,
        "clause": explanation and explanation.clause,
        "cause": explanation and (explanation.hypothesis or None),
        "ratios": {row.tensor: row.ratio for row in verdict.table},
    }


def judged(problems):
    # In each framework, the problems by name; each with its part and its dtype.
    for framework in FRAMEWORKS:
        with backends.open(framework, threads=1) as worker:
            for name, problem, part, dtype in problems():
                try:
                    run = worker.run(*problem, part, dtype, tap_gradients=True)
                    result = of_verdict(conformance.judge(*problem, run, part))
                except (backends.Unsupported, backends.WorkerFailure, spec.SpecError) as error:
                    result = {"status": type(error).__name__, "detail": str(error)}
                yield f"{framework} {name}", result


def check():
    """The standard cases in each framework, in float64 and float32."""

    def problems():
        for case, dtype in product(standard_cases(), ("float64", "float32")):
            yield f"{case.name} {dtype}", (case.config, case.weights, case.batch), "model", dtype

    return judged(problems)


def fuzz():
    """Random cases in each framework, in three precisions."""

    def problems():
        for dtype in ("float64", "float32", "bfloat16"):
            plan = Plan(names=(), dtypes=(dtype,), seed=FUZZ_SEED, shapes=4)
            for index, case in enumerate(sample(plan, range(FUZZ_CASES))):
                yield f"{dtype} {index}", case.build(), case.part, dtype

    return judged(problems)


def alternatives():
    from tests.toys.alternatives import ALTERNATIVES, run

    for variant, scenario in (("nndl-paddle", "ragged"), ("bert-pytorch", "full"), ("bert", "tiny")):
        case = build_case(variant, scenario)
        problem = (case.config, case.weights, case.batch)
        for name, dtype in product(ALTERNATIVES, ("float64", "float32")):
            candidate = run(ALTERNATIVES[name].change, Request(*problem, dtype=dtype, tap_gradients=True))
            yield f"{name} {case.name} {dtype}", of_verdict(conformance.judge(*problem, candidate))


def concord(*arguments, option="--json"):
    # The record of a command, and its exit code.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        written = [option, str(path)] if option else []
        command = [sys.executable, "-m", "concord", *map(str, arguments), *written]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        record = json.loads(path.read_text()) if path.exists() else {"error": ran.stderr[-400:]}
        return {**record, "ended": ran.returncode}


def entries(of, *arguments):
    # Entries of a command's record, without the time they took.
    record = concord(*arguments, "--threads", "1")
    for entry in record[of]:
        named = [str(entry[key]) for key in ("backend", "mutant", "group", "case", "dtype") if key in entry]
        yield " ".join([record["title"], *named]), {**entry, "seconds": 0}


def golden():
    for name in FRAMEWORKS:
        yield from entries("results", "golden", GOLDEN, "--backend", name)


def mutants():
    for name in FRAMEWORKS:
        yield from entries("findings", "mutants", "--backend", name)


def lockstep():
    for dtype in ("float32", "float64"):
        yield from entries("tracks", "lockstep", "--seed", "0", "--steps", STEPS, "--dtype", dtype)


def conversions():
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        porting.write(porting.from_weights(CONFIG, WEIGHTS), source, "hugging-face")
        for name in porting.formats():
            ported = Path(folder) / name
            ended = concord("port", source, "--to", name, "-o", ported, option="")["ended"]
            record = concord("diff", source, ported) if ended == 0 else {}
            yield name, [ended, record.get("ended"), record.get("summary")]
            if name == "torch":
                proof = concord("certify", source, ported, option="--certificate")
                runs = {f"{run['group']} {run['case']}": run["status"] for run in proof["report"]["results"]}
                yield f"{name} certified", {**runs, **{bug["bug"]: bug["found"] for bug in proof["bugs"]}}


def compared(*arguments, **options):
    try:
        return of_comparison(compare(*arguments, **options))
    except spec.SpecError as error:
        return {"status": "refused", "detail": str(error)}


def of_comparison(verdict):
    verdict = verdict.explained()
    return {**of_verdict(verdict), "words": verdict.cause and verdict.cause.text}


def in_double(model):
    # A right run with other bits, for any module.
    def forward(self, own, *args, **kwargs):
        return own(*args, **{name: x.double() if x.is_floating_point() else x for name, x in kwargs.items()})

    wide = copy.deepcopy(model).double()
    instead("", forward)(wide)
    return wide


def architectures():
    for name in ARCHITECTURES:
        model, inputs = architecture(name), inputs_of(name)
        for way in ("eager", "sdpa", "bfloat16", "compile"):
            yield f"{name} {way}", compared(model, inputs=inputs, way=way)
        yield f"{name} sdpa gradients", compared(model, inputs=inputs, way="sdpa", gradients=True)
        for gradients in (False, True):
            result = compared(model, in_double(model), inputs, gradients=gradients)
            yield f"{name} float64{' gradients' * gradients}", result


def module_bugs():
    for name, entries in BUGS.items():
        model, inputs = architecture(name), inputs_of(name)
        for bug in entries:
            wrong = copy.deepcopy(model)
            bug.edit(wrong)
            yield f"{name} {bug.name}", scored(bug, compared(model, wrong, inputs))


def scored(bug, result):
    words = result.get("words")
    named = "none" if not words else "right" if re.search(bug.cause, words) else "wrong"
    scores = {
        "found": result["status"] == "diverges",
        "place": result.get("first") in bug.first,
        "named": named,
    }
    return {**result, **scores}


def h200():
    models = runpy.run_path(str(GPU / "models.py"))
    for path in sorted((GPU / "arrays").glob("*.safetensors")):
        kind, way = path.name.split(".")[:2]
        model, inputs = models["prepared"](kind), models["inputs"](kind)
        if way in ("bfloat16", "float16"):
            model = model.to(getattr(torch, way))
            inputs = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in inputs.items()}
        yield path.stem, compared(model, load_file(path), inputs, gradients="gradients" in way)


def cases():
    for case in runpy.run_path(str(CASES))["CASES"]:
        try:
            verdict, expected = case()
            yield case.__name__, {**of_comparison(verdict), "expected": expected}
        except Exception as error:  # noqa: BLE001 - some of them are about crashes
            kind = "refused" if isinstance(error, spec.SpecError) else type(error).__name__
            yield case.__name__, {"status": kind, "detail": str(error)}


PARTS = {
    part.__name__: part
    for part in (
        *(architectures, module_bugs, h200, cases),
        *(check, golden, alternatives, lockstep, conversions, fuzz, mutants),
    )
}

# Inputs of parts that are outside of the repository.
NEEDS = {"golden": GOLDEN, "h200": GPU, "cases": CASES}


def record(folder, parts):
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        path = folder / f"{part}.jsonl"
        if path.exists():
            continue
        if part in NEEDS and not NEEDS[part].exists():
            print(f"{part}: left out, since {NEEDS[part]} is not there")
            continue
        with path.with_suffix(".unfinished").open("w") as file:
            for name, result in PARTS[part]():
                print(json.dumps([name, result]), file=file, flush=True)
        path.with_suffix(".unfinished").rename(path)


def differences(before, after):
    for path in sorted(before.glob("*.jsonl")):
        if not (after / path.name).exists():
            yield f"{path.stem}: recorded in {before} alone"
            continue
        old, new = (
            dict(map(json.loads, (side / path.name).read_text().splitlines())) for side in (before, after)
        )
        yield from (f"{path.stem} {name}: in {before} alone" for name in old if name not in new)
        yield from (f"{path.stem} {name}: in {after} alone" for name in new if name not in old)
        for name in old:
            if name in new and old[name] != new[name]:
                yield f"{path.stem} {name}: {_differing(old[name], new[name])}"


def _differing(old, new):
    old, new = _parts_that_differ(old, new)
    return f"{json.dumps(old)[:200]} -> {json.dumps(new)[:200]}"


def _parts_that_differ(old, new):
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return old, new
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    pairs = {key: _parts_that_differ(old.get(key), new.get(key)) for key in keys}
    return tuple({key: pair[side] for key, pair in pairs.items()} for side in (0, 1))


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.replay", description=__doc__)
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--part", action="append", choices=PARTS, help="may be repeated; default: all")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.command == "record":
        (folder,) = arguments.folders
        record(folder, arguments.part or list(PARTS))
        return 0
    lines = list(differences(*arguments.folders))
    print("\n".join(lines) or "the same")
    return 1 if lines else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Transformers iterates over sets of words, in a different order in each process.
        again = [sys.executable, "-m", "tests.replay", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main())
