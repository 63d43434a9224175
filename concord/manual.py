"""Write the reference pages of docs/api from the tables and docstrings of the code: ``python -m concord.manual docs/api``."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from concord import backends, conformance, porting, spec
from concord.backends import interface
from concord.conformance import comparison, diagnosis, explain
from concord.porting import stored
from concord.spec import batch as batches
from concord.spec import tensors
from concord.spec.config import CHOICES
from concord.spec.errors import ConfigError
from concord.spec.files import write_text

PACKAGES = {"spec": spec, "backends": backends, "conformance": conformance, "porting": porting}

BEYOND = {
    "spec": {"Tensor": tensors, "batch_of_lengths": batches},
    "backends": dict.fromkeys(
        (
            "Problem",
            "Settings",
            "Steps",
            "Session",
            "Measurable",
            "Editable",
            "IMPLEMENTATIONS",
            "EXECUTIONS",
            "PRECISION_MODES",
        ),
        interface,
    ),
    "conformance": {"Judgement": comparison, "Diagnosis": diagnosis, "Cause": explain},
    "porting": {"Stored": stored},
}
"""What is documented besides the names that a package exports, and where it is."""

AXES = {
    "batch": ("B", "samples"),
    "tokens": ("T", "tokens of a sample"),
    "query": ("Q", "queries of the parts `attention` and `dot_product`"),
    "key": ("S", "their keys"),
    "vocab": ("V", "`vocab_size`"),
    "positions": ("P", "`max_positions`"),
    "segments": ("G", "`num_segments`"),
    "d_model": ("D", "`d_model`"),
    "heads": ("H", "`num_heads`"),
    "head_dim": ("K", "D / H"),
    "d_ff": ("F", "`d_ff`"),
    "classes": ("C", "`num_classes`"),
    "features": ("E", "D, or P D with `pooling = flatten`"),
}
"""Axis name to its symbol and size."""

OPTIONS: dict[str, tuple[Any, ...]] = {
    **{
        name: values
        for name, values in CHOICES.items()
        if name not in ("position_layout", "position_exponent")
    },
    **{field.name: (False, True) for field in spec.FIELDS.values() if field.type == "bool"},
    "num_segments": (0, 2),
    "num_classes": (1, 3),
    "length_epsilon": (None, 1e-12),
}
"""The options that a table may depend on, and values that differ in it."""

TABLES: dict[Any, dict[str, Any]] = {
    "learned": {"position_layout": None, "position_exponent": None, "position_base": None},
    "sinusoidal": {"position_layout": "interleaved", "position_exponent": "pair", "position_base": 10000.0},
}
"""What a choice of positions brings with it."""

SAID = {
    ("num_segments", 2): "`num_segments` above 0",
    ("num_classes", 3): "`num_classes` above 1",
    ("length_epsilon", 1e-12): "`length_epsilon`",
}

Table = Callable[[spec.EncoderConfig, str], Mapping[str, Any]]


def pages() -> dict[str, str]:
    """Return the text of every page by file name."""
    written = {
        "configuration.md": configuration(),
        "parameters.md": parameters(),
        "taps.md": taps(),
        "batch.md": batch(),
        **{f"{name}.md": package(name, module) for name, module in PACKAGES.items()},
    }
    index = "".join(
        f"- [{text.splitlines()[0].removeprefix('# ')}]({name})\n" for name, text in written.items()
    )
    return {
        "README.md": f"# Reference\n\nWritten by `make api` from the code; a test fails if a page is not what it would write.\n\n{index}",
        **written,
    }


def main() -> None:
    """Write the pages into the folder that is named."""
    (folder,) = map(Path, sys.argv[1:])
    for name, text in pages().items():
        write_text(folder / name, text)


def configuration() -> str:
    """Return the page of the options."""
    said = described(spec.EncoderConfig)
    rows = []
    for name, field in spec.FIELDS.items():
        values = ", ".join(f"`{value}`" for value in CHOICES.get(name, ())) or f"{field.type}".replace(
            " | None", ""
        )
        rows.append(
            (
                f"`{name}`",
                values + ("" if field.default is dataclasses.MISSING else ", or absent"),
                said[name],
            )
        )
    return (
        "# Options of a configuration\n\nThe fields of `spec.EncoderConfig`, which are the keys of a variant's TOML file. A clause says exactly what an "
        "option does. `concord show variants` shows how the published variants differ, and `concord show variants NAME` prints one whole.\n\n"
        f"{table(('field', 'type or values', ''), rows)}"
    )


def parameters() -> str:
    """Return the page of the canonical names."""
    parts, trained = (
        {part: derived(spec.parameters, part) for part in spec.PARTS},
        derived(trainable, "model"),
    )
    rows = []
    for name, (entry, when) in parts["model"].items():
        within = [
            part
            for part, names in parts.items()
            if name in names or (part == "attention" and name.removeprefix("layers.0.") in names)
        ]
        gradient = trained[name][1]
        rows.append(
            (
                f"`{name.replace('.0.', '.N.')}`",
                symbols(entry.shape),
                entry.kind,
                when or "always",
                "" if gradient == when else gradient,
                ", ".join(within),
            )
        )
    return (
        "# Canonical parameter names\n\nWhat `spec.parameters(config)` returns: every parameter, in the order of computation. `N` counts the layers from 0. "
        f"A linear weight is (in, out) and is used as x W + b ({linked('SPEC WGT-2')}). Arrays are floating-point numbers of any dtype, and each backend rounds "
        f"them to its precision once ({linked('SPEC PRC-2')}). The gradient of a parameter has its name and its shape.\n\n{axes()}"
        "The part `attention` has the parameters of one attention without `layers.N.` before them; `dot_product` has none.\n\n"
        f"{table(('name', 'shape', 'kind', 'present with', 'trained only with', 'parts'), rows)}"
    )


def taps() -> str:
    """Return the page of the intermediate tensors."""
    text = (
        "# Taps\n\nA tap is an intermediate tensor. What `spec.taps(config, part)` returns, in the order of computation: with `norm_placement = pre` a norm "
        "stands before its sublayer, not after it. `N` counts the layers from 0. A run delivers taps in its own precision; the gradient of the loss by a tap "
        f"has its shape.\n\n{axes()}"
    )
    for parts in (("model", "pooled", "encoder", "stack"), ("attention",), ("dot_product",)):
        lists = {part: derived(spec.taps, part) for part in parts}
        rows = [
            (
                f"`{name.replace('.0.', '.N.')}`",
                symbols(entry.shape),
                clauses(name, lists),
                when or "always",
                ", ".join(part for part in parts if name in lists[part]),
            )
            for name, (entry, when) in lists[parts[0]].items()
        ]
        text += f"\n## {', '.join(f'`{part}`' for part in parts)}\n\n{table(('tap', 'axes', 'defined in', 'present with', 'parts'), rows)}"
    return f"{text}\nIn the last two parts there are masked scores only where the batch has a `key_mask`, and masked weights only where it has a `query_mask`.\n"


def clauses(tap: str, lists: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the clauses that define a tap in some parts; where they are not the same, with the parts."""
    found: dict[str, list[str]] = {}
    for part, names in lists.items():
        if tap in names:
            found.setdefault(f"SPEC {names[tap][0].clause}", []).append(part)
    return linked(
        ", ".join(f"{clause} ({', '.join(parts)})" for clause, parts in found.items())
        if len(found) > 1
        else next(iter(found))
    )


def batch() -> str:
    """Return the page of the inputs."""
    said = described(spec.Batch)
    rows = []
    for field in dataclasses.fields(spec.Batch):
        uses = {part: entry for part in spec.PARTS if (entry := derived(spec.inputs, part).get(field.name))}
        when = next(iter(uses.values()))[1]
        parts = ", ".join(
            f"{part}{'' if entry.required else ' (optional)'}" for part, (entry, _) in uses.items()
        ) + (f"; with {when}" if when else "")
        rows.append((f"`{field.name}`", said[field.name], parts))
    return (
        "# Inputs of a run\n\nThe fields of `spec.Batch`. Whoever asks for the run fills those of the part that it runs; all others stay absent. "
        "`spec.example_batch(config, part=…)` draws all of them, with every awkward kind of padding, and `spec.from_arrays` makes a batch of arrays by name. "
        f"`spec.validate_batch` says everything that is wrong with one.\n\n{axes()}{table(('field', 'what it holds', 'parts that take it'), rows)}"
    )


def named(package: str) -> dict[str, str]:
    """Return every name on a package's page, to its path."""
    exported = {name: f"{package}.{name}" for name in PACKAGES[package].__all__}
    return exported | {name: f"{module.__name__}.{name}" for name, module in BEYOND[package].items()}


def package(name: str, module: ModuleType) -> str:
    """Return the page of what a package exports."""
    text = f"# `from concord import {name}`\n\n{markdown(module.__doc__, name)}"
    for exported, where in sorted(
        named(name).items(), key=lambda item: (not item[0].islower(), item[0].lower())
    ):
        text += f"\n## `{where}`\n\n{entry_of(name, where, getattr(BEYOND[name].get(exported, module), exported))}"
    return text


def entry_of(home: str, where: str, thing: Any) -> str:
    """Return what there is to say of one name on a package's page."""
    thing = inspect.unwrap(thing) if callable(thing) else thing
    if inspect.isfunction(thing):
        return f"{code(where, *signature(thing))}{markdown(thing.__doc__, home)}"
    if not inspect.isclass(thing):
        return f"{markdown(comment_of(home, where.rpartition('.')[2]), home)}\n{values(thing)}"
    fields = (
        {field.name: field for field in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else {}
    )
    text = ""
    if fields:
        text = code(where, [declared(field) for field in fields.values()])
    elif (
        inspect.isfunction(vars(thing).get("__init__"))
        and not issubclass(thing, Exception)
        and not getattr(thing, "_is_protocol", False)
    ):
        text = code(where, signature(thing.__init__)[0])
    text += markdown(
        thing.__doc__,
        home,
        [base.__doc__ for base in reversed(thing.__mro__[1:]) if dataclasses.is_dataclass(base)],
    )
    members = {
        name: value for name, value in vars(thing).items() if not name.startswith("_") and name not in fields
    }
    properties = {
        name: getattr(value, "fget", None) or getattr(value, "func", None) for name, value in members.items()
    }
    text += "".join(
        f"\n`.{name}`: {markdown(getter.__doc__, home)}" for name, getter in properties.items() if getter
    )
    return text + "".join(
        f"\n### `.{name}`\n\n{code(name, *signature(method))}{markdown(method.__doc__, home)}"
        for name, method in members.items()
        if inspect.isfunction(method)
    )


def values(constant: Any) -> str:
    """Return the value of a constant."""
    if isinstance(constant, Mapping) and all(isinstance(text, str) for text in constant.values()):
        return table(("value", ""), ((f"`{key}`", text) for key, text in constant.items()))
    return ", ".join(f"`{value}`" for value in ([constant] if isinstance(constant, str) else constant)) + "\n"


def declared(field: dataclasses.Field[Any]) -> str:
    """Return a field as a parameter of its class."""
    if field.default is not dataclasses.MISSING and not callable(field.default):
        return f"{field.name}: {field.type} = {field.default!r}"
    required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    return f"{field.name}: {field.type}" + ("" if required else " = …")


def signature(function: Callable[..., Any]) -> tuple[list[str], str]:
    """Return the parameters of a function as they stand in its source, and what it returns."""
    source = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(source, ast.FunctionDef)
    given = source.args
    defaults = [None] * (len(given.args) - len(given.defaults)) + given.defaults
    parameters = [
        ast.unparse(name) + (f" = {ast.unparse(default)}" if default else "")
        for name, default in zip(given.args, defaults, strict=True)
        if name.arg != "self"
    ]
    parameters += [f"**{ast.unparse(given.kwarg)}"] if given.kwarg else []
    return parameters, f" -> {ast.unparse(source.returns)}" if source.returns else ""


def code(where: str, parameters: list[str], result: str = "") -> str:
    """Return a call that does not run on: a long one has a line for each parameter."""
    text = f"{where}({', '.join(parameters)}){result}"
    if len(text) > 120:
        text = f"{where}(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + f"){result}"
    return f"```py\n{text}\n```\n\n"


def comment_of(package: str, name: str) -> str:
    """Return the docstring of a constant: the text that follows it where it is defined."""
    for module in [
        module for key, module in sorted(sys.modules.items()) if key.startswith(f"concord.{package}")
    ]:
        body = ast.parse(inspect.getsource(module)).body
        for before, after in itertools.pairwise(body):
            targets = (
                before.targets
                if isinstance(before, ast.Assign)
                else [before.target]
                if isinstance(before, ast.AnnAssign)
                else []
            )
            if (
                name in [ast.unparse(target) for target in targets]
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                return str(after.value.value)
    raise LookupError(f"{name} has no docstring")


def sections(doc: str | None) -> Iterator[tuple[str, list[str]]]:
    """Yield the paragraphs of a docstring, each with the title of its section; an entry of a section is a paragraph."""
    title = ""
    for block in re.split(r"\n\s*\n", inspect.cleandoc(doc or "")):
        lines = block.splitlines()
        if re.fullmatch(r"(Args|Attributes|Raises|Returns):", lines[0]):
            title, lines = lines[0][:-1], inspect.cleandoc("\n" + "\n".join(lines[1:])).splitlines()
        else:
            title = ""
        paragraphs: list[str] = []
        for line in lines:
            if paragraphs and (line.startswith(" ") or title in ("", "Returns")):
                paragraphs[-1] += f" {line.strip()}"
            else:
                paragraphs.append(line)
        yield title, paragraphs


def described(thing: Any) -> dict[str, str]:
    """Return what a docstring says of each attribute."""
    entries = (
        line.partition(": ")
        for title, lines in sections(thing.__doc__)
        if title == "Attributes"
        for line in lines
    )
    return {
        name: plain(text, "spec").removesuffix(".")
        for names, _, text in entries
        for name in names.split(", ")
    }


def markdown(doc: str | None, home: str, inherited: Iterable[str | None] = ()) -> str:
    """Return a docstring as Markdown, with the attributes that a class inherits."""
    before = [
        line
        for base in inherited
        for title, lines in sections(base)
        if title == "Attributes"
        for line in lines
    ]
    text = ""
    for title, lines in sections(doc):
        text += "\n" if text else ""
        if title in ("", "Returns"):
            text += ("Returns: " if title else "") + "".join(f"{plain(line, home)}\n" for line in lines)
        else:
            entries = [line.partition(": ") for line in (before + lines if title == "Attributes" else lines)]
            text += f"{'Arguments' if title == 'Args' else title}:\n\n"
            text += "".join(
                f"- {', '.join(f'`{name}`' for name in names.split(', '))}: {plain(said, home)}\n"
                for names, _, said in entries
            )
    return text


def plain(text: str, home: str) -> str:
    """Return reStructuredText's roles and literals as Markdown's code; what has an entry is linked, and so is the specification."""

    def link(role: re.Match[str]) -> str:
        words = role[1].split(".")
        package = next((word for word in words if word in PACKAGES), home)
        found = next((named(package)[word] for word in reversed(words) if word in named(package)), None)
        anchor = re.sub(r"[^a-z_]", "", found.lower()) if found else ""
        return (
            f"[`{'.'.join(words[-2:]) if words[-1] not in named(package) else words[-1]}`]({package}.md#{anchor})"
            if found
            else f"`{role[1]}`"
        )

    return linked(re.sub(r"``([^`]+)``", r"`\1`", re.sub(r":\w+:`([^`]+)`", link, text)))


def linked(text: str) -> str:
    """Return text in which the specification is linked where a clause is named."""
    return re.sub(r"SPEC [A-Z]{3}-\d+", r"[\g<0>](../../spec/SPEC.md)", text)


def trainable(config: spec.EncoderConfig, part: str) -> dict[str, bool]:
    """Return the names of what gets a gradient as a table."""
    return dict.fromkeys(spec.trainable(config, part), True)


@functools.cache
def derived(table_of: Table, part: str) -> dict[str, tuple[Any, str]]:
    """Return every name that a table may have, its entry, and the options that it needs: found by trying them.

    Raises:
        RuntimeError: if the presence of a name is more than some options each having some values.
    """
    bases = [spec.variant(name, num_layers=1, num_heads=2, d_model=4) for name in spec.variants()]
    kinds = {
        name
        for base in bases
        for name in OPTIONS
        if len({frozenset(table_of(config, part)) for config in varied(base, [name])}) > 1
    }
    configs = list(varied(spec.variant("bert", num_layers=1), sorted(kinds)))
    tables = [table_of(config, part) for config in configs]
    order: list[str] = []
    for found in sorted(tables, key=len, reverse=True):
        for before, name in itertools.pairwise(["", *found]):
            if name not in order:
                order.insert(order.index(before) + 1 if before else 0, name)
    result = {}
    for name in order:
        having = [config for config, found in zip(configs, tables, strict=True) if name in found]
        needed = {
            kind: values
            for kind in sorted(kinds)
            if (values := {getattr(config, kind) for config in having})
            != {getattr(config, kind) for config in configs}
        }
        if having != [
            config
            for config in configs
            if all(getattr(config, kind) in values for kind, values in needed.items())
        ]:
            raise RuntimeError(f"{name}: its presence depends on more than one option at a time")
        result[name] = (
            next(found[name] for found in tables if name in found),
            ", ".join(
                " or ".join(condition(kind, value) for value in OPTIONS[kind] if value in values)
                for kind, values in needed.items()
            ),
        )
    return result


def varied(base: spec.EncoderConfig, kinds: list[str]) -> Iterator[spec.EncoderConfig]:
    """Yield every configuration that differs from one in some options."""
    for values in itertools.product(*(OPTIONS[kind] for kind in kinds)):
        try:
            chosen = dict(zip(kinds, values, strict=True))
            yield base.replace(**chosen, **TABLES.get(chosen.get("positions"), {}))
        except ConfigError:
            continue


def condition(kind: str, value: Any) -> str:
    """Say which value of an option is needed."""
    text = str(value).lower() if isinstance(value, bool) else value
    return SAID.get((kind, value), f"`{kind} = {text}`")


def axes() -> str:
    """Return the legend of the axes."""
    missing = tensors.axis_sizes(spec.variant("bert"), batch=1, tokens=1, query=1, key=1).keys() ^ AXES.keys()
    if missing:
        raise LookupError(f"axes without a symbol, or symbols without an axis: {', '.join(sorted(missing))}")
    return f"Axes: {'; '.join(f'{symbol} = {size}' for symbol, size in AXES.values())}.\n\n"


def symbols(shape: str) -> str:
    """Return a symbolic shape in the symbols of :data:`AXES`."""
    return f"({', '.join(AXES[axis][0] for axis in shape.split())})"


def table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [titles, ("---",) * len(titles), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
