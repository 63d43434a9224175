import json

from tests import replay


def test_a_replay_shows_each_ratio_that_differs(tmp_path):
    for side, ratio in (("before", 0.25), ("after", 0.5)):
        (tmp_path / side).mkdir()
        result = {"status": "agrees", "ratios": {"a": 0.125, "b": ratio}}
        (tmp_path / side / "architectures.jsonl").write_text(json.dumps(["bert eager", result]))
    (line,) = replay.differences(tmp_path / "before", tmp_path / "after")
    assert line == 'architectures bert eager: {"ratios": {"b": 0.25}} -> {"ratios": {"b": 0.5}}'
