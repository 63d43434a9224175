"""Imports, clauses, and files that may drift apart."""

import ast
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from concord import spec

ROOT = Path(__file__).parents[1]
FRAMEWORKS = {
    "torch": {"torch"},
    "tf": {"tensorflow", "keras"},
    "paddle": {"paddle"},
    "jax": {"jax", "jaxlib", "flax", "optax"},
}
ALL_FRAMEWORKS = frozenset().union(*FRAMEWORKS.values())

# What each package may import of our own besides itself; imports go one way.
MAY_IMPORT = {
    "spec": set(),
    "backends": {"spec"},
    "conformance": {"spec", "backends"},
    "porting": {"spec", "backends", "conformance"},
    "speed": {"spec", "backends", "conformance"},
    "concord": {"spec", "backends", "porting", "speed", "conformance"},
}


@cache
def tree(path):
    return ast.parse(path.read_text(), str(path))


@cache
def sources(folder):
    return tuple(sorted((ROOT / folder).rglob("*.py")))


@cache
def tracked():
    # Files that git has, or would add.
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return tuple(path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file())


def text_of(path):
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return ""


def relative(path):
    return path.relative_to(ROOT).as_posix()


# Imports go one way.


def imports(path, nodes=None):
    # Line and dotted name of each import, also within functions; only among `nodes` if given.
    package = relative(path).removesuffix(".py").split("/")[:-1]
    for node in nodes or ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            yield from (
                (node.lineno, str(first.value)) for first in node.args[:1] if isinstance(first, ast.Constant)
            )


def imports_of(folder):
    # The place of each import in a folder, and its dotted name.
    return [(f"{relative(path)}:{line}", name) for path in sources(folder) for line, name in imports(path)]


def part_of(name):
    # The part of Concord to which a module belongs, or the top-level package if it is not ours. Names in
    # `concord/__init__.py` belong to no part, so every part may import them.
    first, inner = (*name.split("."), "")[:2]
    if first != "concord" or inner in MAY_IMPORT:
        return first if first != "concord" else inner
    return "concord" if (ROOT / "concord" / f"{inner}.py").exists() else ""


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package):
    forbidden = MAY_IMPORT.keys() - MAY_IMPORT[package] - {package}
    outside = MAY_IMPORT.keys() - {"concord"}  # only the installed package has these names
    assert not [
        (place, name)
        for place, name in imports_of(package)
        if part_of(name) in forbidden or name.partition(".")[0] in outside
    ]


def test_every_package_of_ours_is_in_the_import_table():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages <= MAY_IMPORT.keys() | {"tests"}


def test_editors_find_every_part_of_the_package_in_a_checkout():
    links = {path.name: path.resolve() for path in (ROOT / "typings" / "concord").iterdir()}
    parts = {name: ROOT / name for name in MAY_IMPORT if name != "concord"}
    assert links == {"__init__.py": ROOT / "concord" / "__init__.py", **parts}


def test_spec_imports_numpy_and_libraries_without_a_framework_only():
    libraries = {"numpy", "pydantic", "pydantic_core", "safetensors", "scipy"}
    allowed = {"", "spec", *libraries, *sys.stdlib_module_names}
    assert not [(place, name) for place, name in imports_of("spec") if part_of(name) not in allowed]


# Places that import a framework.
OWNERS = {
    **{f"backends/{name}/": name for name in FRAMEWORKS},
    **{f"conformance/mutants/plugins/{name}.py": name for name in FRAMEWORKS},
    # A PyTorch module of the user is the reference there, or is measured.
    **dict.fromkeys(("conformance/compare/", "concord/commands/compare.py", "speed/peers/"), "torch"),
    # These run in a process of their own.
    **dict.fromkeys(("porting/containers/torch_files.py", "porting/containers/onnx.py"), "torch"),
    "porting/containers/tensorflow.py": "tf",
}


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_framework_is_imported_in_its_own_places_only_and_no_backend_by_another(folder):
    for place, name in imports_of(folder):
        owner = next((owner for start, owner in OWNERS.items() if place.startswith(start)), "")
        others = tuple(f"concord.backends.{other}" for other in FRAMEWORKS if other != owner)
        assert name.partition(".")[0] not in ALL_FRAMEWORKS - FRAMEWORKS.get(owner, set()), place
        assert folder != "backends" or not name.startswith(others), place


def test_backends_know_neither_variants_nor_each_other():
    names = "|".join(re.escape(name) for name in sorted(spec.variants(), key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w-])({names})(?![\w-])")
    for path in sources("backends"):
        assert pattern.findall(path.read_text()) == [], path
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.If, ast.IfExp, ast.While)):
                assert not re.search(r"\bbackend\b", ast.unparse(node.test)), (path, node.lineno)


# Clauses: the specification and the tests refer to each other.

CLAUSE = re.compile(r"\b[A-Z]{3}-\d+\b")
NO_CLAUSE = {"SHA-256"}


def clauses():
    return re.findall(r"^\| \*\*([A-Z]{3}-\d+)\*\* \|", (ROOT / "spec/SPEC.md").read_text(), re.MULTILINE)


def proven():
    # Clauses in `pytest.mark.clause(…)`.
    return {
        ast.literal_eval(argument)
        for path in (*sources("tests"), *sources("conformance"))
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "clause"
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }


def test_clauses_are_numbered_without_gaps():
    groups = {}
    for clause in clauses():
        group, number = clause.split("-")
        groups.setdefault(group, []).append(int(number))
    assert len(groups) > 10
    for group, numbers in groups.items():
        assert numbers == list(range(1, len(numbers) + 1)), group


def test_every_clause_is_proven_by_a_test():
    assert not set(clauses()) - proven()


def test_every_clause_that_code_or_prose_names_exists():
    clause_ids = {*clauses(), *NO_CLAUSE}
    for path in tracked():
        if path.suffix in (".py", ".md", ".toml"):
            assert set(CLAUSE.findall(text_of(path))) <= clause_ids, path


def test_every_tap_and_input_bears_a_clause_that_exists(variant_config):
    clause_ids = clauses()
    for part in spec.PARTS:
        tables = {**spec.taps(variant_config, part), **spec.inputs(variant_config, part)}
        assert not {name: tensor.clause for name, tensor in tables.items() if tensor.clause not in clause_ids}


# Files: none is too large or names a place on one machine.

ELSEWHERE = (
    # Written so that no pattern matches itself.
    r"/work[/]",
    r"/tmp/bash[_]",
    r"/opt/[w]heels",
    r"/home/[a-z]",
    r"/root[/]",
    r"[A-Z]:\\Users",
    r"pypi[.]org",
    r"python[h]osted",
    r"download[.]pytorch",
    r"anaconda[.]org",
    r"index-[u]rl",
    r"find-[l]inks",
    r"trusted-[h]ost",
)
MOST_BYTES = 2 * 2**20


def test_no_file_names_a_registry_or_a_place_on_one_machine():
    pattern = re.compile("|".join(ELSEWHERE))
    for path in tracked():
        assert pattern.findall(text_of(path)) == [], path


def test_no_file_is_too_large():
    assert not [relative(path) for path in tracked() if path.stat().st_size > MOST_BYTES]


# Links between documents.


def test_links_between_documents_lead_somewhere():
    count = 0
    for path in (path for path in tracked() if path.suffix == ".md"):
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text_of(path)):
            assert (path.parent / link).exists(), (path, link)
            count += 1
    assert count > 10


# Tolerances are derived, never set by hand.

TOLERANCES = (
    r"\b(rtol|atol|rel_tol|abs_tol|reltol|abstol|allclose|isclose|assert_allclose|approx|assert_almost_equal"
    r"|assert_array_almost_equal)\b|\btolerances?\s*=\s*[\d.]"
)
# Files that may use such a word, with the reason; none of them judges a backend.
BY_HAND = {
    "examples/criteria.py": (
        "the field's usual criteria, whose misses and false alarms are counted; no verdict rests on them"
    ),
    "porting/difference.py": (
        "a factor is recognised, to say in words where it may come from; no verdict rests on it"
    ),
    "tests/test_bugs.py": "operations on the tape against NumPy's and differences of them",
    "tests/test_spec_config.py": "the largest number of a precision, as a textbook prints it",
    "tests/test_spec_inputs.py": "a table of sines against math.sin",
}


def test_no_tolerance_is_set_by_hand():
    for path in tracked():
        if path.suffix == ".py" and path != Path(__file__).resolve() and relative(path) not in BY_HAND:
            assert re.findall(TOLERANCES, text_of(path)) == [], path
