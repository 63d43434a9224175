"""Compare a candidate with any PyTorch module (docs/guides/any-model.md).

PyTorch is imported only when a comparison runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from concord.conformance.compare.kernels import KERNELS, TF32
from concord.conformance.progress import say
from concord.spec.deviations import BLIND_ROWS_UNIFORM, BLIND_ROWS_ZERO, UNCOMPUTED_PADDING
from concord.spec.errors import SpecError, refuse, unknowns

if TYPE_CHECKING:
    from concord.conformance.compare.comparisons import Comparisons
    from concord.conformance.compare.model_comparison import ModelComparison
    from concord.conformance.judging.verdict import Verdict

ROWS = (BLIND_ROWS_ZERO, BLIND_ROWS_UNIFORM, UNCOMPUTED_PADDING)

DECLARATIONS = (*ROWS, *KERNELS)
"""What a candidate may declare: zero or uniform rows where no key is visible, uncomputed rows of padding, or
a kernel of :data:`concord.conformance.compare.kernels.KERNELS` with larger errors.
"""


# The candidate by default: the reference, run again. None is a builder's forgotten result.
ITSELF: Any = object()


def compare(
    reference: Any, candidate: Any = ITSELF, inputs: Any = None, **options: Any
) -> Verdict | Comparisons:
    """Judge whether a candidate agrees with a PyTorch module, up to rounding.

    Args:
        reference: a ``torch.nn.Module`` in evaluation mode, an ONNX path, or a NumPy model
            (:class:`concord.conformance.compare.written.Written`).
        candidate: a module, an ONNX or safetensors path, named arrays, a callable, or
            ``package.module:function``, which runs in its own process with arrays as keywords. The default is
            the reference itself. A mapping of names compares several candidates, including
            :data:`concord.conformance.compare.ways.WAYS`.
        inputs: tensors or arrays by parameter name, a tensor, or a tuple. By default, standard text
            (``input_ids``), audio (``input_values``), or images (``pixel_values``) and audio
            (``input_features``) in the sizes of the module's ``config``.
        options: keyword arguments of :func:`prepare`.

    Returns:
        Rows of activations, and of gradients if requested, judged end to end and locally. For several
            candidates: verdicts by name, and timings of agreeing ones.

    Raises:
        SpecError: if the comparison is impossible.
        WorkerFailure: if a candidate raises an exception, its process is killed, or its outputs are
            misshapen.
    """
    several = isinstance(candidate, Mapping) and not any(
        hasattr(value, "__array__") or isinstance(value, (bool, int, float)) for value in candidate.values()
    )
    if several:
        from concord.conformance.compare.comparisons import compare_several

        return compare_several(reference, candidate, inputs, **options)
    if candidate is None and not options.get("way"):
        raise SpecError("the candidate is None but must be a module, arrays, a file or a function")
    comparison = prepare(reference, None if candidate is ITSELF else candidate, inputs, **options)
    verdict = comparison.verdict()
    notes = [f"{topic}: {text}" for topic, text in comparison.notes.items()]
    if candidate is reference:  # such as what a method returns that merges weights in place
        notes.append("the candidate is the reference's own module, so a change of one changes both")
    return replace(verdict, notes=(*verdict.notes, *notes))


def prepare(
    reference: Any,
    candidate: Any = None,
    inputs: Any = None,
    *,
    way: str = "",
    gradients: bool = False,
    names: Mapping[str, str] | None = None,
    declared: Collection[str] = (),
    seed: int | None = None,
    python: str | None = None,
    log_probabilities: bool = False,
    dtype: str | None = None,
    known: dict[Any, Any] | None = None,
    **others: Any,
) -> ModelComparison:
    """Run a candidate, and return its comparison for :func:`compare`.

    Args:
        reference: as in :func:`compare`.
        candidate: as in :func:`compare`, but only one.
        inputs: as in :func:`compare`.
        way: how to run the reference's module as the candidate: names of
            :data:`concord.conformance.compare.ways.WAYS`, joined by ``+``. With ``int8``, the reference gets
            torchao's quantized weights.
        gradients: whether to judge gradients of the outputs times fixed random numbers, with respect to
            parameters, activations, and inputs that require them.
        names: maps the candidate's names to the reference's; ``{i}`` matches a number, and an axis order may
            follow a colon. :attr:`~.model_comparison.ModelComparison.proposed` suggests names.
        declared: names from :data:`DECLARATIONS`, and intentionally missing outputs (``output``: all).
        seed: seed of every run, required by a reference that draws random numbers.
        python: another environment's interpreter, for ``package.module:function``.
        log_probabilities: whether to judge one more output, ``output[log_probabilities]`` (B, T - 1): the log
            softmax of ``output[logits]`` at each next token of ``input_ids`` (B, T). It is float32 for half
            precisions, 0 where the next token, or the one before it, is padding, and computed from the logits
            if a candidate does not return it.
        dtype: ``bfloat16`` or ``float16``, if a candidate that is not a module computes in it.
        known: a cache of references, shared by candidates with the same inputs.
        others: refused.
    """
    if others:
        raise SpecError(
            f"unknown option {', '.join(map(repr, others))}; inputs go into a dictionary: "
            "inputs={'input_ids': ids}"
        )
    import torch
    from torch import nn

    from concord.conformance.compare import candidates, ways
    from concord.conformance.compare.activation_names import renamed
    from concord.conformance.compare.draws import refuse_changes
    from concord.conformance.compare.model_comparison import ModelComparison
    from concord.conformance.compare.module_reference import (
        OUTPUT,
        ModelReference,
        ModuleReference,
        dtype_of,
        is_output,
        unwrapped,
    )
    from concord.conformance.judging.expectation import is_gradient

    absent = [name for name in declared if is_output(name)]
    refuse(unknowns("declaration", [name for name in declared if name not in absent], DECLARATIONS))
    refuse(unknowns("dtype", [dtype] if dtype else [], ways.DTYPES))
    reference = candidates.reference_of(reference, log_probabilities)
    if way and candidate is not None:
        raise SpecError(
            f"way is {way!r}, but a candidate is given too: a way runs the reference's own module"
        )
    args, kwargs = candidates.called_with(reference, inputs)
    right: ModelReference = (
        ModuleReference(unwrapped(reference)) if isinstance(reference, nn.Module) else reference
    )
    right = replace(
        right,
        args=args,
        kwargs=kwargs,
        declared=declared,
        seed=seed,
        keeps=known is not None,
        log_probabilities=log_probabilities,
    )
    parts = way.split("+")
    with candidates.failing():
        candidate = candidates.loaded(candidate, log_probabilities)
    with tempfile.TemporaryDirectory() as folder:  # for an exported graph
        if isinstance(right, ModuleReference):
            device = right.device
            # The way tf32 is also a declaration.
            declared = [*declared, *({TF32} & {*parts})]
            right = replace(right, declared=declared, **right.map_inputs(lambda x: x.to(device)))
            candidates.refuse_values(right.model, right.role)
            candidates.refuse_kinds(right.model)
            candidates.refuse_modes(right.model, seed)
            if candidate is None:
                candidate = ways.candidate_of(right, way, Path(folder)) if way else reference
            if "int8" in parts:
                right = candidates.dequantized(right, candidate)
        module = isinstance(candidate, nn.Module)
        if module:
            candidates.refuse_values(candidate, "the candidate")
        original = right
        if module or dtype:
            right = right.cast(ways.DTYPES[dtype] if dtype else dtype_of(candidate))
        right = right.differentiated() if gradients else right
        if known is not None and "int8" not in parts:
            kept = dtype_of(right.model) if isinstance(right, ModuleReference) else None
            right = known.setdefault((kept, frozenset(declared)), right)
        # The reference runs first, so that the candidate is not blamed for a fault of the reference or its
        # inputs.
        repeat_note = refuse_changes(right)
        if gradients and not any(map(is_gradient, right.plain)):
            raise SpecError(
                "gradients are requested, but no output of the reference depends on a parameter or input "
                "that requires one"
            )
        candidates.refuse_logits(right)
        candidates.refuse_conversion(right)
        outputs = [name for name in right.plain if is_output(name)]
        refuse(unknowns("output", [name for name in absent if name != OUTPUT], outputs))
        say("running the candidate")
        theirs, captured = None, ways.captured()
        if module:
            wide = dtype_of(candidate) == torch.float64  # the reference itself is never in float64
            theirs = ModuleReference(
                candidate,
                compiled=True,
                **right.map_inputs(lambda x: x.double() if wide and x.is_floating_point() else x),
                cotangents=right.cotangents,
                role="the candidate",
                seed=seed,
                log_probabilities=log_probabilities,
            )
        with candidates.failing(), candidates.weights_kept(right):
            run = candidates.run_module(theirs) if theirs else candidates.run(right, candidate, python)
            unsteady = run.unsteady or ways.without_effect(way, original, theirs, right, run.arrays, captured)
        call = candidates.call_of(right, theirs or candidate) if known is not None else None
    arrays, own = renamed(run.arrays, names or {}, right.plain)
    if log_probabilities:
        candidates.add_log_probabilities(right, arrays, own)
    separate_names = [name for name in arrays if own[name] in run.whole]
    notes = {**({"the reference": repeat_note} if repeat_note else {}), **run.notes}
    return ModelComparison(right, arrays, not way, separate_names, theirs, own, notes, unsteady, call=call)


def assert_same(reference: Any, candidate: Any = ITSELF, inputs: Any = None, **options: Any) -> None:
    """Raise an error that describes the first divergence. Arguments as in :func:`compare`.

    Raises:
        AssertionError: if the candidate diverges, or nothing was judged.
    """
    __tracebackhide__ = True  # so that pytest shows only the caller's line
    verdict = compare(reference, candidate, inputs, **options)
    if not verdict.passed:
        verdict = verdict.explained()
        # Pytest's summary shows only the first line.
        raise AssertionError(f"{verdict.headline}\n{verdict}")


__all__ = ["DECLARATIONS", "assert_same", "compare", "prepare"]
