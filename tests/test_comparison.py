"""Two checkpoints, tensor by tensor: each way in which ports go wrong has a name, and a likely cause."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from concord import porting, spec
from concord.cli import app
from concord.porting.comparison import compare
from concord.porting.comparison.kinds import MEANINGS
from concord.spec.precision import precision

SIZES = {"vocab_size": 29, "d_model": 14, "num_heads": 2, "d_ff": 17, "num_classes": 3, "num_layers": 2, "max_positions": 13}
CONFIG = spec.variant("bert", **SIZES)
WEIGHTS = {name: array.astype(np.float32) for name, array in spec.initialize(CONFIG, seed=3).items()}
QUERY, OUTPUT = "layers.0.attention.query.weight", "layers.1.attention.output.weight"
TOKEN, POSITION, GAIN = "embeddings.token.weight", "embeddings.position.weight", "embeddings.norm.weight"
Array = np.ndarray[Any, Any]


def interleaved(array: Array) -> Array:
    return array.reshape(14, 2, 7).swapaxes(1, 2).reshape(14, 14)


def put(array: Array, row: int, value: float) -> Array:
    found = array.copy()
    found[row] = value
    return found


WRONG: dict[str, tuple[str, Callable[[Array], Array], str, str]] = {
    "transposed": (QUERY, lambda a: a.T, "transposed", "since it is square"),
    "permuted": (QUERY, lambda a: np.roll(a, 7, 1), "heads permuted: B's heads are A's 1, 0", "reordered"),
    "permuted rows": (OUTPUT, lambda a: np.roll(a, 7, 0), "heads permuted", "reordered"),
    "interleaved": (QUERY, interleaved, "heads interleaved", "(head_dim, heads)"),
    "shifted": (POSITION, lambda a: np.concatenate([a[-2:], a[:-2]]), "rows are shifted by 2", "counted from the padding id"),
    "shifted the other way": (POSITION, lambda a: np.concatenate([a[1:], a[:1]]), "row i of B is row i + 1 of A", "counted from 1"),
    "reordered": (TOKEN, lambda a: a[np.r_[0, 3, 2, 1, 4:29]], "2 rows stand in another order, the first at 1, 3", "vocabulary was reordered"),
    "bfloat16": (QUERY, lambda a: precision("bfloat16").round(a), "rounded to bfloat16", "saved in"),
    "float16": (QUERY, lambda a: precision("float16").round(a), "rounded to float16", "saved in"),
    "scaled": (TOKEN, lambda a: a * np.float32(np.sqrt(14)), "B is A times 3.7416", "the root of d_model"),
    "negated": (QUERY, lambda a: -a, "B is A times -1", "sign"),
    "offset": (GAIN, lambda a: a - 1, "B is A plus -1", "a gain without its 1"),
    "never loaded": (GAIN, np.ones_like, "all numbers of B are 1", "never loaded"),
    "computed again": (QUERY, lambda a: np.nextafter(a, np.float32(9)), "the same but for the last digits", "computed again"),
    "padding zeroed": (TOKEN, lambda a: put(a, 0, 0.0), "1 rows differ, the first at 0", "row of padding"),
    "different": (QUERY, lambda a: a[::-1] * a, "different: 196 of 196 numbers differ", ""),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_has_a_name_and_a_cause(mistake: str) -> None:
    name, change, words, cause = WRONG[mistake]
    other = {**WEIGHTS, name: np.asarray(change(WEIGHTS[name]), np.float32, order="C")}
    found = compare(porting.from_weights(CONFIG, WEIGHTS), porting.from_weights(CONFIG, other))
    (pair,) = found.pairs
    assert (pair.name, found.same, found.exit_code) == (name, len(WEIGHTS) - 1, 1)
    assert words in pair.words
    assert cause in pair.cause
    assert bool(pair.cause) == bool(cause)
    assert pair.difference.kind in MEANINGS


def test_tensors_in_each_others_place_are_named() -> None:
    key, value = "layers.0.attention.key.weight", "layers.1.attention.value.weight"
    other = {**WEIGHTS, key: WEIGHTS[QUERY], QUERY: WEIGHTS[key], value: WEIGHTS["layers.0.attention.value.weight"]}
    pairs = {pair.name: pair for pair in compare(porting.from_weights(CONFIG, WEIGHTS), porting.from_weights(CONFIG, other)).pairs}
    assert (pairs[key].other, pairs[QUERY].other) == (QUERY, key)
    assert "the wrong way" in pairs[key].cause
    assert "another" in pairs[value].cause


def test_the_same_numbers_in_another_dtype_are_told_from_others() -> None:
    wide = {name: array.astype(np.float64) for name, array in WEIGHTS.items()}
    found = compare(porting.from_weights(CONFIG, WEIGHTS), porting.from_weights(CONFIG, wide))
    assert {pair.difference.kind for pair in found.pairs} == {"same numbers"}
    assert "float32 in A, float64 in B" in found.pairs[0].words


def test_rows_that_one_alone_has_and_options_are_named() -> None:
    padded = CONFIG.replace(vocab_size=31)
    other = {**WEIGHTS, TOKEN: np.concatenate([WEIGHTS[TOKEN], np.zeros((2, 14), np.float32)])}
    found = compare(porting.from_weights(CONFIG, WEIGHTS), porting.from_weights(padded, other))
    assert found.pairs[0].words == "B has 2 more rows; all others are the same"
    assert found.config == {"vocab_size": ("29", "31")}
    smaller = porting.from_weights(CONFIG, {name: array for name, array in WEIGHTS.items() if not name.startswith(("pooler", "classifier"))}, "encoder")
    found = compare(porting.from_weights(CONFIG, WEIGHTS), smaller)
    assert found.missing == ("pooler.weight", "pooler.bias", "classifier.weight", "classifier.bias")
    assert "4 missing in B" in found.summary
    assert found.exit_code == 1


def test_the_command_compares_formats(tmp_path: Path) -> None:
    porting.write(porting.from_weights(CONFIG, WEIGHTS), tmp_path / "a", "concord")
    porting.write(porting.from_weights(CONFIG, WEIGHTS), tmp_path / "b", "jax-msgpack")
    porting.write(porting.from_weights(CONFIG, {**WEIGHTS, QUERY: WEIGHTS[QUERY].T.copy()}), tmp_path / "c", "torch")
    run = CliRunner()
    same = run.invoke(app, ["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    assert (same.exit_code, "41 of 41 parameters have the same bits; the same configuration" in same.output) == (0, True)
    other = run.invoke(app, ["diff", str(tmp_path / "b"), str(tmp_path / "c"), "--json", str(tmp_path / "diff.json")])
    assert other.exit_code == 1
    assert f"{QUERY}: transposed" in other.output
    said = json.loads((tmp_path / "diff.json").read_text())
    assert [(pair["name"], pair["difference"]["kind"]) for pair in said["pairs"]] == [(QUERY, "transposed")]
