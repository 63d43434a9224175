"""Files of weights spoilt from within: taken apart, changed, and put together again."""

import io
import pickle
import pickletools
import warnings
import zipfile

from tests.toys.mutations import (
    BYTES,
    WAYS,
    changed_data,
    json_changed,
    json_nested,
    mutated,
    or_flipped,
)


@or_flipped
def archive_changed(content, random):
    """Spoil a member of an archive, leave it out, repeat it, or call it as another one."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    place, act = random.randrange(len(members)), random.randrange(5)
    name, inner = members[place]
    if act == 0:
        del members[place]
    elif act == 1:
        members.insert(
            place, (random.choice(("constants.pkl", "../x", "", random.choice(members)[0])), inner)
        )
    else:
        members[place] = name, mutated(inner, name, random, EVERY)
    found, how = io.BytesIO(), random.choice((zipfile.ZIP_STORED,) * 9 + (zipfile.ZIP_DEFLATED,))
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(found, "w", how) as archive:
        for member in members:
            archive.writestr(*member)
    return found.getvalue()


NAMED = (
    "posix\nsystem",
    "torch\nQInt8Storage",
    "numpy\ndtype",
    "collections\nOrderedDict",
    "_codecs\nencode",
)

STEPS = (
    *(bytes([code]) for code in range(256)),
    *(pickle.GLOBAL + name.encode() + b"\n" for name in NAMED),
    pickle.EMPTY_LIST * 2000,
    pickle.LONG4 + b"\xd0\x07\0\0" + b"\x7f" * 2000,
    pickle.BINBYTES8 + b"\xff" * 7 + b"\x7f",
    pickle.SHORT_BINUNICODE + b"\x02\xff\xfe",
    pickle.LONG_BINPUT + b"\xff" * 4,
)
"""Steps of a pickle that nobody expects, or that are endless, huge, or below zero."""


@or_flipped
def pickle_changed(content, random):
    """Put a step of a pickle in the place of another, or one that nobody expects."""
    with warnings.catch_warnings(action="ignore"):  # of texts with escapes that are none
        places = [place for _, _, place in pickletools.genops(content)]
    steps = [content[a:b] for a, b in zip(places, [*places[1:], len(content)], strict=True)]
    for _ in range(random.choice((1, 1, 3))):
        width = random.randrange(3)
        place = random.randrange(len(steps))
        steps[place : place + width] = [random.choice(random.choice((steps, STEPS)))]
    return b"".join(steps)


@or_flipped
def msgpack_changed(content, random):
    """Change what is in a dictionary of Flax, or what an array says of itself."""
    import msgpack

    arrays = []

    def array(code, data):
        arrays.append([code, *msgpack.unpackb(data)])
        return arrays[-1]

    data = msgpack.unpackb(content, ext_hook=array, strict_map_key=False)
    changed_data(random.choice((data, random.choice(arrays))), random)

    def packed(value):
        if any(value is one for one in arrays):
            return msgpack.ExtType(value[0], msgpack.packb(value[1:]))
        return {key: packed(inner) for key, inner in value.items()} if isinstance(value, dict) else value

    return bytes(msgpack.packb(packed(data)))


EVERY = {
    **WAYS,
    "pt": (archive_changed,),
    "bin": (archive_changed,),
    "keras": (archive_changed,),
    "pdparams": (pickle_changed,),
    "pkl": (pickle_changed,),
    "h5": BYTES,
    "msgpack": (msgpack_changed,),
    "_METADATA": (json_changed, json_nested),
}
"""By how a file's name ends."""
