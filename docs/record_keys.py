"""The keys of JSON records, made from their classes and the comments at their fields.

A hook of MkDocs fills them into a page; ``python docs/record_keys.py`` prints them.
"""

import ast
import inspect
import json
import pkgutil
import re
import textwrap
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from concord.conformance.run.record import Record, plain
from concord.output_files import KINDS
from concord.spec.config import EncoderConfig

MARK = "<!-- the keys of records -->"

CONFIGURATION = "[configuration](spec.md)"

SCALARS = {str: "text", float: "number", int: "whole number", bool: "true or false", NoneType: "null"}

Key = tuple[str, str, str, str]
"""The name, the type in words, the default as JSON, and the meaning."""


def has_keys(kind: Any) -> bool:
    """Whether JSON has an object with the class's fields."""
    return kind is not EncoderConfig and (is_dataclass(kind) or hasattr(kind, "__required_keys__"))


def type_words(kind: Any) -> str:
    """A type in words, linked to its table."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is EncoderConfig:
        return CONFIGURATION
    if has_keys(kind):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    if origin is Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(map(type_words, arguments))
    if kind in (list, tuple) or (origin and issubclass(origin, Sequence)):
        inner = dict.fromkeys(type_words(argument) for argument in arguments if argument is not ...)
        return "list of " + " or ".join(inner)
    if kind is dict or (origin and issubclass(origin, Mapping)):
        values = arguments[1:] or (int,)  # of a Counter
        return f"object of {type_words(values[0])}" if arguments else "object"
    return SCALARS.get(kind, "anything")


def inner_classes(kind: Any) -> Iterator[Any]:
    """Yield the classes with keys inside a type."""
    if has_keys(kind):
        yield kind
    for argument in get_args(kind):
        yield from inner_classes(argument)


def meanings(kind: type) -> dict[str, str]:
    """Each field's meaning: from the docstring's attributes, or a comment beside or above it."""
    source = textwrap.dedent(inspect.getsource(kind))
    lines = iter(source.splitlines(keepends=True))
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(lambda: next(lines, ""))
        if token.type == tokenize.COMMENT
    }
    alone = {i for i, line in enumerate(source.splitlines(), start=1) if line.lstrip().startswith("#")}
    (node,) = ast.parse(source).body
    texts = dict[str, str]()
    for field in node.body:  # type: ignore[attr-defined]
        if isinstance(field, ast.AnnAssign):
            above = field.lineno
            while above - 1 in alone:
                above -= 1
            beside = comments.get(field.end_lineno or 0, "")
            lead = " ".join(comments[i] for i in range(above, field.lineno))
            texts[ast.unparse(field.target)] = beside or lead
    attributes = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
    for names, text in re.findall(r"^    (\w[\w, ]*): (.*(?:\n {5,}.*)*)", attributes, re.MULTILINE):
        texts |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    for name in written_beside(node):
        texts[name] = inspect.cleandoc(getattr(kind, name).__doc__ or "").partition("\n")[0]
    return {name: tidy(text) for name, text in texts.items()}


def written_beside(node: ast.stmt) -> list[str]:
    """Properties that a class writes too."""
    return [
        ast.literal_eval(argument)
        for statement in node.body  # type: ignore[attr-defined]
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "as_written"
        for argument in getattr(statement.value, "args", [])
    ]


def tidy(text: str) -> str:
    """Docstring text as a cell of a table."""
    text = re.sub(r":\w+:`~?([^`]+)`", lambda match: f"`{match[1].rpartition('.')[2]}`", text)
    text = re.sub(r"\bNone\b", "null", text).replace("``", "`").replace("|", "\\|").rstrip(".")
    return text[:1].lower() + text[1:]


def keys(kind: type) -> list[Key]:
    """Return the keys of a class."""
    hints, texts = get_type_hints(kind), meanings(kind)
    defaults = {}
    if is_dataclass(kind):
        defaults = {
            field.name: field.default if field.default_factory is MISSING else field.default_factory()
            for field in fields(kind)
        }
        skipped = {field.name for field in fields(kind) if field.type == "Unwritten"}
        hints = {name: hint for name, hint in hints.items() if name in defaults and name not in skipped}
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        hints |= {name: get_type_hints(getattr(kind, name).fget)["return"] for name in written_beside(node)}
    return [
        (name, type_words(hint), default_words(defaults.get(name, MISSING)), texts.get(name, ""))
        for name, hint in hints.items()
    ]


def default_words(value: Any) -> str:
    """A default as JSON; empty if the key is always there, or its default is an object."""
    value = plain(value) if is_dataclass(value) else value
    return "" if value is MISSING or (isinstance(value, Mapping) and value) else f"`{json.dumps(value)}`"


def tables() -> str:
    """The tables of all records: common keys, and each kind's outcome."""
    roots = {"Every record": Record}
    for kind, name in KINDS.items():
        root = pkgutil.resolve_name(name)
        section = next((title for title, other in roots.items() if other is root), "")
        roots.pop(section, None)
        roots[f"{section}, `{kind}`" if section else f"`{kind}`"] = root
    visited, parts = set[Any](), list[str]()
    for title, root in roots.items():
        parts.append(f"## {title}")
        waiting = [root]
        while waiting:
            kind = waiting.pop(0)
            if kind in visited:
                continue
            visited.add(kind)
            parts.append(table(kind))
            hints = get_type_hints(kind).values()
            waiting += [inner for hint in hints for inner in inner_classes(hint)]
    return "\n\n".join(parts)


def table(kind: type) -> str:
    """Return the table of a class."""
    rows = [f"| `{name}` | {words} | {default} | {text} |" for name, words, default, text in keys(kind)]
    summary = " ".join(inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].split())
    head = [
        f"### {kind.__name__}",
        "",
        f"{summary[:1]}{tidy(summary)[1:]}.",
        "",
        "| key | type | default | meaning |",
    ]
    return "\n".join([*head, "| --- | --- | --- | --- |", *rows])


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill the tables into the page that has the mark."""
    return markdown.replace(MARK, tables()) if MARK in markdown else markdown


if __name__ == "__main__":
    print(tables())
