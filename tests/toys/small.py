"""Small requests, and how to make them of a worker."""

from concord import spec
from concord.backends.interface import Request


def request_for(config, part="model", **fields):
    """Return a request with small weights and a small batch."""
    tokens = 5 if part in ("attention", "dot_product") or config.pooling != "flatten" else None
    return Request(
        config,
        spec.initialize(config, part=part),
        spec.example_batch(config, 3, tokens, part=part),
        part,
        **fields,
    )


def run_of(worker, request):
    """Return what a worker makes of a request."""
    return worker.run(request.config, request.weights, request.batch, request.part, request.dtype)


def run_case(worker, case, dtype="float32", **settings):
    """Return what a worker makes of a case."""
    return worker.run(case.config, case.weights, case.batch, case.part, dtype, **settings)
