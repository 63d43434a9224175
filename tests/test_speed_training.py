"""What a training step that is timed has to be: AdamW's, and every other is refused."""

import pytest

from concord.backends.bench import Bench
from concord.backends.interface import Unsupported
from concord.conformance.estimate import Z
from concord.spec.errors import SpecError
from concord.speed import SpeedRecord, truth
from concord.speed.presets import RECIPE
from concord.speed.record import described
from concord.speed.table import size_of
from tests.test_speed import RIGHT, measured, plan_of, small
from tests.toys import measurable


def prepared(made, work):
    """Return what a backend computes before it is timed."""
    return Bench(made).prepare(**work.request())[1]


@pytest.mark.parametrize(
    ("made", "least"),
    [
        (measurable.Measurable(), 0.0),
        *(
            (measurable.Otherwise(**fields), 3.0)
            for fields in (
                {"learning_rate": 1.01 * RECIPE.learning_rate},
                {"epsilon_placement": "uncorrected"},
                {"bias_correction": False},
                {"decay_form": "alone"},
                {"undecayed": ("bias",)},
                {"beta2": 0.999},
            )
        ),
        (measurable.Forgetting(), 3.0),
        (measurable.TwiceTheGradient(), 3.0),
    ],
    ids=lambda given: given.name if isinstance(given, measurable.Measurable) else "",
)
def test_a_wrong_optimizer_is_refused(made, least):
    work = small("training")
    worst, tensor = truth.expected(work).worst(prepared(made, work), Z)
    assert worst > least if least else worst < 1, tensor


def test_a_session_that_does_not_show_its_optimizer_is_not_measured():
    with pytest.raises(
        Unsupported, match="numpy cannot be measured in training: its session has no method 'state'"
    ):
        prepared(measurable.WithoutState(), small("training"))


def test_what_was_measured_otherwise_is_not_gone_on_with():
    old = measured(plan_of(RIGHT, thorough=False))
    old["workloads"]["small inference ragged"]["key"] = "another"
    with pytest.raises(
        SpecError, match="has measured another 'small inference ragged' than this version measures"
    ):
        SpeedRecord(plan_of(RIGHT), old)
    assert size_of(described(small("training"))).endswith(" a step; updated by AdamW, rate 0.0004")
    assert size_of(described(small())).endswith(" a step")
