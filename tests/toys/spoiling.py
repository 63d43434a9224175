"""Spoilt files: a reader reads or refuses each in bounded time and memory."""

import io
import json
import os
import resource
import signal
import sys
import traceback
import warnings
import zipfile
from contextlib import contextmanager
from pathlib import Path
from random import Random

from concord.spec.errors import SpecError

# Processor time for one spoilt file; a right one takes less than a second.
SECONDS = 20

# Bytes beyond those in use at the start.
MEMORY = 1 << 30

# Instead of the file, a line may name the checkpoint's source or its tensor.
PLACES = ("source=", "parameter=")

NASTY = (
    *(None, True, float("nan"), 0, -1, 7, 0.5, 1e308, 2**31, 2**63, 10**7, 10**400),
    *(
        "",
        "x",
        "\ud800",
        "é" * 400,
        "..",
        "../../x",
        "/dev/zero",
        "a\nb",
        "\x1b[31m",
        "[/red]",
        "F8_E4M3",
        "C64",
    ),
    *([], {}, [[]], [-1], ["x"], [None], {"x": {}}, [[1, 2], [3]], [2**32, 2**32]),
)


# Each function returns the content of a file, spoilt at random.


def bytes_spoilt(content, random):
    place = random.randrange(len(content) + 1)
    near = random.choice(
        (place, min(place, 64), -place)
    )  # archives and tables have their directory at the end
    return random.choice(
        (
            *(content[:near] + random.randbytes(count) + content[near:][count:] for count in (1, 1, 4, 8)),
            *(content[:place], content[:place] + content[place // 2 :], content + content, b""),
            *(b"[" * 100_000, b"1" * 5000, b"\xff\xfe", b"\xef\xbb\xbf" + content),
        )
    )


def places(data, path=()):
    # Yields the container, the key in it, and all keys that lead there.
    for key, entry in [*(data.items() if isinstance(data, dict) else enumerate(data))]:
        yield data, key, (*path, key)
        if isinstance(entry, (dict, list)):
            yield from places(entry, (*path, key))


def json_spoilt(content, random):
    data = json.loads(content)
    container, key, _ = random.choice([*places(data)])
    if random.random() < 0.25:
        del container[key]
    else:
        container[key] = random.choice(NASTY)
    return json.dumps(data).encode()


def header_spoilt(content, random):
    """Change what a safetensors file says about its tensors."""
    end = 8 + int.from_bytes(content[:8], "little")
    text = json_spoilt(content[8:end], random)
    return len(text).to_bytes(8, "little") + text + content[end:]


def toml_spoilt(content, random):
    lines = content.decode(errors="replace").splitlines()
    place = random.choice([place for place, line in enumerate(lines) if "=" in line])
    key = lines[place].partition("=")[0]
    other = random.choice(["1979-05-27", "9" * 5000, "[" * 2000, *map(json.dumps, NASTY)])
    lines[place : place + 1] = random.choice(
        ([], [lines[place]] * 2, [f"[{key.strip()}]"], [f"{key}= {other}"])
    )
    return "\n".join(lines).encode()


def archive_spoilt(content, random):
    """Spoil, remove, rename or repeat a member."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    name, inner = members.pop(random.randrange(len(members)))
    members += random.choice(([], [(name, spoilt(inner, name, random))], [("../x", inner)], [members[0]]))
    written = io.BytesIO()
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(written, "w") as archive:
        for member in members:
            archive.writestr(*member)
    return written.getvalue()


# By the end of a file's name. They raise if the content is already too spoilt to take apart.
WAYS = {
    **dict.fromkeys(("json", "_METADATA"), json_spoilt),
    "safetensors": header_spoilt,
    "toml": toml_spoilt,
    **dict.fromkeys(("pt", "bin", "keras"), archive_spoilt),
}


def spoilt(content, name, random):
    way = WAYS.get(name.rpartition("/")[2].rpartition(".")[2], bytes_spoilt)
    for _ in range(random.choice((1, 1, 2, 5))):
        try:
            content = random.choice((way, way, bytes_spoilt))(content, random)
        except Exception:  # noqa: BLE001 - whatever a library raises that takes the file apart
            content = bytes_spoilt(content, random)
    return content


def other_lengths(text):
    """Yield JSON with a list empty, one entry shorter, or one longer."""
    data, kinds = json.loads(text), set()
    for container, key, path in places(data):
        kind, value = tuple("*" if isinstance(step, int) else step for step in path), container[key]
        if isinstance(value, list) and value and kind not in kinds:
            kinds.add(kind)
            for container[key] in ([], value[:-1], [*value, value[-1]]):
                yield json.dumps(data)
            container[key] = value


def late(*_):
    raise TimeoutError(f"it took more than {SECONDS} s of the processor")


@contextmanager
def bounded():
    """Fail before time or memory of the machine are exhausted."""
    limits, before = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGPROF, late)
    try:
        if sys.platform == "linux":
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def campaign(make, read, seeds, folder):
    """Spoil one file for each seed, and read the folder; `make` writes it right.

    Returns:
        how often it was refused without the end of a process, and a list of faults.
    """
    make(folder)
    right = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    read(folder)  # right files are read
    refused, wrong, before = 0, [], {*folder.rglob("*")}
    with bounded():
        for seed in seeds:
            random = Random(seed)
            name = random.choice(sorted(right))
            (folder / name).write_bytes(spoilt(right[name], name, random))
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                read(folder)
            except SpecError as error:
                refused += "its process ended" not in str(error)
                wrong += [
                    f"{seed} {name}: not one line that names the file: {line[:200]!r}"
                    for line in error.problems
                    if "\n" in line or not any(place in line for place in (str(folder), name, *PLACES))
                ]
            except Exception:  # noqa: BLE001 - anything else is a fault
                wrong.append(f"{seed} {name}: {traceback.format_exc(limit=-4)}")
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                (folder / name).write_bytes(right[name])
            if {*folder.rglob("*")} != before:
                wrong.append(f"{seed} {name}: a file has come or gone")
    return refused, wrong
