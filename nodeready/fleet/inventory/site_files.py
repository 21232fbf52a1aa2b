"""A site's own files: Python of the inventory, and ``checks.d/*.toml`` beside it."""

from __future__ import annotations

import ast
import contextlib
import importlib.abc
import os
import re
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from pyinfra import logger
from pyinfra.api.exceptions import InventoryError, PyinfraError

from nodeready.core.files import read_regular
from nodeready.core.policy import SiteCheck, parse
from nodeready.core.settings import Invalid, closest_word
from nodeready.core.text import sanitise
from nodeready.fleet.inventory import trust
from nodeready.fleet.inventory.trust import Authors

Hosts = list[Any]
#: A group's hosts (names, or (name, data)) and its data.
Group = tuple[Hosts, dict[str, Any]]


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, PyinfraError):
        return sanitise(text)
    return sanitise(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(read_regular(path), filename=str(path))
    except OSError as error:
        raise InventoryError(f"cannot read {path}: {error.strerror}") from None
    except SyntaxError as error:
        raise InventoryError(f"{path}:{error.lineno or 1}: {sanitise(error.msg)}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise InventoryError(f"{path}: {_one_line(error)}") from None


def refuse_strangers(path: Path, trusted: bool, authors: Authors = None) -> None:
    """Raises InventoryError for a file that another user could have written for us to run.

    trusted: accept any file
    authors: as for `trust.distrust`
    """
    reason = "" if trusted else trust.distrust(path, authors=authors)
    if reason:
        raise InventoryError(sanitise(reason))


def execute(path: Path, trusted: bool = False, authors: Authors = None) -> dict[str, Any]:
    """The names that the file ``path`` binds at its top level, without its imports.

    The file can import from the current directory, as under pyinfra, and from its own where it
    adds that to the path: only files that this user, root or the file's owner alone could have
    written. Its prints go to standard error, since standard output is for results. Raises
    InventoryError, one line.

    trusted: run it although others could have written it; see `nodeready.fleet.inventory.trust`
    authors: as for `trust.distrust`
    """
    refuse_strangers(path, trusted, authors)
    tree = _parse(path)
    bound: dict[str, Any] = {"__file__": str(path)}
    directory, owner = os.getcwd(), {path.stat().st_uid}
    reason = "" if trusted else trust.distrust(directory, authors=owner)
    if reason:
        _forget(directory)
    added = not reason and directory not in sys.path
    if added:
        sys.path.append(directory)
    # The directory of the file by its name, and without links.
    folders = {os.path.dirname(os.path.abspath(path)), os.path.dirname(os.path.realpath(path))}
    guard = _Guard([directory, *folders], owner)
    try:
        with contextlib.redirect_stdout(sys.stderr), _no_strangers(guard, trusted):
            exec(compile(tree, str(path), "exec", dont_inherit=True), bound)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the file can raise anything
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        place = f"{path}:{lines[-1]}" if lines else str(path)
        distrusted = f"; {reason}" if reason and isinstance(error, ImportError) else ""
        raise InventoryError(f"{place}: {_one_line(error)}{sanitise(distrusted)}") from None
    finally:
        if added:
            with contextlib.suppress(ValueError):
                sys.path.remove(directory)
    if "__all__" in bound:
        chosen = set(bound["__all__"])
    else:
        chosen = bound.keys() - _imported(tree)
    return {k: v for k, v in bound.items() if k in chosen and not k.startswith("__")}


_PACKAGE = str(Path(__file__).parents[2])  # the directory of nodeready's own modules


def _forget(directory: str) -> None:
    """Import nothing more from this directory, unless nodeready itself is there.

    `python -m` and `python -c` begin with the current directory.
    """
    parent = os.path.dirname(_PACKAGE)
    sys.path[:] = [path for path in sys.path if path == parent or (path or directory) != directory]


def _as_prefix(directory: str) -> str:
    return os.path.abspath(directory).rstrip("/") + "/"


class _Guard(importlib.abc.MetaPathFinder):
    """Finds nothing; refuses a module below the directories that another user could have written.

    What is installed below them, on the import path, is the interpreter's.

    owner: as `authors` of `trust.distrust`
    """

    def __init__(self, directories: Iterable[str], owner: Collection[int]) -> None:
        self.directories = {_as_prefix(directory) for directory in directories}
        self.installed = {_as_prefix(place) for place in [*sys.path, _PACKAGE] if place}
        self.owner = owner

    def _guards(self, place: str) -> bool:
        """Whether the nearest parent directory belongs to the project."""
        parents = filter(place.startswith, self.directories | self.installed)
        return max(parents, key=len, default="") in self.directories

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None:
            return None
        places = [spec.origin or "", *(spec.submodule_search_locations or ())]
        if any(map(self._guards, places)):
            # Its compiled file is loaded instead if the times match.
            for place in filter(None, [*places, spec.cached]):
                refuse_strangers(Path(place), trusted=False, authors=self.owner)
        return None


@contextlib.contextmanager
def _no_strangers(guard: _Guard, trusted: bool) -> Iterator[None]:
    """Meanwhile, the guard looks at each import. trusted: it does not"""
    if trusted:
        yield
        return
    sys.meta_path.insert(0, guard)
    try:
        yield
    finally:
        sys.meta_path.remove(guard)


def _imported(tree: ast.Module) -> set[str]:
    """The names that the import statements at the top level of a file bind."""
    imports = (node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))
    return {alias.asname or alias.name.split(".")[0] for node in imports for alias in node.names}


def read_groups(path: Path, trusted: bool = False) -> dict[str, Group]:
    """The groups of an inventory file, in its order: each list of hosts, or (hosts, data).

    As under pyinfra, names with a leading underscore and values of other kinds are no groups.
    trusted: as for `execute`. Raises InventoryError, one line.
    """
    groups: dict[str, Group] = {}
    for name, value in execute(path, trusted).items():
        if name.startswith("_") or not isinstance(value, list | tuple):
            continue
        data: dict[str, Any] = {}
        hosts = value
        if isinstance(value, tuple):
            if len(value) != 2 or not isinstance(value[0], list) or not isinstance(value[1], dict):
                if any(isinstance(item, str | list) for item in value):
                    raise InventoryError(
                        f"{path}: {name} must be a list of hosts, or (hosts, data)"
                    )
                continue
            hosts, data = value
        invalid = next((host for host in hosts if not _is_host(host)), None)
        if invalid is not None:
            shown = sanitise(repr(invalid), 60)
            logger.warning(f"{path}: {name} is no group of hosts: {shown} is no name")
            continue
        groups[name] = (list(hosts), dict(data))
    return groups


def _is_host(item: object) -> bool:
    if isinstance(item, tuple):
        return len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], dict)
    return isinstance(item, str)


def group_data(
    folder: Path, trusted: bool = False, authors: Collection[int] = ()
) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """Each group's name, file and data in ``folder``.

    Nothing when there is no such folder. Raises InventoryError, one line, for a file that fails,
    and for one that another user could have written. trusted, authors: as for `execute`.
    """
    if not folder.is_dir():
        return
    for file in sorted(folder.glob("*.py")):
        yield file.stem, file, execute(file, trusted, authors)


# --- The files ``checks.d/*.toml``: a site's own checks, beside the inventory as group_data is.

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TABLE = "check"
_MAX_BYTES = 1 << 20  # maximum bytes of a file


def read(
    folders: Iterable[Path], trusted: bool = False, authors: Collection[int] = ()
) -> tuple[list[SiteCheck], list[str]]:
    """The checks in the files of these folders, in the order of the files' names, and a line for
    each problem. A folder that does not exist has none.

    trusted: take files that other users could have written; see `nodeready.fleet.inventory.trust`
    authors: as for `trust.distrust`
    """
    checks: dict[str, SiteCheck] = {}
    problems: list[str] = []
    for folder in folders:
        for file in sorted(folder.glob("*.toml")):
            if file.name.startswith("."):
                continue
            for check, problem in _read_file(file, trusted, authors):
                if check is None:
                    problems.append(problem)
                elif check.name in checks:
                    first = checks[check.name].source
                    problems.append(f'{file}: id = "{check.name}": is in {first}, too')
                else:
                    checks[check.name] = check
    return list(checks.values()), problems


def _read_file(
    file: Path, trusted: bool, authors: Collection[int]
) -> Iterable[tuple[SiteCheck | None, str]]:
    """Each check of the file, or None and what is wrong with it."""
    shown = sanitise(str(file))
    try:
        refuse_strangers(file, trusted, authors)
        if file.stat().st_size > _MAX_BYTES:
            raise InventoryError(f"{shown}: is larger than {_MAX_BYTES} bytes")
        text = read_regular(file).decode("utf-8-sig")
        tables = _tables(tomllib.loads(text))
    except InventoryError as error:
        return [(None, str(error))]
    except OSError as error:
        return [(None, f"{shown}: {error.strerror}")]
    except UnicodeDecodeError:
        return [(None, f"{shown}: is not in UTF-8")]
    except (tomllib.TOMLDecodeError, Invalid, RecursionError) as error:
        return [(None, f"{shown}: {sanitise(' '.join(str(error).split()))}")]
    return [_read_table(file, text, number, table) for number, table in enumerate(tables, 1)]


def _tables(data: dict[str, Any]) -> list[Any]:
    """The tables of a file's checks. Raises Invalid."""
    for key in data:
        if key != _TABLE:
            close = closest_word(key, [_TABLE])
            hint = f"write [[{_TABLE}]]" if close else f"there is only [[{_TABLE}]]"
            raise Invalid(f"unknown key {key!a}: {hint}")
    tables = data.get(_TABLE)
    if not isinstance(tables, list) or not tables:
        raise Invalid(f"has no check: each begins with a line [[{_TABLE}]]")
    return tables


def _read_table(file: Path, text: str, number: int, table: Any) -> tuple[SiteCheck | None, str]:
    name = table.get("id") if isinstance(table, dict) else None
    place, shown = f"{file.parent.name}/{file.name}", f"check {number}"
    if isinstance(name, str) and name:
        shown = f"check {sanitise(name, 60)}"
        match = re.search(rf"""^[^#\n]*\bid["']?\s*=\s*["']{re.escape(name)}["']""", text, re.M)
        if match:
            place += f":{text.count(chr(10), 0, match.end()) + 1}"
    try:
        return parse(table, place), ""
    except Invalid as error:
        line = place.partition(":")[2]
        origin = sanitise(str(file)) + (f":{line}" if line else "")
        return None, f"{origin}: {shown}: {sanitise(str(error))}"
