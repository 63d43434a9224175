import runpy

import pytest

from tests.toys.surroundings import ROOT

PROGRAM = runpy.run_path(str(ROOT / "docs/side_by_side.py"))
PATTERNS = sorted({pattern for _, _, patterns in PROGRAM["PAGES"].values() for pattern in patterns})
COLUMNS = tuple(PROGRAM["FRAMEWORKS"])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_each_line_of_a_framework_stands_once_in_its_column_in_order(pattern):
    rows = [row for _, rows in PROGRAM["sections"](pattern) for row in rows]
    for column, name in enumerate(COLUMNS):
        lines = (ROOT / pattern.format(name)).read_text().splitlines()
        expected = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
        assert sorted(cell[:2] for row in rows if (cell := row[column])) == expected
    for _, part in PROGRAM["sections"](pattern):
        for column in range(len(COLUMNS)):
            numbers = [cell[0] for row in part if (cell := row[column])]
            assert numbers == sorted(numbers)


def test_the_same_class_and_the_same_step_stand_in_one_row():
    parts = dict(PROGRAM["sections"]("backends/{}/layers.py"))
    (row,) = (row for row in parts["PostNormLayer"] if row[0] and row[0][1].startswith("class "))
    assert all(cell and cell[1].startswith("class PostNormLayer(") for cell in row)
    (row,) = (row for row in parts["gelu_erf"] if row[0] and "return" in row[0][1])
    assert all(cell and "erf" in cell[1] for cell in row)
