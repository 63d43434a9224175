"""Runs that someone without a backend saves beside exported cases."""

import json

import numpy as np
from safetensors.numpy import load_file, save_file

from concord.conformance.run.dump import export_cases, read_job
from concord.conformance.run.standard_jobs import check_jobs
from concord.spec.reference import reference


def answer(folder, wrong=None):
    """Write a run beside each case, with one wrong tensor if named."""
    for path in folder.rglob("case.json"):
        job, request = read_job(path.parent), json.loads(path.read_text())["wanted"]
        truth = reference(job.config, job.weights, job.batch, True, job.part, job.dtype, job.dtype)
        results = {"output": truth.taps[request["output"]], "loss": truth.loss}
        results |= {f"taps/{name}": truth.taps[name] for name in request["taps"]}
        results |= {f"gradients/{name}": truth.gradients[name] for name in request["gradients"]}
        if wrong is not None:
            results[wrong] = results[wrong] * results[wrong].dtype.type(1.01)
        arrays = {name: np.asarray(array, order="C") for name, array in results.items()}
        save_file(arrays, path.with_name("run.safetensors"))
        about = {"backend": "standalone", "info": {"numpy": np.__version__}}
        path.with_name("run.json").write_text(json.dumps(about))
    return folder


def exported(folder, *names, dtypes=("float64", "float32"), part="model"):
    export_cases(folder, check_jobs(dtypes=dtypes, part=part, cases=names))
    return folder


def leave(path, *names):
    run = load_file(path)
    save_file({name: run[name] for name in names}, path)
