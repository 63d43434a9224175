"""Any model: whether a candidate computes what a PyTorch module computes (docs/guides/any-model.md).

PyTorch is imported where a comparison is made.
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
"""What a candidate may declare: rows that see no key are zero, or uniform; rows of padding are not computed;
kernels that err by more than their operations (:data:`concord.conformance.compare.kernels.KERNELS`).
"""


def compare(
    reference: Any, candidate: Any = None, inputs: Any = None, **options: Any
) -> Verdict | Comparisons:
    """Judge whether a candidate computes what a PyTorch module computes, to within rounding.

    Args:
        reference: a ``torch.nn.Module`` in evaluation mode, or a model in NumPy
            (:class:`concord.conformance.compare.written.Written`).
        candidate: another module; a path of an ONNX graph or a safetensors file; a mapping of arrays by name;
            ``package.module:function``, called in a process of its own with arrays by keyword; or a callable
            that is called so here. By default the reference itself. A mapping of several such candidates by
            name may also hold names of :data:`concord.conformance.compare.ways.WAYS`.
        inputs: tensors or arrays by keyword, a tuple of them, or one. By default they are made by the names
            that the module takes: texts (``input_ids``), images (``pixel_values``) or sounds
            (``input_features``, ``input_values``).
        options: keyword arguments of :func:`prepare`.

    Returns:
        A row for each activation, and each gradient if those are wanted, judged end to end and from the
        candidate's own activations before it. Of several candidates: their verdicts by name, and how long
        those that agree take.

    Raises:
        SpecError: for what cannot be compared, with everything that is wrong.
        WorkerFailure: if the process of a candidate is killed.
    """
    if is_several(candidate):
        from concord.conformance.compare.comparisons import compare_several

        return compare_several(reference, candidate, inputs, **options)
    return prepare(reference, candidate, inputs, **options).verdict()


def is_several(candidate: Any) -> bool:
    """Return whether something is candidates by name, and not the arrays of one."""
    return isinstance(candidate, Mapping) and not any(
        hasattr(value, "__array__") or isinstance(value, (bool, int, float)) for value in candidate.values()
    )


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
    known: dict[Any, Any] | None = None,
) -> ModelComparison:
    """Return the comparison that :func:`compare` judges.

    Args:
        reference: as of :func:`compare`.
        candidate: one, as of :func:`compare`.
        inputs: as of :func:`compare`.
        way: how the reference's own module runs as a candidate: names of
            :data:`concord.conformance.compare.ways.WAYS`, joined by ``+``. With ``int8`` torchao keeps
            weights in 8 bits, and the reference is the module with those weights.
        gradients: whether to judge gradients of parameters and activations, of all outputs times fixed random
            numbers.
        names: the candidate's name of an activation to the reference's; ``{i}`` stands for a number. After a
            colon the order of the candidate's axes. :attr:`~.model_comparison.ModelComparison.proposed`
            proposes names.
        declared: of :data:`DECLARATIONS`, and the names of outputs that the candidate lacks on purpose;
            ``output``: all.
        seed: from which every run draws the same random numbers; without one a reference that draws is
            refused.
        python: the interpreter of another environment in which a function is called.
        known: references of other candidates for the same inputs, which this one shares; its own is added.
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
    with tempfile.TemporaryDirectory() as folder:  # of a graph that is made on the way
        if isinstance(right, ModuleReference):
            device = right.device
            # Way tf32 is the declaration of that name too.
            declared = [*declared, *({TF32} & {*parts})]
            right = replace(right, declared=declared, **right.given(lambda x: x.to(device)))
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
        right = right.cast(dtype_of(candidate)) if module else right
        right = right.differentiated() if gradients else right
        if known is not None and "int8" not in parts:
            dtype = dtype_of(right.model) if isinstance(right, ModuleReference) else None
            right = known.setdefault((dtype, frozenset(declared)), right)
        # The reference runs first: a fault of it, or of the inputs, is no fault of the candidate.
        changing = refuse_changes(right)
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
    whole = [name for name in arrays if own[name] in run.whole]
    notes = {**({"two runs of the reference": changing} if changing else {}), **run.notes}
    return ModelComparison(right, arrays, not way, whole, theirs, own, notes, run.unsteady, call=call)


def assert_same(reference: Any, candidate: Any = None, inputs: Any = None, **options: Any) -> None:
    """Fail with the first divergence in words unless a candidate agrees; arguments as of :func:`compare`.

    Raises:
        AssertionError: if it diverges, or nothing was judged.
    """
    __tracebackhide__ = True  # pytest shows the caller's line alone
    verdict = compare(reference, candidate, inputs, **options)
    assert verdict.passed, str(verdict)


__all__ = ["DECLARATIONS", "assert_same", "compare", "prepare"]
