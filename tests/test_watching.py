"""What is said of a judgement that takes long."""

import time

from concord.conformance.watching import Countdown, listening


def test_each_step_says_how_many_are_left_and_how_long_they_take(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    said = []
    with listening(said.append):
        steps = Countdown("work", 7)
    for seconds in (3, 3, 1, 6, 6, 6, 6):
        now[0] += seconds
        steps.step()
    assert said == [
        "work: 2 of 7 runs, about 15 s more",
        "work: 4 of 7 runs, about 10 s more",
        "work: 5 of 7 runs, about 8 s more",
        "work: 6 of 7 runs, about 4 s more",
    ]
