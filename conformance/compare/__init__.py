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


def compare(
    reference: Any, candidate: Any = None, inputs: Any = None, **options: Any
) -> Verdict | Comparisons:
    """Judge whether a candidate computes the same as a PyTorch module, up to rounding.

    Args:
        reference: a ``torch.nn.Module`` in evaluation mode, or a NumPy model
            (:class:`concord.conformance.compare.written.Written`).
        candidate: another module, the path of an ONNX graph or a safetensors file, arrays by name, a
            callable, or ``package.module:function``, which runs in its own process with arrays by keyword.
            The default is the reference itself. A mapping of names to candidates compares several; its values
            may also be names of :data:`concord.conformance.compare.ways.WAYS`.
        inputs: tensors or arrays by keyword, a tuple, or a single one. By default, standard text
            (``input_ids``), images (``pixel_values``) or audio (``input_features``, ``input_values``), as the
            module's parameters require.
        options: keyword arguments of :func:`prepare`.

    Returns:
        A row per activation, and per gradient if requested, judged end to end and locally. For several
        candidates: their verdicts by name, and timings of those that agree.

    Raises:
        SpecError: if the comparison is impossible.
        WorkerFailure: if a candidate's process is killed.
    """
    several = isinstance(candidate, Mapping) and not any(
        hasattr(value, "__array__") or isinstance(value, (bool, int, float)) for value in candidate.values()
    )
    if several:
        from concord.conformance.compare.comparisons import compare_several

        return compare_several(reference, candidate, inputs, **options)
    return prepare(reference, candidate, inputs, **options).verdict()


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
    dtype: str | None = None,
    known: dict[Any, Any] | None = None,
) -> ModelComparison:
    """Run a candidate, and return the comparison that :func:`compare` judges.

    Args:
        reference: see :func:`compare`.
        candidate: a single one; see :func:`compare`.
        inputs: see :func:`compare`.
        way: how to run the reference's own module as the candidate: names of
            :data:`concord.conformance.compare.ways.WAYS`, joined by ``+``. With ``int8``, the reference gets
            the weights that torchao quantized.
        gradients: whether to judge gradients too. The differentiated scalar is the sum of all outputs times
            fixed random numbers.
        names: the reference's name for each of the candidate's names; ``{i}`` matches a number, and an axis
            order may follow a colon. :attr:`~.model_comparison.ModelComparison.proposed` suggests names.
        declared: names from :data:`DECLARATIONS`, and outputs that the candidate lacks on purpose
            (``output``: all).
        seed: seeds every run. Without it, a reference that draws random numbers is refused.
        python: the interpreter of another environment, for a ``package.module:function``.
        dtype: ``bfloat16`` or ``float16``, if a candidate that is not a module computes in it.
        known: a cache of references, shared by candidates with the same inputs.
    """
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
    from concord.conformance.compare.written import Written

    absent = [name for name in declared if is_output(name)]
    refuse(unknowns("declaration", [name for name in declared if name not in absent], DECLARATIONS))
    refuse(unknowns("dtype", [dtype] if dtype else [], ways.DTYPES))
    if not isinstance(reference, (nn.Module, Written)):
        raise SpecError(
            f"the reference is a {type(reference).__name__} but must be a torch.nn.Module, or a Written"
        )
    if way and candidate is not None:
        raise SpecError(f"way is {way!r}, but a candidate is given too: it is for the reference's own module")
    args, kwargs = candidates.called_with(reference, inputs)
    right: ModelReference = (
        ModuleReference(unwrapped(reference)) if isinstance(reference, nn.Module) else reference
    )
    right = replace(right, args=args, kwargs=kwargs, declared=declared, seed=seed, keeps=known is not None)
    parts = way.split("+")
    candidate = candidates.loaded(candidate)
    with tempfile.TemporaryDirectory() as folder:  # holds an exported graph
        if isinstance(right, ModuleReference):
            device = right.device
            # Way tf32 is also a declaration.
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
        if module or dtype:
            right = right.cast(ways.DTYPES[dtype] if dtype else dtype_of(candidate))
        right = right.differentiated() if gradients else right
        if known is not None and "int8" not in parts:
            kept = dtype_of(right.model) if isinstance(right, ModuleReference) else None
            right = known.setdefault((kept, frozenset(declared)), right)
        # The reference runs first, so that its own fault, or one of the inputs, is not blamed on the
        # candidate.
        repeat_note = refuse_changes(right)
        outputs = [name for name in right.plain if is_output(name)]
        refuse(unknowns("output", [name for name in absent if name != OUTPUT], outputs))
        say("running the candidate")
        theirs = None
        if module:
            theirs = ModuleReference(
                candidate,
                compiled=True,
                args=right.args,
                kwargs=right.kwargs,
                cotangents=right.cotangents,
                role="the candidate",
                seed=seed,
            )
        with candidates.weights_kept(right):
            run = candidates.run_module(theirs) if theirs else candidates.run(right, candidate, python)
        call = candidates.call_of(right, theirs or candidate) if known is not None else None
    arrays, own = renamed(run.arrays, names or {}, right.plain)
    separate_names = [name for name in arrays if own[name] in run.whole]
    notes = {**({"two runs of the reference": repeat_note} if repeat_note else {}), **run.notes}
    return ModelComparison(
        right, arrays, not way, separate_names, theirs, own, notes, run.unsteady, call=call
    )


def assert_same(reference: Any, candidate: Any = None, inputs: Any = None, **options: Any) -> None:
    """Raise an error that describes the first divergence. The arguments are those of :func:`compare`.

    Raises:
        AssertionError: if the candidate diverges, or nothing was judged.
    """
    __tracebackhide__ = True  # pytest shows only the caller's line
    verdict = compare(reference, candidate, inputs, **options)
    assert verdict.passed, str(verdict)


__all__ = ["DECLARATIONS", "assert_same", "compare", "prepare"]
