"""Writes the generated documentation; with `--check`, only says what is out of date.

docs/checks.md, docs/nodeready.1 and the schemas are generated whole. In the remaining pages the
text between `<!-- begin NAME -->` and `<!-- end NAME -->` is generated: the names are in PIECES.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import facts_schema
import man_page
import tables

from nodeready.reports import schema

ROOT = Path(__file__).resolve().parents[1]

#: Files that are generated whole: path -> its text.
PAGES: dict[str, Callable[[], str]] = {
    "docs/checks.md": tables.checks_page,
    "inventories/group_data/all.py": tables.policy_example,
    "docs/nodeready.1": man_page.page,
    "docs/schema/facts-1.json": facts_schema.text,
    **{
        f"docs/schema/{schema.file_name(name)}": partial(schema.text, name)
        for name in schema.DOCUMENTS
    },
}
#: Generated pieces of other pages: the name between the marks -> its text.
PIECES: dict[str, Callable[[], str]] = {
    "policy-keys": tables.policy_keys,
    "exit-codes": tables.exit_codes,
    "operations": tables.operations,
    "environment-rules": tables.environment_rules,
}

_PIECE = re.compile(r"(<!-- begin ([a-z-]+) -->\n).*?(<!-- end \2 -->)", re.S)


def with_pieces(text: str) -> str:
    """``text`` with its generated pieces. Raises KeyError for a name that is not in PIECES."""
    return _PIECE.sub(lambda match: f"{match[1]}{PIECES[match[2]]()}{match[3]}", text)


def generated_files() -> dict[Path, str]:
    """Every file with generated text, as it should be."""
    texts = {ROOT / name: page() for name, page in PAGES.items()}
    for path in sorted((ROOT / "docs").glob("*.md")):
        if path not in texts and path.is_file() and _PIECE.search(text := path.read_text()):
            texts[path] = with_pieces(text)
    return texts


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = []
    for path, text in generated_files().items():
        if path.is_file() and path.read_text() == text:
            continue
        stale.append(path.relative_to(ROOT))
        if not check:
            path.write_text(text)
    for name in stale:
        print(f"{name}: {'out of date: run scripts/make_docs.py' if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
