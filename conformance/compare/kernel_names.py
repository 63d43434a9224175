"""Names of the GPU kernels that computed an activation."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from concord.conformance.compare.module_reference import ModuleReference, is_output, submodules
from concord.spec.text import first_of, shown

MARK = "concord: "

# Limits on the listed names, and on the characters of each.
FEW, LONGEST = 3, 72

# Meaning of each pattern in a kernel's name.
MEANINGS = {
    r"tf32|s1688(gemm|fprop|dgrad|wgrad)": "products in TF32",
    r"(?i)winograd": "a convolution by Winograd's algorithm",
    r"(?i)fft": "a convolution by an FFT",
    r"(?i)persist|RNN|elemWise.*LSTM": "cuDNN's recurrent kernels",
    r"(?i)flash|fmha|attention": "fused attention",
    r"16816|bf16|f16f16|h884": "products in half precision",
    r"(?i)split_?k": "a product split along its reduction axis (split-K)",
}


def kernels(candidate: ModuleReference, end: str, starts: Collection[str]) -> list[str]:
    """Describe a candidate's GPU kernels from ``starts`` to ``end``."""
    if candidate.device.type != "cuda":
        return []
    modules = {"": candidate.model} | submodules(candidate.model)
    with ExitStack() as stack, torch.no_grad():
        for path, module in modules.items():
            entered = list[Any]()
            stack.callback(module.register_forward_pre_hook(partial(_enter, entered, path)).remove)
            stack.callback(module.register_forward_hook(partial(_leave, entered)).remove)
        stack.enter_context(candidate.untouched())
        inputs = candidate.map_inputs(lambda x: x.to(candidate.device))
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            candidate.model(*inputs["args"], **inputs["kwargs"])
            torch.cuda.synchronize()
    owner = "" if is_output(end) else re.sub(r"(#\d+)?(\[.*\])?$", "", end)
    others = {f"{MARK}{start}" for start in starts}
    marked = (event for event in profiler.events() if event.name == f"{MARK}{owner}")
    names = list(dict.fromkeys(name for event in marked for name in within(event, others)))
    if not names:
        return []
    listing, explanations = first_of([shown(name, LONGEST) for name in names], FEW), meanings(names)
    return [
        f"kernels that ran: {listing}"
        + (f"; their names indicate: {', '.join(explanations)}" if explanations else "")
    ]


def meanings(names: Collection[str]) -> list[str]:
    """Meanings of kernel names."""
    return [text for pattern, text in MEANINGS.items() if any(re.search(pattern, name) for name in names)]


def _enter(entered: list[Any], path: str, *_: Any) -> None:
    entered.append(record_function(f"{MARK}{path}"))
    entered[-1].__enter__()


def _leave(entered: list[Any], *_: Any) -> None:
    entered.pop().__exit__(None, None, None)


def within(event: Any, others: Collection[str]) -> Iterator[str]:
    """Yield a profiler event's kernels, except those of other activations."""
    yield from (kernel.name for kernel in event.kernels)
    for child in event.cpu_children:
        if child.name not in others:
            yield from within(child, others)
