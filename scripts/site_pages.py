"""The repository's own pages as pages of the site: the hook of mkdocs.yml.

The pages are written for the repository: README.md, CONTRIBUTING.md and CHANGELOG.md stand at its
top, links are relative to the file, lists are indented as CommonMark wants it. Here the pages of
the top level become pages of the site, links between pages follow, and lists get the four columns
that Python-Markdown wants.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

#: Files outside of docs/, or of another name there -> where they are in the site.
TOP = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "LICENSE.txt",
    "benchmarks/HISTORY.md": "measurements.md",
    # mkdocs would take a README.md for the index of its directory.
    "docs/README.md": "overview.md",
}

#: Elements that a browser would fetch from another server.
_FOREIGN = re.compile(
    r"<(?:script|img|iframe|link)\b[^>]*(?:src|stylesheet\" href)=\"(?:https?:)?//[^>]*>"
)
_LINK = re.compile(r"(\]\(|<img [^>]*src=\")([^)\s\":#]+)")
_ITEM = re.compile(r"(?:[-*+]|\d+[.)]) +")
_FENCE = re.compile(r"```|~~~")
_BLOCK = re.compile(r"(^ *```.*?^ *```$)", re.M | re.S)


def in_site(path: str) -> str:
    """Where a file of the repository is in the site."""
    return TOP.get(path) or path.removeprefix("docs/")


def with_links(text: str, page: str) -> str:
    """``text`` of the repository's file ``page``, its relative links as the site needs them."""

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), match[2]))
        directory = posixpath.dirname(in_site(page)) or "."
        return match[1] + posixpath.relpath(in_site(target), directory)

    parts = _BLOCK.split(text)
    parts[::2] = [_LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts)


def with_lists(text: str) -> str:
    """``text`` with four columns before what belongs to an item of a list. Python-Markdown wants
    four. CommonMark begins where the item's own text begins, two columns after "-" and three after
    "1.".
    """
    lines, starts, fence = [], [], ""
    for line in text.split("\n"):
        body = line.lstrip(" ")
        indent = len(line) - len(body)
        if not body:
            lines.append("")
            continue
        if not fence:
            while starts and indent < starts[-1]:
                starts.pop()
        deeper = max(0, indent - (starts[-1] if starts else 0))
        lines.append(" " * (4 * len(starts) + deeper) + body)
        if fence:
            fence = "" if body.startswith(fence) else fence
        elif mark := _FENCE.match(body):
            fence = mark[0]
        elif item := _ITEM.match(body):
            starts.append(indent + item.end())
    return "\n".join(lines)


def on_files(files: Any, config: Any) -> Any:
    """mkdocs's hook for the list of files: add those of the top level."""
    from mkdocs.structure.files import File

    for source, target in TOP.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs's hook for a page's Markdown: convert links and lists."""
    source = Path(page.file.abs_src_path).resolve().relative_to(ROOT)
    return with_lists(with_links(markdown, source.as_posix()))


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """mkdocs's hook for a page's HTML. Raises PluginError if it needs another server."""
    from mkdocs.exceptions import PluginError

    if match := _FOREIGN.search(output):
        raise PluginError(f"{page.file.src_uri}: the page needs another server: {match[0]}")
    return output
