"""One Transformer-encoder text classifier in four frameworks, with proof that all four compute the same
results.

Public: ``from concord import spec, backends, conformance, compare, load, show``. Only :func:`compare` imports
a framework, PyTorch.
"""

from pathlib import Path
from pkgutil import resolve_name
from typing import Any

# The name ``concord`` belongs to another distribution.
DISTRIBUTION = "concord-conformance"

# In a checkout, the parts of the package are next to its folder; in an installation, inside it.
CHECKOUT = not (Path(__file__).parent / "spec").is_dir()

if CHECKOUT:
    __path__.append(str(Path(__file__).resolve().parent.parent))


def installation(extra: str) -> str:
    """The command that installs an extra."""
    return (
        # By path, since the distribution is not published.
        f"pip install -e '.[{extra}]' -c constraints/py311.txt"
        if CHECKOUT
        else f"pip install '.[{extra}]' in a checkout"
    )


# Imported on request, since refusing a command or printing its help needs no judge.
PUBLIC = {
    "compare": "concord.conformance.compare:compare",
    "assert_same": "concord.conformance.compare:assert_same",
    "load": "concord.porting.prediction:load",
    "show": "concord.notebook:show",
}


def __getattr__(name: str) -> Any:
    if name in PUBLIC:
        return resolve_name(PUBLIC[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
