"""A report with every outcome of a run, made without a worker."""

from dataclasses import replace
from functools import cache

import numpy as np

from concord.conformance.judging.verdict import Result
from concord.conformance.run.campaign import Report, Setup
from concord.spec.cases import build_case
from tests.toys import rounded

WRONG = "my.plugin:Backend"


def result(backend="torch", status="agrees", verdict=None, **fields):
    values = {"group": "bert", "case": "bert-ragged", "dtype": "float32", "seconds": 0.25, **fields}
    return Result(backend, status=verdict.status if verdict else status, verdict=verdict, **values)


@cache
def verdicts():
    """Verdicts: right, with a known bug, with NaN, with a hidden tap, and with nothing that can be judged."""
    case = build_case("bert", "ragged")
    right = rounded.run_of(case)
    few = replace(rounded.run_of(build_case("bert", "peaked"), "bfloat16"), taps={}, info={})
    runs = {
        "right": right,
        "bug": rounded.run_with(rounded.option(activation="gelu_tanh"), case),
        "no number": rounded.other(right, "layers.1.norm1", rounded.put((2, 3, 5), np.nan)),
        "hidden": replace(
            rounded.without(right, "layers.0.attention.scores"), info={"not_exposed": ["*.scores"]}
        ),
    }
    by_name = {name: rounded.verdict_of(case, run).explained() for name, run in runs.items()}
    few = replace(few, gradients={}, requested=("taps",))
    return by_name | {"undetermined": rounded.verdict_of(build_case("bert", "peaked"), few)}


@cache
def mixed():
    by_name = verdicts()
    results = [
        result("torch", case="bert-full", verdict=by_name["right"]),
        result("torch", verdict=by_name["right"]),
        result("torch", dtype="float64", verdict=by_name["hidden"]),
        result(WRONG, verdict=by_name["bug"]),
        result(WRONG, case="bert-peaked", verdict=by_name["bug"]),
        result(WRONG, case="bert-full", verdict=by_name["no number"]),
        result("jax", "unsupported", detail="no such precision", dtype="float64"),
        result("tf", "crashed", detail="killed by SIGSEGV", stderr="first words\nlast words"),
        result("tf", "crashed", detail="killed by SIGSEGV", dtype="float64"),
        result("paddle", "absent", detail="No module named 'paddle'"),
        result("half", dtype="bfloat16", verdict=by_name["undetermined"]),
    ]
    switches = {"matmul": "highest", "tf32": False}
    floor = {"name": "softmax_floor", "value": -64.0, "reason": "the kernel clips"}
    environments = {
        "torch": {"version": "2.0", "precision_switches": switches, "peak_memory_bytes": 2**28},
        WRONG: {"version": "1.0", "deviations": [floor]},
    }
    notes = {"not compared, 3 x lr": "belongs to the optimizer"}
    return Report(results, environments, Setup(), 12.0, notes).explained()
