"""A BERT converted by CTranslate2, which returns only the last hidden state and skips padding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from small import FOLDER, TRANSFORMERS, bert, judge, needs, saved

REQUIREMENTS = ("ctranslate2>=4.8",)


def main() -> None:
    needs("transformers", *TRANSFORMERS)
    needs("ctranslate2", *REQUIREMENTS)
    import ctranslate2
    from ctranslate2.converters import TransformersConverter
    from transformers import BertTokenizer

    folder, source = FOLDER / "ctranslate2", Path(saved())
    config = json.loads((source / "config.json").read_text())
    # The converter requires this key, which transformers 5 leaves out.
    config["position_embedding_type"] = "absolute"
    (source / "config.json").write_text(json.dumps(config))
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *(f"w{i}" for i in range(config["vocab_size"] - 5)),
    ]
    (source / "vocab.txt").write_text("\n".join(words) + "\n")
    BertTokenizer(str(source / "vocab.txt")).save_pretrained(source)
    TransformersConverter(str(source)).convert(str(folder), force=True)
    encoder: Any = ctranslate2.Encoder(str(folder), device="cpu", compute_type="float32", intra_threads=1)

    def run(input_ids: Any, attention_mask: Any, token_type_ids: Any) -> dict[str, np.ndarray]:
        texts = [row[: sum(mask)].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]
        results = encoder.forward_batch(texts)
        hidden = np.array(results.last_hidden_state)
        return {"output[last_hidden_state]": hidden, "output[pooler_output]": np.array(results.pooler_output)}

    judge("CTranslate2", bert(), run)
    judge("CTranslate2, padding declared as not computed", bert(), run, declared=["uncomputed_padding"])


if __name__ == "__main__":
    main()
