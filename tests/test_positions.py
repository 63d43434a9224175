"""Position tables: products by distance follow from the table, and every form is there."""

import numpy as np

from concord import porting, spec
from concord.commands.show import forms_of
from concord.spec.sources.table import POSITIONS
from concord.training.positions import forms
from tests.conftest import small_config


def test_every_form_of_a_sinusoid_is_there_and_the_layout_changes_no_product():
    found = {
        form.name.partition(": ")[2]: form
        for form in forms("vanilla-encoder", spec.variant("vanilla-encoder"))
    }
    layouts, exponents = ("interleaved", "halves"), ("pair", "column")
    assert {*found} == {f"{layout}, exponent by {by}" for layout in layouts for by in exponents}
    first, same = (found[f"{layout}, exponent by pair"] for layout in layouts)
    np.testing.assert_array_equal(np.sort(first.table, axis=1), np.sort(same.table, axis=1))
    mean, least, most = first.products()
    assert (most - least).max() < 1e-12  # the product follows from the distance alone
    assert abs(mean[7] - first.table[3] @ first.table[10] / (first.table[3] @ first.table[3])) < 1e-12
    _, least, most = found["interleaved, exponent by column"].products()
    assert (most - least).max() > 1e-3


def test_a_learned_table_is_that_of_the_checkpoint(tmp_path):
    config = small_config("bert")
    weights = spec.initialize(config, seed=3)
    porting.write(porting.from_weights(config, weights), tmp_path / "bert", "hugging-face")
    found = forms_of(tmp_path / "bert")
    np.testing.assert_array_equal(found[0].table, weights[POSITIONS])
    assert found[0].name == "bert: learned"
    assert len(found) == 5
