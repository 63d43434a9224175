"""``concord compare``: compare any candidate with a PyTorch model."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import typer

from concord import options
from concord.conformance.compare import prepare
from concord.conformance.judging.verdict import Result
from concord.conformance.progress import listening
from concord.conformance.run.campaign import Report, Setup
from concord.conformance.wording import counted
from concord.junit import junit_xml
from concord.spec.errors import optional, refuse
from concord.spec.files import write_text
from concord.terminal import Terminal, bars


def compare(
    reference: str | None = None,
    candidate: list[str] | None = None,
    *,
    way: list[str] | None = None,
    inputs: Path | None = None,
    text: list[str] | None = None,
    gradients: bool = False,
    names: Path | None = None,
    declare: list[str] | None = None,
    seed: int | None = None,
    listing: bool = False,
    prove: bool = False,
    alone_and_batched: bool = False,
    python: str | None = None,
    device: str = "cpu",
    repro: options.Written | None = None,
    junit: options.Written | None = None,
    outputs: options.Outputs,
) -> None:
    """Judge whether a candidate computes what a PyTorch model computes.

    Args:
        reference (REFERENCE): package.module:function that returns a torch.nn.Module, or a folder
            of transformers. Default: what concord.toml, or tool.concord in pyproject.toml, compares.
        candidate (CANDIDATE): A graph (.onnx), arrays by name (.safetensors),
            package.module:function of any framework that takes and returns arrays by name, one
            without parameters that returns a module, or a folder; may be repeated. Default: the
            reference itself, as --as says.
        way (WAY, --as): How the reference runs again: eager, sdpa, math, flash, cudnn, bfloat16,
            float16, int8, cuda, tf32, compile, several joined by +; onnx, openvino; padded,
            padded-left, cached. May be repeated.
        inputs: Arrays by name (.safetensors). Default: standard texts.
        text (TEXT): A text for the folder's tokenizer; may be repeated.
        gradients: Judge gradients of parameters and activations too.
        names: A file of lines CANDIDATE'S NAME = REFERENCE'S NAME; {{i}} stands for a number. If
            it does not exist, it is written with names proposed from what the tensors hold.
        declare (NAME): What the candidate does on purpose: {values}; may be
            repeated.
        seed (S): The seed of every run. Without one, a reference that draws random numbers is
            refused.
        listing (--list): Print every activation of the reference, with shape, dtype and source, as a
            function that a port has to fill; judge nothing.
        prove: Put bugs into the reference, and say which of them this comparison would find.
        alone_and_batched: Judge each sample of a batch by the same sample run alone, without padding.
        python (PATH): The interpreter in which the candidate's function is called.
        repro: A script, and tensors beside it, that compute the diverging stretch by PyTorch alone.
        junit: Write the results as JUnit's XML, a test for each candidate.
        device (D): cpu, cuda or cuda:N: where the reference stands, and is computed exactly too.
    """
    outputs.check(repro, junit)
    selection, proposing = [*(candidate or ()), *(way or ())], names is not None and not names.exists()
    several = len(selection) > 1
    flags = {"prove": prove, "alone-and-batched": alone_and_batched, "repro": repro, "list": listing}
    arguments = {
        **{"as": way, "inputs": inputs, "text": text, "gradients": gradients, "names": names},
        **{"declare": declare, "seed": seed, "python": python, **flags},
    }
    refuse(
        [
            f"--{name} is given but needs a REFERENCE"
            for name in arguments
            if arguments[name] and reference is None
        ]
        + [f"--{name} is given but is about one candidate alone" for name in flags if flags[name] and several]
        + ["--text and --inputs are both given but one of them alone may be"] * bool(text and inputs)
        + [f"--device is {device!r} but must be cpu, cuda or cuda:N"] * (not options.DEVICE.fullmatch(device))
        + ["--list is given but is about the reference alone"] * (listing and len(selection) == 1)
        + ["--repro is given but is about one candidate, not --alone-and-batched"]
        * bool(repro and alone_and_batched)
        + [f"--names: {names} does not exist, but names are proposed for one candidate alone"]
        * (proposing and several)
    )
    silence_libraries()
    with optional("concord compare", "torch"):
        import torch

        from concord.comparison_file import (
            ComparisonFile,
            KeptCandidate,
            judge_all,
            read_comparison_file,
        )
        from concord.conformance.compare import candidates, proof, reproduction, ways
    if reference is None:
        kept = read_comparison_file()
    else:
        own_options: dict[str, Any] = {"declare": declare or [], "names": str(names or ""), "python": python}
        entries = {name: KeptCandidate(candidate=name, **own_options) for name in candidate or ()}
        entries |= {name: KeptCandidate.model_validate({"as": name, **own_options}) for name in way or ()}
        kept = ComparisonFile(
            reference=reference,
            inputs=str(inputs or ""),
            texts=text or [],
            gradients=gradients,
            seed=seed,
            candidates=entries or {"again": KeptCandidate(**own_options)},
        )
    for entry in kept.candidates.values():
        if entry.way:
            ways.parts_of(entry.way)
    started, milliseconds = time.perf_counter(), 0.0
    with bars(["comparing"], None) as advance, listening(lambda words: advance("comparing", 0, words)):
        model = candidates.placed(candidates.load(kept.reference), device)
        if reference is None or several:
            results, notes, milliseconds = judge_all(kept, model)
        else:
            ((name, entry),) = kept.candidates.items()
            arrays, label = kept.arrays(kept.inputs)
            comparison = prepare(
                model,
                entry.candidate or None,
                arrays,
                way=entry.way,
                gradients=gradients,
                seed=seed,
                **entry.options(names_exist=not proposing),
            )
            if listing:
                print(candidates.stub(comparison.reference), end="")
                raise typer.Exit(0)
            if names and proposing:
                lines = "".join(f"{line}\n" for line in comparison.lines)
                write_text(names, lines)
                Terminal().tell(f"{lines}written: {names}; look at it, and run the same again")
                raise typer.Exit(3)  # nothing was judged
            verdicts = (
                proof.batched(comparison.reference) if alone_and_batched else [(label, comparison.verdict())]
            )
            dtype = comparison.reference.precision
            results = [
                Result(name, kept.reference, case, dtype, verdict.status, verdict=verdict.explained())
                for case, verdict in verdicts
            ]
            notes = comparison.notes
            if prove:
                notes |= proof.summary(proof.prove(comparison))
            if repro and results[0].verdict:
                notes["reproduction"] = reproduction.attempt(comparison, results[0].verdict, repro)
    versions = {name: {"reference": f"PyTorch {torch.__version__}"} for name in kept.candidates}
    seconds = time.perf_counter() - started
    report = Report(results, versions, Setup(), seconds, notes, milliseconds=milliseconds)
    label = counted(len(versions), "candidate") if len(versions) > 1 else results[0].backend
    title = f"{label} compared with {kept.reference}"
    file = junit, lambda: junit_xml(report, title)
    raise typer.Exit(outputs.show_report(report, "compare", title, "reference", [file]))


def silence_libraries() -> None:
    """Suppress libraries' warnings at import."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
