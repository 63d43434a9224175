"""Other machines on this one: tests and verdicts under the kernels that libraries take on other processors.

``python -m tests.machines kernels`` runs the tests of :data:`FILES` under each kernel of NumPy's BLAS that
this processor has. ``python -m tests.machines verdicts`` judges the four backends under each of
:data:`PROCESSORS` and writes the table of ``docs/guides/machines.md``; what has been written to
``build/machines`` is not made again.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GUIDE = ROOT / "docs" / "guides" / "machines.md"
RECORDS = ROOT / "build" / "machines"

AVX2, SSE4 = {"avx2", "fma"}, {"sse4_2"}
AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}

KERNELS = {"Haswell": AVX2, "SkylakeX": AVX512, "Nehalem": SSE4}
"""Kernels of OpenBLAS, and what a processor needs for each.

One that lacks it would end in an illegal instruction.
"""

FILES = (
    "test_breakdown",
    "test_judgement",
    "test_predicting",
    "test_spec_gradients",
    "test_spec_inputs",
    "test_spec_reference",
    "test_spec_training",
    "test_tolerance",
)
"""Tests of numbers that NumPy alone computes.

The reference, tolerances, verdicts and what is predicted by them.
"""


def libraries(openblas, onednn, aten, mkl, xla):
    """Return what tells each library as which processor to compute."""
    return {
        "OPENBLAS_CORETYPE": openblas,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "ATEN_CPU_CAPABILITY": aten,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
        "XLA_FLAGS": f"--xla_cpu_max_isa={xla}",
    }


PROCESSORS = {
    "as it is": (set(), {}),
    "AVX2": (AVX2, libraries("Haswell", "AVX2", "avx2", "AVX2", "AVX2")),
    "SSE4": (SSE4, libraries("Nehalem", "SSE41", "default", "SSE4_2", "SSE4_2")),
    "other libraries": (set(), {"MKL_CBWR": "COMPATIBLE", "TF_ENABLE_ONEDNN_OPTS": "0"}),
}
"""Processors by what they have, and the environment in which libraries compute as they do there."""

KINDS = ("check", "golden", "mutants")
"""Commands by which backends are judged."""

EVERY = 12
"""Of so many mutants one is judged."""


def features():
    """Return what this processor has, as Linux calls it; nothing where there is no Linux to ask."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {word for line in lines if line.startswith("flags") for word in line.partition(":")[2].split()}


def kernel(chosen):
    """Return the kernel that NumPy's BLAS takes where one is asked for."""
    program = (
        "import numpy, threadpoolctl; print(*{str(one.get('architecture')) for one in "
        "threadpoolctl.threadpool_info()})"
    )
    environment = {**os.environ, **({"OPENBLAS_CORETYPE": chosen} if chosen else {})}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def obstacle(name):
    """Say why a kernel cannot run here; nothing if it can."""
    if lacking := KERNELS[name] - features():
        return f"this processor has no {', '.join(sorted(lacking))}"
    taken = kernel(name)
    return "" if taken == name else f"NumPy's BLAS takes {taken or 'no kernel that it names'} instead"


def run_kernels():
    """Run the tests under each kernel, say which ran and which did not, and return an exit code."""
    outcomes = {}
    for name in KERNELS:
        outcomes[name] = obstacle(name) and f"skipped: {obstacle(name)}"
        if not outcomes[name]:
            print(f"\n{name}", flush=True)
            files = [str(ROOT / "tests" / f"{file}.py") for file in FILES]
            command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", *files]
            failed = subprocess.run(
                command, cwd=ROOT, env={**os.environ, "OPENBLAS_CORETYPE": name}, check=False
            ).returncode
            outcomes[name] = "FAILED" if failed else "passed"
    print(
        "\nkernels of NumPy's BLAS:",
        *(f"  {name}: {outcome}" for name, outcome in outcomes.items()),
        sep="\n",
    )
    return int("FAILED" in outcomes.values())


def commands(backends, kinds):
    """Return what is run on backends, by its kind."""
    from concord.conformance.mutants.matrix import chosen

    asked = [word for name in backends for word in ("--backend", name)]
    sample = [word for mutant in chosen(None)[::EVERY] for word in ("--mutant", mutant.name)]
    found = {
        "check": ["check", *asked],
        "golden": ["golden", *asked],
        "mutants": ["mutants", *asked, *sample],
    }
    return {kind: found[kind] for kind in kinds}


def outcomes_of(record):
    """Return what came of each run of a record, by what it is.

    A status, and of a mutant the tensor that is named.
    """
    if "findings" in record:
        return {
            (one["backend"], one["mutant"]): f"{one['status']} {one.get('tensor', '')}".strip()
            for one in record["findings"]
        }
    return {(one["backend"], one["case"], one["dtype"]): one["status"] for one in record["results"]}


def judged(name, kind, command, folder):
    """Return the record of a command as on a processor."""
    path = folder / f"{name.replace(' ', '-')}.{kind}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", "concord", *command, "--json", str(path)]
        done = subprocess.run(
            words,
            cwd=ROOT,
            env={**os.environ, **PROCESSORS[name][1]},
            capture_output=True,
            text=True,
            check=False,
        )
        if not path.exists():
            raise SystemExit(f"{name}, {kind}: no record came of it:\n{done.stderr}")
    found = json.loads(path.read_text())
    return found


def run_verdicts(backends, kinds, folder):
    """Judge backends as on each processor.

    Returns:
        The lines of a table, and a line for each outcome that is not that of this processor as it is.
    """
    table, differing = ["| as on | " + " | ".join(kinds) + " |", "| --- |" + " --- |" * len(kinds)], []
    usual = {}
    for name, (needs, _) in PROCESSORS.items():
        if lacking := needs - features():
            table.append(
                f"| {name} |" + f" skipped: this processor has no {', '.join(sorted(lacking))} |" * len(kinds)
            )
            continue
        cells = []
        for kind, command in commands(backends, kinds).items():
            found = outcomes_of(judged(name, kind, command, folder))
            before = usual.setdefault(kind, found)
            others = [key for key in {**before, **found} if before.get(key) != found.get(key)]
            differing += [
                f"{name}, {kind}: {' '.join(key)}: {found.get(key)}, but {before.get(key)} as it is"
                for key in others
            ]
            counted = Counter(outcome.partition(" ")[0] for outcome in found.values())
            said = ", ".join(f"{count} {status}" for status, count in sorted(counted.items()))
            cells.append(f"{said}; {len(others) or 'none'} differ{'s' if len(others) == 1 else ''}")
            print(f"{name}, {kind}: {cells[-1]}", flush=True)
        table.append(f"| {name} | {' | '.join(cells)} |")
    return table, differing


def versions(folder):
    """Return on what the records were made, in a sentence."""
    record = json.loads((folder / "as-it-is.check.json").read_text())
    said = [f"{name} {about['version']}" for name, about in record["environments"].items()]
    import numpy

    of_numpy = f"NumPy {numpy.__version__} with the kernel {kernel('') or 'of another BLAS'}"
    return f"{record['machine'].get('processor', platform.machine())}; {of_numpy}; {', '.join(said)}."


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("kernels", "verdicts"))
    parser.add_argument("--backend", action="append")
    parser.add_argument("--kind", action="append", choices=KINDS)
    asked = parser.parse_args()
    if asked.what == "kernels":
        return run_kernels()
    from concord.conformance.report import within

    table, differing = run_verdicts(
        asked.backend or ("torch", "tf", "paddle", "jax"), asked.kind or KINDS, RECORDS
    )
    text = "\n".join(
        [
            "",
            *table,
            "",
            *(f"- {line}" for line in differing),
            *([""] if differing else []),
            versions(RECORDS),
            "",
        ]
    )
    GUIDE.write_text(within(GUIDE, "machines", text))
    print(*differing, sep="\n")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
