"""Adds the README and linked files to the site, so that no link is dead."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"""(\]\(|(?:href|src|srcset)=")([^):#"]+)((?:#[^)"]*)?[)"])""")
OURS = "docs/"


def in_repository(page: str) -> str:
    """A page's path in the repository."""
    return OURS + page if (ROOT / OURS / page).is_file() else page


def targets(text: str, page: str) -> dict[str, str]:
    """The path of each link from a page to a file of the repository."""
    folder = posixpath.dirname(in_repository(page))
    paths = {match[2]: posixpath.normpath(posixpath.join(folder, match[2])) for match in LINK.finditer(text)}
    return {link: path for link, path in paths.items() if (ROOT / path).is_file()}


def on_files(files: Files, *, config: Any) -> Files:
    """Add the README, and recursively all linked files."""
    files.append(File.generated(config, "README.md", abs_src_path=str(ROOT / "README.md")))
    waiting = [file.src_uri for file in files if file.is_documentation_page()]
    while waiting:
        page = waiting.pop()
        text = (ROOT / in_repository(page)).read_text()
        for path in targets(text, page).values():
            place = path.removeprefix(OURS)
            file = files.get_file_from_path(place)
            if file is None:
                file = File.generated(config, place, abs_src_path=str(ROOT / path))
                files.append(file)
                waiting += [place] * place.endswith(".md")
            file.inclusion = InclusionLevel.INCLUDED
    return files


def on_page_markdown(markdown: str, *, page: Any, files: Any, **_: Any) -> str:
    """Point links into the repository to their places on the site."""
    here = page.file.src_uri
    places = targets(markdown, here)

    def turned(match: re.Match[str]) -> str:
        if match[2] not in places:
            return match[0]
        place = places[match[2]].removeprefix(OURS)
        link = posixpath.relpath(place, posixpath.dirname(here) or ".")
        if match[1] != "](":  # mkdocs turns a file into its page in Markdown's own links alone
            link = get_relative_url(files.get_file_from_path(place).url, page.url)
        return match[1] + link + match[3]

    return LINK.sub(turned, markdown)
