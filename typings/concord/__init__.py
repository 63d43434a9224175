"""One Transformer-encoder text classifier in four frameworks, and the proof that they compute the same.

The public face is ``from concord import spec, backends, conformance``. None of it imports a framework.
"""

from pathlib import Path

DISTRIBUTION = "concord-conformance"
"""The name under which this package is installed: the package index has another ``concord``."""

CHECKOUT = not (Path(__file__).parent / "spec").is_dir()
"""Whether this is a checkout, in which the parts of the package stand beside its folder."""

if CHECKOUT:
    __path__.append(str(Path(__file__).resolve().parent.parent))


def installation(extra: str) -> str:
    """Return the command that installs what an optional part needs."""
    return (
        f"pip install -e '.[{extra}]' -c constraints/py311.txt"
        if CHECKOUT
        else f"pip install '{DISTRIBUTION}[{extra}]'"
    )
