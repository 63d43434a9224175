"""What the code says, recorded, so that a change of its form can be proven to be no more than that.

``python -m tests.replay record FOLDER`` writes one file for each part; what is there is not made again.
``python -m tests.replay compare BEFORE AFTER`` prints each difference, and ends with 1 if there is one. Both
recordings must come from one machine: another processor rounds otherwise. Ratios are compared by all their
digits; NumPy's products take one thread, since several add up in another order each time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy is imported, here and in the workers

from concord import backends, conformance, porting, spec
from concord.backends.interface import Request
from concord.spec.cases import build_case, standard_cases
from tests.toys.checkpoints import CONFIG, WEIGHTS

FRAMEWORKS = ("torch", "tf", "paddle", "jax")

GOLDEN = Path(__file__).resolve().parents[1].parent / "shared" / "golden"

FUZZ_SEED, FUZZ_CASES = 2027, 100

STEPS = 60


def of_verdict(verdict):
    """Return what a verdict says.

    Status, first tensor, cause, and how near each tensor came to its tolerance.
    """
    first = verdict.first_divergence
    found = verdict.explained().diagnosis if first else None
    return {
        "status": verdict.status,
        "first": first and first.tensor,
        "clause": found and found.clause,
        "cause": found and found.cause and found.cause.hypothesis,
        "ratios": {row.tensor: row.ratio for row in verdict.table},
    }


def judged(worker, problem, dtype, part="model"):
    """Run a configuration with weights on a batch, and return what the verdict says, or why there is none."""
    try:
        run = worker.run(*problem, part, dtype, tap_gradients=True)
        return of_verdict(conformance.judge(*problem, run, part))
    except (backends.Unsupported, backends.WorkerFailure, spec.SpecError) as error:
        return {"status": type(error).__name__, "detail": str(error)}


def check():
    """Judge the standard cases in each framework, in float64 and float32."""
    for name in FRAMEWORKS:
        with backends.open(name, threads=1) as worker:
            for case in standard_cases():
                for dtype in ("float64", "float32"):
                    problem = (case.config, case.weights, case.batch)
                    yield f"{name} {case.name} {dtype}", judged(worker, problem, dtype)


def fuzz():
    """Judge random cases in each framework, in three precisions."""
    from concord.conformance.fuzz.plan import Plan, sample

    for name in FRAMEWORKS:
        with backends.open(name, threads=1) as worker:
            for dtype in ("float64", "float32", "bfloat16"):
                plan = Plan(names=(), dtypes=(dtype,), seed=FUZZ_SEED, shapes=4)
                for index, case in enumerate(sample(plan, range(FUZZ_CASES))):
                    yield f"{name} {dtype} {index}", judged(worker, case.build(), dtype, case.part)


def alternatives():
    """Judge each admissible algorithm, in NumPy."""
    from concord.conformance.bugs.catalogue import ALTERNATIVES
    from concord.conformance.bugs.tape import run

    for variant, scenario in (("nndl-paddle", "ragged"), ("bert-pytorch", "full"), ("bert", "tiny")):
        case = build_case(variant, scenario)
        problem = (case.config, case.weights, case.batch)
        for name, dtype in product(ALTERNATIVES, ("float64", "float32")):
            made = run(ALTERNATIVES[name].change, Request(*problem, dtype=dtype, tap_gradients=True))
            yield f"{name} {case.name} {dtype}", of_verdict(conformance.judge(*problem, made))


def concord(*arguments, option="--json"):
    """Return the record that a command writes where an option says, with how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        written = [option, str(path)] if option else []
        command = [sys.executable, "-m", "concord", *map(str, arguments), *written]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        record = json.loads(path.read_text()) if path.exists() else {"error": ran.stderr[-400:]}
        return {**record, "ended": ran.returncode}


def entries(record, of):
    """Yield each entry of a list of a record by its name, without how long it took."""
    for entry in record[of]:
        named = [str(entry[key]) for key in ("backend", "mutant", "group", "case", "dtype") if key in entry]
        yield " ".join([record["title"], *named]), {**entry, "seconds": 0}


def golden():
    """Judge each framework by the tensors that the published sources computed."""
    asked = [word for name in FRAMEWORKS for word in ("--backend", name)]
    yield from entries(concord("golden", GOLDEN, *asked, "--threads", "1"), "results")


def mutants():
    """Put every bug of models and of training into each framework."""
    for name in FRAMEWORKS:
        yield from entries(concord("mutants", "--backend", name, "--threads", "1"), "findings")


def lockstep():
    """Train the standard case in lockstep, in float32 and float64."""
    for dtype in ("float32", "float64"):
        words = ("train", "--lockstep", "--seed", "0", "--threads", "1", "--steps", STEPS, "--dtype", dtype)
        yield from entries(concord(*words), "tracks")


def conversions():
    """Write one checkpoint in each format, compare it with what it was, and certify one."""
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
                yield f"{name} certified", {claim["name"]: claim["status"] for claim in proof["claims"]}


PARTS = {part.__name__: part for part in (check, golden, alternatives, lockstep, conversions, fuzz, mutants)}


def record(folder, parts):
    """Write what each part says, one line for each thing that was judged; a file that is there stays."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        path = folder / f"{part}.jsonl"
        if path.exists():
            continue
        with path.with_suffix(".unfinished").open("w") as file:
            for name, said in PARTS[part]():
                print(json.dumps([name, said]), file=file, flush=True)
        path.with_suffix(".unfinished").rename(path)


def differences(before, after):
    """Yield what two recordings do not say alike, in one line each."""
    for path in sorted(before.glob("*.jsonl")):
        if not (after / path.name).exists():
            yield f"{path.stem}: recorded in {before} alone"
            continue
        old, new = (dict(json.loads(line) for line in (side / path.name).open()) for side in (before, after))
        yield from (f"{path.stem} {name}: in {before} alone" for name in old if name not in new)
        yield from (f"{path.stem} {name}: in {after} alone" for name in new if name not in old)
        for name in old:
            if name in new and old[name] != new[name]:
                yield f"{path.stem} {name}: {_differing(old[name], new[name])}"


def _differing(old, new):
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        old, new = ({key: side.get(key) for key in keys} for side in (old, new))
    return f"{json.dumps(old)[:200]} -> {json.dumps(new)[:200]}"


def main():
    """Record, or compare two recordings."""
    parser = argparse.ArgumentParser(prog="python -m tests.replay", description=__doc__)
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--part", action="append", choices=PARTS, help="may be repeated; default: all")
    asked = parser.parse_args()
    if asked.command == "record":
        (folder,) = asked.folders
        record(folder, asked.part or list(PARTS))
        return 0
    found = list(differences(*asked.folders))
    print("\n".join(found) or "the same")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
