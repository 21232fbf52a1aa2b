"""An INVENTORY of the command line as pyinfra's Inventory, and its nodes' policies. No connection
is made.

An inventory is a Python file (pyinfra's own form, with group_data beside it), a hostfile, or a
comma list of names, node sets (``gpu[001-064]``), ClusterShell's groups (``@rack1``) and pyinfra
connectors (``@local``). It is never empty, and every name in it is safe to hand to ssh, to a shell
and to a file.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import glob
import importlib.abc
import os
import re
import stat
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from pyinfra import logger
from pyinfra.api import Host, Inventory, State
from pyinfra.api.connectors import get_all_connectors
from pyinfra.api.exceptions import InventoryError, PyinfraError
from pyinfra.connectors.local import LocalConnector
from pyinfra.context import ctx_inventory

from nodeready import files
from nodeready.inventory import hostfile, nodeset
from nodeready.inventory.nodeset import NodeSetError, expand_one, fold, host_name, split, unique
from nodeready.policy import Policy
from nodeready.policy.fields import shown
from nodeready.policy.policy import PolicyError, check_settings
from nodeready.subjects import snapshot
from nodeready.subjects.base import Line
from nodeready.subjects.registry import check_ids
from nodeready.subjects.ssh_client.config import directive
from nodeready.subjects.ssh_client.identity import clean_address
from nodeready.subjects.ssh_client.known_hosts import Endpoint, Names
from nodeready.text import sanitise

# --- Inventory and group_data files: Python of pyinfra's users, executed as pyinfra does.
#
# pyinfra's own loader is in its command (pyinfra_cli), whose import patches the whole process.
# This loader gives the same groups and data; an error in a file becomes one line that names the
# file and the line.

Hosts = list[Any]
#: A group's hosts (names, or (name, data)) and its data.
Group = tuple[Hosts, dict[str, Any]]


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, PyinfraError):
        return sanitise(text)
    return sanitise(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _line_in(path: Path, error: BaseException) -> int | None:
    """The line of ``path`` that was running when ``error`` was raised."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except OSError as error:
        raise InventoryError(f"cannot read {path}: {error.strerror}") from None
    except SyntaxError as error:
        raise InventoryError(f"{path}:{error.lineno or 1}: {sanitise(error.msg)}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise InventoryError(f"{path}: {_one_line(error)}") from None


def _refuse_strangers(path: Path, trusted: bool) -> None:
    """Raises InventoryError for a file that others than root could have written for root to run.

    trusted: it was asked for nevertheless
    """
    why = "" if trusted else files.distrust(path)
    if why:
        raise InventoryError(sanitise(why))


def execute(path: Path, trusted: bool = False) -> dict[str, Any]:
    """What the file ``path`` binds at its top level, without what it imports.

    The current directory can be imported from, as under pyinfra, but for root only what nobody
    else could have put there or written; what the file prints goes to standard error, since
    standard output is for results. Raises InventoryError, one line.

    trusted: run it whoever could have written it; see `nodeready.files`
    """
    _refuse_strangers(path, trusted)
    tree = _parse(path)
    bound: dict[str, Any] = {"__file__": str(path)}
    here = os.getcwd()
    if not trusted and files.distrust(here):
        _forget(here)
        added = False
    else:
        added = here not in sys.path
    if added:
        sys.path.append(here)
    try:
        with contextlib.redirect_stdout(sys.stderr), _only_roots(here, trusted):
            exec(compile(tree, str(path), "exec", dont_inherit=True), bound)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the file can raise anything
        line = _line_in(path, error)
        place = f"{path}:{line}" if line else str(path)
        raise InventoryError(f"{place}: {_one_line(error)}") from None
    finally:
        if added:
            with contextlib.suppress(ValueError):
                sys.path.remove(here)
    if "__all__" in bound:
        chosen = set(bound["__all__"])
    else:
        chosen = bound.keys() - _imported(tree)
    return {k: v for k, v in bound.items() if k in chosen and not k.startswith("__")}


def _forget(here: str) -> None:
    """Import nothing more from this directory, unless nodeready itself is there.

    `python -m` and `python -c` begin with the current directory.
    """
    own = str(Path(__file__).parents[2])
    sys.path[:] = [place for place in sys.path if place == own or (place or here) != here]


class _Guard(importlib.abc.MetaPathFinder):
    """Finds nothing; refuses a module of a directory that others than root could have written."""

    def __init__(self, here: str) -> None:
        self.here = here.rstrip("/") + "/"

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None:
            return None
        places = [spec.origin or "", *(spec.submodule_search_locations or ())]
        if any(place.startswith(self.here) for place in places):
            # What it was compiled to is taken instead of it, as long as it looks as old.
            for place in filter(None, [*places, spec.cached]):
                _refuse_strangers(Path(place), trusted=False)
        return None


@contextlib.contextmanager
def _only_roots(here: str, trusted: bool) -> Iterator[None]:
    """Meanwhile, root imports from ``here`` only what root could have written."""
    if trusted or os.geteuid() != 0:
        yield
        return
    guard = _Guard(here)
    sys.meta_path.insert(0, guard)
    try:
        yield
    finally:
        sys.meta_path.remove(guard)


def _imported(tree: ast.Module) -> set[str]:
    """The names that the import statements at the top level of a file bind."""
    return {
        alias.asname or alias.name.split(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }


def read_groups(path: Path, trusted: bool = False) -> dict[str, Group]:
    """The groups of an inventory file, in its order: each list of hosts, or (hosts, data).

    As under pyinfra, names with a leading underscore and values of other kinds are no groups.
    trusted: as for `execute`. Raises InventoryError, one line.
    """
    found: dict[str, Group] = {}
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
        wrong = next((host for host in hosts if not _is_host(host)), None)
        if wrong is not None:
            shown = sanitise(repr(wrong), 60)
            logger.warning(f"{path}: {name} is no group of hosts: {shown} is no name")
            continue
        found[name] = (list(hosts), dict(data))
    return found


def _is_host(item: object) -> bool:
    if isinstance(item, tuple):
        return len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], dict)
    return isinstance(item, str)


def group_data(folder: Path, trusted: bool = False) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """Each group's data in ``folder``: the group's name, its file, what the file binds.

    Nothing when there is no such folder. Raises InventoryError, one line, for a file that fails,
    and for one that somebody else left where everyone can write (/tmp/group_data): it would run
    with our rights. trusted: as for `execute`.
    """
    if not folder.is_dir():
        return
    for file in sorted(folder.glob("*.py")):
        if _is_planted(file):
            raise InventoryError(
                f"{file} is not run: it is another user's, where everyone can write; "
                "go to your project's directory"
            )
        yield file.stem, file, execute(file, trusted)


def _is_planted(file: Path) -> bool:
    """Whether a stranger could have put ``file`` there for us to run."""
    try:
        places = [file.parent.stat(), file.parent.parent.stat()]
        owners = {file.stat().st_uid, places[0].st_uid}
    except OSError:
        return False
    trusted = {0, os.geteuid()}
    return not owners <= trusted and any(place.st_mode & stat.S_IWOTH for place in places)


# --- The inventory, and the hosts that ``--limit`` selects.

__all__ = [
    "InventoryError",
    "NodeInventory",
    "endpoint",
    "given_addresses",
    "limit",
    "load",
    "names",
    "policies",
    "ssh_lines",
]

_USAGE = "name a file, @local, host1,host2 or a node set such as gpu[001-064]"
_FILE_ENDINGS = (".py", ".txt")


class _Members(list[Host]):
    """A group's hosts. pyinfra asks ``host not in group`` for each: here that is one look-up."""

    def __init__(self) -> None:
        super().__init__()
        self._known: set[int] = set()

    def append(self, host: Host) -> None:
        self._known.add(id(host))
        super().append(host)

    def __contains__(self, host: object) -> bool:
        return id(host) in self._known


class _Node(Host):
    """pyinfra's Host; its `init` looks at all hosts to find the longest name: 10,000 times."""

    inventory: NodeInventory

    def init(self, state: State) -> None:
        self.state = state
        self.connector = self.connector_cls(state, self)
        self.print_prefix_padding = " " * (self.inventory.longest_name - len(self.name))


class NodeInventory(Inventory):
    """pyinfra's Inventory, fit for 10,000 nodes: loaded in 0.1 s, a State made in 1 s.

    group_files: the group_data files that set each group's data, in the order in which they
        apply, for messages that name the file; "all" for the data of all nodes
    note: what was read that may not have been meant, one line; "": nothing
    file: the inventory's own file; "": the command line lists the nodes
    """

    note = file = ""
    group_files: dict[str, list[Path]]
    longest_name: int

    def make_hosts_and_groups(self, names: Any, groups: Any) -> None:
        self.group_files = {}
        self.groups = defaultdict(_Members)
        super().make_hosts_and_groups(names, groups)
        self.longest_name = max(map(len, self.hosts), default=0)
        for host in self.hosts.values():
            host.__class__ = _Node


def load(
    argument: str,
    *,
    data: Mapping[str, Any] | None = None,
    group_data: Sequence[str | Path] = (),
    cwd: str | Path | None = None,
    trusted: bool = False,
) -> NodeInventory:
    """The inventory that ``argument`` names.

    data:       overrides the data of every host (``--data``, ``--ssh-user``)
    group_data: further folders of group data, after ``cwd``'s and the inventory file's own
    cwd:        where ``group_data`` is looked for; the current directory by default
    trusted:    take files that others than root could have written, as root; see
                `nodeready.files`
    Raises InventoryError, one line that says what to do, also when no node is left.
    """
    here = Path(cwd) if cwd is not None else Path.cwd()
    folders = [here / "group_data"]
    path = _file(argument)
    if path is None:
        groups: dict[str, Group] = {"all": (list(_listed(argument)), {})}
    else:
        beside = path.resolve().parent / "group_data"
        if beside != folders[0].resolve():
            folders.append(beside)
        groups = _from_file(path, trusted)
    inventory = _make(groups, argument, dict(data or {}))
    _add_group_data(inventory, [*folders, *map(Path, group_data)], trusted)
    _refuse_unused(inventory, path)
    for file in _ssh_files(inventory):
        _refuse_strangers(file, trusted)
    inventory.file = "" if path is None else str(path.resolve())
    if path is not None and _is_like_a_node(argument):
        inventory.note = (
            f"{argument}: read as the hostfile ./{argument}; write ./{argument} to say so, and "
            f"{argument}, (with the comma) for the node"
        )
    return inventory


def _is_like_a_node(argument: str) -> bool:
    """Whether the word for a file could be a node's name or a node set as well."""
    if argument.endswith(_FILE_ENDINGS) or f"./{argument}" in hostfile.DEFAULT_FILES:
        return False
    try:
        return bool(expand_one(argument))
    except NodeSetError:
        return False


def _file(argument: str) -> Path | None:
    """The file that ``argument`` names, None when it is a list of nodes."""
    path = Path(argument)
    try:
        if argument and path.is_file():
            return path
        if argument and path.is_dir() and not argument.startswith("@"):
            raise InventoryError(f"{argument!a} is a directory: name an inventory file in it")
        if argument and path.exists():
            raise InventoryError(f"{argument!a} is no regular file: copy it to one")
    except (OSError, ValueError):
        # Too long for a path, or a NUL byte: then it is a list of nodes, or no name at all.
        return None
    for part in split(argument):
        outside = part.split("[", 1)[0]
        if part.startswith("@") or not ("/" in outside or part.endswith(_FILE_ENDINGS)):
            continue
        if part != argument and Path(part).is_file():
            raise InventoryError(f"{part!a} is a file: name one inventory file, or list the nodes")
        raise InventoryError(f"no such inventory file: {_visible(part)}{_similar_file(part)}")
    return None


def _similar_file(part: str) -> str:
    path = Path(part)
    try:
        beside = [item.name for item in path.parent.iterdir() if item.is_file()]
    except (OSError, ValueError):
        return ""
    close = difflib.get_close_matches(path.name, beside, n=1)
    return f"; did you mean {_visible(str(path.with_name(close[0])))}?" if close else ""


def _visible(text: str) -> str:
    return sanitise(text, 200)


def _listed(argument: str) -> list[str]:
    """The nodes of a comma list, in the order in which they are written."""
    try:
        return unique(name for part in split(argument) for name in _members(part))
    except NodeSetError as error:
        raise InventoryError(f"{error}; {_USAGE}") from None


def _members(part: str) -> list[str]:
    """The nodes of one part of a list: ``@word`` is a connector of pyinfra's, else a group of
    ClusterShell's. Raises NodeSetError."""
    found = None if part[1:] in get_all_connectors() else nodeset.group(part)
    return expand_one(part) if found is None else found


def _from_file(path: Path, trusted: bool) -> dict[str, Group]:
    """The groups of a file, "all" among them and, as under pyinfra, one of the file's name."""
    if path.suffix != ".py":
        return {"all": (list(hostfile.with_data(hostfile.read(path, trusted))), {})}
    groups = read_groups(path, trusted)
    if "all" not in groups:
        every = unique(_name(host) for hosts, _ in groups.values() for host in hosts)
        groups["all"] = (list(every), {})
    groups.setdefault(path.stem, (list(groups["all"][0]), {}))
    for group, (hosts, _) in groups.items():
        for host in hosts:
            try:
                host_name(_name(host))
            except NodeSetError as error:
                raise InventoryError(f"{path}: group {_visible(group)}: {error}") from None
    return groups


def _name(host: Any) -> str:
    return str(host[0] if isinstance(host, tuple) else host)


def _make(groups: dict[str, Group], argument: str, override: dict[str, Any]) -> NodeInventory:
    """pyinfra's Inventory of these groups. Raises InventoryError, also when there is no node."""
    hosts, every_data = groups.pop("all")
    every: dict[str, dict[str, Any]] = {}
    for host in hosts:
        own = host[1] if isinstance(host, tuple) else {}
        every.setdefault(_name(host), {}).update(own)
    shown = _visible(argument)
    try:
        names_data = (list(every.items()), every_data)
        inventory = NodeInventory(names_data, override, **groups)  # type: ignore[no-untyped-call]
        for host in inventory:
            host_name(host.name)
    except (PyinfraError, NodeSetError, OSError, TypeError) as error:
        text = " ".join(str(error).split())
        raise InventoryError(f"inventory {shown}: {_visible(text)}") from None
    if not len(inventory):
        raise InventoryError(f"inventory {shown or repr('')} names no node: {_USAGE}")
    return inventory


def _add_group_data(inventory: NodeInventory, folders: Iterable[Path], trusted: bool) -> None:
    """Add what the folders' files say; a later folder wins, and files win over the inventory."""
    with ctx_inventory.use(inventory):
        found = [item for folder in folders for item in group_data(folder, trusted)]
    for group, file, settings in found:
        target = inventory.data if group == "all" else inventory.group_data[group]
        target.update(settings)
        inventory.group_files.setdefault(group, []).append(file)


def _refuse_unused(inventory: NodeInventory, path: Path | None) -> None:
    """Raises InventoryError for a file of group_data that no group uses: its nodes would have the
    defaults, and nobody would be told. A list of nodes has no groups: there it is a note.

    Not where another inventory beside it has that group; nor where the inventory computes its
    groups, as Slurm's partitions: which of them exist changes from run to run.
    """
    unused = [group for group in inventory.group_files if group not in ("all", *inventory.groups)]
    if path is None:
        shown = ", ".join(str(inventory.group_files[group][0]) for group in unused)
        if unused:
            inventory.note = f"not used, for a list of nodes has no groups: {_visible(shown)}"
        return
    if "globals()" in _text(path):
        return
    for group in unused:
        file = inventory.group_files[group][0]
        places = {path.resolve().parent, file.resolve().parent.parent}
        beside = {one for place in places for one in place.glob("*.py")} - {path.resolve()}
        if any(re.search(rf"\b{re.escape(group)}\b", _text(one)) for one in beside):
            continue
        groups = sorted(name for name, members in inventory.groups.items() if members)
        close = difflib.get_close_matches(group, groups, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(groups)}"
        raise InventoryError(f"{_visible(str(file))}: no group is called {group}: {hint}")


def _text(file: Path) -> str:
    """The file's text; "" where it cannot be read."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


#: What pyinfra reads where an inventory names no file, and the key with which it names one: how to
#: connect (a ProxyCommand and `Match exec` run here), and which host keys are the nodes'.
_SSH_FILES = {
    "ssh_config_file": "~/.ssh/config",
    "ssh_known_hosts_file": "~/.ssh/known_hosts",
}


def _ssh_files(inventory: NodeInventory) -> set[Path]:
    """The files that decide how, and to whom, we connect, with what they include."""
    told = [inventory.data, inventory.override_data]
    told += [*inventory.group_data.values(), *inventory.host_data.values()]
    found = set()
    for key, usual in _SSH_FILES.items():
        named = {str(one) for data in told if (one := data.get(key))} | {usual}
        # Everybody may write to that one, and nothing of it is ever read.
        named.discard(os.devnull)
        found |= {Path(os.path.expanduser(one)) for one in named}
        if key == "ssh_config_file":
            for one in named:
                # ssh_config(5): relative names are those of ~/.ssh.
                list(ssh_lines(os.path.expanduser(one), "~/.ssh", read=found))
    return found


class SshLine(NamedTuple):
    """A line of ssh_config, and for whom it counts.

    when:    criteria as a Match line has them, all of which must hold; () for everybody
    keyword: in small letters
    text:    the line
    """

    when: tuple[str, ...]
    keyword: str
    text: str

    @property
    def value(self) -> str:
        said = directive(Line("", 0, self.text))
        return said.value if said else ""


#: ssh itself gives up at this depth of Include (READCONF_MAX_DEPTH).
_MAX_DEPTH = 16


def ssh_lines(
    path: str,
    below: str,
    when: tuple[str, ...] = (),
    depth: int = 0,
    read: set[Path] | None = None,
) -> Iterator[SshLine]:
    """The lines of an ssh_config file in the order in which ssh takes them, without Host, Match
    and Include. What cannot be read has none.

    below: where the files are that an Include names without a directory
    read:  gets the files
    """
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    if read is not None:
        read.add(Path(path))
    here = when
    for text in lines:
        said = directive(Line(path, 0, text))
        if said is None:
            continue
        if said.keyword == "host":
            here = (*when, f"originalhost {','.join(said.value.split())}")
        elif said.keyword == "match":
            every = said.value.strip().lower() == "all"
            here = when if every else (*when, text.strip().partition(" ")[2].strip())
        elif said.keyword == "include":
            for word in said.value.split() if depth < _MAX_DEPTH else ():
                inside = os.path.join(os.path.expanduser(below), os.path.expanduser(word))
                for name in sorted(glob.glob(inside)):
                    yield from ssh_lines(name, below, here, depth + 1, read)
        else:
            yield SshLine(here, said.keyword, text.strip())


def names(hosts: Iterable[Host]) -> list[str]:
    """The names of these hosts, in their order."""
    return [str(host.name) for host in hosts]


def limit(
    inventory: Inventory,
    expression: str,
    named: Mapping[str, Iterable[str]] | None = None,
) -> list[Host]:
    """The hosts that a ``--limit`` selects, in the inventory's order.

    expression: a comma list of names, node sets, groups (``h100``, or ``@h100``), ``all``, globs
        over names (``gpu*``), and ClusterShell's groups (``@rack1``, ``@slurm:debug``)
    named: what further words stand for (``{"@last-failed": [...]}``); names among them that have
        left the inventory are passed over
    Raises InventoryError for a node or group that is not there, with the closest one that is,
    and when nothing is selected.
    """
    chosen: set[str] = set()
    missing: list[str] = []
    for part in split(expression):
        if named is not None and part in named:
            chosen.update(name for name in named[part] if name in inventory.hosts)
            continue
        members = _group(inventory, part)
        if members is not None:
            chosen.update(members)
            continue
        try:
            if part.startswith("@") and part not in inventory.hosts:
                # Of a group of the whole cluster's, those that are in the inventory.
                known = [name for name in _members(part) if name in inventory.hosts]
                chosen.update(known)
                missing.extend([] if known else [part])
                continue
            wanted = expand_one(part, globs=True)
        except NodeSetError as error:
            if part.startswith("@") and ":" not in part:
                missing.append(part)
                continue
            raise InventoryError(f"--limit: {error}") from None
        for name in wanted:
            if name in inventory.hosts:
                chosen.add(name)
                continue
            globbed = "*" in name or "?" in name
            found = [n for n in inventory.hosts if fnmatchcase(n, name)] if globbed else []
            chosen.update(found)
            if not found:
                missing.append(name)
    if missing:
        raise InventoryError(_not_there(inventory, missing))
    if not chosen:
        raise InventoryError(f"--limit {_visible(expression)!r} selects no node of the inventory")
    return [host for host in inventory if host.name in chosen]


def _group(inventory: Inventory, word: str) -> list[str] | None:
    """The names in the group ``word`` (or ``@word``); None when there is no such group."""
    if word in inventory.hosts:
        return None
    for group in (word, word[1:] if word.startswith("@") else word):
        if group == "all":
            return list(inventory.hosts)
        members = inventory.groups.get(group)
        if members:
            return names(members)
    return None


def _not_there(inventory: Inventory, missing: Sequence[str]) -> str:
    groups = [name for name, members in inventory.groups.items() if members]
    close = difflib.get_close_matches(missing[0], [*groups, *inventory.hosts], n=1)
    if close:
        hint = f"did you mean {close[0]}?"
    else:
        hint = f"its nodes are {_visible(fold(inventory.hosts))}"
        hint += f"; its groups are {_visible(', '.join(groups))}" if groups else ""
    return f"--limit: no node or group {_visible(fold(missing))} in the inventory; {hint}"


# --- The nodes' policies, as pyinfra merges group and host data, and where their sshd is.

#: Host data that is pyinfra's or an inventory's, and never a misspelt setting of ours.
_INVENTORY_KEYS = frozenset({"slots", "ssh_names"})


def _foreign() -> frozenset[str]:
    keys = set(_INVENTORY_KEYS)
    for connector in get_all_connectors().values():
        keys.update(getattr(connector, "data_meta", {}) or {})
    return frozenset(keys)


def _origin(inventory: Inventory, group: str) -> str:
    """The files that set a group's data, or the group's name when pyinfra itself loaded them."""
    files = getattr(inventory, "group_files", {}).get(group, ())
    return ", ".join(str(path) for path in files) or f"group {group}"


def policies(inventory: Inventory, hosts: Iterable[Host]) -> dict[str, Policy]:
    """The policy of each of these hosts, by name, from group and host data as pyinfra merges them.

    Raises PolicyError with the problems of all origins, each with its file or host, before any
    node is touched.
    """
    foreign, ids = _foreign(), check_ids()
    problems: list[str] = []
    cache: dict[tuple[Any, ...], Policy] = {}

    def settings(data: Mapping[str, Any], where: str) -> dict[str, Any]:
        problems.extend(_connection(data, where))
        try:
            found = check_settings(data, where, foreign)
        except PolicyError as error:
            problems.extend(error.problems)
            return {}
        waived = snapshot.problems(Policy(waivers=found.get("waivers", ())), ids)
        problems.extend(f"{where}: {problem}" for problem in waived)
        return found

    everywhere = settings(inventory.get_data(), _origin(inventory, "all"))
    by_group = {
        group: settings(inventory.get_group_data(group), _origin(inventory, group))
        for group in inventory.groups.keys() | inventory.group_data.keys()
    }
    override = settings(inventory.get_override_data(), "command line")
    made: dict[str, Policy] = {}
    for host in hosts:
        own = settings(inventory.get_host_data(host.name), f"host {host.name}")
        key = (tuple(host.groups), tuple(sorted(own.items())))
        if key not in cache:
            merged = dict(everywhere)
            for group in host.groups:
                merged.update(by_group.get(group, {}))
            cache[key] = Policy(**{**merged, **own, **override})
        made[host.name] = cache[key]
    if problems:
        raise PolicyError(list(dict.fromkeys(problems)))
    return made


# --- Where the nodes' sshd are, and how to log in: pyinfra's keys, and ssh_names.

_NO_USER = re.compile(r"-|.*[\s\x00-\x1f\x7f]")


def _port(value: object) -> str:
    if type(value) is int and 0 < value < 65536:
        return ""
    return "must be a whole number from 1 to 65535, without quotes"


def _user(value: object) -> str:
    if isinstance(value, str) and value and not _NO_USER.match(value):
        return ""
    return "must be the name of a user"


def _key(value: object) -> str:
    if isinstance(value, str | os.PathLike) and str(value) and "\0" not in str(value):
        return ""
    return "must be the path of a private key"


def _host(value: object) -> str:
    try:
        connector = host_name(value if isinstance(value, str) else "").startswith("@")
    except NodeSetError:
        connector = True
    return "must be a host name or an address" if connector else ""


def _names(value: object) -> str:
    if isinstance(value, list | tuple) and not any(map(_host, value)):
        return ""
    return "must be a list of host names and addresses"


#: Key -> what is wrong with a value, or "". None and "" are as if the key were not there.
_CONNECTION: dict[str, Callable[[object], str]] = {
    "ssh_port": _port,
    "ssh_user": _user,
    "ssh_key": _key,
    "ssh_hostname": _host,
    "ssh_names": _names,
}


def _connection(data: Mapping[str, Any], where: str) -> list[str]:
    """What is wrong with the connection data of one origin, a line each."""
    found = []
    for key, wrong in _CONNECTION.items():
        value = data.get(key)
        if value not in (None, "") and (why := wrong(value)):
            found.append(f"{where}: {key} = {shown(value)}: {why}")
    return found


def endpoint(host: Host) -> Endpoint:
    """Where a node's sshd is and what the node is called, as the inventory has it.

    Under pyinfra's own command nothing has checked the values.
    """
    data = host.data
    address, port, names = data.get("ssh_hostname"), data.get("ssh_port"), data.get("ssh_names")
    return Endpoint(
        "" if _host(address) else str(address),
        22 if _port(port) else int(port),
        () if _names(names) else tuple(names),
        local=issubclass(host.connector_cls, LocalConnector),
    )


def given_addresses(inventory: Iterable[Host]) -> dict[str, str]:
    """Address -> the node to which the inventory gives it: as its name, ``ssh_hostname``, or in
    ``ssh_names``. What it gives to several nodes, or with a port of its own, is not there."""
    given = Names({host.name: endpoint(host) for host in inventory}).owners
    return {one: node for one, node in given.items() if node and clean_address(one)}
