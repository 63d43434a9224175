"""``concord compare``: compare any candidate with a PyTorch model."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import typer

from concord import options
from concord.comparison_file import ComparisonFile, accept, read_comparison_file, read_names, unneeded
from concord.conformance.compare import prepare
from concord.conformance.judging.verdict import Result
from concord.conformance.progress import listening
from concord.conformance.run.campaign import Report, Setup
from concord.conformance.wording import counted, gather
from concord.spec.errors import optional, refuse
from concord.spec.files import read_arrays, write_text
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
    repro: Path | None = None,
    outputs: options.Reports,
) -> None:
    """Judge whether a candidate computes what a PyTorch model computes.

    Args:
        reference (REFERENCE): package.module:function that returns a torch.nn.Module, or a folder
            of transformers. Default: what concord.toml, or [tool.concord] of pyproject.toml, compares.
        candidate (CANDIDATE): A graph (.onnx), arrays by name (.safetensors),
            package.module:function of any framework that takes and returns arrays by name, or a
            folder; may be repeated. Default: the reference itself, as --as says.
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
        device (D): cpu, cuda or cuda:N: where the reference stands, and is computed exactly too.
    """
    outputs.check()
    if reference is None:
        given = {
            **{"as": way, "inputs": inputs, "text": text, "gradients": gradients, "names": names},
            **{"declare": declare, "seed": seed, "list": listing, "prove": prove, "python": python},
            **{"alone-and-batched": alone_and_batched, "repro": repro},
        }
        refuse([f"--{name} is given but needs a REFERENCE" for name, value in given.items() if value])
        raise typer.Exit(compare_kept(read_comparison_file(), device, outputs))
    chosen_names = [*(candidate or ()), *(way or ())]
    several, proposing = len(chosen_names) > 1, names is not None and not names.exists()
    refuse(
        ["--text and --inputs are both given but one of them alone may be"] * bool(text and inputs)
        + [f"--device is {device!r} but must be cpu, cuda or cuda:N"] * (not options.DEVICE.fullmatch(device))
        + ["--list is given but is about the reference alone"] * (listing and bool(chosen_names))
        + [f"--names: {names} does not exist, but names are proposed for one candidate alone"]
        * (several and proposing)
        + ["--prove is given but judges one candidate alone"] * (several and prove)
        + ["--alone-and-batched is given but judges the reference alone"] * (several and alone_and_batched)
        + ["--repro is given but is about one candidate alone"]
        * bool(repro and (several or alone_and_batched))
    )
    silence_libraries()
    with optional("concord compare", "torch"):
        from concord.conformance.compare import candidates, proof, reproduction, ways
        from concord.conformance.compare.comparisons import compare_several
    for name in way or ():
        ways.parts_of(name)
    started = time.perf_counter()
    with bars(["comparing"], None) as advance, listening(lambda words: advance("comparing", 0, words)):
        model = candidates.placed(candidates.load(reference), device)
        arrays: Any = read_arrays(inputs) if inputs else None
        arrays = candidates.tokens(Path(reference), text) if text else arrays
        what = str(inputs) if inputs else "texts" if text else "standard texts"
        chosen = {name: loaded(name) for name in candidate or ()}
        chosen |= {name: name for name in way or ()}
        asked: dict[str, Any] = {
            "gradients": gradients,
            "names": read_names(names) if names and not proposing else None,
            "declared": declare or (),
            "seed": seed,
            "python": python,
        }
        if several:
            compared = compare_several(model, chosen, arrays, **asked)
            results, notes = compared.explained().results(reference, what), dict(compared.notes)
            own = compared.milliseconds.get("reference", 0.0)
        else:
            ((name, candidate_itself),) = chosen.items() or [("again", None)]
            comparison = prepare(
                model, None if way else candidate_itself, arrays, way=name if way else "", **asked
            )
            if listing:
                print(candidates.stub(comparison.reference), end="")
                raise typer.Exit(0)
            if names and proposing:
                lines = "".join(f"{line}\n" for line in comparison.lines)
                write_text(names, lines)
                Terminal().tell(f"{lines}written: {names}; look at it, and run the same again")
                raise typer.Exit(3)  # nothing was judged
            dtype, own = comparison.reference.precision, 0.0
            verdicts = (
                proof.batched(comparison.reference) if alone_and_batched else [(what, comparison.verdict())]
            )
            results = [
                Result(name, reference, case, dtype, verdict.status, verdict=verdict.explained())
                for case, verdict in verdicts
            ]
            notes = comparison.notes
            if prove:
                notes |= proof.said(proof.prove(comparison))
            if repro and results[0].verdict:
                notes["reproduction"] = reproduction.told(comparison, results[0].verdict, repro)
    raise typer.Exit(show_results(results, time.perf_counter() - started, notes, own, reference, outputs))


def show_results(
    results: list[Result],
    seconds: float,
    notes: dict[str, str],
    own: float,
    reference: str,
    outputs: options.Reports,
) -> int:
    """Write and show the results of all candidates for a reference, and return the exit code."""
    import torch

    names = [*dict.fromkeys(result.backend for result in results)]
    versions = {name: {"reference": f"PyTorch {torch.__version__}"} for name in names}
    report = Report(results, versions, Setup(), seconds, notes, milliseconds=own)
    title = f"{names[0] if len(names) == 1 else counted(len(names), 'candidate')} compared with {reference}"
    return outputs.show_report(report, "compare", title, "reference")


def loaded(candidate: str) -> Any:
    """Return the module of a folder; any other candidate by its name."""
    from concord.conformance.compare import candidates

    return candidates.load(candidate) if Path(candidate).is_dir() else candidate


def compare_kept(kept: ComparisonFile, device: str, outputs: options.Reports) -> int:
    """Judge every candidate of a file, and return the exit code."""
    silence_libraries()
    with optional("concord compare", "torch"):
        from concord.conformance.compare import candidates
        from concord.conformance.compare.comparisons import compare_several
    started, results, notes, own = time.perf_counter(), list[Result](), dict[str, str](), 0.0
    with bars(["comparing"], None) as advance, listening(lambda words: advance("comparing", 0, words)):
        model = candidates.placed(candidates.load(kept.reference), device)
        by_inputs = gather(kept.candidates.items(), lambda entry: entry[1].inputs or kept.inputs)
        for inputs, entries in by_inputs.items():
            compared = compare_several(
                model,
                {name: entry.way or loaded(entry.candidate) for name, entry in entries},
                read_arrays(Path(inputs)) if inputs else None,
                {name: entry.options for name, entry in entries},
                gradients=kept.gradients,
                seed=kept.seed,
            )
            results += compared.explained().results(kept.reference, inputs or "standard texts")
            notes |= compared.notes
            own = own or compared.milliseconds.get("reference", 0.0)
    findings = {name: entry.accepted for name, entry in kept.candidates.items()}
    notes |= {one.backend: gone for one in results if (gone := unneeded(one, findings[one.backend]))}
    results = [accept(result, findings[result.backend]) for result in results]
    return show_results(results, time.perf_counter() - started, notes, own, kept.reference, outputs)


def silence_libraries() -> None:
    """Suppress libraries' warnings at import."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
