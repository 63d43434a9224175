"""One Transformer-encoder text classifier in four frameworks, and the proof that they compute the same.

The public face is ``from concord import spec, backends, conformance, compare, load, show``. None of it
imports a framework but :func:`compare`, whose reference is a PyTorch module, when it is called.
"""

from pathlib import Path
from typing import Any

DISTRIBUTION = "concord-conformance"
"""The name under which this package is installed; another ``concord`` is on the package index."""

CHECKOUT = not (Path(__file__).parent / "spec").is_dir()
"""Whether this is a checkout, in which the parts of the package stand beside its folder."""

if CHECKOUT:
    __path__.append(str(Path(__file__).resolve().parent.parent))


def installation(extra: str) -> str:
    """Return the command that installs what an optional part needs: no index has the distribution."""
    return (
        f"pip install -e '.[{extra}]' -c constraints/py311.txt"
        if CHECKOUT
        else f"pip install '.[{extra}]' in a checkout"
    )


def __getattr__(name: str) -> Any:
    if name in ("compare", "assert_same"):  # with all that judges
        from concord.conformance import compare

        return getattr(compare, name)
    if name == "load":
        from concord.porting.prediction import load

        return load
    if name == "show":
        from concord.notebook import show

        return show
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
