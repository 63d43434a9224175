"""Measure the cost of comparing any model: ``make any`` on a CPU, ``make gpu-any`` on a GPU.

Each model has random weights, and a process of its own, because peak memory is measured by process:

    python -m examples.any_model [--device cuda] [MODEL …]

``--growth`` measures how the cost of ``compare`` and ``check`` grows with layers, width, tokens and batch.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

from concord import backends, conformance, spec
from concord.conformance.compare import prepare

MINILM = {"vocab_size": 30522, "hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}
HALF = {"vocab_size": 151936, "hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864}
SEVEN = {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 11008}


def bert(texts, tokens, **sizes):
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**sizes)), ids(texts, tokens)


def decoder(tokens, heads, groups, **sizes):
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=groups, use_cache=False)
    return LlamaModel(config), ids(1, tokens)


def ids(*shape):
    tokens = torch.randint(1, 1000, shape, generator=torch.Generator("cpu").manual_seed(1), device="cpu")
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def mlp():
    layers = torch.nn.Sequential(torch.nn.Linear(13, 31), torch.nn.GELU(), torch.nn.Linear(31, 7))
    return layers, torch.randn(5, 13)


def recurrent(kind):
    return getattr(torch.nn, kind)(11, 13, 2, batch_first=True), torch.randn(3, 36, 11)


# By name: a function that makes the model and its inputs, the way in which it runs again, and options.
MODELS = {
    "MLP": (mlp, "float32", {}),
    "GRU, 36 steps": (lambda: recurrent("GRU"), "float32", {}),
    "LSTM, 36 steps, gradients": (lambda: recurrent("LSTM"), "float32", {"gradients": True}),
    "MiniLM 8 x 64": (lambda: bert(8, 64, num_attention_heads=12, **MINILM), "eager", {}),
    "MiniLM 8 x 64, gradients": (
        lambda: bert(8, 64, num_attention_heads=12, **MINILM),
        "eager",
        {"gradients": True},
    ),
    "BERT base 2 x 128": (lambda: bert(2, 128), "eager", {}),
    "decoder of 0.5 billion, 1 x 64": (lambda: decoder(64, 14, 2, **HALF), "eager", {}),
    "decoder of 7 billion, 1 x 64": (lambda: decoder(64, 32, 32, **SEVEN), "eager", {}),
}

# Judged only on a GPU, in bfloat16.
LARGE = "decoder of 7 billion, 1 x 64"


def judge(name: str, device: str) -> dict[str, object]:
    make, way, options = MODELS[name]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if name == LARGE else torch.float32)
    with torch.device(device):
        model, inputs = make()
    torch.set_default_dtype(torch.float32)
    if way == "float32":  # judge the same module, although its bits are equal
        way, options = "", {**options, "candidate": model}
    started, used = time.perf_counter(), time.process_time()
    comparison = prepare(model.eval(), inputs=inputs, way=way, **options)
    comparison.allow_same_bits = False
    verdict = comparison.verdict()
    gigabytes = torch.cuda.max_memory_allocated() / 2**30 if device != "cpu" else 0.0
    return {
        "status": verdict.status,
        "worst": verdict.worst,
        "seconds": time.perf_counter() - started,
        "processor": time.process_time() - used,
        "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "device": gigabytes,
    }


# A small BERT, and the factors by which each size grows.
SMALL, FACTORS = {"layers": 2, "width": 128, "tokens": 64, "batch": 4}, (1, 2, 4)


def cost_of_compare(layers: int, width: int, tokens: int, batch: int) -> float:
    """CPU seconds of comparing a BERT with its eager attention."""
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 4 * width}
    model, inputs = bert(batch, tokens, vocab_size=1009, num_attention_heads=width // 32, **sizes)
    started = time.process_time()
    comparison = prepare(model.eval(), inputs=inputs, way="eager")
    comparison.allow_same_bits = False
    assert comparison.verdict().passed
    return time.process_time() - started


def cost_of_check(layers: int, width: int, tokens: int, batch: int) -> float:
    """CPU seconds of judging the PyTorch backend's BERT, with gradients."""
    sizes = {"d_model": width, "d_ff": 4 * width, "num_layers": layers, "num_heads": width // 32}
    config = spec.variant("bert", vocab_size=1009, max_positions=1024, **sizes)
    weights = spec.initialize(config, seed=0)
    inputs = spec.example_batch(config, batch=batch, tokens=tokens, seed=0)
    with backends.open("torch") as torch_backend:
        run = torch_backend.run(config, weights, inputs, dtype="float32", taps=True, gradients=True)
    started = time.process_time()
    assert conformance.judge(config, weights, inputs, run).passed
    return time.process_time() - started


def print_growth() -> None:
    print("| command | grows | CPU seconds | exponent |\n|---|---|---|---:|")
    for command, cost in {"compare": cost_of_compare, "check": cost_of_check}.items():
        cost(**SMALL)  # imports, and fills caches
        for name, size in SMALL.items():
            seconds = [cost(**{**SMALL, name: factor * size}) for factor in FACTORS]
            listed = ", ".join(
                f"{factor * size}: {t:.2f}" for factor, t in zip(FACTORS, seconds, strict=True)
            )
            exponent = math.log2(seconds[-1] / seconds[-2])
            print(f"| `{command}` | {name} | {listed} | {exponent:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="*", help=f"by default all: {', '.join(MODELS)}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=float, default=600, help="seconds of one model")
    parser.add_argument("--alone", action="store_true", help="judge one model in this process; print JSON")
    parser.add_argument("--growth", action="store_true", help="measure how the cost grows")
    arguments = parser.parse_args()
    if arguments.growth:
        print_growth()
        return
    if arguments.alone:
        print(json.dumps(judge(arguments.model[0], arguments.device)))
        return
    print("| model | verdict | worst | seconds | of the processor | GB | of the GPU |\n|" + "---|" * 7)
    for name in arguments.model or [name for name in MODELS if name != LARGE or arguments.device != "cpu"]:
        print(f"| {name} | {' | '.join(cells(name, arguments.device, arguments.limit))} |", flush=True)


def cells(name: str, device: str, limit: float) -> list[str]:
    command = [sys.executable, "-m", "examples.any_model", "--alone", "--device", device, name]
    here = Path(__file__).parents[1]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=limit, cwd=here
        )
    except subprocess.TimeoutExpired:
        return [f"none within {limit:.0f} s", *[""] * 5]
    if process.returncode:
        return [f"failed: {process.stderr.strip().splitlines()[-1]}", *[""] * 5]
    row = json.loads(process.stdout.strip().splitlines()[-1])
    numbers = (f"{row[key]:.1f}" for key in ("seconds", "processor", "host", "device"))
    return [row["status"], f"{row['worst']:.2f}", *numbers]


if __name__ == "__main__":
    main()
