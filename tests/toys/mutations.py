"""Files spoilt in every way that is easy to think of, from a seed."""

import io
import json
import re
import warnings
import zipfile
from functools import wraps

NUMBERS = (0, 1, -1, 2, 3, 7, 0.5, -0.0, 1e308, -1e-320, 2**31, 2**53, 2**63, -(2**63) - 1, 10**7, 10**400)

TEXTS = (
    " |x|1|nan|inf|cpu|..|../../x|/dev/zero|-oProxyCommand=id|torch|[/red]|[bold|\x1b[31m|a\nb|{n}|layers.0|*"
    "|F64|F16|BF16|F8_E4M3|I32|U8|C64|F4|constants.pkl"
)

NASTY = (
    *(None, True, False, float("nan"), float("inf"), "", "\x00", "\ud800", "\u202e", "é" * 400, *NUMBERS),
    *(
        *TEXTS.split("|"),
        [],
        {},
        [[]],
        [1],
        [-1],
        ["x"],
        [None],
        {"": 1},
        {"x": {}},
        [[1, 2], [3]],
        [2**32, 2**32],
    ),
)


def mutated(content, name, random):
    """Return the content of a file, spoilt once or a few times, from within where its kind is known."""
    ways = WAYS.get(name.rpartition("/")[2].rpartition(".")[2], BYTES)
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        content = random.choice(ways if random.random() < 0.75 else BYTES)(content, random)
    return content


def or_flipped(way):
    """Return a way for what a library takes apart: what it cannot is flipped."""

    @wraps(way)
    def tried(content, random):
        try:
            return way(content, random)
        except Exception:  # noqa: BLE001 - whatever the library raises
            return flipped(content, random)

    return tried


# Bytes.


def flipped(content, random):
    """Archives and tables say at their ends what is in them."""
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 4, 64)) if changed else 0):
        place = random.randrange(min(len(changed), random.choice((16, 400, len(changed)))))
        changed[random.choice((place, -1 - place))] = random.choice(
            (0, 10, 34, 127, 255, random.randrange(256))
        )
    return bytes(changed)


def truncated(content, random):
    return content[: random.randrange(len(content) + 1)]


def spliced(content, random):
    a, b, c = sorted(random.randrange(len(content) + 1) for _ in range(3))
    return content[:a] + random.choice((b"", content[b:c], content[a:c])) + content[b:]


def replaced(content, random):
    others = (b"", b"\x00" * 50, b"\xff\xfe", b"[" * 100_000, b"{" * 3000, b"1" * 5000, b"null", b"[]", b'""')
    return random.choice((*others, b"\xef\xbb\xbf" + content, content + content, content + b"\n,"))


def counted_otherwise(content, random):
    """Put a number where another may be: a length, a place, or a count."""
    width = random.choice((1, 2, 4, 8))
    most = 2 ** (8 * width)
    value = random.choice((0, 1, 7, most // 2 - 1, most // 2, most - 1, random.randrange(most)))
    place = random.randrange(min(len(content), random.choice((64, 2000, 10**9)))) if content else 0
    return content[:place] + value.to_bytes(width, "little") + content[place + width :]


BYTES = (flipped, truncated, spliced, replaced, counted_otherwise)

# JSON, and what holds it.


def places(data):
    """Yield every place in JSON data, as container and key."""
    for key, entry in data.items() if isinstance(data, dict) else enumerate(data):
        yield data, key
        if isinstance(entry, (dict, list)):
            yield from places(entry)


def changed_data(data, random):
    found = list(places(data)) if isinstance(data, (dict, list)) else []
    if not found:
        return random.choice(NASTY)
    (container, key), (other, place) = random.choice(found), random.choice(found)
    copy = json.loads(json.dumps(other[place]))
    act = random.randrange(6)
    if act < 3:
        container[key] = random.choice(NASTY)
    elif act == 3:
        del container[key]
    elif act == 4 and isinstance(container, dict):
        container[random.choice(("x", "", "\x1b[2J", "a\nb", "__metadata__", *container))] = container.pop(
            key
        )
    else:
        container[key] = copy
    return data


@or_flipped
def json_changed(content, random):
    text = json.dumps(changed_data(json.loads(content), random))
    if random.random() < 0.03:
        text = re.sub(
            r"-?\d+", lambda match: random.choice((match[0], "9" * 5000, "1e999", "-0")), text, count=3
        )
    return text.encode()


def json_nested(content, random):
    depth = random.choice((100, 900, 3000, 100_000))
    value = random.choice((b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth))
    return re.sub(rb": ?[^,{\[]+,", lambda match: b": " + value + b",", content, count=1)


@or_flipped
def header_changed(content, random):
    """Change what a safetensors file says of its tensors."""
    end = 8 + int.from_bytes(content[:8], "little")
    text = json.dumps(changed_data(json.loads(content[8:end]), random)).encode()
    return random.choice((len(text),) * 12 + (0, 2**40)).to_bytes(8, "little") + text + content[end:]


# TOML.

VALUES = '1|-1|0|2.5|nan|inf|-inf|"x"|""|true|[]|{}|[1]|1979-05-27|07:32:00|10000000|"\\u001b[31m"'
LONG = ["0x" + "f" * 5000, "9" * 5000, "[" * 2000 + "]" * 2000]


@or_flipped
def toml_changed(content, random):
    lines = content.decode(errors="replace").splitlines()
    place = random.choice([place for place, line in enumerate(lines) if "=" in line])
    key, _, value = lines[place].partition("=")
    lines[place : place + 1] = random.choice(
        (
            [],
            [lines[place]] * 2,
            [lines[place], f"[{key.strip()}]"],
            [f"{random.choice(('x', random.choice(lines).partition('=')[0]))}={value}"],
            [f"{key}= {random.choice([*VALUES.split('|'), *LONG])}"],
        )
    )
    return "\n".join(lines).encode()


# Archives.


@or_flipped
def archive_changed(content, random):
    """Spoil a member of an archive, leave it out, repeat it, or call it as another one."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    place = random.randrange(len(members))
    name, inner = members[place]
    members[place : place + 1] = random.choice(
        (
            [],
            [members[place], (random.choice(("../x", "", random.choice(members)[0])), inner)],
            [(name, mutated(inner, name, random))],
        )
    )
    found = io.BytesIO()
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(found, "w") as archive:
        for member in members:
            archive.writestr(*member)
    return found.getvalue()


WAYS = {
    "json": (json_changed, json_changed, json_changed, json_changed, json_nested),
    "_METADATA": (json_changed, json_nested),
    "safetensors": (header_changed,),
    "toml": (toml_changed,),
    **dict.fromkeys(("pt", "bin", "keras"), (archive_changed,)),
}
"""By how a file's name ends; what else is read in test_containers.py takes any bytes there."""
