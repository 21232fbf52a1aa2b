"""An INVENTORY of the command line as pyinfra's Inventory. No connection is made.

An inventory is a Python file (pyinfra's own form, with group_data beside it), a hostfile, one of
Ansible's, or a comma list of names, node sets (``gpu[001-064]``), ClusterShell's groups
(``@rack1``) and connectors (``@local``, ``@slurm/4711``). It is never empty, and every name in it
is safe to hand to ssh, to a shell and to a file.
"""

from __future__ import annotations

import difflib
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from pyinfra.api import Host, Inventory, State
from pyinfra.api.connectors import get_all_connectors
from pyinfra.api.exceptions import InventoryError, PyinfraError
from pyinfra.context import ctx_inventory

from nodeready.core.files import read_regular
from nodeready.core.policy import FOLDER, SiteCheck
from nodeready.core.text import sanitise
from nodeready.fleet.inventory import ansible, connectors, hostfile, nodeset, site_files
from nodeready.fleet.inventory.connectors import is_connector
from nodeready.fleet.inventory.site_files import Group, group_data, read_groups, refuse_strangers
from nodeready.fleet.transport.ssh_config import ssh_lines

# --- The hosts of an inventory that ``--limit`` selects.


sanitised = partial(sanitise, limit=200)


def group_members(part: str) -> list[str]:
    """The nodes of one part of a list: ``@word`` is a connector, else a group of ClusterShell's.

    Raises NodeSetError; InventoryError when one of nodeready's connectors finds no nodes.
    """
    if is_connector(part):
        return connectors.names(part)
    members = None if part[1:] in get_all_connectors() else nodeset.group(part)
    return nodeset.expand_one(part) if members is None else members


def names(hosts: Iterable[Host]) -> list[str]:
    return [str(host.name) for host in hosts]


def select_hosts(
    inventory: Inventory, expression: str, named: Mapping[str, Iterable[str]] | None = None
) -> list[Host]:
    """The hosts that a ``--limit`` selects, in the inventory's order.

    expression: a comma list of names, node sets, groups (``h100``, or ``@h100``), ``all``, globs
        over names (``gpu*``), ClusterShell's groups (``@rack1``, ``@slurm:debug``), and
        nodeready's connectors (``@slurm/4711``)
    named: further words -> their nodes (``{"@last-failed": [...]}``); nodes that have left the
        inventory are ignored
    Raises InventoryError for a node or group that is not there, with the closest one that is,
    and when nothing is selected.
    """
    chosen: set[str] = set()
    missing: list[str] = []
    for part in nodeset.split(expression):
        if named is not None and part in named:
            chosen.update(name for name in named[part] if name in inventory.hosts)
            continue
        members = _group(inventory, part)
        if members is not None:
            chosen.update(members)
            continue
        try:
            if part.startswith("@") and part not in inventory.hosts:
                # A group of the whole cluster may have nodes outside the inventory.
                present = [name for name in group_members(part) if name in inventory.hosts]
                chosen.update(present)
                missing.extend([] if present else [part])
                continue
            expanded = nodeset.expand_one(part, globs=True)
        except nodeset.NodeSetError as error:
            if part.startswith("@") and ":" not in part:
                missing.append(part)
                continue
            raise InventoryError(f"--limit: {error}") from None
        for name in expanded:
            if name in inventory.hosts:
                chosen.add(name)
                continue
            globbed = "*" in name or "?" in name
            matching = [n for n in inventory.hosts if fnmatchcase(n, name)] if globbed else []
            chosen.update(matching)
            if not matching:
                missing.append(name)
    if missing:
        raise InventoryError(_not_there(inventory, missing))
    if not chosen:
        raise InventoryError(f"--limit {sanitised(expression)!r} selects no node of the inventory")
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
        hint = f"its nodes are {sanitised(nodeset.fold(inventory.hosts))}"
        hint += f"; its groups are {sanitised(', '.join(groups))}" if groups else ""
    return f"--limit: no node or group {sanitised(nodeset.fold(missing))} in the inventory; {hint}"


# --- The inventory.

_USAGE = "name a file, @local, host1,host2 or a node set such as gpu[001-064]"
_FILE_ENDINGS = (".py", ".txt", *ansible.ENDINGS)


class _HostGroup(list[Host]):
    """A group's hosts. pyinfra asks ``host not in group`` for each: here that is one look-up."""

    def __init__(self) -> None:
        super().__init__()
        self._known: set[int] = set()

    def append(self, host: Host) -> None:
        self._known.add(id(host))
        super().append(host)

    def __contains__(self, host: object) -> bool:
        return id(host) in self._known


class _InventoryNode(Host):
    """pyinfra's Host; its `init` looks at all hosts to find the longest name: 10,000 times."""

    inventory: NodeInventory

    def init(self, state: State) -> None:
        self.state = state
        self.connector = self.connector_cls(state, self)
        self.print_prefix_padding = " " * (self.inventory.longest_name - len(self.name))


class NodeInventory(Inventory):
    """pyinfra's Inventory, fit for 10,000 nodes: loaded in 0.1 s, a State made in 1 s.

    note: a likely misunderstanding of the command line, one line; "": none
    file: the inventory's own file; "": the command line lists the nodes
    """

    note = file = ""
    site_checks: Sequence[SiteCheck] = ()  # the checks of the files of `checks.d`
    check_problems: Sequence[str] = ()  # what is wrong with those files, a line each
    # the group_data files that set each group's data, in the order in which they apply, for
    # messages that name the file; "all" for the data of all nodes
    group_files: dict[str, list[Path]]
    longest_name: int

    def make_hosts_and_groups(self, names: Any, groups: Any) -> None:
        self.group_files = {}
        self.groups = defaultdict(_HostGroup)
        super().make_hosts_and_groups(names, groups)
        self.longest_name = max(map(len, self.hosts), default=0)
        for host in self.hosts.values():
            host.__class__ = _InventoryNode


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
    trusted:    take files that other users could have written; see `inventory.trust`
    Raises InventoryError, one line that says what to do, also when no node is left.
    """
    directory = Path(cwd) if cwd is not None else Path.cwd()
    places = [directory]
    path = _file(argument)
    # Who names an inventory takes what its author has put beside it.
    authors = set() if path is None else {path.stat().st_uid}
    if path is None:
        groups: dict[str, Group] = {"all": (list(_listed(argument)), {})}
        note = ""
    else:
        if path.resolve().parent != directory.resolve():
            places.append(path.resolve().parent)
        groups, note = _from_file(path, trusted)
    inventory = _make(groups, argument, dict(data or {}))
    inventory.note = note
    folders = [place / "group_data" for place in places]
    inventory.file = "" if path is None else str(path.resolve())
    _add_group_data(inventory, [*folders, *map(Path, group_data)], trusted, authors)
    _refuse_unused(inventory, path)
    checks, problems = site_files.read([place / FOLDER for place in places], trusted, authors)
    inventory.site_checks = checks
    inventory.check_problems = [*problems, *_check_problems(inventory, path)]
    for file in _ssh_files(inventory):
        refuse_strangers(file, trusted)
    if path is not None and _is_like_a_node(argument):
        remedy = f"write ./{argument} to say so, and {argument}, (with the comma) for the node"
        inventory.note = f"{argument}: read as the hostfile ./{argument}; {remedy}"
    return inventory


def _is_like_a_node(argument: str) -> bool:
    """Whether the word for a file could be a node's name or a node set as well."""
    if argument.endswith(_FILE_ENDINGS) or f"./{argument}" in hostfile.DEFAULT_FILES:
        return False
    try:
        return bool(nodeset.expand_one(argument))
    except nodeset.NodeSetError:
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
    for part in nodeset.split(argument):
        outside = part.split("[", 1)[0]
        if part.startswith("@") or not ("/" in outside or part.endswith(_FILE_ENDINGS)):
            continue
        if part != argument and Path(part).is_file():
            raise InventoryError(f"{part!a} is a file: name one inventory file, or list the nodes")
        raise InventoryError(f"no such inventory file: {sanitised(part)}{_similar_file(part)}")
    return None


def _similar_file(part: str) -> str:
    path = Path(part)
    try:
        siblings = [item.name for item in path.parent.iterdir() if item.is_file()]
    except (OSError, ValueError):
        return ""
    close = difflib.get_close_matches(path.name, siblings, n=1)
    return f"; did you mean {sanitised(str(path.with_name(close[0])))}?" if close else ""


def _listed(argument: str) -> list[str]:
    """The nodes of a comma list, in the order in which they are written."""
    try:
        names: dict[str, None] = {}
        for part in nodeset.split(argument):
            names |= dict.fromkeys([part] if is_connector(part) else group_members(part))
            _refuse_many(names, argument)
        return list(names)
    except nodeset.NodeSetError as error:
        raise InventoryError(f"{error}; {_USAGE}") from None


def _refuse_many(names: Collection[Any], argument: str) -> None:
    """Raises InventoryError for more nodes than an inventory may have."""
    if reason := nodeset.too_many(len(names), f"inventory {sanitised(argument)}"):
        raise InventoryError(reason)


def _from_file(path: Path, trusted: bool) -> tuple[dict[str, Group], str]:
    """The groups of a file, "all" among them, with one of the file's name as under pyinfra; and a
    line about what is not used, or "".
    """
    if path.suffix != ".py":
        text = hostfile.content(path, trusted)
        if ansible.is_ansible(path, text):
            return ansible.read(path, text, trusted)
        return {"all": (list(hostfile.with_data(hostfile.parse(text, str(path)))), {})}, ""
    groups = read_groups(path, trusted)
    if "all" not in groups:
        every = nodeset.unique(_name(host) for hosts, _ in groups.values() for host in hosts)
        groups["all"] = (list(every), {})
    groups.setdefault(path.stem, (list(groups["all"][0]), {}))
    for group, (hosts, _) in groups.items():
        for host in hosts:
            try:
                if not is_connector(_name(host)):
                    nodeset.host_name(_name(host))
            except nodeset.NodeSetError as error:
                raise InventoryError(f"{path}: group {sanitised(group)}: {error}") from None
    return groups, ""


def _name(host: Any) -> str:
    return str(host[0] if isinstance(host, tuple) else host)


def _make(groups: dict[str, Group], argument: str, override: dict[str, Any]) -> NodeInventory:
    """pyinfra's Inventory of these groups. Raises InventoryError, also when there is no node."""
    hosts, every_data = groups.pop("all")
    every: dict[str, dict[str, Any]] = {}
    for host in hosts:
        host_data = host[1] if isinstance(host, tuple) else {}
        every.setdefault(_name(host), {}).update(host_data)
    shown = sanitised(argument)
    _refuse_many(every, argument)
    try:
        names_data = (list(every.items()), every_data)
        inventory = NodeInventory(names_data, override, **groups)  # type: ignore[no-untyped-call]
        for host in inventory:
            nodeset.host_name(host.name)
    except (PyinfraError, nodeset.NodeSetError, OSError, TypeError) as error:
        text = " ".join(str(error).split())
        raise InventoryError(f"inventory {shown}: {sanitised(text)}") from None
    # A connector is one word for many nodes.
    _refuse_many(inventory.hosts, argument)
    if not len(inventory):
        raise InventoryError(f"inventory {shown or repr('')} names no node: {_USAGE}")
    return inventory


def _add_group_data(
    inventory: NodeInventory, folders: Iterable[Path], trusted: bool, authors: Collection[int]
) -> None:
    """Add the folders' group data; a later folder wins, and files win over the inventory."""
    with ctx_inventory.use(inventory):
        items = [item for folder in folders for item in group_data(folder, trusted, authors)]
    for group, file, settings in items:
        target = inventory.data if group == "all" else inventory.group_data[group]
        target.update(settings)
        inventory.group_files.setdefault(group, []).append(file)


def _refuse_unused(inventory: NodeInventory, path: Path | None) -> None:
    """Raises InventoryError for a file of group_data that no group uses: its nodes would silently
    have the defaults. A list of nodes, which has no groups, only gets a note.

    A file is used if another inventory beside this one has that group. Groups that the inventory
    computes, such as Slurm's partitions, are not checked: they change from run to run.
    """
    unused = [group for group in inventory.group_files if group not in ("all", *inventory.groups)]
    if path is None:
        shown = ", ".join(str(inventory.group_files[group][0]) for group in unused)
        if unused:
            inventory.note = f"not used, for a list of nodes has no groups: {sanitised(shown)}"
        return
    if "globals()" in _text(path):
        return
    for group in unused:
        file = inventory.group_files[group][0]
        problem = _group_problem(inventory, group, {path, file.resolve().parent})
        if problem:
            raise InventoryError(f"{sanitised(str(file))}: {problem}")


def _check_problems(inventory: NodeInventory, path: Path | None) -> Iterator[str]:
    """A line for each group of a site's check that no inventory here has; see _refuse_unused."""
    group_names = {"all", *inventory.groups}
    limited = [check for check in inventory.site_checks if not group_names >= {*check.groups}]
    if path is None and limited:
        shown = ", ".join(check.id for check in limited)
        inventory.note = f"not made, for a list of nodes has no groups: {sanitised(shown)}"
    if path is None or "globals()" in _text(path):
        return
    for check in limited:
        for group in {*check.groups} - group_names:
            problem = _group_problem(inventory, group, {path})
            if problem:
                yield f"{check.source}: check {check.name}: groups: {problem}"


def _group_problem(inventory: NodeInventory, group: str, places: set[Path]) -> str:
    """Why this group is a mistake; "": another inventory beside one of these files has it."""
    siblings = {sibling for place in places for sibling in place.resolve().parent.glob("*.py")}
    siblings.discard(Path(inventory.file))
    if any(re.search(rf"\b{re.escape(group)}\b", _text(sibling)) for sibling in siblings):
        return ""
    groups = sorted(name for name, members in inventory.groups.items() if members)
    close = difflib.get_close_matches(group, groups, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(groups)}"
    return f"no group is called {sanitised(group)}: {hint}"


def _text(file: Path) -> str:
    """The file's text; "" where it cannot be read."""
    try:
        return read_regular(file).decode("utf-8", "replace")
    except OSError:
        return ""


#: Host data that names a file of ssh -> pyinfra's default: how to connect (a ProxyCommand and
#: `Match exec` run on this machine), and the nodes' host keys.
_SSH_FILES = {"ssh_config_file": "~/.ssh/config", "ssh_known_hosts_file": "~/.ssh/known_hosts"}


def _ssh_files(inventory: NodeInventory) -> set[Path]:
    """The files of ssh that decide how to connect, and to which hosts, with included files."""
    sources = [inventory.data, inventory.override_data]
    sources += [*inventory.group_data.values(), *inventory.host_data.values()]
    files = set()
    for key, usual in _SSH_FILES.items():
        named = {str(name) for data in sources if (name := data.get(key))} | {usual}
        # Every user may write to /dev/null, but reading it gives nothing.
        named.discard(os.devnull)
        files |= {Path(os.path.expanduser(name)) for name in named}
        if key == "ssh_config_file":
            for name in named:
                # ssh_config(5): relative names are those of ~/.ssh.
                list(ssh_lines(os.path.expanduser(name), "~/.ssh", read=files))
    return files
