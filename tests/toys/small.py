"""Small requests and their runs."""

from concord import spec
from concord.backends.interface import Request


def request_for(config, part="model", **fields):
    tokens = 5 if part in ("attention", "dot_product") or config.pooling != "flatten" else None
    return Request(
        config,
        spec.initialize(config, part=part),
        spec.example_batch(config, 3, tokens, part=part),
        part,
        **fields,
    )


def run_of(worker, request):
    return worker.run(request.config, request.weights, request.batch, request.part, request.dtype)


def run_case(worker, case, dtype="float32", **settings):
    return worker.run(case.config, case.weights, case.batch, case.part, dtype, **settings)
