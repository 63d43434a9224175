"""Scripts that reproduce a divergence with only PyTorch."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from concord.conformance.compare.aten_arithmetic import Computed
from concord.conformance.compare.stretch import Stretch
from concord.conformance.judging.verdict import Verdict
from concord.spec.files import write_bytes, write_text

if TYPE_CHECKING:
    from concord.conformance.compare.model_comparison import ModelComparison

SCRIPT = '''"""{text}"""

from pathlib import Path

import torch

held = torch.load(Path(__file__).with_name("{tensors}"))


def reference(dtype):
    given = [x.to(dtype) if x.is_floating_point() else x for x in held["reference"]]
{reference}
{candidate}

right = reference(torch.float64)
runs = {{
    "reference in float64": right,
    "reference in {dtype}": reference(torch.{dtype}),
    "candidate": held["candidate"],{again}
}}
for name, run in runs.items():
    error = (run.double() - right).abs().max() / right.abs().max()
    print(f"{{name:24}} {{run[{element}].item():.9g}}, largest error ÷ largest value {{error.item():.3g}}")
print("tolerance of that element: {tolerance:.3g}")
'''


def write(comparison: ModelComparison, verdict: Verdict, path: Path) -> str:
    """Write the first divergence's stretch as a script, with tensors in a ``.pt`` file.

    Returns a message about the files, or why there are none.
    """
    first, reference, theirs = verdict.first_divergence, comparison.reference, comparison.theirs
    if first is None or first.deciding is None:
        return "no tensor diverges, so there is nothing to reproduce"
    end = first.tensor
    right = comparison.stretch(end)
    if not (right and right.steps):
        return f"no sequence of forward operations that a script could contain computes {end}"
    lines, inputs = steps(right)
    contents: dict[str, Any] = {"reference": inputs, "candidate": torch.from_numpy(comparison.tensors[end])}
    candidate = again = ""
    if theirs and comparison.own[end] in theirs.plain:
        their_lines, contents["its tensors"] = steps(comparison.their_stretch(theirs.on_host(), end))
        candidate = f'\n\ndef candidate():\n    dtype, given = None, held["its tensors"]\n{their_lines}\n'
        # For a compiled or GPU candidate, separate operations may give a different result.
        again = '\n    "candidate, run again": candidate(),'
    # So named, it replaces no weights that have the script's name.
    tensors, content = path.with_name(f"{path.name}.pt"), io.BytesIO()
    torch.save(contents, content)
    write_bytes(tensors, content.getvalue())
    write_text(
        path,
        SCRIPT.format(
            text=verdict.cause.text if verdict.cause else f"`{end}` diverges",
            tensors=tensors.name,
            reference=lines,
            candidate=candidate,
            element=first.deciding.element,
            dtype=reference.activations[end].dtype,
            again=again,
            tolerance=first.deciding.tolerance,
        ),
    )
    return f"written: {path}, with {tensors.name}"


def steps(stretch: Stretch) -> tuple[str, list[Tensor]]:
    """A stretch as Python source, and its inputs."""
    inputs, names, lines = list[Tensor](), dict[int, str](), list[str]()

    def name_of(x: Tensor) -> str:
        if id(x) not in names:
            names[id(x)] = f"given[{len(inputs)}]"
            before = stretch.before.get(id(x), x)  # in case an operation was in-place
            with _disable_current_modes():
                plain = (
                    before.value.to(before.dtype) if isinstance(before, Computed) else before.detach().cpu()
                )
                inputs.append(plain.clone())
        return names[id(x)]

    for number, step in enumerate(stretch.steps):
        operation, result = step.operation, step.result
        operands = [
            *(written(x, name_of) for x in operation.args),
            *(f"{key}={written(x, name_of)}" for key, x in operation.kwargs.items()),
        ]
        lines.append(f"    t{number} = torch.ops.{operation.func}({', '.join(operands)})")
        if isinstance(result, (tuple, list)):
            names |= {id(x): f"t{number}[{place}]" for place, x in enumerate(result)}
        else:
            names[id(result)] = f"t{number}"
    lines.append(f"    return {name_of(stretch.result)}")
    return "\n".join(lines), inputs


def written(x: Any, name_of: Callable[[Tensor], str]) -> str:
    """An operand as Python source."""
    if isinstance(x, Tensor):
        return name_of(x)
    if isinstance(x, (tuple, list)):
        return f"[{', '.join(written(entry, name_of) for entry in x)}]"
    if isinstance(x, torch.dtype) and x.is_floating_point:
        return f"dtype or {x}"  # keeps the float64 run in float64
    if isinstance(x, float) and not math.isfinite(x):
        return f"float('{x}')"
    return f"torch.device({str(x)!r})" if isinstance(x, torch.device) else repr(x)
