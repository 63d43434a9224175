"""PyTorch's BERT of transformers 5 compared with the last Flax and TensorFlow ones, of transformers 4.57."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

REQUIREMENTS = (
    *("transformers==4.57.6", "huggingface_hub<1", "tokenizers<=0.23.0", "tf-keras==2.21.0"),
    *("regex", "pyyaml", "tqdm", "filelock", "fsspec", "requests", "certifi", "idna", "urllib3"),
    "charset_normalizer",
)
SAVED = "CONCORD_WILD_BERT"


def by_name(results: Any) -> dict[str, np.ndarray]:
    first, *layers = map(np.asarray, results.hidden_states)
    weights = map(np.asarray, results.attentions)
    return {
        "embeddings.LayerNorm": first,
        **{f"encoder.layer.{i}.output.LayerNorm": array for i, array in enumerate(layers)},
        **{f"encoder.layer.{i}.attention.self[1]": array for i, array in enumerate(weights)},
        "output[last_hidden_state]": np.asarray(results.last_hidden_state),
        "output[pooler_output]": np.asarray(results.pooler_output),
    }


def flax(**inputs: np.ndarray) -> dict[str, np.ndarray]:
    from transformers import FlaxBertModel

    model = FlaxBertModel.from_pretrained(os.environ[SAVED], from_pt=True)
    return by_name(model(**inputs, output_hidden_states=True, output_attentions=True))


def tf(**inputs: np.ndarray) -> dict[str, np.ndarray]:
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    from transformers import TFBertModel

    model = TFBertModel.from_pretrained(os.environ[SAVED], from_pt=True)
    return by_name(model(inputs, output_hidden_states=True, output_attentions=True))


def main() -> None:
    from small import bert, elsewhere, judge, saved

    os.environ[SAVED] = saved()
    python = elsewhere("transformers-4", *REQUIREMENTS)
    for name, words in (("flax", "Flax"), ("tf", "TensorFlow")):
        judge(f"{words} of transformers 4", bert(), f"older:{name}", python=python)


if __name__ == "__main__":
    main()
