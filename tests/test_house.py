"""The house stays small enough to keep in mind: sizes, names, and no circular imports."""

import ast
import re
import tokenize
from collections import defaultdict
from graphlib import TopologicalSorter

import pytest

from tests.test_structure import ROOT, imports, sources, tree

# The ceiling and the aim of each folder, in tokens of Python. Lower a ceiling as its folder shrinks. Raising
# one is a decision, with its reason in `docs/decisions`.
SIZES = {
    "spec": (44_200, 42_000),
    "backends": (53_700, 50_000),
    "conformance": (182_000, 82_000),
    "porting": (30_100, 26_000),
    "speed": (11_500, 9_000),
    "concord": (19_700, 13_000),
    "tests": (162_700, 90_000),
}

UNCOUNTED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}

SOURCES = [name for name in SIZES if name != "tests"]


def modules(*folders):
    return [path for folder in folders for path in sources(folder)]


def size(path):
    with path.open("rb") as file:
        return sum(token.type not in UNCOUNTED for token in tokenize.tokenize(file.readline))


@pytest.mark.parametrize("folder", SIZES)
def test_a_folder_is_no_larger_than_its_ceiling(folder):
    ceiling, aim = SIZES[folder]
    tokens = sum(map(size, modules(folder)))
    print(f"{folder}: {tokens} tokens, at most {ceiling}, aim {aim}")
    assert aim <= ceiling
    assert tokens <= ceiling


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    inner = parts[1:] if parts[0] == "concord" else parts
    return ".".join(("concord", *(part for part in inner if part != "__init__")))


def at_once(path):
    # Statements that run on import of the module.
    waiting = [*tree(path).body]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, (ast.Try, ast.With)) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test)
        ):
            waiting += node.body


def imported(path, names):
    # Modules imported on import of the module.
    for _, name in imports(path, at_once(path)):
        yield name if name in names else name.rpartition(".")[0]


def test_no_import_goes_in_a_circle():
    paths = {name_of(path): path for path in modules(*SOURCES)}
    # Raises an error that names the circle.
    TopologicalSorter(
        {
            name: {other for other in imported(path, set(paths)) if other in paths and other != name}
            for name, path in paths.items()
        }
    ).prepare()


def folder_of(name):
    # Modules at the top of conformance are `base`, which all folders use, or `faces`, which use all folders.
    _, _, first = f"{name}.".split(".")[:3]
    if (ROOT / "conformance" / first / "__init__.py").exists():
        return first or "faces"
    return "faces" if first in ("plugin", "test_conformance") else "base"


def test_no_folder_of_conformance_imports_back():
    paths = {name_of(path): path for path in modules("conformance")}
    graph = defaultdict(set)
    for name, path in paths.items():
        for _, other in imports(path):
            target = other if other in paths else other.rpartition(".")[0]
            if target in paths and folder_of(target) != folder_of(name):
                graph[folder_of(name)].add(folder_of(target))
    TopologicalSorter(graph).prepare()


def place_of(path):
    # Each of the four backends has files of the same names.
    return re.sub(r"/(torch|tf|paddle|jax)\b", "/FRAMEWORK", path.relative_to(ROOT).as_posix())


# A command's file has the name of the command, which may also be that of a module.
SHARED_NAMES = {"__init__", "__main__"}


def repeated(named):
    # Names that stand in several places.
    places = defaultdict(set)
    for name, path in named:
        places[name].add(place_of(path))
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def test_no_module_has_the_name_of_another():
    named = [(path.stem, path) for path in modules(*SOURCES) if path.parent.name != "commands"]
    assert repeated(named).keys() <= SHARED_NAMES


def test_no_class_has_the_name_of_another():
    named = [
        (node.name, path)
        for path in modules(*SOURCES)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    ]
    assert repeated(named) == {}
