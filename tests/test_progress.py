"""What is said while a command works, where nobody watches: one plain line for each part that is done."""

import re

from concord.progress import bars, counting, telling


def lines(capsys):
    captured = capsys.readouterr()
    assert not captured.out
    return [re.sub(r"^ *\d+ s  ", "", line) for line in captured.err.splitlines()]


def test_each_tenth_has_a_line(capsys):
    with counting(["torch"], 23) as progress:
        progress("torch", "started")
        for number in range(23):
            progress("torch", f"job {number}")
    told = lines(capsys)
    assert told[0] == "torch: 0 of 23 (started)"
    assert told[1] == "torch: 3 of 23 (job 2)"
    assert told[-1] == "torch: 23 of 23 (job 22)"
    assert len(told) == 11


def test_where_nobody_knows_how_many_there_will_be_every_hundredth_has_a_line(
    capsys,
):
    with bars(["here", "there"], None, "cases") as reached:
        for done in range(0, 230, 23):
            reached("here", done, "")
        reached("there", 17, "")
    assert lines(capsys) == ["here: 0 cases", "here: 115 cases", "here: 207 cases", "there: 17 cases"]


def test_what_is_done_is_told(capsys):
    with telling() as tell:
        tell("minilm: warming up " + "and up " * 30)
    assert lines(capsys) == ["minilm: warming up " + "and up " * 30]
