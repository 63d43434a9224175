"""Names that no file system has: every command refuses them in a line, wherever it takes a path."""

import pytest

from concord import writing
from tests.toys.surroundings import commands

COMMANDS = {name: command.params for name, command in commands().items()}


def is_path(parameter):
    return parameter.type_descriptor.parameter_info.parser in (writing.path, writing.output)


def is_argument(parameter):
    return not parameter.opts[0].startswith("-")


PATHS = [
    (name, parameter.opts[0])
    for name, parameters in COMMANDS.items()
    for parameter in parameters
    if is_path(parameter)
]


def line(command, path, text):
    """Return a command line in which one path is this, and everything else that has to be there is too."""
    arguments = [
        text if one.opts[0] == path else "there"
        for one in COMMANDS[command]
        if is_argument(one) and (one.required or one.opts[0] == path)
    ]
    needed = [
        word
        for one in COMMANDS[command]
        if not is_argument(one) and one.required and one.opts[0] != path
        for word in (one.opts[0], "there")
    ]
    values = [text] * next(one.nargs for one in COMMANDS[command] if one.opts[0] == path)
    return [*command.split(), *arguments, *needed, *([path, *values] if path.startswith("-") else [])]


def test_every_command_that_reads_or_writes_is_tried():
    assert len(PATHS) > 60
    assert {"check", "fuzz", "show report", "certify", "diff", "port", "train", "speed", "case run"} <= {
        command for command, _ in PATHS
    }


@pytest.mark.parametrize(("command", "path"), PATHS)
def test_a_name_of_300_bytes_is_refused_in_a_line(command, path, invoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, lines = invoke(*line(command, path, "é" * 150))
    assert code == 2, lines
    errors = [one for one in lines if one.startswith("concord: ")]
    assert errors
    assert all(one.startswith("concord: error: ") for one in errors)
    assert list(tmp_path.iterdir()) == []
