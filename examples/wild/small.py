"""Shared by these programs: a small BERT, its inputs, packages, and a row of the table."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packaging.requirements import Requirement

from concord.conformance.compare import prepare
from concord.conformance.compare.module_reference import named

HERE = Path(__file__).parent
FOLDER = Path(tempfile.gettempdir()) / "concord-wild"

HUB = (
    *("regex", "pyyaml", "tqdm", "filelock", "fsspec", "certifi", "idna"),
    *("httpx", "anyio", "httpcore", "h11", "hf-xet"),
)
TRANSFORMERS = ("transformers==5.23.0", "huggingface_hub>=2", "tokenizers>=0.22,<=0.23.3", *HUB)

torch.set_num_threads(1)


def lacking(requirements: tuple[str, ...]) -> list[str]:
    missing = []
    for text in requirements:
        requirement = Requirement(text)
        try:
            fits = requirement.specifier.contains(version(requirement.name), prereleases=True)
        except PackageNotFoundError:
            fits = False
        missing += [] if fits else [text]
    return missing


def install(name: str, *requirements: str) -> Path:
    """Install packages into their own folder, without dependencies."""
    folder = FOLDER / name
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, *requirements], check=True)
    return folder


def needs(name: str, *requirements: str) -> None:
    """Make packages importable, and install missing ones."""
    if missing := lacking(requirements):
        sys.path.insert(0, str(install(name, *missing)))


def elsewhere(name: str, *requirements: str) -> str:
    """Return an interpreter with other versions of packages."""
    folder = install(name, *requirements)
    python = FOLDER / f"python-{name}"
    paths = os.pathsep.join([str(folder), str(HERE)])
    python.write_text(f'#!/bin/sh\nPYTHONPATH={paths} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


def large(model: torch.nn.Module) -> torch.nn.Module:
    # With fresh weights, which are small, and trivial norms, many wrong steps would not show.
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model.eval()


def bert(attention: str = "eager") -> torch.nn.Module:
    """A BERT of transformers with 3 layers of width 132, and random weights."""
    needs("transformers", *TRANSFORMERS)
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 997,
        "hidden_size": 132,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 260,
        "max_position_embeddings": 64,
    }
    return large(BertModel(BertConfig(**sizes, attn_implementation=attention)))


def saved() -> str:
    folder = FOLDER / "bert"
    bert().save_pretrained(folder)
    return str(folder)


def texts() -> dict[str, torch.Tensor]:
    """Three texts of 23, 11 and 5 tokens."""
    mask = (torch.arange(23) < torch.tensor([23, 11, 5])[:, None]).long()
    ids = torch.randint(1, 997, mask.shape, generator=torch.Generator().manual_seed(1)) * mask
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}


def by_hand(model: torch.nn.Module, inputs: dict[str, torch.Tensor], name: str, array: np.ndarray) -> float:
    """An output's error divided by that of PyTorch's own float32, both compared with float64."""

    def run(module: torch.nn.Module) -> np.ndarray:
        with torch.no_grad():
            return named(module(**inputs), "output")[name].double().numpy()

    right, own = run(copy.deepcopy(model).double()), run(model)
    real = inputs["attention_mask"].numpy() != 0 if right.ndim == 3 else ...
    return float(abs(array - right)[real].max() / abs(own - right)[real].max())


def judge(what: str, model: torch.nn.Module, candidate: Any, inputs: Any = None, **options: Any) -> str:
    """Judge a candidate, print a row of the table, and return the status."""
    started, inputs = time.perf_counter(), texts() if inputs is None else inputs
    comparison = prepare(model, candidate, inputs, **options)
    verdict = comparison.verdict()
    explained = verdict.explained()
    cause = explained.cause.text if explained.cause else ""
    seconds = time.perf_counter() - started
    output = next(
        name for name in comparison.plain if name.startswith("output") and name in comparison.tensors
    )
    array = comparison.tensors[output]
    print(
        f"| {what} | {verdict.status} | {f'`{verdict.first}`' if verdict.first else ''} | {cause} "
        f"| {verdict.worst:.2f} | {by_hand(model, inputs, output, array):.1f} | {seconds:.0f} |",
        flush=True,
    )
    print("\n".join([str(explained), *map(str, comparison.notes.items())]), file=sys.stderr, flush=True)
    return verdict.status
