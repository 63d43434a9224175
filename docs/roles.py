"""The site's reading of docstrings: a role of reStructuredText is code."""

import re
from typing import Any

import griffe


class Roles(griffe.Extension):
    """Rewrites each docstring as it is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Make ``:func:`name``` of a docstring `name`."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", obj.docstring.value)
