"""Plot a checkpoint's accuracy by epoch, its attention in a text or a pair, and its positions.

``python examples/nndl/pictures.py run "天气好吗" "天气怎么样" --out pictures``
"""

import argparse
import json
import warnings
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from concord import backends, spec
from concord.exit_codes import end
from concord.porting.prediction import read_model
from concord.porting.texts import Text, batch_of
from concord.spec.batch import completed
from concord.spec.positions import sinusoid


def curves(epochs: list[dict[str, float]]) -> Figure:
    figure = Figure(figsize=(7.0, 2.8), layout="constrained")
    losses, accuracy = figure.subplots(1, 2)
    steps = [epoch["epoch"] for epoch in epochs]
    for name in ("loss", "dev loss"):
        losses.plot(steps, [epoch[name] for epoch in epochs], marker=".", label=name)
    accuracy.plot(steps, [epoch["accuracy"] for epoch in epochs], marker=".")
    losses.set(title="loss", xlabel="epoch")
    accuracy.set(title="dev accuracy", xlabel="epoch")
    for axes in (losses, accuracy):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    losses.legend()
    return figure


def attention(weights: np.ndarray, tokens: list[str]) -> Figure:
    """Draw attention weights (L, H, T, T), with the heads of a layer in a row."""
    layers, heads, *_ = weights.shape
    figure = Figure(figsize=(2.6 * heads, 2.8 * layers), layout="constrained")
    for (layer, head), axes in np.ndenumerate(figure.subplots(layers, heads, squeeze=False)):
        axes.imshow(weights[layer, head], cmap="Blues", vmin=0)
        axes.set(title=f"layer {layer}, head {head}")
        axes.set_xticks(range(len(tokens)), tokens, rotation=90)
        axes.set_yticks(range(len(tokens)), tokens)
    return figure


def positions(config: spec.EncoderConfig) -> Figure:
    """Draw the table of positions, and the mean product of two rows by their distance."""
    table = sinusoid(config)
    products = table @ table.T
    figure = Figure(figsize=(7.4, 3.0), layout="constrained")
    image, fall = figure.subplots(1, 2)
    image.imshow(table, cmap="PuOr", aspect="auto")
    image.set(title="positions", xlabel="column", ylabel="position")
    fall.plot([np.diagonal(products, distance).mean() for distance in range(len(table))])
    fall.set(title="product of two rows", xlabel="distance")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text", nargs="+", help="a text, or two of a pair")
    parser.add_argument("--backend", choices=backends.BUILT_IN, default="torch")
    parser.add_argument("--out", type=Path, default=Path("pictures"))
    asked = parser.parse_args()
    model = read_model(asked.checkpoint)
    (encoded,) = model.encoder.encode([Text(*asked.text)])
    batch = completed(model.config, batch_of(model.config, [encoded]))
    with backends.open(asked.backend) as worker:
        run = worker.run(model.config, model.weights, batch, taps=True, gradients=False)
    weights = [run.taps[f"layers.{layer}.attention.weights"][0] for layer in range(model.config.num_layers)]
    asked.out.mkdir(exist_ok=True)
    # Text stays text, so that the viewer draws letters that matplotlib's font lacks.
    matplotlib.rcParams["svg.fonttype"] = "none"
    warnings.filterwarnings("ignore", "Glyph .* missing from font")
    epochs = json.loads((asked.checkpoint / "epochs.json").read_text())
    curves(epochs).savefig(asked.out / "epochs.svg")
    attention(np.stack(weights), encoded.tokens).savefig(asked.out / "attention.svg")
    positions(model.config).savefig(asked.out / "positions.svg")
    print(f"written: {asked.out}")


if __name__ == "__main__":
    end(main)
