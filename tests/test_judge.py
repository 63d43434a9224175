import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from concord.conformance.judging import exemptions
from concord.conformance.judging.estimate import Z
from concord.conformance.judging.exemptions import (
    GROWN,
    NO_DIGIT,
    NORM,
    NOT_EXPOSED,
    NOT_FINITE_BEFORE,
    OUT_OF_RANGE,
    OUT_OF_RANGE_BEFORE,
    PADDING,
    UNUSED,
)
from concord.conformance.judging.expectation import Expectation
from concord.conformance.judging.judge import MISSING, WIDER, Judge
from concord.conformance.judging.protocol import Activation

X = np.linspace(1.0, 3.0, 7)
SIGMA = 1e-6


class Doubled:
    # The activation is twice the input, and the output is one more.
    def __init__(self, dtype="float32", excused=False, **fields):
        self.dtype, self.excuse, self.fields = dtype, excused, fields
        self.activations = {
            name: Activation(
                X.shape, dtype, "PRT-2", absent=NOT_EXPOSED if name == "norm" else "", wider=name != "output"
            )
            for name in ("norm", "output", "gradients.taps.norm", "gradients.weight")
        }

    def compute_exactly(self, pin):
        def pinned(name, value):
            array = pin(name)
            return value if array is None else array.astype(np.float64)

        norm = pinned("norm", 2 * X)
        gradient = pinned("gradients.taps.norm", np.ones_like(X))
        return {
            "norm": 2 * X,
            "output": norm + 1,
            "gradients.taps.norm": np.ones_like(X),
            "gradients.weight": gradient * X,
        }

    def expect(self, pin):
        values = self.compute_exactly(pin or (lambda name: None))
        sigmas = {name: np.full_like(value, SIGMA) for name, value in values.items()}
        expected = Expectation(self.dtype, values, sigmas, {}, norms=["norm"])
        yield replace(expected, **{name: change(expected) for name, change in self.fields.items()})

    def excused(self, name):
        return self.excuse

    def contradiction(self, name):
        return ""


def delivered(**changes):
    right = Doubled().compute_exactly(lambda name: None)
    tensors = {name: value.astype(np.float32) for name, value in right.items()}
    for short, change in changes.items():
        name = {"back": "gradients.taps.norm"}.get(short, short)
        tensors[name] = change(tensors[name])
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def judged(reference, **changes):
    return {row.tensor: row for row in Judge(reference, delivered(**changes)).table()}


@pytest.mark.clause("PRT-2")
def test_a_wrong_step_diverges_alone_and_what_follows_end_to_end():
    rows = judged(Doubled(), norm=lambda x: x + 1, output=lambda x: x + 1)
    assert {name for name, row in rows.items() if row.status == "diverges"} == {"norm"}
    assert rows["output"].end_to_end.status == "diverges"
    assert rows["gradients.weight"].end_to_end.status == "agrees"
    assert round(rows["norm"].local.z * SIGMA) == 1


@pytest.mark.parametrize(
    ("share", "sigma", "expected"),
    [(0.0, SIGMA, [True]), (0.7, SIGMA, [True, False]), (0.0, np.nan, [True, False])],
    ids=["clear", "near the tolerance", "undetermined"],
)
def test_a_second_look_is_taken_only_where_the_first_is_not_enough(share, sigma, expected):
    looks = []

    class TwoLooks(Doubled):
        def expect(self, pin):
            for few in (True, False):
                looks.append(few)
                for expectation in super().expect(pin):
                    yield replace(expectation, few=few)

    error = np.float32(share * Z * SIGMA) * (np.arange(7) == 3)
    tensors = delivered(norm=lambda x: x + error)
    Judge(TwoLooks(**sigma_of("norm", sigma)), tensors).judge_steps()
    assert looks == expected


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda x: None, MISSING),
        (lambda x: x[:5], "has shape (5,) but must be (7,)"),
        (lambda x: x.astype(np.float64) + 1e-9, WIDER),
    ],
)
def test_what_is_no_such_tensor_diverges(change, note):
    row = judged(Doubled(), output=change)["output"]
    assert (row.status, row.note) == ("diverges", note)


def sigma_of(name, sigma):
    return {"sigmas": lambda expected: {**expected.sigmas, name: np.full_like(X, sigma)}}


EXEMPT = {
    NOT_EXPOSED: ("norm", Doubled(), {"norm": lambda x: None}),
    OUT_OF_RANGE: ("norm", Doubled(**sigma_of("norm", np.nan)), {}),
    OUT_OF_RANGE_BEFORE: ("gradients.weight", Doubled(**sigma_of("norm", np.nan)), {}),
    NOT_FINITE_BEFORE: ("gradients.weight", Doubled(), {"norm": lambda x: x * np.float32(np.inf)}),
    GROWN: ("output", Doubled(**sigma_of("norm", 1.0)), {}),
    NORM: ("gradients.taps.norm", Doubled(**sigma_of("norm", 1.0)), {}),
    NO_DIGIT: ("gradients.weight", Doubled("bfloat16", **sigma_of("gradients.weight", 9.0)), {}),
    PADDING: ("output", Doubled(excused=True), {"output": lambda x: x + 9}),
    UNUSED: ("gradients.taps.norm", Doubled(), {"back": np.zeros_like}),
}


@pytest.mark.parametrize("note", EXEMPT)
def test_every_exemption_leaves_out_what_it_says(note):
    tensor, reference, changes = EXEMPT[note]
    row = judged(reference, **changes)[tensor]
    silent = [
        judgement for judgement in (row.local, row.end_to_end, row) if judgement and note in judgement.note
    ]
    assert [judgement for judgement in silent if judgement.status in ("undetermined", "not exposed")], row
    assert note != GROWN or row.local.status == "agrees", "each step is still judged"


def test_every_exemption_has_a_test():
    tests = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    names = [name for name in vars(exemptions) if name.isupper()]
    assert [name for name in names if not re.search(rf"(?<!\w){name}(?!\w)", tests)] == []
