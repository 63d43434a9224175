"""Files spoilt in every way that is easy to think of, from a seed."""

import io
import json
import re
import warnings
import zipfile

NUMBERS = (0, 1, -1, 7, 0.5, -0.0, 1e308, 2**31, 2**53, 2**63, -(2**63) - 1, 10**7, 10**400)

TEXTS = (
    " |x|1|nan|inf|cpu|..|../../x|/dev/zero|-oProxyCommand=id|torch|[/red]|[bold|\x1b[31m|a\nb|{n}|layers.0|*"
    "|F64|F16|BF16|F8_E4M3|I32|U8|C64|F4|constants.pkl"
)

NASTY = (
    *(None, True, float("nan"), float("inf"), "", "\x00", "\ud800", "\u202e", "é" * 400, *NUMBERS),
    *TEXTS.split("|"),
    *([], {}, [[]], [-1], ["x"], [None], {"": 1}, {"x": {}}, [[1, 2], [3]], [2**32, 2**32]),
)


def mutated(content, name, random):
    """Return the content of a file, spoilt once or a few times, from within where its kind is known."""
    way = WAYS.get(name.rpartition("/")[2].rpartition(".")[2])
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        if way and random.random() < 0.75:
            try:
                content = way(content, random)
                continue
            except Exception:  # noqa: BLE001 - whatever a library raises that takes the file apart
                pass
        content = random.choice(BYTES)(content, random)
    return content


# Bytes.


def flipped(content, random):
    """Archives and tables say at their ends what is in them."""
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 4, 64)) if changed else 0):
        place = random.randrange(min(len(changed), random.choice((16, 400, len(changed)))))
        changed[random.choice((place, -1 - place))] = random.choice((0, 10, 34, 127, 255))
    return bytes(changed)


def spliced(content, random):
    """Leave out a piece, the end perhaps, or repeat one."""
    a, b, c = sorted(random.randrange(len(content) + 1) for _ in range(3))
    return content[:a] + random.choice((b"", content[b:c], content[a:c])) + content[random.choice((b, c)) :]


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


BYTES = (flipped, spliced, replaced, counted_otherwise)

# What holds data, which is spoilt from within, or cannot be taken apart and raises.


def places(data, outer=()):
    """Yield every place in JSON data, as its container and the keys that lead there."""
    for key, entry in data.items() if isinstance(data, dict) else enumerate(data):
        yield data, (*outer, key)
        if isinstance(entry, (dict, list)):
            yield from places(entry, (*outer, key))


def kinds_of_places(data):
    """Yield a place of each kind in JSON data, as keys: of a list's entries with the same keys the first."""
    seen = set()
    for container, path in places(data):
        kind = (*("*" if isinstance(key, int) else key for key in path), type(container[path[-1]]))
        if kind not in seen:
            seen.add(kind)
            yield path


def at_each_place(text, others):
    """Yield JSON text with another value at a place of each kind, with where that is.

    Args:
        others: returns what may stand in the place of a value.
    """
    for *outer, last in kinds_of_places(json.loads(text)):
        value = json.loads(text)
        for key in outer:
            value = value[key]
        for other in others(value[last]):
            data = container = json.loads(text)
            for key in outer:
                container = container[key]
            container[last] = other
            yield ".".join(map(str, (*outer, last))), other, json.dumps(data)


def lengths(value):
    """Return a list with none of its entries, and with one fewer and one more."""
    return [[], value[:-1], [*value, value[-1]]] if isinstance(value, list) and value else []


def anything(value):
    """Return what stands nowhere, and numbers beside a number."""
    near = [value + 1, value - 1, 2.0**40] if type(value) in (int, float) else []
    return [*NASTY, *near, *lengths(value)]


def json_changed(content, random):
    data = json.loads(content)
    container, (*_, key) = random.choice([*places(data)])
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
        other, (*_, place) = random.choice([*places(data)])
        container[key] = json.loads(json.dumps(other[place]))
    return json.dumps(data).encode()


def json_nested(content, random):
    depth = random.choice((100, 900, 3000, 100_000))
    value = random.choice((b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth, b"9" * 5000))
    return re.sub(rb": ?[^,{\[]+,", lambda match: b": " + value + b",", content, count=1)


def json_spoilt(content, random):
    return random.choice((*[json_changed] * 4, json_nested))(content, random)


def header_changed(content, random):
    """Change what a safetensors file says of its tensors."""
    end = 8 + int.from_bytes(content[:8], "little")
    text = json_changed(content[8:end], random)
    return random.choice((len(text),) * 12 + (0, 2**40)).to_bytes(8, "little") + text + content[end:]


VALUES = ["1979-05-27", "07:32:00", "0x" + "f" * 5000, "9" * 5000, "[" * 2000 + "]" * 2000]


def toml_changed(content, random):
    lines = content.decode(errors="replace").splitlines()
    place = random.choice([place for place, line in enumerate(lines) if "=" in line])
    key, _, value = lines[place].partition("=")
    other = random.choice([*VALUES, *map(json.dumps, NASTY)])
    lines[place : place + 1] = random.choice(
        ([], [lines[place]] * 2, [lines[place], f"[{key.strip()}]"], [f"x={value}"], [f"{key}= {other}"])
    )
    return "\n".join(lines).encode()


def archive_changed(content, random):
    """Spoil a member of an archive, leave it out, repeat it, or call it as another one."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    place = random.randrange(len(members))
    name, inner = members[place]
    again = (random.choice(("../x", "", random.choice(members)[0])), inner)
    members[place : place + 1] = random.choice(
        ([], [members[place], again], [(name, mutated(inner, name, random))])
    )
    found = io.BytesIO()
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(found, "w") as archive:
        for member in members:
            archive.writestr(*member)
    return found.getvalue()


WAYS = {
    **dict.fromkeys(("json", "_METADATA"), json_spoilt),
    "safetensors": header_changed,
    "toml": toml_changed,
    **dict.fromkeys(("pt", "bin", "keras"), archive_changed),
}
"""By how a file's name ends; what else is read in test_containers.py takes any bytes there."""
