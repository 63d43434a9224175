"""Files of weights spoilt from within: taken apart, changed, and put together again.

With the checksums that belong to them.

What is only cut off or flipped is mostly noticed at once; what is spoilt here gets as far as a reader goes.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import struct
import warnings
import zipfile
from collections.abc import Callable
from random import Random
from typing import Any

from tests.toys import hdf5
from tests.toys.mutations import (
    WAYS,
    changed_data,
    flipped,
    json_changed,
    json_nested,
    mutated,
    or_flipped,
)

HUGE = (
    0,
    1,
    2,
    7,
    127,
    128,
    255,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)

NAMES = (
    b"",
    b"a",
    b"..",
    b"../../x",
    b"/etc/passwd",
    b"a\nb",
    b"\x1b[31m",
    b"\xff\xfe",
    b"\x00",
    b"weights",
    b"optimizer/x",
    b"x" * 5000,
)


def pointed_elsewhere(content: bytes, random: Random) -> bytes:
    """Change a whole number of eight bytes that may be a place in the file, or a length.

    Into another one of them, or one that leads nowhere.
    """
    words = [
        place
        for place in range(0, len(content) - 7, 8)
        if 0 < int.from_bytes(content[place : place + 8], "little") <= len(content)
    ]
    if not words:
        return flipped(content, random)
    place, other = random.choice(words), random.choice(words)
    value = random.choice(
        (
            content[other : other + 8],
            random.choice(HUGE).to_bytes(8, "little"),
            max(len(content) - random.randrange(64), 0).to_bytes(8, "little"),
        )
    )
    return content[:place] + value + content[place + 8 :]


# Archives.

FIELDS = {
    b"PK\x01\x02": ((8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (42, 4)),
    b"PK\x03\x04": ((6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)),
    b"PK\x05\x06": ((8, 2), (10, 2), (12, 4), (16, 4), (20, 2)),
}
"""Where in the records of an archive stand flags, ways of compression, checksums, lengths and places:
https://pkware.cachefly.net/webdocs/APPNOTE/APPNOTE-6.3.9.TXT."""


@or_flipped
def archive_changed(content: bytes, random: Random) -> bytes:
    """Change a member of an archive, or which it has."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    members_changed(members, random)
    found = io.BytesIO()
    compressed = random.choice(
        (zipfile.ZIP_STORED,) * 9 + (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
    )
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(found, "w", compressed) as archive:
        for name, inner in members:
            archive.writestr(name, inner)
    return found.getvalue()


def members_changed(members: list[tuple[str, bytes]], random: Random) -> None:
    place, other, act = random.randrange(len(members)), random.randrange(len(members)), random.randrange(9)
    name, inner = members[place]
    if act < 4:
        telling = [number for number, (member, _) in enumerate(members) if member.endswith((".pkl", ".h5"))]
        place = random.choice(telling or [place])
        name, inner = members[place]
        members[place] = name, mutated(inner, name, random, EVERY)
    elif act == 4:
        del members[place]
    elif act == 5:
        members.insert(other, members[place])
    elif act == 6:
        members[place] = (
            random.choice(
                (
                    *(text.decode("latin-1") for text in NAMES),
                    members[other][0],
                    f"{name}/x",
                    "constants.pkl",
                    name.upper(),
                )
            ),
            inner,
        )
    elif act == 7:
        members[place], members[other] = (name, members[other][1]), (members[other][0], inner)
    else:
        members.append((random.choice(("archive/x", name, "x.h5")), bytes(random.choice((0, 1 << 20)))))


def archive_lying(content: bytes, random: Random) -> bytes:
    """Have a record of an archive say something else."""
    signature = random.choice(sorted(FIELDS))
    places = [place for place in range(len(content)) if content.startswith(signature, place)]
    if not places:
        return flipped(content, random)
    where, width = random.choice(FIELDS[signature])
    place = random.choice(places) + where
    value = random.choice((*HUGE, random.randrange(len(content)))) % (1 << 8 * width)
    return content[:place] + value.to_bytes(width, "little") + content[place + width :]


def torch_changed(content: bytes, random: Random) -> bytes:
    """Change PyTorch's own file: an archive, or pickles one after the other."""
    if content[:2] == b"PK":
        return random.choice((archive_changed, archive_changed, archive_lying))(content, random)
    return pickle_changed(content, random)


# Pickles.

STEPS: tuple[bytes, ...] = (
    pickle.NONE,
    pickle.MARK,
    pickle.POP,
    pickle.POP_MARK,
    pickle.DUP,
    pickle.STOP,
    pickle.TUPLE,
    pickle.TUPLE2,
    pickle.TUPLE3,
    pickle.LIST,
    pickle.DICT,
    pickle.APPEND,
    pickle.APPENDS,
    pickle.SETITEM,
    pickle.SETITEMS,
    pickle.REDUCE,
    pickle.NEWOBJ,
    pickle.BUILD,
    pickle.BINPERSID,
    pickle.MEMOIZE,
    pickle.EMPTY_DICT,
    pickle.EMPTY_SET,
    pickle.FROZENSET,
    pickle.STACK_GLOBAL,
    pickle.NEWOBJ_EX,
    pickle.OBJ,
    pickle.EMPTY_LIST * 2000,
    pickle.DUP * 2000,
    pickle.TUPLE1 * 2000,
    pickle.MARK * 2000,
    (pickle.EMPTY_LIST + pickle.APPEND) * 99,
    pickle.BININT + struct.pack("<i", -1),
    pickle.BININT + struct.pack("<i", 2**31 - 1),
    pickle.LONG1 + b"\x09" + bytes(8) + b"\x01",
    pickle.LONG4 + struct.pack("<i", 2000) + b"\x7f" * 2000,
    pickle.LONG4 + struct.pack("<i", -5),
    pickle.INT + b"9" * 5000 + b"\n",
    pickle.LONG + b"-1L\n",
    pickle.FLOAT + b"nan\n",
    pickle.FLOAT + b"1e999\n",
    pickle.BINFLOAT + b"\xff" * 8,
    pickle.NEWTRUE,
    pickle.INT + b"01\n",
    pickle.BINUNICODE + b"\xff\xff\xff\xff",
    pickle.BINUNICODE8 + b"\xff" * 8,
    pickle.BINBYTES8 + b"\xff" * 7 + b"\x7f",
    pickle.BINSTRING + b"\xff\xff\xff\xff",
    pickle.SHORT_BINUNICODE + b"\x03\x1b[m",
    pickle.SHORT_BINUNICODE + b"\x02\xff\xfe",
    pickle.UNICODE + b"\\ud800\n",
    pickle.STRING + b"'a\\x41'\n",
    pickle.SHORT_BINBYTES + b"\x00",
    pickle.BYTEARRAY8 + bytes(8),
    pickle.FRAME + b"\xff" * 8,
    pickle.GLOBAL + b"posix\nsystem\n",
    pickle.GLOBAL + b"torch\nQInt8Storage\n",
    pickle.GLOBAL + b"torch\nDoubleStorage\n",
    pickle.GLOBAL + b"torch._utils\n_rebuild_tensor_v3\n",
    pickle.GLOBAL + b"torch._utils\n_rebuild_parameter\n",
    pickle.GLOBAL + b"numpy\ndtype\n",
    pickle.GLOBAL + b"collections\nOrderedDict\n",
    pickle.GLOBAL + b"collections\ndefaultdict\n",
    pickle.GLOBAL + b"numpy.core.numeric\n_frombuffer\n",
    pickle.GLOBAL + b"_codecs\nencode\n",
    pickle.GLOBAL + b"builtins\nbytes\n",
    pickle.GLOBAL + b"\xff\n\n",
    pickle.BINGET + b"\x00",
    pickle.BINGET + b"\xff",
    pickle.GET + b"-1\n",
    pickle.PUT + b"99999999999\n",
    pickle.LONG_BINPUT + b"\xff" * 4,
    pickle.PERSID + b"x\n",
    pickle.EXT1 + b"\x01",
    pickle.INST + b"os\nsystem\n",
    pickle.NEXT_BUFFER,
    b"\x00",
)
"""Steps of a pickle that are put where others were: what nobody expects there, endless, huge, or below
zero."""


def taken_apart(content: bytes) -> list[bytes]:
    """Return the steps of pickles that stand one after the other, and what follows them."""
    steps, begin = [], 0
    while content[begin : begin + 1] == pickle.PROTO:
        try:
            with warnings.catch_warnings(action="ignore"):  # of texts with escapes that are none
                places = [place + begin for _, _, place in pickletools.genops(content[begin:])]
        except (ValueError, LookupError, OverflowError, TypeError, struct.error):
            break
        ends = [*places[1:], places[-1] + 1]
        steps += [content[place:end] for place, end in zip(places, ends, strict=True)]
        begin = ends[-1]
    return [*steps, content[begin:]]


def pickle_changed(content: bytes, random: Random) -> bytes:
    """Change a step of a pickle, leave one out, or put one in."""
    steps = taken_apart(content)
    for _ in range(random.choice((1, 1, 1, 3))):
        place, other, act = random.randrange(len(steps)), random.randrange(len(steps)), random.randrange(8)
        if act == 0 and len(steps) > 1:
            del steps[place]
        elif act == 1:
            steps.insert(place, steps[other])
        elif act == 2:
            steps[place], steps[other] = steps[other], steps[place]
        elif act == 3:
            alike = [step for step in steps if step[:1] == steps[place][:1]]
            steps[place] = random.choice(alike)
        elif act == 4:
            steps[place] = random.choice(STEPS)
        elif act == 5:
            steps[place] = steps[place][:1] + flipped(steps[place][1:], random)
        elif act == 6:
            begin, end = sorted((place, other))
            steps[begin:begin] = steps[begin : min(end, begin + 60)] * random.choice((1, 2))
        else:
            steps.insert(place, random.choice(STEPS))
    return b"".join(steps)


# MessagePack.


@or_flipped
def msgpack_changed(content: bytes, random: Random) -> bytes:
    """Change what is in a dictionary of Flax, or what an array says of itself."""
    import msgpack

    data = msgpack.unpackb(content, strict_map_key=False)
    outer, key = random.choice(
        [(outer, key) for outer, key in _places(data, []) if isinstance(outer[key], msgpack.ExtType)]
    )
    inner, act = msgpack.unpackb(outer[key].data), random.randrange(7)
    if act == 0:
        data = changed_data(data, random)
    elif act == 1:
        outer[key] = msgpack.ExtType(random.choice((0, 2, 3, 127)), outer[key].data)
    elif act == 2:
        inner[0] = random.choice(
            (
                [],
                [0],
                [-1],
                inner[0][::-1],
                [*inner[0], 1],
                [2**32, 2**32],
                [2**63],
                [0, 2**62],
                [1] * 40,
                [0.5],
                ["x"],
                None,
                {"0": 3},
                [True],
                [[1]],
            )
        )
    elif act == 3:
        inner[1] = random.choice(
            (
                "float64",
                "float16",
                "bfloat16",
                "int8",
                "bool",
                "complex64",
                "object",
                "x",
                "",
                3,
                None,
                "\x1b[31m",
                b"float32",
            )
        )
    elif act == 4:
        inner = changed_data(inner, random)
    elif act == 5:
        inner[2] = random.choice((b"", inner[2][:-1], inner[2] * 2, b"\xff" * len(inner[2]), "x", None, [1]))
    else:
        outer[key] = _pieces(outer[key], inner[0], random)
    if 2 <= act <= 5:
        outer[key] = msgpack.ExtType(1, msgpack.packb(inner))
    return bytes(msgpack.packb(data))


def _pieces(array: Any, shape: Any, random: Random) -> Any:
    """Return an array that is said to be kept in pieces."""
    said = {
        "__msgpack_chunked_array__": True,
        "shape": {str(n): size for n, size in enumerate(shape)},
        "chunks": {"0": array},
    }
    return (
        changed_data(said, random)
        if random.random() < 0.8
        else {**said, "chunks": dict.fromkeys(map(str, range(2000)), array)}
    )


def _places(data: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    for key, entry in data.items() if isinstance(data, dict) else ():
        found.append((data, key))
        _places(entry, found)
    return found


def msgpack_nested(content: bytes, random: Random) -> bytes:
    """Put dictionaries or lists in each other, in place of a value."""
    depth = random.choice((40, 60, 1000, 100_000))
    place = random.randrange(min(len(content), 400)) if content else 0
    return (
        content[:place]
        + random.choice(
            (
                b"\x81\xa1a" * depth + b"\xc0",
                b"\x91" * depth + b"\x90",
                b"\xc7\x08\x01" * depth,
                b"\xdf\x00\x0f\xff\xff" * depth,
            )
        )
        + content[place:]
    )


# Folders of Orbax.


@or_flipped
def json_in_text_changed(content: bytes, random: Random) -> bytes:
    """Change JSON, or a text of it that is JSON itself."""
    data = json.loads(content)
    inner = [key for key, value in data.items() if isinstance(value, str) and value[:1] == "{"]
    if not inner:
        return json_changed(content, random)
    key = random.choice(inner)
    data[key] = json_changed(data[key].encode(), random).decode(errors="replace")
    return json.dumps(data).encode()


EVERY: dict[str, tuple[Callable[[bytes, Random], bytes], ...]] = {
    **WAYS,
    "pt": (torch_changed,),
    "bin": (torch_changed,),
    "pkl": (pickle_changed,),
    "pdparams": (pickle_changed,),
    "h5": (hdf5.changed, hdf5.changed, pointed_elsewhere),
    "keras": (archive_changed, archive_changed, archive_lying),
    "msgpack": (msgpack_changed, msgpack_changed, msgpack_changed, msgpack_nested),
    "_METADATA": (json_changed, json_changed, json_nested, json_in_text_changed),
    "_CHECKPOINT_METADATA": (json_changed, json_nested),
    "_sharding": (json_in_text_changed,),
}
"""By how a file's name ends."""
