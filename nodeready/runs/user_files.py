"""The user's own files: the configuration, the nodes that failed last, the directory of ``-o``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nodeready.core import files
from nodeready.core.exit_codes import Refused
from nodeready.core.text import sanitise
from nodeready.fleet.inventory import trust

MEMORY = "memory"  # the table of the memory, which is of no command

SYSTEM = Path("/etc/nodeready/config.toml")


def user_file() -> Path:
    """``$XDG_CONFIG_HOME/nodeready/config.toml``, or under ~/.config."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "nodeready" / "config.toml"


def paths() -> tuple[Path, Path]:
    """The system's file and the user's, in the order in which they are read."""
    return SYSTEM, user_file()


def refuse_unsafe(path: str | Path, prefix: str = "") -> None:
    """For root: raise Refused, with this prefix, for a path that another user can write."""
    if reason := trust.distrust(path, remedy=trust.SET_VARIABLE):
        raise Refused(f"{prefix}{reason}")


def refuse_strangers(name: str, *, trusted: bool) -> None:
    """Raises Refused for a default file in the current directory that another user could have
    written. trusted: the user trusts every inventory
    """
    if not trusted and (reason := trust.distrust(name, authors=())):
        raise Refused(sanitise(reason))


def read(path: Path) -> dict[str, Any]:
    """The tables and keys of a file; none where it is missing. Raises Refused."""
    refuse_unsafe(path)
    try:
        content = files.read_regular(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from None
    # Imported only here: most users have no file.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        data: dict[str, Any] = tomllib.loads(content.decode("utf-8"))
        return data
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Refused(f"{path}: {error}") from None


def option_name(path: Path, key: str, options: Iterable[str]) -> str:
    """The option of a key. Raises Refused, with the most similar option, for an unknown key."""
    name = key.replace("-", "_")
    if name not in options:
        from nodeready.core.settings import suggestion

        raise Refused(f"{path}: unknown option {key}: {suggestion(name, options)}")
    return name


def memory_settings() -> dict[str, str]:
    """The keys of ``[memory]`` in both files, then NODEREADY_MEMORY and NODEREADY_MEMORY_KEY, as
    texts. Raises Refused for a key that means nothing.
    """
    keys = ("file", "days", "megabytes")
    settings: dict[str, str] = {}
    for path in paths():
        table = read(path).get(MEMORY, {})
        settings |= {option_name(path, key, keys): str(value) for key, value in table.items()}
    for key, name in zip(keys, ("", "_DAYS", "_MEGABYTES"), strict=True):
        if value := os.environ.get(f"NODEREADY_MEMORY{name}"):
            settings[key] = value
    return settings


# --- The nodes that failed in the last run, kept for ``--limit @last-failed``.

LAST_FAILED = "@last-failed"  # the word in ``--limit`` that stands for these nodes


def _state_file() -> Path:
    return files.state_directory() / "last-failed"


@dataclass(frozen=True)
class FailedNode:
    """A node that failed in its last run."""

    name: str
    lost: bool = False  # the command could not reach it, and so no check has failed on it
    inventory: str = ""  # the inventory file of that run; "": the command line listed the nodes

    @classmethod
    def parse(cls, row: str) -> FailedNode:
        """A row of the state file, as `__str__` writes it."""
        name, lost, inventory = (*row.split("\t", 2), "", "")[:3]
        return cls(name, bool(lost), inventory)

    def __str__(self) -> str:
        lost = "lost" if self.lost else ""
        return "\t".join((self.name, lost, self.inventory)).rstrip("\t")


def load_failed() -> list[FailedNode]:
    """The nodes of the state file; none where it cannot be read."""
    try:
        path = files.private_file(_state_file(), make=False)
        rows = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    return [FailedNode.parse(row) for row in rows if row]


def save_failed(
    failed: Iterable[str], reached: Set[str], inventory: str, *, is_whole: bool, lost: bool
) -> None:
    """Update the state file with the result of a run; a write error is ignored.

    The rows of nodes that were not contacted stay, so that a run with --limit or an interrupted
    run forgets no node. A run over a whole inventory forgets the nodes that have left that
    inventory.

    failed:    names of the nodes that failed in this run
    reached:   names of the nodes that the run contacted
    inventory: the inventory file; "": the command line listed the nodes
    is_whole:  every node of the inventory was contacted
    lost:      the command only collects: ``failed`` are the nodes that it could not reach, and
               only the rows of lost nodes are replaced
    """
    rows = [
        node
        for node in load_failed()
        if (lost and not node.lost)
        or not (node.name in reached or (is_whole and node.inventory == inventory))
    ]
    names = {node.name for node in rows}
    rows += [FailedNode(n, lost, inventory) for n in dict.fromkeys(failed) if n not in names]
    with contextlib.suppress(OSError):
        path = files.private_file(_state_file(), make=True)
        files.write_atomically(path, [f"{node}\n" for node in rows], 0o600)


# --- The directory of ``-o``.


def output_directory(
    path: Path, file: str, is_ours: Callable[[str], Any] | None = None, option: str = "-o "
) -> Path:
    """Make this directory if it is missing, private to us. Raises Refused.

    file:    one that it must be able to take
    is_ours: whether a file of this name may be in it; None: any
    option:  what the messages begin with
    """
    if os.path.lexists(path) and not path.is_dir():
        raise Refused(f"{option}{path}: is no directory")
    try:
        files.own_directory(path, file)
        names = [entry.name for entry in path.iterdir()] if is_ours else []
    except OSError as problem:
        raise Refused(f"{option}{problem.filename}: {problem.strerror}") from None
    if is_ours and (foreign := [name for name in names if not is_ours(name)]):
        raise Refused(f"{option}{path}: holds other files ({min(foreign)}): name a new directory")
    return path
