"""Files spoilt in every way that is easy to think of, from a seed."""

import json
import re
from functools import wraps

NUMBERS = (0, 1, -1, 2, 3, 7, 0.5, -0.0, 1e308, -1e-320, 2**31, 2**53, 2**63, -(2**63) - 1, 10**7, 10**400)

TEXTS = (
    " |x|1|nan|inf|cpu|..|../../x|/dev/zero|-oProxyCommand=id|torch|[/red]|[bold|\x1b[31m|a\nb|{n}|layers.0|*"
)

NASTY = (
    *(None, True, False, float("nan"), float("inf")),
    *NUMBERS,
    *("", "\x00", "\ud800", "\u202e", "é" * 400, *TEXTS.split("|")),
    *([], {}, [[]], [1], ["x"], [None], {"": 1}, {"x": {}}, [[1, 2], [3]]),
)


def mutated(
    content,
    name,
    random,
    every=None,
):
    """Return the content of a file, spoilt once or a few times.

    Args:
        every: the ways in which a file is spoilt from within, by how its name ends.
    """
    ways = (WAYS if every is None else every).get(name.rpartition("/")[2].rpartition(".")[2], ())
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        way = random.choice(ways) if ways and random.random() < 0.75 else random.choice(BYTES)
        content = way(content, random)
    return content


def or_flipped(way):
    """Return a way for what a library takes apart; what is spoilt already.

    Or cannot be put together again, is flipped.
    """

    @wraps(way)
    def tried(content, random):
        try:
            return way(content, random)
        except Exception:  # noqa: BLE001 - whatever the library raises
            return flipped(content, random)

    return tried


# Bytes.


def flipped(content, random):
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 4, 64)) if changed else 0):
        changed[random.randrange(min(len(changed), random.choice((16, 400, len(changed)))))] = random.choice(
            (0, 10, 34, 127, 255, random.randrange(256))
        )
    return bytes(changed)


def truncated(content, random):
    return content[: random.randrange(len(content) + 1)]


def spliced(content, random):
    a, b, c = sorted(random.randrange(len(content) + 1) for _ in range(3))
    return random.choice(
        (
            content[:a] + content[b:],
            content[:b] + content[a:],
            content[:a] + content[b:c] + content[a:b] + content[c:],
        )
    )


def replaced(content, random):
    return random.choice(
        (
            b"",
            b"\x00" * 50,
            b"\xff\xfe",
            b"[" * 100_000,
            b"{" * 3000,
            b"1" * 5000,
            b"null",
            b"[]",
            b'""',
            b"\xef\xbb\xbf" + content,
            content + content,
            content + b"\n,",
        )
    )


def flipped_at_the_end(content, random):
    """Spoil where archives and tables say what is in them."""
    return flipped(content[::-1], random)[::-1]


def counted_otherwise(content, random):
    """Put a number where another may be: a length, a place, or a count."""
    width = random.choice((1, 2, 4, 8))
    value = random.choice(
        (
            0,
            1,
            2,
            7,
            2 ** (8 * width - 1) - 1,
            2 ** (8 * width - 1),
            2 ** (8 * width) - 1,
            random.randrange(2 ** (8 * width)),
            len(content) % 2 ** (8 * width),
        )
    )
    place = random.randrange(min(len(content), random.choice((64, 2000, 10**9)))) if content else 0
    place = random.choice((place, max(0, len(content) - place - width)))
    return (
        content[:place] + value.to_bytes(width, random.choice(("little", "big"))) + content[place + width :]
    )


BYTES = (flipped, truncated, spliced, replaced, flipped_at_the_end, counted_otherwise)

# JSON.


def places(data, found):
    """Return every place in JSON data, as container and key."""
    for key, entry in list(data.items() if isinstance(data, dict) else enumerate(data)):
        found.append((data, key))
        if isinstance(entry, (dict, list)):
            places(entry, found)
    return found


def changed_data(data, random):
    found = places(data, []) if isinstance(data, (dict, list)) else []
    if not found:
        return random.choice(NASTY)
    container, key = random.choice(found)
    act = random.randrange(6)
    if act < 3:
        container[key] = random.choice(NASTY)
    elif act == 3:
        del container[key]
    elif act == 4 and isinstance(container, dict):
        container[random.choice(("x", "", "\x1b[2J", "a\nb", *container))] = random.choice(
            [*NASTY, container[key]]
        )
    else:
        other, place = random.choice(found)
        container[key] = (
            json.loads(json.dumps(other[place], default=str))
            if place in (other if isinstance(other, dict) else range(len(other)))
            else None
        )
    return data


def json_changed(content, random):
    try:
        text = json.dumps(changed_data(json.loads(content), random))
    except (ValueError, RecursionError):
        return flipped(content, random)
    if random.random() < 0.03:
        text = re.sub(
            r"-?\d+", lambda match: random.choice((match[0], "9" * 5000, "1e999", "-0")), text, count=3
        )
    return text.encode()


def json_nested(content, random):
    depth = random.choice((100, 900, 3000, 100_000))
    value = random.choice((b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth))
    return (
        content.replace(random.choice((b'"', b"1", b":")), value, 1)
        if random.random() < 0.3
        else re.sub(rb": ?[^,{\[]+,", b": " + value + b",", content, count=1)
    )


# Safetensors.


CODES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "I64", "I32", "U8", "BOOL", "C64", "F4", "x", 3, None)

SHAPES = ([], [0], [1], [2**32, 2**32], [0, 2**62], [-1], ["x"], None)

TENSORS = ("x", "", "\x1b[31m", "taps/x", "gradients/taps.x", "weights/x", "inputs/x", "__metadata__")

BITS = (b"\xff" * 8, bytes(8), bytes(6) + b"\xf0\x7f", bytes(6) + b"\xf8\x7f", b"\xff" * 6 + b"\xef\x7f")


@or_flipped
def header_changed(content, random):
    length = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    tensors = [name for name in header if name != "__metadata__"]
    name, other = random.choice(tensors), random.choice(tensors)
    entry, act = header[name], random.randrange(9)
    begin, end = entry["data_offsets"]
    if act == 0:
        ends = random.choice((0, -1, 8, 2**63, begin)), random.choice((0, 7, 2**62, len(body), end))
        entry["data_offsets"] = ends
    elif act == 1:
        entry["dtype"] = random.choice(CODES)
    elif act == 2:
        shape = entry["shape"]
        entry["shape"] = random.choice((*SHAPES, shape[::-1], [*shape, 1], shape[1:]))
    elif act == 3:
        del header[name]
    elif act == 4:
        header[random.choice((*tensors, *TENSORS))] = header.pop(name)
    elif act == 5:
        header[name], header[other] = header[other], header[name]
    elif act == 6:
        about = header.get("__metadata__", {})
        config = json.dumps(changed_data(json.loads(about.get("config", "{}")), random))
        said = {random.choice([*about, "x"]): random.choice((config, "x", "", "{", "[" * 5000))}
        header["__metadata__"] = about | said
    elif act == 7:
        header = changed_data(header, random)
    else:
        bits = random.choice((*BITS, random.randbytes(8)))
        body = body[:begin] + (bits * ((end - begin) // 8 + 1))[: end - begin] + body[end:]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    length = random.choice((len(text),) * 12 + (0, 2**40, len(text) + 8))
    return length.to_bytes(8, "little") + text + body


# TOML.

TOML = (
    *("1", "-1", "0", "2.5", "nan", "inf", "-inf", '"x"', '""', "true", "[]", "{}", "[1]", "1979-05-27"),
    *("07:32:00", "10000000", '"\\u001b[31m"', "9007199254740993", "'{n}'"),
    *("0x" + "f" * 5000, "9" * 5000, "[" * 2000 + "]" * 2000),
)


def toml_changed(content, random):
    lines = content.decode(errors="replace").splitlines()
    keyed = [place for place, line in enumerate(lines) if "=" in line]
    if not keyed:
        return flipped(content, random)
    place, act = random.choice(keyed), random.randrange(4)
    key, _, value = lines[place].partition("=")
    if act == 0:
        del lines[place]
    elif act == 1:
        lines.insert(
            place,
            random.choice(
                (
                    lines[place],
                    f"x = {random.choice(TOML)}",
                    f"[{key.strip()}]",
                    "[[runs]]",
                    f'"\\n{key.strip()}" = 1',
                )
            ),
        )
    elif act == 2:
        lines[place] = f"{random.choice((key, 'x', lines[random.choice(keyed)].partition('=')[0]))}={value}"
    else:
        lines[place] = f"{key}= {random.choice(TOML)}"
    return "\n".join(lines).encode()


WAYS = {
    "json": (json_changed, json_changed, json_changed, json_changed, json_nested),
    "safetensors": (header_changed,),
    "toml": (toml_changed,),
}
