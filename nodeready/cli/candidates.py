"""The words that complete a command line. They are read from texts and from the memory.

Importing the subjects takes longer than a user waits after Tab; running an inventory to complete a
word would run a stranger's file.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
from click.shell_completion import CompletionItem

import nodeready
from nodeready.cli.options import default_inventory
from nodeready.core.exit_codes import Refused
from nodeready.core.files import only_regular
from nodeready.core.policy import FOLDER
from nodeready.fleet.inventory import labs
from nodeready.runs.user_files import LAST_FAILED

#: Maximum bytes of an inventory that is read: one of 10,000 nodes has 200 kB.
_MAX_BYTES = 1_000_000
_NODE = re.compile(r"[A-Za-z0-9][\w.,\[\]-]*")  # a name of a node, or a node set
_SITE_CHECK = re.compile(r"""^\s*id\s*=\s*["']([a-z_0-9]+)["']""", re.M)
#: The noun of a check, in `check("SUBJECT.NOUN"` or in a row that makes one, `_free_check("NOUN"`.
_CHECK = re.compile(r'check\w*\(\s*"(?:[a-z_0-9]+\.)?([a-z_0-9]+)"')


def inventories(_: click.Context, incomplete: str) -> list[CompletionItem]:
    """Files, ``@local`` and the labs of this machine."""
    words = ["@local", "@lab", *(f"@lab/{name}" for name in labs.lab_names())]
    if incomplete.startswith("@"):
        return [CompletionItem(word) for word in words if word.startswith(incomplete)]
    return [CompletionItem(incomplete, type="file")]


def checks(context: click.Context, incomplete: str) -> list[CompletionItem]:
    """The checks and their subjects, after the last comma, with those of the site."""
    folder = Path(_inventory(context)).parent
    folders = dict.fromkeys((Path(FOLDER), folder / FOLDER))
    return _listed([*_check_words(), *_site_words(folders)], incomplete)


def nodes(context: click.Context, incomplete: str) -> list[CompletionItem]:
    """The groups and nodes of the command's inventory, after the last comma."""
    return _listed([LAST_FAILED, *_node_words(_inventory(context))], incomplete)


def remembered(_: click.Context, incomplete: str) -> list[CompletionItem]:
    """The nodes that the memory has."""
    from nodeready.runs.memory.kept_looks import open_memory

    try:
        with open_memory() as memory:
            return _listed(memory.names(), incomplete)
    except Refused:
        return []


def _inventory(context: click.Context) -> str:
    """The command's inventory; "": it has none."""
    # click leaves the arguments unread where the last option has no value yet.
    inventory = context.params.get("inventory") or next(iter(context.args), None)
    if inventory is None and (default := default_inventory(context)):
        inventory, _ = default
    return inventory or ""


def faults(_: click.Context, incomplete: str) -> list[CompletionItem]:
    """The faults of a lab, and the words that `nodeready lab up --fault` takes besides."""
    text = _text(Path(nodeready.__file__).parent / "lab" / "faults.toml")
    names = re.findall(r"^\[[\w-]+\.([\w-]+)\]$", text, re.M)
    return _listed(["none", "list", *names], incomplete)


def _listed(words: Iterable[str], incomplete: str) -> list[CompletionItem]:
    """The words that complete the last one of a comma list, with what stands before it."""
    before, comma, last = incomplete.rpartition(",")
    fitting = (word for word in dict.fromkeys(words) if word.startswith(last))
    return [CompletionItem(f"{before}{comma}{word}") for word in fitting]


def _check_words() -> list[str]:
    folder = Path(nodeready.__file__).parent / "subjects"
    subjects = [file.parent.name for file in sorted(folder.glob("*/checks.py"))]
    files = sorted(folder.glob("*/*.py"))
    checks = [f"{f.parent.name}.{noun}" for f in files for noun in _CHECK.findall(_text(f))]
    return [*subjects, *checks]


def _site_words(folders: Iterable[Path]) -> list[str]:
    """The site's own checks in the files of these folders."""
    files = [file for folder in folders for file in sorted(folder.glob("*.toml"))]
    return [f"site.{name}" for file in files for name in _SITE_CHECK.findall(_text(file))]


def _node_words(inventory: str) -> list[str]:
    """The groups and nodes that the text of an inventory names."""
    if inventory == "@lab" or inventory.startswith("@lab/"):
        names = [inventory.partition("/")[2]] if "/" in inventory else labs.lab_names()
        nodes: list[str] = []
        for name in names:
            with contextlib.suppress(OSError, ValueError):
                nodes += labs.read(name)
        return nodes
    text = _text(Path(inventory))
    if inventory.endswith(".py"):
        return list(_python_words(text))
    hosts = (re.split(r"[\s:#]", line, maxsplit=1)[0] for line in text.splitlines())
    return [host for host in hosts if _NODE.fullmatch(host)]


def _python_words(text: str) -> Iterator[str]:
    """The groups of an inventory file, and the strings in their lists."""
    import ast

    try:
        tree = ast.parse(text)
    except (ValueError, RecursionError, MemoryError, SyntaxError):
        return

    def names(value: ast.expr) -> Iterator[str]:
        parts: list[ast.expr] = []
        if isinstance(value, ast.Constant):
            if isinstance(value.value, str) and _NODE.fullmatch(value.value):
                yield value.value
        elif isinstance(value, ast.List | ast.Tuple):
            parts = value.elts[: None if isinstance(value, ast.List) else 1]
        elif isinstance(value, ast.Call):
            parts = value.args
        elif isinstance(value, ast.BinOp):
            parts = [value.left, value.right]
        for part in parts:
            yield from names(part)

    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            group = statement.targets[0].id
            members = list(names(statement.value))
            if members and not group.startswith("_"):
                yield group
                yield from members


def _text(file: Path) -> str:
    """The beginning of a file; "" where it cannot be read. A pipe is not waited for."""
    try:
        with open(file, "rb", opener=only_regular) as opened:
            return opened.read(_MAX_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""
