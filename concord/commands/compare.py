"""``concord compare``: compare any candidate with a PyTorch model."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import typer

from concord import options, output_files
from concord.backends.wire import WorkerFailure
from concord.conformance.judging.verdict import Result, Verdict
from concord.conformance.progress import listening
from concord.conformance.run.campaign import Report, Setup
from concord.conformance.wording import counted
from concord.junit import junit_xml
from concord.spec.errors import collecting, optional, refuse
from concord.spec.files import write_text
from concord.terminal import Terminal, bars


def compare(
    reference: options.Named | None = None,
    candidate: options.NamedList = None,
    *,
    way: list[str] | None = None,
    inputs: Path | None = None,
    text: list[str] | None = None,
    gradients: bool = False,
    log_probabilities: bool = False,
    names: Path | None = None,
    declare: list[str] | None = None,
    seed: int | None = None,
    listing: bool = False,
    prove: bool = False,
    alone_and_batched: bool = False,
    python: str | None = None,
    device: str = "cpu",
    repro: options.Written | None = None,
    node_values: options.Written | None = None,
    junit: options.Written | None = None,
    outputs: options.Outputs,
) -> None:
    """Judge whether a candidate computes what a PyTorch model computes.

    Args:
        reference (REFERENCE): package.module:function, model folder, or graph (.onnx). The function
            returns a torch.nn.Module; the folder is one of transformers. Default: the comparisons in
            concord.toml, or in tool.concord of pyproject.toml.
        candidate (CANDIDATE): package.module:function, folder, .onnx or .safetensors; may be
            repeated. The function takes and returns named arrays, in any framework, or takes no
            parameters and returns a module. Default: the reference itself, run as --as specifies.
        way (WAY, --as): How to run the reference again; may be repeated. These can be joined by +: eager,
            sdpa, math, flash, cudnn, bfloat16, float16, int8, cuda, tf32, compile. These cannot:
            onnx, openvino, padded, padded-left, cached.
        inputs: Named arrays (.safetensors). Default: standard inputs.
        text (TEXT): A text for the folder's tokenizer; may be repeated.
        gradients: Judge gradients of parameters and activations too.
        log_probabilities: Judge a decoder's log probabilities of next tokens too.
        names: A file of lines CANDIDATE'S NAME = REFERENCE'S NAME; {{i}} stands for a number. If it
            does not exist, Concord writes it, with names proposed from the tensors' values.
        declare (NAME): An intended deviation of the candidate: {values}; may be repeated.
        seed (S): The seed of every run. Without a seed, Concord refuses a reference that draws random
            numbers.
        listing (--list): Print a stub of a port; judge nothing. The stub names every activation of
            the reference, with its shape, dtype and source.
        prove: Plant bugs in the reference; report which of them this comparison would find.
        alone_and_batched: Judge each sample of the reference's batch against the same sample alone, without
            padding.
        python (PATH): The Python interpreter that calls the candidate's function.
        repro: Write a script, with a file of its tensors, that reproduces the diverging section of
            code in PyTorch alone.
        node_values: Write errors by node for Model Explorer (JSON), with the exported program (.pt2).
        junit: Write the results as JUnit XML, with one test for each candidate.
        device (D): cpu, cuda or cuda:N. The reference runs there, and so does its exact computation.

    Examples: concord compare my.model:build --as sdpa --as bfloat16 ·
        concord compare my.model:build port.onnx --gradients
    """
    output_files.READ += map(Path, () if reference else ("concord.toml", "pyproject.toml"))
    outputs.check(repro, node_values, junit)
    selection, proposing = [*(candidate or ()), *(way or ())], names is not None and not names.exists()
    several = len(selection) > 1
    own = ("alone-and-batched", "list")  # flags that concern only the reference
    flags = {
        "prove": prove,
        "alone-and-batched": alone_and_batched,
        "repro": repro,
        "node-values": node_values,
        "list": listing,
    }
    arguments = {
        "as": way,
        "inputs": inputs,
        "text": text,
        "gradients": gradients,
        "names": names,
        "declare": declare,
        "seed": seed,
        "python": python,
        **flags,
        "log-probabilities": log_probabilities,
    }
    refuse(
        [
            f"--{name} is given but applies only to a REFERENCE{' and one candidate' * (name in flags)}"
            " on the command line"
            for name in arguments
            if arguments[name] and reference is None
        ]
        + [
            f"--{name} is given but applies only to "
            f"{'the reference' if name in own else 'a single candidate'}"
            for name in flags
            if flags[name] and len(selection) > (name not in own)
        ]
        + ["--text and --inputs are both given; give only one"] * bool(text and inputs)
        + [f"--device is {device!r} but must be cpu, cuda or cuda:N"] * (not options.DEVICE.fullmatch(device))
        + ["--repro is given but applies to a candidate, not to --alone-and-batched"]
        * bool(repro and alone_and_batched)
        + [f"--names: {names} does not exist; Concord proposes names only for a single candidate"]
        * (proposing and several)
    )
    silence_libraries()
    with optional("concord compare", "torch"):
        import torch

        from concord.comparison_file import (
            ComparisonFile,
            KeptCandidate,
            judge_all,
            prepare_only,
            read_comparison_file,
        )
        from concord.conformance.compare import candidates, proof, reproduction
        from concord.conformance.compare.node_values import write_node_values
        from concord.conformance.compare.ways import parts_of
    if reference is None:
        kept = read_comparison_file()
    else:
        own_options: dict[str, Any] = {"declare": declare or []}
        # A way has the names of the reference.
        theirs: dict[str, Any] = {"names": str(names or ""), "python": python}
        entries = {name: KeptCandidate(candidate=name, **own_options, **theirs) for name in candidate or ()}
        entries |= {name: KeptCandidate.model_validate({"as": name, **own_options}) for name in way or ()}
        kept = ComparisonFile(
            reference=reference,
            inputs=str(inputs or ""),
            texts=text or [],
            gradients=gradients,
            seed=seed,
            log_probabilities=log_probabilities,
            candidates=entries or {"the reference, run again": KeptCandidate(**own_options)},
        )
    for kept_way in filter(None, (entry.way for entry in kept.candidates.values())):
        parts_of(kept_way)  # an unknown one is refused
    versions = {name: {"reference": f"PyTorch {torch.__version__}"} for name in kept.candidates}
    name, *_ = kept.candidates
    started, report, problems = time.perf_counter(), Report([], versions, Setup()), list[str]()
    try:
        with bars(["comparing"], None) as advance, listening(lambda words: advance("comparing", 0, words)):
            model = candidates.placed(candidates.load(kept.reference, kept.log_probabilities), device)
            if reference is None or several:
                judge_all(kept, model, report)
            else:
                comparison = prepare_only(kept, model, names_exist=not proposing)
                if listing:
                    print(candidates.stub(comparison.reference), end="")
                    raise typer.Exit(0)
                if names and proposing:
                    write_names(names, comparison.lines)
                    raise typer.Exit(3)  # nothing was judged
                verdicts = (
                    proof.batched(comparison.reference)
                    if alone_and_batched
                    else [(kept.case(kept.inputs), comparison.verdict())]
                )
                dtype = comparison.reference.precision
                report.results = [
                    Result(name, kept.reference, case, dtype, verdict.status, verdict=verdict)
                    for case, verdict in verdicts
                ]
                report.notes |= comparison.notes
            report = report.with_verdicts(Verdict.explained)
            if prove:
                report.notes |= proof.summary(proof.prove(comparison))
            verdict = report.results[0].verdict
            with collecting(problems):
                if repro and verdict:
                    report.notes["reproduction"] = reproduction.write(comparison, verdict, repro)
                if node_values and verdict:
                    report.notes["node values"] = write_node_values(comparison, verdict, node_values)
    except WorkerFailure as error:  # of the only candidate
        report.results = [
            Result(
                name,
                kept.reference,
                kept.case(kept.inputs),
                "float32",
                error.status,
                error.detail,
                stderr=error.stderr,
            )
        ]
    except KeyboardInterrupt:
        if not report.results:
            raise
        report = report.with_verdicts(Verdict.unexplained)
        report.notes["interrupted"] = "the search for causes, or a later step, did not finish"
    report.seconds = time.perf_counter() - started
    label = counted(len(versions), "candidate") if len(versions) > 1 else name
    title = f"{label}, compared with {kept.reference}"
    file = junit, lambda: junit_xml(report, title)
    raise typer.Exit(
        outputs.show_report(report, "compare", title, "reference", problems=problems, others=[file])
    )


def write_names(path: Path, lines: list[str]) -> None:
    """Write proposed names, and show them."""
    write_text(path, "".join(f"{line}\n" for line in lines))
    done = "review it, then run the same command again" if lines else "it is empty: no names are proposed"
    for line in (*lines, f"written: {path}; {done}"):
        Terminal().tell(line)


def silence_libraries() -> None:
    """Suppress libraries' warnings at import."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
