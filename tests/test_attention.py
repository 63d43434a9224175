"""Attention maps: what is shown is what backends computed, judged; pages hold the tokens."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from concord import spec
from concord.commands import show
from concord.conformance.campaign import Setup
from concord.training.attention.maps import ReadText, look
from concord.training.attention.page import page
from tests.conftest import small_config
from tests.test_html import Outline, said
from tests.test_predicting import trained
from tests.toys.ready import hugging_face
from tests.toys.surroundings import toy

RIGHT, WRONG = toy("NumpyBackend"), toy("WrongSecondHead")


def reading_of(config, lengths, tokens):
    batch = spec.example_batch(config, 1, tokens, padding=[lengths])
    parts = (np.arange(tokens) >= 3).astype(np.int64)
    if config.num_segments:
        batch = replace(batch, segment_ids=parts[None])
    return ReadText(
        "a text",
        config,
        spec.initialize(config),
        batch,
        tuple(f"word{i}" for i in range(tokens)),
        tuple(parts.tolist()),
    )


@pytest.fixture(scope="module")
def two():
    """Two backends; one gives each query of a head of the second layer the weights of the one before."""
    config = small_config("bert", d_model=15, num_heads=3)
    return look(reading_of(config, 8, 11), [RIGHT, WRONG], Setup(asked=(RIGHT, WRONG)), "float64")


def test_maps_hold_what_the_run_delivered(two):
    truth = spec.reference(two.reading.config, two.reading.weights, two.reading.batch)
    for layer, name in enumerate(two.reading.names):
        np.testing.assert_array_equal(two.sides[0].weights[layer], truth.taps[name][0])


def test_a_difference_in_tolerances_points_to_the_head_that_is_wrong(two):
    largest = abs(two.difference()).max(axis=(-2, -1))
    assert (largest[0] < 1).all()
    assert largest[1, 1] > 1e6
    assert (largest[1, [0, 2]] < 1).all()
    _, rows = two.table()
    beyond = [(layer, head) for layer, head, *_, difference in rows if float(difference.lstrip(">")) > 1]
    assert beyond == [("1", "1")]
    assert (two.report.exit_code, {row[3] for row in rows}) == (1, {"0"})


def test_the_page_is_one_file_that_opens_at_the_head_that_is_wrong(two):
    names = ("</script><img src=x>", "\x1b[31m", "<!--", *(f"word{i}" for i in range(8)))
    text = page(replace(two, reading=replace(two.reading, tokens=names)))
    outline = Outline(text)
    assert outline.wrong == []
    assert not [tag for tag, _ in outline.tags if tag == "img"]
    assert not re.search(r"https?://|@import|javascript:", text)
    (about,) = re.findall(r'<script type="application/json" id="maps">(.*?)</script>', text)
    assert json.loads(about)["start"] == [1, 1]
    assert "WrongSecondHead diverges" in said(text)


def test_overwritten_weights_of_padded_queries_are_no_weights():
    config = small_config("tf1-text-classifier")
    maps = look(reading_of(config, 8, 11), [RIGHT], Setup(asked=(RIGHT,)))
    assert all(name.endswith("masked_weights") for name in maps.reading.names)
    assert (maps.sides[0].weights[:, :, 8:] < -1e9).all()
    assert 0 < float(maps.table()[1][0][2]) <= round(np.log2(8), 2)


def test_somebody_elses_model_reads_by_its_own_tokenizer(entered, tmp_path):
    for part, kept in (("model", "classifier.weight"), ("encoder", "layers.1.norm2.weight")):
        path = hugging_face(tmp_path / part, part)
        found = show.reading_of(path, "The cats sat", "who?")
        assert found.tokens == ("[CLS]", "the", "cat", "##s", "sat", "[SEP]", "who", "?", "[SEP]")
        assert (found.segments, found.part, kept in found.weights) == ([0] * 6 + [1] * 3, part, True)
    page = tmp_path / "page.html"
    entered(f"show attention {path} --backend {RIGHT} --html {page}", "The cats sat")
    assert '"cat", "##s", "sat"' in page.read_text()


def test_a_library_that_keeps_its_weights_to_itself_is_said(entered, tmp_path):
    folder = trained(tmp_path / "chinese", small_config("bert"))
    output, _ = entered(f"show attention {folder} 天气 --backend {toy('DeclaresNotExposed')}")
    assert "does not expose attention weights" in output
