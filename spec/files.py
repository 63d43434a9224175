"""Reading and writing files; irregular, oversized or malformed ones are rejected."""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import json
import math
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load

from concord.spec.arrays import Arrays
from concord.spec.errors import SpecError, located

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

T = TypeVar("T")

# Writes the next bytes of a file.
Write = Callable[[bytes | memoryview], None]

# Largest text to read, in bytes; records of campaigns have a few million.
LARGEST = 1 << 26

# Largest file of arrays to read, in bytes: enough for weights, gradients and taps of a model with 350 million
# parameters.
LARGEST_ARRAYS = 1 << 34

# Name prefix of a file being written; a killed process may leave one behind.
TEMPORARY = ".concord-"

# Maximum nesting depth of data in a file: code that walks it may recurse.
DEEPEST = 100

# Maximum digits of an integer. transformers writes 31 for a tokenizer without a length limit; Python refuses
# to convert thousands.
LONGEST_WHOLE = 40

# Irregular files by their letter in ``ls -l``.
KINDS = {"d": "a folder", "p": "a pipe", "c": "a device", "b": "a device", "s": "a socket"}

# Maximum lines per file; the first problems suffice.
MOST_PROBLEMS = 10


def find(folder: Path, pattern: str) -> list[Path]:
    """Matching files under a folder, sorted, without following links to folders.

    Raises:
        SpecError: if a folder cannot be read: an unreadable file must not seem absent.
    """
    if not folder.is_dir():
        raise SpecError(f"{folder}: no such folder")
    problems: list[str] = []
    walk = os.walk(
        folder, onerror=lambda error: problems.append(f"{error.filename}: cannot be read: {error.strerror}")
    )
    paths = [Path(place) / name for place, _, names in walk for name in fnmatch.filter(names, pattern)]
    if problems:
        raise SpecError(problems)
    return sorted(paths)


def read_bytes(path: Path, largest: int = LARGEST_ARRAYS) -> bytes:
    """Content of a regular file.

    Raises:
        SpecError: if it is missing, unreadable, irregular or too large.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        # Files in /proc report a size of 0 but have content.
        most = size or min(largest, LARGEST)
        content: bytes | None = file.read(most + 1) if most <= largest else b""
        if content is None:  # opened without blocking, and nothing is available yet
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if most > largest or len(content) > most:
            raise SpecError(
                f"{path} has {max(size, len(content))} bytes but must have at most {min(most, largest)}"
            )
        return content


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open a regular file to read it in pieces."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = KINDS.get(stat.filemode(mode)[0], "something else")
            raise SpecError(f"{path}: cannot be read: it is {kind} but must be a regular file")
        # The file may have become a pipe since the check: do not wait for its writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            yield file
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file") from None
    except SpecError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise SpecError(f"{path}: cannot be read: {_reason(error)}") from None


def sha256_of(path: Path) -> str:
    """SHA-256 of a regular file."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text(path: Path) -> str:
    """Return the content of a utf-8 file, or raise ``SpecError``."""
    try:
        return read_bytes(path, LARGEST).decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not valid utf-8 text: {error.reason} at byte {error.start}") from None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, or raise ``SpecError``."""
    return parse_json(read_bytes(path, LARGEST), str(path))


def parse_json(content: str | bytes, where: str) -> Any:
    """Content of a JSON text.

    Raises:
        SpecError: if it is invalid, contains ``NaN``, numbers beyond float64 or lone surrogates, or exceeds
            :data:`DEEPEST`.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        value = json.loads(text, parse_constant=_number, parse_float=_number, parse_int=_whole)
        # Only an escaped lone surrogate can make this fail.
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        # Level by level, since a recursive walk would need the depth that it must reject.
        level = [value]
        for _ in range(DEEPEST + 1):
            level = [inner for outer in level for inner in _within(outer)]
        if not level:
            return value
        raise RecursionError
    except RecursionError:
        raise SpecError(f"{where}: not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise SpecError(f"{where}: not valid JSON: {error}") from None


def _within(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def _whole(text: str) -> int:
    if len(text) > LONGEST_WHOLE:
        raise ValueError(f"a whole number has {len(text)} digits but must have at most {LONGEST_WHOLE}")
    return int(text)


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Content of a TOML text.

    Raises:
        SpecError: if it is invalid or has an integer beyond 64 bits.
    """
    try:
        content = tomllib.loads(text)
        if _has_wide(content):
            raise ValueError("a whole number has more than 64 bits")
        return content
    except RecursionError:
        raise SpecError(f"{where}: not valid TOML: nested too deeply") from None
    except ValueError as error:
        raise SpecError(f"{where}: not valid TOML: {error}") from None


def _has_wide(value: Any) -> bool:
    wide = isinstance(value, int) and not -(2**63) <= value < 2**63
    return wide or any(map(_has_wide, _within(value)))


def read_as(path: Path, kind: type[T], version: str = "format", written_by: str = "") -> T:
    """Read a JSON file and check its types.

    Args:
        kind: a data class or typed dictionary; unknown keys are ignored.
        version: key of the format version; if it is wrong, nothing else is reported.
        written_by: command that writes such files, for messages.

    Raises:
        SpecError: as in :func:`read_json`, and listing missing keys and wrong types.
    """
    content = read_bytes(path, LARGEST)
    parse_json(content, str(path))
    with located(str(path)):
        return typed(kind, content, version, written_by)


@cache
def adapter(kind: type[T]) -> TypeAdapter[T]:
    """Pydantic adapter of a type, which takes 0.1 s to build."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def typed(
    kind: type[T], content: str | bytes | Mapping[str, Any], version: str = "format", written_by: str = ""
) -> T:
    """Check the types of JSON text or plain data; arguments as in :func:`read_as`."""
    from pydantic import ValidationError  # not at the top: a worker's environment may lack pydantic

    try:
        reader: TypeAdapter[T] = adapter(kind)  # type: ignore[arg-type]  # to mypy no type is hashable
        if isinstance(content, (str, bytes)):
            return reader.validate_json(content, strict=True)
        return reader.validate_python(content, strict=True)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    # If the format is wrong, all other problems are noise.
    other = [problem for problem in problems if problem["loc"] == (version,)]
    hint = f"; this version of {written_by} writes that value" if other and written_by else ""
    raise SpecError([f"{line}{hint}" for line in _lines(other or problems)][:MOST_PROBLEMS])


def _lines(errors: Iterable[ErrorDetails]) -> Iterator[str]:
    # All keys missing in one place share a line.
    missing: dict[str, list[str]] = {}
    for problem in errors:
        *outer, last = ("", *problem["loc"])
        if problem["type"] == "missing":
            missing.setdefault(_place(outer[1:]), []).append(repr(last))
            continue
        if problem["type"] == "extra_forbidden":
            yield f"unknown key {_place(problem['loc'])!r}"
            continue
        required = (
            re.sub(r"^\w+ should have (.*) after validation, not \d+", r"must have \1", problem["msg"])
            .partition(" or instance of ")[0]
            .removeprefix("Value error, ")
            .replace("a valid dictionary", "a table")
            .replace("a valid array", "a list")
            .replace("Input should be", "must be")
            .replace("a valid integer", "an integer")
            .replace("a valid ", "a ")
            .replace("an object", "a JSON object")
        )
        value, place = problem["input"], _place(problem["loc"])
        if place:
            yield from (
                f"{place!r} is {_briefly(value)} but {line}"
                if line.startswith("must")
                else f"{place!r}: {line}"
                for line in required.split("\n")  # a configuration can have several problems
            )
        else:
            yield f"holds a {type(value).__name__} but {required.replace('must be', 'must hold')}"
    yield from (
        f"{f'{place!r} ' if place else ''}lacks {', '.join(names)}" for place, names in missing.items()
    )


def _place(keys: Iterable[int | str]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def _briefly(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_arrays(path: Path) -> Arrays:
    """Read a safetensors file, or raise ``SpecError``."""
    return read_described(path)[1]


def read_described(path: Path) -> tuple[dict[str, str], Arrays]:
    """Read metadata and arrays of a safetensors file."""
    content = read_bytes(path)
    try:
        arrays = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    # Versions of the library report a dtype that NumPy lacks with different exceptions.
    except (
        SafetensorError,
        OSError,
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        RecursionError,
    ) as error:
        reason = " ".join(str(error).split())
        raise SpecError(f"{path}: not a complete safetensors file with NumPy dtypes: {reason}") from None
    # The library returns arrays in random order; the header has the file's.
    return header.pop("__metadata__", None) or {}, {name: arrays[name] for name in header}


def section(arrays: Mapping[str, NDArray[Any]], prefix: str) -> Arrays:
    """Arrays whose names start with a prefix, without the prefix."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def obstacle(path: Path) -> str | None:
    """Reason why a file cannot be written, if any."""
    try:
        if path.is_dir():
            raise IsADirectoryError(0, "Is a directory")
        if (mode := _mode(path)) is not None and not os.access(path, os.W_OK):
            raise PermissionError(0, "Permission denied")
        # Writing goes through a temporary file, so the folder must allow one.
        if mode is None or stat.S_ISREG(mode):
            temporary = new_beside(path.resolve(strict=False))
            temporary.touch(exist_ok=False)
            temporary.unlink()
    except (OSError, RuntimeError, ValueError) as error:
        return f"{path}: cannot be written: {_reason(error)}"
    return None


def same_file(one: Path, other: Path) -> bool:
    """Whether two names denote the same regular file, which may not exist yet."""
    with suppress(OSError, RuntimeError, ValueError):
        modes = {_mode(one), _mode(other)}
        if any(mode is not None and not stat.S_ISREG(mode) for mode in modes):
            return False
        return (
            one.samefile(other)
            if None not in modes
            else one.resolve(strict=False) == other.resolve(strict=False)
        )
    return one == other


def write_text(path: Path, text: str) -> None:
    """Write utf-8 text atomically; an existing file keeps its permissions."""
    # A file name that is not utf-8 has lone surrogates, which must be escaped.
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write bytes atomically."""
    with writing(path) as write:
        write(content)


@contextmanager
def writing(path: Path) -> Iterator[Write]:
    """Yield a function that writes the next bytes of a file; the file appears after the block, unless it
    fails.
    """
    with refusing(path):
        mode = _mode(path)
        # A pipe or /dev/null is written directly: replacing it would destroy it. For a link, its target is
        # replaced.
        regular = mode is None or stat.S_ISREG(mode)
        target = path.resolve(strict=False) if regular else path
        temporary = new_beside(target) if regular else path
        file = temporary.open("wb")

    def write(content: bytes | memoryview) -> None:
        with refusing(path):
            file.write(content)

    try:
        yield write
        with refusing(path):
            file.close()
            if mode is not None and regular:
                temporary.chmod(stat.S_IMODE(mode))
            if regular:
                temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            file.close()
        if regular:
            temporary.unlink(missing_ok=True)
        raise


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turn a system error while writing into a :class:`concord.spec.errors.SpecError`."""
    try:
        yield
    except FileExistsError as error:
        if error.filename == str(path):
            raise
        raise SpecError(
            f"{path}: cannot be written: {os.strerror(errno.ENOTDIR)}"
        ) from None  # a file is where a folder must be
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # RuntimeError: circular links; ValueError: a null character
        raise SpecError(f"{path}: cannot be written: {_reason(error)}") from None


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def new_beside(path: Path) -> Path:
    """An unused name in the same folder."""
    # Raises immediately if the name is too long.
    with suppress(FileNotFoundError):
        path.lstat()
    return path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
