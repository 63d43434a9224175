import json
import re
from dataclasses import replace

import numpy as np
import pytest

from concord import porting, spec
from concord.conformance.run.campaign import Setup
from concord.porting.attention_page import attention_page, look
from concord.porting.prediction import TextModel
from concord.porting.texts import Text, TextEncoder, batch_of
from concord.spec.batch import completed
from tests.conftest import small_config
from tests.test_page import Outline, said
from tests.toys.ready import VOCABULARY, WORDS, hugging_face
from tests.toys.surroundings import toy

RIGHT, WRONG = toy("NumpyBackend"), toy("WrongSecondHead")


def model_of(name, **fields):
    config = small_config(name, vocab_size=len(WORDS), **fields)
    checkpoint = porting.Checkpoint(config, "model", {}, files={"vocab.txt": VOCABULARY.encode()})
    return TextModel("toy", config, spec.initialize(config), (), "model", TextEncoder(checkpoint))


@pytest.fixture(scope="module")
def two():
    # In one backend, a head of the second layer gives each query the weights of the query before it.
    model = model_of("bert", d_model=15, num_heads=3)
    return look(model, Text("the cat sat", "who?"), [RIGHT, WRONG], Setup(asked=(RIGHT, WRONG)), "float64")


def test_a_difference_in_tolerances_points_to_the_head_that_is_wrong(two):
    right, wrong, difference = two.largest().values()
    assert (right < 1).all()
    assert (difference[0] < 1).all()
    assert difference[1, 1] > 1e6
    assert (difference[1, [0, 2]] < 1).all()
    assert (wrong[1, 1] > 1, two.report.exit_code) == (True, 1)


def test_the_page_is_one_file_that_opens_at_the_head_that_is_wrong(two):
    names = ["</script><img src=x>", "\x1b[31m", "<!--", *(f"word{i}" for i in range(5))]
    text = attention_page(replace(two, tokens=names))
    outline = Outline(text)
    assert outline.wrong == []
    assert not [tag for tag, _ in outline.tags if tag == "img"]
    assert not re.search(r"https?://|@import|javascript:", text)
    (about,) = re.findall(r'<script type="application/json" id="maps">(.*?)</script>', text)
    assert json.loads(about)["start"] == [1, 1]
    assert "WrongSecondHead diverges" in said(text)


def test_maps_are_the_activations_of_the_run():
    model = model_of("tf1-text-classifier")
    (attention,) = look(model, Text("the cat sat"), [RIGHT], Setup(asked=(RIGHT,)), "float64").maps
    encoded = model.encoder.encode([Text("the cat sat")])
    batch = batch_of(model.config, encoded)
    truth = spec.reference(model.config, model.weights, completed(model.config, batch))
    for layer, weights in enumerate(attention.weights):
        np.testing.assert_array_equal(weights, truth.taps[f"layers.{layer}.attention.masked_weights"][0])


def test_a_checkpoint_of_others_is_shown_and_its_page_may_be_made_anew(entered, tmp_path):
    folder = hugging_face(tmp_path / "encoder", "encoder")
    for _ in range(2):
        entered(f"show attention {folder} --backend {RIGHT} --html {folder / 'page.html'}", "The cats sat")
    assert '"cat", "##s", "sat"' in (folder / "page.html").read_text()


def test_a_library_that_keeps_its_weights_to_itself_is_said(entered, tmp_path):
    folder = hugging_face(tmp_path / "bert")
    output, _ = entered(f"show attention {folder} cat --backend {toy('DeclaresNotExposed')}")
    assert "no backend exposes attention weights" in output
