"""The tables of sources: weights and configurations of other projects, both ways."""

import numpy as np
import pytest

from concord import spec
from concord.spec.errors import SpecError, WeightsError
from concord.spec.parameters import parameters
from concord.spec.sources import table
from concord.spec.sources.names import fill
from tests.toys.checkpoints import SIZES
from tests.toys.surroundings import refusal


def config_for(source, part):
    entry = table.load(source).parts[part]
    return spec.variant(table.load(source).variant, **{**SIZES, **entry.constants})


def test_all_problems_are_reported_at_once_in_the_source_s_names():
    config = config_for("tf1-text-classifier", "model")
    native = table.native(table.load("tf1-text-classifier"), config, spec.initialize(config))
    del native["dense_4/kernel"]
    native["dense_6/kernel"] = native["dense/kernel"]
    native["conv1d_1/kernel"] = native["conv1d_1/kernel"][0]
    native["embedding_w"] = native["embedding_w"].astype(np.int64)
    native["output_w"][2, 1] = np.nan
    with pytest.raises(WeightsError) as raised:
        table.canonical(table.load("tf1-text-classifier"), config, native)
    text = "\n".join(raised.value.problems)
    assert len(raised.value.problems) == 5
    assert "'output_w' holds NaN or infinity but must be finite" in text
    assert (
        "'conv1d_1/kernel' has shape (17, 14) but must be (1, 17, 14) "
        "[parameter=layers.0.feed_forward.outer.weight" in text
    )
    assert "'dense_4/kernel' is missing but is required [parameter=layers.1.attention.key.weight" in text
    assert "'dense_6/kernel' is unexpected" in text
    assert "'embedding_w' has dtype int64" in text


def test_a_configuration_that_the_source_cannot_hold_is_refused():
    config = config_for("nndl-paddle", "model").replace(norm_sharing="separate")
    with pytest.raises(
        WeightsError,
        match=r"'layers.0.norm1.weight' is required by this configuration but the source has no weight",
    ):
        table.native(table.load("nndl-paddle"), config, spec.initialize(config))


PARTS = [(source, part) for source in table.sources() for part in table.load(source).parts]


@pytest.mark.parametrize(("source", "part"), PARTS, ids=map(" ".join, PARTS))
def test_a_table_names_what_the_family_has_and_gives_each_parameter_a_place(source, part):
    entry, config = table.load(source).parts[part], config_for(source, part)
    required, places = parameters(config, part), table.bindings(entry, config)
    computed = {table.POSITIONS} if config.positions == "sinusoidal" else set()
    assert required.keys() - places.keys() <= computed
    carried = {name for name in entry.checkpoint.carried if not name.startswith("heads.")}
    assert not carried - parameters(config).keys()
    assert not {fill(pattern, {"i": 0}) for pattern in entry.weights} - required.keys()
    natives = [name for place in places.values() for name in place.names]
    assert len(natives) == len({*natives})
    assert not {*entry.fields, *entry.options, *entry.constants} - spec.FIELDS.keys()
    known = spec.inputs(config, part)
    assert {name for name, one in known.items() if one.required} <= entry.inputs.keys() or not entry.runs
    assert not entry.inputs.keys() - known.keys()
    activations = {*spec.taps(config, part), "predictions"}
    runs = [output for run in entry.runs for output in run.outputs.values()]
    numbers = {"i": 0, "n": config.num_layers}
    for output in (*entry.outputs.values(), *runs):
        assert fill(output.tap, numbers) in activations


def test_a_model_that_the_source_does_not_have_is_refused_with_every_reason():
    config = spec.variant("bert", **SIZES, num_segments=0, norm_placement="pre")
    raised = refusal(table.stated, table.load("bert-hugging-face"), config)
    assert raised == [
        "norm_placement is 'pre' but must be 'post' [source=bert-hugging-face]",
        "'embeddings.segment.weight' is required but the configuration has no such parameter "
        "[source=bert-hugging-face]",
    ]
    with pytest.raises(
        SpecError, match=r"^activation is 'relu' but must be 'gelu_tanh' \[source=bert-pytorch\]$"
    ):
        table.stated(
            table.load("bert-pytorch"), config_for("bert-pytorch", "model").replace(activation="relu")
        )


def test_a_configuration_lists_every_missing_key():
    raised = refusal(table.configure, table.load("bert-pytorch"), {"hidden": 8, "gelu": "erf"})
    assert len(raised) == 11
    assert "configuration: key 'gelu' is 'erf' but must be one of tanh [source=bert-pytorch]" in raised
