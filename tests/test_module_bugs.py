import copy
import json

import pytest
import torch

from concord import compare
from tests import replay
from tests.toys.architectures import architecture, inputs_of
from tests.toys.module_bugs import BUGS, CONTROLS

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", BUGS)
def test_bugs_change_what_a_model_computes_and_right_edits_agree(name):
    model, inputs = architecture(name), inputs_of(name)
    for bug in BUGS[name]:
        wrong = copy.deepcopy(model)
        bug.edit(wrong)
        with torch.no_grad():
            outputs = zip(model(**inputs).to_tuple(), wrong(**inputs).to_tuple(), strict=True)
            assert any(not torch.equal(*pair) for pair in outputs), bug.name
    right = copy.deepcopy(model)
    CONTROLS[name](right)
    assert compare(model, right, inputs).status == "agrees"


def test_a_replay_shows_each_ratio_that_differs(tmp_path):
    for side, ratio in (("before", 0.25), ("after", 0.5)):
        (tmp_path / side).mkdir()
        result = {"status": "agrees", "ratios": {"a": 0.125, "b": ratio}}
        (tmp_path / side / "architectures.jsonl").write_text(json.dumps(["bert eager", result]))
    (line,) = replay.differences(tmp_path / "before", tmp_path / "after")
    assert line == 'architectures bert eager: {"ratios": {"b": 0.25}} -> {"ratios": {"b": 0.5}}'
