"""The cost of judging a large model: seconds and memory of one forward pass, judged end to end and locally.

``python cost.py bert`` judges BERT base with 2 texts of 128 tokens; ``python cost.py decoder`` a decoder of
0.5 billion parameters (Qwen2 without its output layer) with one text of 64.
"""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import torch
from small import TRANSFORMERS, large, needs

from concord.conformance.compare import compare

REQUIREMENTS = TRANSFORMERS


def model(name: str, attention: str) -> Any:
    """Return a model with random weights, and the shape of its input ids."""
    from transformers import BertConfig, BertModel, Qwen2Config, Qwen2Model

    torch.manual_seed(0)
    if name == "bert":
        return large(BertModel(BertConfig(attn_implementation=attention))), (2, 128)
    sizes = {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    }
    config = Qwen2Config(**sizes, use_cache=False, attn_implementation=attention)
    return Qwen2Model(config).eval(), (1, 64)


def main() -> None:
    needs("transformers", *TRANSFORMERS)
    name = sys.argv[1] if len(sys.argv) > 1 else "bert"
    reference, shape = model(name, "eager")
    ids = torch.randint(1, 1000, shape, generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    started, used = time.perf_counter(), time.process_time()
    verdict = compare(reference, None, inputs, way="sdpa")
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    parameters = sum(parameter.numel() for parameter in reference.parameters()) / 1e6
    print(
        f"{type(reference).__name__}, {parameters:.0f} million parameters, {shape[0]} x {shape[1]} tokens: "
        f"{verdict.status}, worst {verdict.worst:.2f} tolerances, {time.perf_counter() - started:.0f} s "
        f"({time.process_time() - used:.0f} s of processor), {gigabytes:.1f} GB"
    )


if __name__ == "__main__":
    main()
