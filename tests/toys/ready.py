"""A small BERT checkpoint of Hugging Face, with random weights."""

import json

import numpy as np
from safetensors.numpy import save_file

from concord import spec
from concord.spec.sources import source_tables

VOCABULARY = (
    "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\na\ncat\ndog\nrain\nbank\nsat\nran\nsaid\non\nin\n##s\n##ing\n"
    "quick\n.\n,\n?\nwho\nshort\nlook\n"
)
WORDS = VOCABULARY.split()

SENTENCES = (
    "The cat sat on the rain.",
    "A quick dog ran, looking in the bank?",
    "Short.",
    "Who said the dogs ran in the rain?",
    "the cats said",
)

CONFIG = spec.variant(
    "bert",
    vocab_size=len(WORDS),
    d_model=14,
    num_heads=2,
    d_ff=17,
    num_classes=3,
    num_layers=2,
    max_positions=19,
)


def hugging_face(folder, part="model", change=lambda tensors: tensors, **stated):
    """Write a checkpoint with changed tensors, or other configuration keys; encoders have a pooler."""
    folder.mkdir(parents=True, exist_ok=True)
    bert = source_tables.load("bert-hugging-face")
    weights = {name: array.astype(np.float32) for name, array in spec.initialize(CONFIG, 3).items()}
    tensors = source_tables.native(bert, CONFIG, weights)
    kept = {name: array for name, array in tensors.items() if part == "model" or "classifier" not in name}
    settings = {**source_tables.stated(bert, CONFIG), "model_type": "bert", **stated}
    if "id2label" in stated:  # `id2label` implies it
        del settings["num_labels"]
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(
        {name: np.ascontiguousarray(array) for name, array in change(kept).items()},
        folder / "model.safetensors",
    )
    (folder / "vocab.txt").write_text(VOCABULARY)
    return folder


def texts(path, *lines):
    """Write lines, by default :data:`SENTENCES`."""
    path.write_text("\n".join(lines or SENTENCES) + "\n")
    return path


def headed(folder, **others):
    """Write a checkpoint with pretraining heads; ``__`` in names stands for a dot."""
    generator = np.random.default_rng(5)
    width, words = CONFIG.d_model, CONFIG.vocab_size
    shapes = {
        "transform.dense.weight": (width, width),
        "transform.dense.bias": (width,),
        "transform.LayerNorm.weight": (width,),
        "transform.LayerNorm.bias": (width,),
        "bias": (words,),
    }
    heads = {
        f"cls.predictions.{name}": generator.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    heads["bert.embeddings.position_ids"] = np.arange(CONFIG.max_positions)[None]
    extras = {name.replace("__", "."): array for name, array in others.items()}
    return hugging_face(
        folder,
        "encoder",
        lambda arrays: {
            **arrays,
            **heads,
            "cls.predictions.decoder.weight": arrays["bert.embeddings.word_embeddings.weight"],
            **extras,
        },
    )
