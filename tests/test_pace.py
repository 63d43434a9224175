"""Turns of workers at the same jobs: so many at a time, none far ahead, and no end of waiting when the work was ended."""

import threading
import time

from concord.conformance.pace import Pace

JOBS, AHEAD = 23, 3


def work(pace, name, seconds, at, seen, busy):
    for number in range(JOBS):
        with pace.turn(name, number) as mine:
            assert mine
            at[name] = number
            seen.append(number - min(at.values()))
            busy.append(1)
            assert len(busy) <= 2
            time.sleep(seconds)
            busy.pop()
    at[name] = JOBS
    pace.leave(name)


def test_pace_keeps_workers_together_and_lets_so_many_work_at_a_time():
    names = {"slow": 0.004, "fast": 0.0, "faster": 0.0}
    pace, at, seen, busy = Pace(names, width=2, ahead=AHEAD), dict.fromkeys(names, 0), [], []
    threads = [
        threading.Thread(target=work, args=(pace, name, seconds, at, seen, busy))
        for name, seconds in names.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(at.values()) == {JOBS}
    assert 0 < max(seen) <= AHEAD


def test_pace_waits_for_nobody_who_has_left():
    pace = Pace(["gone", "here"], width=1, ahead=0)
    pace.leave("gone")
    for number in range(JOBS):
        with pace.turn("here", number) as mine:
            assert mine


def test_pace_ends_with_the_work():
    ended = threading.Event()
    pace = Pace(["first", "second"], ended.is_set, width=1, ahead=0)
    found = []

    def wait() -> None:
        with pace.turn("second", 5) as mine:
            found.append(mine)

    thread = threading.Thread(target=wait)
    thread.start()
    ended.set()
    thread.join(30)
    assert found == [False]
