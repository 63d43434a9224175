"""Renders reStructuredText roles in docstrings as code on the site."""

import re
from typing import Any

import griffe


class Roles(griffe.Extension):
    """Rewrites each docstring as it is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Replace ``:func:`name``` in a docstring by `name`."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", obj.docstring.value)
