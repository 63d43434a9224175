"""Reading the table of a source strictly: every key that is missing, unknown or of the wrong type is reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from concord.spec.deviations import NONE, Deviations, declared
from concord.spec.errors import SpecError
from concord.spec.sources.layouts import TENSOR_LAYOUTS, WEIGHT_LAYOUTS
from concord.spec.sources.names import problem
from concord.spec.sources.schema import (
    CheckpointTable,
    Ignored,
    InputGradient,
    MaskSource,
    Native,
    Option,
    Output,
    PartTable,
    RunEntry,
    Table,
    TrainingTable,
)

T = TypeVar("T")


def parse(data: Mapping[str, Any], where: str) -> Table:
    """Return a table from plain data.

    Args:
        data: what the TOML file holds.
        where: its name, for messages.

    Raises:
        SpecError: listing every key that is missing, unknown or of the wrong type, every unknown layout and every
            placeholder that cannot be read, at once.
    """
    problems: list[str] = []
    top = _Section(_spread(data), where, "", problems)
    parts = top.each("parts", _part)
    table = Table(
        top.text("source"),
        top.text("variant"),
        top.optional_text("part_key"),
        parts,
        _deviations(top),
        _training(top) if "training" in top.data else None,
        top.text("like", ""),
        top.text("words", ""),
    )
    top.finish()
    if not problems and not parts:
        problems.append(f"{where}: 'parts' is empty but must hold at least one part")
    if problems:
        raise SpecError(problems)
    return table


def _spread(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data with all that a part has from another one; what is no part is complained of later."""
    parts = data.get("parts")
    if not isinstance(parts, Mapping):
        return dict(data)
    found: dict[str, Any] = {}
    for name, part in parts.items():
        found[name] = part
        if isinstance(part, Mapping) and isinstance(model := found.get(str(part.get("like"))), Mapping):
            left, weights = part.get("without", []), model.get("weights", {})
            plain = isinstance(left, list) and isinstance(weights, Mapping)
            kept = {key: value for key, value in weights.items() if key not in left} if plain else weights
            own = {
                key: value
                for key, value in part.items()
                if key not in ("like", *(["without"] if plain else []))
            }
            found[name] = {
                **inherited(model),
                "weights": kept,
                **own,
                "checkpoint": _both(model.get("checkpoint", {}), part.get("checkpoint", {})),
            }
    return {**data, "parts": found}


def _both(one: Any, other: Any) -> Any:
    """Return what files have of a part and of the one that it is like: what is ignored in either, and of everything else its own."""
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return other  # complained of later
    ignored = [part["ignored"] for part in (one, other) if "ignored" in part]
    merged = (
        {"ignored": {name: why for part in ignored for name, why in part.items()}}
        if ignored and all(isinstance(part, Mapping) for part in ignored)
        else {}
    )
    return {**one, **other, **merged}


def inherited(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return what one part has from another: not what was run, and what that gave."""
    return {
        key: value for key, value in part.items() if key not in ("outputs", "gradients", "unchecked", "runs")
    }


class _Section:
    """A TOML table that is read key by key; what is wrong with it is noted, and what nobody asked for is refused."""

    def __init__(self, data: Any, where: str, path: str, problems: list[str]) -> None:
        self.where, self.path, self.problems = where, path, problems
        if not isinstance(data, Mapping):
            self.note("", data, "a table")
        self.data: dict[str, Any] = dict(data) if isinstance(data, Mapping) else {}

    def note(self, key: str, value: Any, required: str) -> None:
        name = ".".join(filter(None, (self.path, key)))
        actual = "is missing" if value is None else f"is {value!r}"
        self.problems.append(f"{self.where}: {name!r} {actual} but must be {required}")

    def take(self, key: str, kind: type[T], default: T | None, required: str) -> T:
        value = self.data.pop(key, default)
        if not isinstance(value, kind):
            self.note(key, value, required)
            return kind()
        return value

    def text(self, key: str, default: str | None = None) -> str:
        return self.take(key, str, default, "text")

    def pattern(self, key: str, default: str | None = None) -> str:
        return self.checked(self.text(key, default))

    def checked(self, name: str) -> str:
        wrong = problem(name)
        if wrong:
            self.problems.append(f"{self.where}: {self.path}: {wrong}")
        return name

    def optional_text(self, key: str) -> str | None:
        return self.text(key) if key in self.data else None

    def flag(self, key: str) -> bool:
        return self.take(key, bool, False, "true or false")

    def layout(self, known: Mapping[str, Any], default: str | None = None) -> str:
        value = self.text("layout", default)
        if value and value not in known:
            self.note("layout", value, f"one of {', '.join(known)}")
        return value

    def plain(self, key: str) -> dict[str, Any]:
        return self.take(key, dict, {}, "a table")

    def texts(self, key: str) -> dict[str, str]:
        inner = self.section(key)
        return {name: inner.text(name) for name in list(inner.data)}

    def ignored(self) -> dict[str, Ignored]:
        outer, found = self.section("ignored"), {}
        for name in list(outer.data):
            if isinstance(outer.data[name], Mapping):
                inner = outer.section(name)
                found[name] = Ignored(inner.text("reason"), inner.text("holds"))
                inner.finish()
            else:
                found[name] = Ignored(outer.text(name))
        return found

    def section(self, key: str) -> _Section:
        return _Section(
            self.data.pop(key, {}), self.where, ".".join(filter(None, (self.path, key))), self.problems
        )

    def each(self, key: str, read: Callable[[_Section], T]) -> dict[str, T]:
        outer, found = self.section(key), {}
        for name in list(outer.data):
            inner = outer.section(outer.checked(name))
            found[name] = read(inner)
            inner.finish()
        return found

    def finish(self) -> None:
        for key in self.data:
            self.note(key, self.data[key], "left out: no table has such a key")


def _native(section: _Section) -> Native:
    return Native(section.pattern("name"), section.layout(WEIGHT_LAYOUTS))


def _input(section: _Section) -> Native:
    return Native(section.pattern("name"), section.layout(TENSOR_LAYOUTS, "same"))


def _output(section: _Section) -> Output:
    return Output(section.pattern("tap"), section.layout(TENSOR_LAYOUTS, "same"), section.flag("required"))


def _option(section: _Section) -> Option:
    absent = {section.text("absent"): None} if "absent" in section.data else {}
    return Option(section.text("key"), {**section.plain("values"), **absent})


def _input_gradient(section: _Section) -> InputGradient:
    names = section.take("sum_of", list, None, "a list of inputs")
    return InputGradient(tuple(map(str, names)), section.layout(TENSOR_LAYOUTS, "same"))


def _checkpoint(section: _Section) -> CheckpointTable:
    positions = section.section("positions") if "positions" in section.data else None
    table = CheckpointTable(
        prefixes=tuple(map(str, section.take("prefixes", list, [], "a list of texts"))),
        older=section.texts("older"),
        ignored=section.ignored(),
        tied=section.texts("tied"),
        positions=_native(positions) if positions else None,
        carried=section.each("carried", _native),
        requires={
            key: tuple(value) if isinstance(value, list) else (value,)
            for key, value in section.plain("requires").items()
        },
        equal=section.texts("equal"),
        defaults=section.plain("defaults"),
        counts=section.texts("counts"),
        sizes=section.texts("sizes"),
        writes=section.plain("writes"),
    )
    for inner in filter(None, (positions, section)):
        inner.finish()
    return table


def _mask(section: _Section) -> MaskSource:
    none = section.section("none")
    mask = MaskSource(section.text("stored"), section.text("ids"), none.text("key"), none.text("value"))
    for inner in (none, section):
        inner.finish()
    return mask


def _run(section: _Section) -> RunEntry:
    fields, outputs, gradients = (
        section.plain("fields"),
        section.each("outputs", _output),
        section.each("gradients", _native),
    )
    run = RunEntry(section.text("label"), fields, outputs, gradients, section.flag("only"))
    section.finish()
    return run


def _deviations(section: _Section) -> Deviations:
    try:
        return declared(section.take("deviations", list, [], "a list of tables"))
    except SpecError as error:
        section.problems += [f"{section.where}: {problem}" for problem in error.problems]
        return NONE


def _training(section: _Section) -> TrainingTable:
    inner = section.section("training")
    table = TrainingTable(
        inner.plain("constants"), inner.texts("fields"), _deviations(inner), inner.flag("float32_positions")
    )
    inner.finish()
    return table


def _part(section: _Section) -> PartTable:
    positions, gradients = section.section("positions"), section.section("gradients")
    runs = section.take("runs", list, [], "a list of tables")
    part = PartTable(
        name=section.path.rpartition(".")[2],
        kind=section.text("kind", ""),
        fields=section.texts("fields"),
        options=section.each("options", _option),
        constants=section.plain("constants"),
        weights=section.each("weights", _native),
        position_output=positions.optional_text("output"),
        inputs=section.each("inputs", _input),
        mask=_mask(section.section("mask")) if "mask" in section.data else None,
        outputs=section.each("outputs", _output),
        gradients_under=gradients.pattern("under", None if runs else ""),
        input_gradients=gradients.each("inputs", _input_gradient),
        unchecked=section.texts("unchecked"),
        checkpoint=_checkpoint(section.section("checkpoint")),
        runs=tuple(
            _run(_Section(run, section.where, f"{section.path}.runs.{n}", section.problems))
            for n, run in enumerate(runs)
        ),
    )
    for inner in (positions, gradients):
        inner.finish()
    return part
