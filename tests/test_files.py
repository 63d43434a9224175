"""Files that are read and written whole."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from concord.spec.errors import SpecError
from concord.spec.files import LARGEST, read_bytes, read_json, read_text, write_text


def refusal(function, *arguments) -> str:
    with pytest.raises(SpecError) as refused:
        function(*arguments)
    assert len(refused.value.problems) == 1
    return refused.value.problems[0]


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    pipe, circle = tmp_path / "pipe", tmp_path / "circle"
    os.mkfifo(pipe)
    circle.symlink_to(circle)
    assert refusal(read_text, pipe) == f"{pipe}: cannot be read: is a pipe but must be a regular file"
    assert refusal(read_text, Path("/dev/zero")) == "/dev/zero: cannot be read: is a device but must be a regular file"
    assert refusal(read_bytes, tmp_path) == f"{tmp_path}: cannot be read: is a folder but must be a regular file"
    assert refusal(read_json, tmp_path / "none") == f"{tmp_path / 'none'}: no such file"
    assert refusal(read_json, circle).startswith(f"{circle}: cannot be read: ")


def test_text_that_is_too_large_or_none_is_refused(tmp_path: Path) -> None:
    large, other = tmp_path / "large", tmp_path / "other"
    with large.open("wb") as file:
        file.truncate(LARGEST + 1)
    other.write_bytes(b"abc\xff")
    assert refusal(read_text, large) == f"{large}: has {LARGEST + 1} bytes but must have at most {LARGEST}"
    assert refusal(read_text, other) == f"{other}: is no text in utf-8: invalid start byte at byte 3"


@pytest.mark.parametrize("text", ["", "[" * 100_000, "{", '{"a": 1e}', "1" * 5_000])
def test_json_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    assert refusal(read_json, path).startswith(f"{path}: not valid JSON: ")


def test_a_file_is_written_whole_and_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "out"
    write_text(path, "first")
    path.chmod(0o640)
    write_text(path, "ü")
    assert path.read_text(encoding="utf-8") == "ü"
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["out"]


def test_a_link_is_written_through(tmp_path: Path) -> None:
    target, link, circle = tmp_path / "target", tmp_path / "link", tmp_path / "circle"
    target.write_text("old")
    link.symlink_to(target)
    circle.symlink_to(circle)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert refusal(write_text, circle, "text").startswith(f"{circle}: cannot be written: ")


def test_a_pipe_and_a_device_are_written_straight_into(tmp_path: Path) -> None:
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "through")
    reader.join(timeout=10)
    assert found == ["through"]
    write_text(Path(os.devnull), "nothing")
    assert Path(os.devnull).is_char_device()


def test_what_cannot_be_written_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    assert refusal(write_text, tmp_path / "none" / "out", "text").startswith(f"{tmp_path / 'none' / 'out'}: cannot be written: ")
    assert refusal(write_text, tmp_path / ("n" * 300), "text").endswith("cannot be written: File name too long")
    full = Path("/dev/full")
    if full.is_char_device():
        assert refusal(write_text, full, "text") == "/dev/full: cannot be written: No space left on device"
    assert not os.listdir(tmp_path)
