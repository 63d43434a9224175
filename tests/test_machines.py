"""Kernels that libraries select on other processors, run on this machine."""

import functools
import json
from pathlib import Path

import pytest

from concord.conformance.mutants.matrix import select_mutants
from tests.toys.surroundings import ROOT, options, python

pytestmark = pytest.mark.slow

AVX2, SSE4 = {"avx2", "fma"}, {"sse4_2"}
AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}

# Kernels of OpenBLAS and the instructions they need; without those, a process ends by SIGILL.
KERNELS = {"Haswell": AVX2, "SkylakeX": AVX512, "Nehalem": SSE4}

# Tests that use nothing but NumPy's numbers.
OF_NUMPY = [
    f"tests/test_{name}.py"
    for name in [
        "breakdown",
        "estimate",
        "family",
        "golden_files",
        "judge",
        "spec_inputs",
        "spec_reference",
        "spec_training",
    ]
]

# Only the slow suite runs these files by name; this check lets the quick suite notice a rename.
assert all((ROOT / file).exists() for file in OF_NUMPY)


def libraries(openblas, onednn, aten, mkl, xla):
    # Environment variables that select each library's instruction set.
    return {
        "OPENBLAS_CORETYPE": openblas,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "ATEN_CPU_CAPABILITY": aten,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
        "XLA_FLAGS": f"--xla_cpu_max_isa={xla}",
    }


PROCESSORS = {
    "AVX2": (AVX2, libraries("Haswell", "AVX2", "avx2", "AVX2", "AVX2")),
    "SSE4": (SSE4, libraries("Nehalem", "SSE41", "default", "SSE4_2", "SSE4_2")),
    "other libraries": (set(), {"MKL_CBWR": "COMPATIBLE", "TF_ENABLE_ONEDNN_OPTS": "0"}),
}

COMMANDS = {
    "check": [],
    "golden": [],
    "mutants": options("--mutant", (mutant.name for mutant in select_mutants(None)[::12])),
}


def require(needs):
    # Only Linux lists the processor's instructions.
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    if lacking := needs - set(flags):
        pytest.skip(f"this processor has no {', '.join(sorted(lacking))}")


@pytest.mark.parametrize("kernel", KERNELS)
def test_tests_of_numpy_alone_pass_under_each_kernel(kernel):
    require(KERNELS[kernel])
    program = (
        "import numpy, threadpoolctl; print([one['architecture'] for one in threadpoolctl.threadpool_info()])"
    )
    if kernel not in (output := python("-c", program, OPENBLAS_CORETYPE=kernel).stdout):
        pytest.skip(f"NumPy's BLAS takes {output.strip()} instead")
    done = python("-m", "pytest", "-q", *OF_NUMPY, patience=None, OPENBLAS_CORETYPE=kernel)
    assert done.returncode == 0, done.stdout


@functools.cache
def outcomes(command, backend, folder, processor=None):
    # For each run its status, and for a mutant also the named tensor.
    path = folder / f"{command}.{backend}.{processor}.json"
    environment = PROCESSORS[processor][1] if processor else {}
    done = python(
        *("-m", "concord", command, "--backend", backend, *COMMANDS[command], "--json", path),
        patience=None,
        **environment,
    )
    assert path.exists(), done.stderr
    record = json.loads(path.read_text())
    names = ("mutant", "case", "dtype", "status", "tensor")
    return [[entry.get(name) for name in names] for entry in record.get("findings") or record["results"]]


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("command", COMMANDS)
def test_verdicts_do_not_depend_on_the_processor(worker, command, processor, tmp_path_factory):
    require(PROCESSORS[processor][0])
    folder = tmp_path_factory.getbasetemp()
    assert outcomes(command, worker.name, folder, processor) == outcomes(command, worker.name, folder)
