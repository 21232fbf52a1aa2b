"""docs/troubleshooting.md has every error line that a user can meet."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.unit.docs.pages import DOCS, ROOT

PAGE = (DOCS / "troubleshooting.md").read_text().replace("\\|", "|")

#: What these are given is shown to a user as it is.
SHOWN = {
    "Answer", "DrainError", "Gap", "InventoryError", "LabError", "LabUnavailable", "NodeSetError",
    "PlanError", "ProbeError", "PySpyError", "SourceError", "UsageError", "_Wrong",
}  # fmt: skip
#: Not for users: what needs a programming mistake, or is told in other words on its way.
INTERNAL = {
    "ip: ",
    ": exit ",
    "must be one of ",
}


def _pieces(node: ast.expr) -> list[str]:
    """The fixed words of a message."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return [part.value for part in node.values if isinstance(part, ast.Constant)]
    if isinstance(node, ast.BinOp):
        return [*_pieces(node.left), *_pieces(node.right)]
    return []


def _words(pieces: list[str]) -> str:
    """The longest run of fixed words, up to the first advice."""
    runs = [re.split(r"[;:(`]| \[", piece)[0].strip(" .,-'") for piece in pieces]
    return max(runs, key=len, default="")


def messages() -> Iterator[tuple[str, str]]:
    """(where, the fixed words) of every message."""
    for path in [*(ROOT / "nodeready").rglob("*.py"), *(ROOT / "operations").glob("*.py")]:
        if "operations" in path.relative_to(ROOT).parts[1:] or path.name.startswith("vm"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = ""
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", "") or getattr(node.func, "attr", "")
            if isinstance(node, ast.Call) and name in SHOWN:
                for value in [*node.args, *(k.value for k in node.keywords if k.arg == "error")]:
                    yield f"{path.name}:{node.lineno}", _words(_pieces(value))
    for path in (ROOT / "nodeready/sh").glob("*.sh"):
        for line in path.read_text().splitlines():
            for text in re.findall(r"nr_fail [\"'](.*?)[\"'](?:$|[; ])", line):
                yield path.name, _words(re.split(r"\$\{[^}]*\}|\$\w+", text))


def test_every_message_is_explained():
    found = [(where, words) for where, words in messages() if len(words) > 7]
    assert len(found) > 80
    missing = [
        f"{where}: {words}"
        for where, words in found
        if words not in PAGE and words not in INTERNAL
    ]
    assert not missing, f"docs/troubleshooting.md: a row is missing for {'; '.join(missing)}"


def test_every_word_for_a_connection_that_failed_is_explained():
    tree = ast.parse((ROOT / "nodeready/transport/connection.py").read_text())
    functions = [one for one in tree.body if isinstance(one, ast.FunctionDef)]
    (function,) = [one for one in functions if one.name == "connect_error"]
    for pair in (n for n in ast.walk(function) if isinstance(n, ast.Tuple)):
        if len(pair.elts) == 2 and (words := _words(_pieces(pair.elts[1]))):
            assert words in PAGE
    for node in (n for n in ast.walk(function) if isinstance(n, ast.Return)):
        assert node.value is not None
        for part in _pieces(node.value)[1:2]:
            assert re.split(r"[;.:(]", part)[0].strip() in PAGE, part
