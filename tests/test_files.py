import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from concord.spec.errors import SpecError
from concord.spec.files import (
    LARGEST,
    find,
    parse_toml,
    read_as,
    read_bytes,
    read_json,
    read_text,
    write_text,
)
from concord.spec.folders import new_folder
from tests.toys import surroundings


def refusal(function, *arguments):
    (line,) = surroundings.refusal(function, *arguments)
    return line


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    pipe, circle = tmp_path / "pipe", tmp_path / "circle"
    os.mkfifo(pipe)
    circle.symlink_to(circle)
    for path, kind in ((pipe, "pipe"), (Path("/dev/zero"), "device"), (tmp_path, "folder")):
        assert (
            refusal(read_bytes, path) == f"{path}: cannot be read: it is a {kind} but must be a regular file"
        )
    assert refusal(read_json, tmp_path / "none") == f"{tmp_path / 'none'}: no such file"
    for path in (circle, tmp_path / ("é" * 150)):
        assert refusal(read_json, path).startswith(f"{path}: cannot be read: ")


def test_a_folder_that_cannot_be_read_is_no_empty_one(tmp_path, monkeypatch):
    for name in ("b/x.json", "a/x.json", "x.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "again").symlink_to(tmp_path)
    assert find(tmp_path, "*.json") == [tmp_path / name for name in ("a/x.json", "b/x.json", "x.json")]
    assert refusal(find, tmp_path / "none", "*") == f"{tmp_path / 'none'}: no such folder"
    scan = os.scandir

    def forbidding(path):
        if str(path).endswith("b"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", forbidding)
    assert refusal(find, tmp_path, "*.json") == f"{tmp_path / 'b'}: cannot be read: Permission denied"


@dataclass
class Inner:
    count: int
    names: list[str]


@dataclass
class Outer:
    format: Literal["a/1"]
    inner: dict[str, Inner]
    rest: float = 0.5


def test_types_are_checked_and_everything_wrong_is_said_at_once(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"format": "a/1", "inner": {"x": {"count": 3, "names": ["n"]}}, "unknown": 1}')
    assert read_as(path, Outer) == Outer("a/1", {"x": Inner(3, ["n"])})
    path.write_text('{"format": "a/1", "inner": {"x": {"count": "3", "names": [1]}, "y": {}}, "rest": null}')
    assert surroundings.refusal(read_as, path, Outer) == [
        f"{path}: 'inner.x.count' is '3' but must be an integer",
        f"{path}: 'inner.x.names[0]' is 1 but must be a string",
        f"{path}: 'rest' is null but must be a number",
        f"{path}: 'inner.y' lacks 'count', 'names'",
    ]
    path.write_text('{"format": "a/2", "inner": 3}')
    assert refusal(lambda: read_as(path, Outer, written_by="'it'")).startswith(
        f"{path}: 'format' is 'a/2' but must be 'a/1'"
    )
    path.write_text("[1]")
    assert refusal(read_as, path, Outer) == f"{path} holds a list but must hold a JSON object"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"a": NaN}', "NaN is not a finite number"),
        ("9" * 41, "a whole number has 41 digits but must have at most 40"),
        ('"\\ud800"', "surrogates not allowed"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_numbers_and_characters_that_are_none_are_no_json(tmp_path, content, reason):
    path = tmp_path / "x.json"
    path.write_text(content)
    line = refusal(read_json, path)
    assert line.startswith(f"{path}: not valid JSON: ")
    assert line.endswith(reason)


@pytest.mark.parametrize("value", ["[" * 5000, "0x" + "f" * 5000])
def test_toml_that_is_none_is_refused(value):
    assert refusal(parse_toml, f"a = {value}", "x.toml").startswith("x.toml: not valid TOML: ")


def test_text_that_is_too_large_or_none_is_refused(tmp_path):
    large, other = tmp_path / "large", tmp_path / "other"
    with large.open("wb") as file:
        file.truncate(LARGEST + 1)
    other.write_bytes(b"abc\xff")
    assert refusal(read_text, large) == f"{large} has {LARGEST + 1} bytes but must have at most {LARGEST}"
    assert refusal(read_text, other) == f"{other} is not valid utf-8 text: invalid start byte at byte 3"


def test_a_file_is_written_whole_and_keeps_its_permissions(tmp_path):
    path = tmp_path / "out"
    write_text(path, "first")
    path.chmod(0o640)
    write_text(path, "ü")
    assert path.read_text(encoding="utf-8") == "ü"
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["out"]


def test_a_link_is_written_through(tmp_path):
    target, link, circle = tmp_path / "target", tmp_path / "link", tmp_path / "circle"
    target.write_text("old")
    link.symlink_to(target)
    circle.symlink_to(circle)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert refusal(write_text, circle, "text").startswith(f"{circle}: cannot be written: ")


def test_a_pipe_and_a_device_are_written_straight_into(tmp_path):
    pipe, texts = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: texts.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "through")
    reader.join(timeout=10)
    assert texts == ["through"]
    write_text(Path(os.devnull), "nothing")
    assert Path(os.devnull).is_char_device()


def test_an_error_within_a_new_folder_names_it_as_the_caller_does(tmp_path):
    path = tmp_path / "new"
    with pytest.raises(SpecError, match=f"^{re.escape(str(path))}/file: full$"), new_folder(path) as folder:
        raise SpecError(f"{folder}/file: full")
