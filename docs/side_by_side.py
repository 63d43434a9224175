"""Pages of the site that show the same model in four frameworks, made from the sources.

``python docs/side_by_side.py FOLDER`` writes only these; ``make site`` includes them. Each row aligns one
line per framework, and marks words that differ.
"""

import ast
import html
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FRAMEWORKS = {"torch": "PyTorch", "tf": "TensorFlow", "paddle": "PaddlePaddle", "jax": "JAX"}
PAGES = {
    "layers": (
        "Four frameworks side by side",
        "The layers and the model of Concord: the same classes in the same order. Only the framework "
        "calls differ.",
        ("backends/{}/layers.py", "backends/{}/model.py"),
    ),
    "bert": (
        "Four plain BERTs side by side",
        "The same BERT without options, as each framework's users would write it.",
        ("examples/bert/{}.py",),
    ),
}
SYNONYMS = {"Array": "Tensor", "call": "forward", "__call__": "forward"}
"""Framework-specific words of equal meaning."""

LEAST = 0.4
"""Minimum share of common words for two lines in one row."""

CLAUSE = r"\b[A-Z]{3}-\d+\b"
WORDS = re.compile(r"\w+|\s+|[^\w\s]")

Cell = tuple[int, str, bool]
"""Line number, line, and whether it is prose: a comment or docstring."""
Row = list[Cell | None]


def words(line: str) -> list[str]:
    """Words of a line, with synonyms unified."""
    return [SYNONYMS.get(word, word) for word in WORDS.findall(line) if not word.isspace()]


def units(path: Path) -> dict[str, list[Cell]]:
    """Lines of a file by function, class head or method."""
    text = path.read_text()
    tree, lines, cells, before = ast.parse(text), text.splitlines(), dict[str, list[Cell]](), 0
    prose = {
        number
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    } | {number for number, line in enumerate(lines, start=1) if line.lstrip().startswith("#")}

    def add(name: str, end: int) -> None:
        nonlocal before
        cells.setdefault(name, []).extend(
            (number, lines[number - 1], number in prose)
            for number in range(before + 1, end + 1)
            if lines[number - 1].strip()
        )
        before = end

    for node in tree.body:
        end = node.end_lineno or node.lineno
        if isinstance(node, ast.ClassDef):
            add(
                node.name,
                min([node.body[0].lineno, *(decorator.lineno for decorator in decorators(node.body[0]))]) - 1,
            )
            for inner in node.body:
                method = isinstance(inner, ast.FunctionDef)
                name = (
                    f".{SYNONYMS.get(inner.name, inner.name)}" if isinstance(inner, ast.FunctionDef) else ""
                )
                add(f"{node.name}{name}" if method else node.name, inner.end_lineno or end)
        elif isinstance(node, ast.FunctionDef):
            add(node.name, end)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            add(ast.unparse(target), end)
        else:
            add("Imports" if isinstance(node, (ast.Import, ast.ImportFrom)) else "About", end)
    return cells


def decorators(node: ast.stmt) -> list[ast.expr]:
    """Decorators, if any."""
    return getattr(node, "decorator_list", [])


def in_order(lists: list[list[str]]) -> list[str]:
    """Merge lists of names, keeping each list's order."""
    order: list[str] = []
    for names in lists:
        place = 0
        for name in names:
            if name in order:
                place = order.index(name) + 1
            else:
                order.insert(place, name)
                place += 1
    return order


def alike(line: str, row: Row) -> float:
    """The largest share of words that a line has in common with a row's cell."""
    mine, best = Counter(words(line)), 0.0
    for cell in row:
        if cell is not None:
            other = Counter(words(cell[1]))
            best = max(best, 2 * (mine & other).total() / max(1, mine.total() + other.total()))
    return best


def joined(rows: list[Row], lines: list[Cell], column: int) -> list[Row]:
    """Align another column's lines with rows, maximising common words."""
    empty: Row = [None] * len(FRAMEWORKS)
    score = [[0.0] * (len(lines) + 1) for _ in range(len(rows) + 1)]
    near = [[alike(line, row) for _, line, _ in lines] for row in rows]
    for i in range(len(rows) - 1, -1, -1):
        for j in range(len(lines) - 1, -1, -1):
            both = near[i][j] + score[i + 1][j + 1] if near[i][j] >= LEAST else 0.0
            score[i][j] = max(both, score[i + 1][j], score[i][j + 1])
    result, i, j = list[Row](), 0, 0
    while i < len(rows) or j < len(lines):
        row = rows[i] if i < len(rows) else empty
        pair = i < len(rows) and j < len(lines) and near[i][j] >= LEAST
        if pair and score[i][j] == near[i][j] + score[i + 1][j + 1]:
            result.append([*row[:column], lines[j], *row[column + 1 :]])
            i, j = i + 1, j + 1
            continue
        if j == len(lines) or (i < len(rows) and score[i][j] == score[i + 1][j]):
            result.append(row)
            i += 1
        else:
            result.append([*empty[:column], lines[j], *empty[column + 1 :]])
            j += 1
    return result


def sections(pattern: str) -> list[tuple[str, list[Row]]]:
    """Parts of a file in four frameworks, with their rows."""
    parts = [units(ROOT / pattern.format(name)) for name in FRAMEWORKS]
    result = []
    for name in in_order([list(part) for part in parts]):
        rows: list[Row] = []
        for column, part in enumerate(parts):
            rows = joined(rows, part.get(name, []), column)
        result.append((name, rows))
    return result


def clauses() -> dict[str, str]:
    """The specification's clauses."""
    return dict(re.findall(rf"^\| \*\*({CLAUSE})\*\* \| (.*) \|$", (ROOT / "spec/SPEC.md").read_text(), re.M))


def marked(line: str, common: set[str], definitions: dict[str, str]) -> str:
    """A line as HTML, with uncommon words marked and clauses linked."""
    parts = []
    for piece in re.split(f"({CLAUSE})", line.strip()):
        if piece in definitions:
            definition = html.escape(definitions[piece], quote=True)
            parts.append(f'<a href="#{piece}" title="{definition}">{piece}</a>')
            continue
        for word in WORDS.findall(piece):
            text = html.escape(word)
            plain = word.isspace() or SYNONYMS.get(word, word) in common
            parts.append(text if plain else f"<mark>{text}</mark>")
    return "".join(parts).replace("</mark><mark>", "")


def table_row(row: Row, definitions: dict[str, str]) -> str:
    """Return a row as HTML."""
    word_sets = [set(words(cell[1])) for cell in row if cell is not None]
    common = set.intersection(*word_sets) if len(word_sets) > 1 else set.union(*word_sets)
    same = (
        len(word_sets) == len(row) and len({tuple(words(cell[1])) for cell in row if cell is not None}) == 1
    )
    cells = []
    for cell in row:
        if cell is None:
            cells.append('<td class="none"></td>')
            continue
        number, line, prose = cell
        indent = len(line) - len(line.lstrip())
        kind = "line" + " alone" * (len(word_sets) == 1) + " prose" * prose
        place = f'class="{kind}" data-line="{number}" style="--in:{indent}"'
        cells.append(f"<td {place}>{marked(line, common, definitions)}</td>")
    return f"<tr{' class=same' if same else ''}>{''.join(cells)}</tr>"


def page(name: str) -> str:
    """Return a page as HTML."""
    title, lead, patterns = PAGES[name]
    definitions, body, contents, citations = clauses(), list[str](), list[str](), set[str]()
    for pattern in patterns:
        file = pattern.rpartition("/")[2].format("…")
        for part, rows in sections(pattern):
            anchor = f"{file}-{part}".replace("….py-", "").replace(".py-", ".")
            if "." not in part and part[0].isupper() and not part.isupper():
                contents.append(f'<a href="#{anchor}">{part}</a>')
            body.append(
                f'<tbody id="{anchor}"><tr><th colspan="4">{html.escape(part)} '
                f"<small>{pattern.format('…')}</small></th></tr>"
                f"{''.join(table_row(row, definitions) for row in rows)}</tbody>"
            )
            citations |= {key for row in rows for cell in row if cell for key in re.findall(CLAUSE, cell[1])}
    others = " ".join(f'<a href="{key}.html">{PAGES[key][0]}</a>.' for key in PAGES if key != name)
    tabs = "".join(
        f'<label><input type="radio" name="framework" value="{short}"{" checked" * (short == "torch")}>'
        f"{long}</label>"
        for short, long in FRAMEWORKS.items()
    )
    heads = "".join(f"<th>{long}</th>" for long in FRAMEWORKS.values())
    rules = "".join(
        f"body:has([value={short}]:checked) tr>td:nth-child({place}){{display:block}}"
        f"body:has([value={short}]:checked) tbody:not(:has(.line:nth-child({place}))){{display:none}}"
        for place, short in enumerate(FRAMEWORKS, start=1)
    )
    texts = "".join(
        f'<dt id="{key}">{key}</dt><dd>{html.escape(definitions[key])}</dd>'
        for key in sorted(citations & set(definitions))
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}@media(max-width:900px){{{rules}}}</style>"
        f"<h1>{title}</h1><p>{lead} Words that are not in every column are marked. Each clause links to its "
        f"definition below. {others}</p><nav>{' · '.join(contents)}</nav>"
        f'<form>{tabs}<label><input type="checkbox" id="differing">only lines that differ</label></form>'
        f"<table><thead><tr>{heads}</tr></thead>{''.join(body)}</table>"
        f"<h2>Clauses named above</h2><dl>{texts}</dl></html>"
    )


STYLE = """
:root{color-scheme:light dark;--page:#f7f7f4;--card:#fff;--ink:#1c2126;--muted:#566069;--line:#d8dbd9;
--mark:#ffe3a3;--alone:#e6eefb;--none:#eceeed;--link:#1a5a9e}
@media(prefers-color-scheme:dark){:root{--page:#15181b;--card:#1c2024;--ink:#e4e6e8;--muted:#9aa4ad;
--line:#343a40;
--mark:#5c4710;--alone:#20304a;--none:#191c1f;--link:#8ab8ee}}
body{margin:0 auto;padding:1rem 1.2rem 4rem;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;margin:.5rem 0}p{max-width:46rem;color:var(--muted)}a{color:var(--link)}
nav{font-size:.85rem;line-height:1.9}form{margin:.8rem 0;font-size:.9rem;display:flex;gap:1rem;flex-wrap:wrap}
table{width:100%;table-layout:fixed;border-collapse:collapse;background:var(--card);
font:11.5px/1.45 ui-monospace,"DejaVu Sans Mono",monospace}
thead th{position:sticky;top:0;background:var(--card);border-bottom:2px solid var(--line);padding:.4rem;
text-align:left;font-size:.8rem;z-index:1}
tbody th{text-align:left;padding:1.1rem .4rem .2rem;font-size:.8rem;border-top:1px solid var(--line)}
small{color:var(--muted);font-weight:normal}
td{vertical-align:top;overflow-wrap:anywhere;border-right:1px solid var(--line)}
.line{padding:0 .3rem 0 calc(.3rem + (var(--in) + 2)*.75ch);text-indent:-1.5ch}
.alone{background:var(--alone)}.none{background:var(--none)}
mark{background:var(--mark);color:inherit;border-radius:2px}.prose{color:var(--muted)}
body:has(#differing:checked) .same{display:none}
form label:has([type=radio]){display:none}
dt{font-weight:bold;margin-top:.7rem}dd{margin-left:0;max-width:60rem}:target{outline:2px solid var(--link)}
@media(max-width:900px){form label:has([type=radio]){display:inline}thead{display:none}
table,tbody,tr{display:block}td{display:none;border:0}.none{background:none}.line{font-size:12px}
tbody th{display:block}form{position:sticky;top:0;background:var(--page);padding:.5rem 0;z-index:1}}
"""


def on_post_build(config: dict[str, str]) -> None:
    """Add the pages to the site."""
    write(Path(config["site_dir"]) / "side-by-side")


def write(folder: Path) -> None:
    """Write the pages."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PAGES:
        (folder / f"{name}.html").write_text(page(name))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
