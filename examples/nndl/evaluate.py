"""Evaluate a checkpoint in any framework: ``python examples/nndl/evaluate.py run DATA --backend jax``."""

import argparse
from pathlib import Path

from matching import read
from sklearn.metrics import classification_report, confusion_matrix

import concord
from concord.exit_codes import end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path, help="the folder whose test.tsv is predicted")
    parser.add_argument("--backend", choices=concord.backends.BUILT_IN, default="torch")
    asked = parser.parse_args()
    samples = read(asked.data, "test")["test"]
    texts = [
        (sample["text_a"], sample["text_b"]) if "text_b" in sample else sample["text_a"] for sample in samples
    ]
    with concord.load(asked.checkpoint, asked.backend) as predictor:
        predicted = [prediction["label"] for prediction in predictor(texts)]
    labels = [sample["label"] for sample in samples]
    print(classification_report(labels, predicted, digits=4, zero_division=0.0))
    print("rows: true class; columns: predicted class")
    print(confusion_matrix(labels, predicted))


if __name__ == "__main__":
    end(main)
