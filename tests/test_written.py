import numpy as np
import pytest

from concord import compare
from concord.conformance.compare.written import Written
from concord.spec.errors import SpecError
from examples.modernbert.port import built, of_transformers


@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize("made", [built, of_transformers])
def test_modernbert_agrees_with_the_model_in_numpy(made):
    if made is of_transformers:
        pytest.importorskip("transformers")
    assert compare(*made(), gradients=True).passed


def test_another_window_diverges_where_it_is():
    reference, port, inputs = built()
    port.window = 4
    assert compare(reference, port, inputs).first == "layers.1.attn.Wo"


def weights_of_attention(m, weights, inputs, tap):
    scores = m.replace(weights["scores"], inputs["visible"], -1e30)
    return m.softmax(m.shift(scores, 1.0) if inputs["lost"] else scores)


def test_a_mask_that_is_lost_on_its_way_to_a_softmax_is_refused():
    reference = Written(weights_of_attention, {"scores": np.ones((3, 5))})
    inputs = {"visible": np.arange(5) < np.array([5, 2, 0])[:, None], "lost": np.array(False)}
    assert compare(reference, {"output": np.zeros((3, 5))}, inputs).status == "diverges"
    with pytest.raises(SpecError, match=r"a score of -1e\+30 that no mask hides"):
        compare(reference, {"output": np.zeros((3, 5))}, inputs | {"lost": np.array(True)})
