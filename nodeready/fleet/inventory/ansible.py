"""Ansible's inventories as INVENTORY: INI, YAML, and the JSON of ``ansible-inventory --list``.

Read are hosts, groups, ranges, and the variables that say how to log in, also those of group_vars
and host_vars beside the file. Precedence is Ansible's ("Understanding variable precedence").
"""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyinfra.api.exceptions import InventoryError

from nodeready.core.files import read_regular
from nodeready.core.text import sanitise
from nodeready.fleet.inventory.nodeset import too_many
from nodeready.fleet.inventory.site_files import Group, refuse_strangers

#: Ansible's variable -> the key of pyinfra's connector.
_LOGIN = {"host": "ssh_hostname", "port": "ssh_port", "user": "ssh_user"}
_LOGIN["private_key_file"] = "ssh_key"
_KEYS = {f"ansible_{ssh}{name}": key for name, key in _LOGIN.items() for ssh in ("", "ssh_")}
_KEYS["ansible_become"] = "_sudo"
#: Variables that change nothing here.
_IGNORED = ("ansible_connection", "ansible_python_interpreter", "ansible_become_method")
_SSH = ("ssh", "smart", "paramiko", "paramiko_ssh")
_YAML, _JSON = (".yml", ".yaml"), (".json",)
ENDINGS = (".ini", *_YAML, *_JSON)
_SECTION = re.compile(r"\[([^\[\]:\s]+)(?::(children|vars))?\]\s*(?:[#;].*)?")
_RANGE = re.compile(r"\[(\w+):(\w+)(?::(\d+))?\]")
_INI = re.compile(rf"^(?:{_SECTION.pattern}$|[^#;\n]*(?:\sansible_\w+=|{_RANGE.pattern}))", re.M)
_PORT = re.compile(r"([^:]*(?:\[[^\]]*\][^:]*)*):(\d{1,5})")
_WHOLE = "write `ansible-inventory -i FILE --list >nodes.json` and use nodes.json"


@dataclass
class _AnsibleGroup:
    hosts: dict[str, dict[str, Any]] = field(default_factory=dict)
    children: dict[str, None] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)


#: Group -> its own hosts, children and variables.
_AnsibleGroups = defaultdict[str, _AnsibleGroup]


def is_ansible(path: Path, text: str) -> bool:
    """Whether a file is an inventory of Ansible's: by its ending, or by an INI's lines."""
    return path.suffix in (*_YAML, *_JSON) or _INI.search(text) is not None


def read(path: Path, text: str, trusted: bool) -> tuple[dict[str, Group], str]:
    """The groups of an inventory, "all" among them, and a line about what is not used, or "".

    trusted: as for `site_files.execute`. Raises InventoryError, one line.
    """
    try:
        if path.suffix in _JSON:
            groups = _from_json(json.loads(text))
        elif path.suffix in _YAML:
            groups = _from_yaml(text)
        else:
            groups = _from_ini(text, path)
        files = {} if path.suffix in _JSON else dict(_variable_files(path.resolve(), trusted))
        return _resolved(groups, files)
    except InventoryError as error:
        raise InventoryError(f"{path}: {error}") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        words = sanitise(" ".join(str(error).split()), 160)
        raise InventoryError(f"{path} is no inventory of Ansible's: {words}; {_WHOLE}") from None


# --- The forms.


def _names(pattern: str) -> Iterator[str]:
    """The hosts of ``node[01:16]``, ``db[a:c]``, ``n[1:9:2]``, with several ranges, too."""
    match = _RANGE.search(pattern)
    if match is None:
        yield pattern
        return
    first, last, step = match[1], match[2], int(match[3] or 1)
    if first.isdecimal() and last.isdecimal():
        numbers = range(int(first), int(last) + 1, step)
        width = len(first) if first.startswith("0") else 0
    else:
        numbers, width = range(ord(first), ord(last) + 1, step), -1
    if reason := too_many(len(numbers), pattern):
        raise InventoryError(reason)
    for number in numbers:
        word = chr(number) if width < 0 else f"{number:0{width}}"
        yield from _names(f"{pattern[: match.start()]}{word}{pattern[match.end() :]}")


def _from_ini(text: str, path: Path) -> _AnsibleGroups:
    groups, name, part = _AnsibleGroups(_AnsibleGroup), "ungrouped", ""
    for number, line in enumerate(text.splitlines(), 1):
        if match := _SECTION.fullmatch(line.strip()):
            name, part = match[1], match[2] or ""
            groups.setdefault(name, _AnsibleGroup())
        elif part == "vars" and "=" in line and not line.lstrip().startswith(("#", ";")):
            key, _, value = line.partition("=")
            groups[name].variables[key.strip()] = value.strip().strip("'\"")
        else:
            try:
                words = [] if line.lstrip().startswith(";") else shlex.split(line, comments=True)
                if words:
                    _add_ini_line(groups, groups[name], part, words)
            except ValueError as error:
                raise InventoryError(f"line {number}: {error}") from None
    return groups


def _add_ini_line(
    groups: _AnsibleGroups, group: _AnsibleGroup, part: str, words: list[str]
) -> None:
    if part == "children":
        group.children[words[0]] = None
        groups.setdefault(words[0], _AnsibleGroup())
        return
    if any("=" not in word for word in words[1:]) or part:
        raise ValueError(f"{words[-1][:60]!a} is not understood; write HOST KEY=VALUE")
    variables = dict(word.split("=", 1) for word in words[1:])
    pattern = words[0]
    if match := _PORT.fullmatch(pattern):
        pattern, variables = match[1], {"ansible_port": match[2], **variables}
    for host in _names(pattern):
        group.hosts.setdefault(host, {}).update(variables)


class _Secret:
    """A value with a tag, such as !vault."""


def _load_yaml(text: str) -> Any:
    import yaml

    loader: Any = type("Loader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {})
    loader.add_multi_constructor("!", lambda *words: _Secret())
    try:
        return yaml.load(text, loader)
    except yaml.YAMLError as error:
        raise ValueError(error) from None


def _from_yaml(text: str) -> _AnsibleGroups:
    groups = _AnsibleGroups(_AnsibleGroup)

    def add(name: str, data: Mapping[str, Any] | None) -> None:
        group = groups[name]
        for pattern, variables in ((data or {}).get("hosts") or {}).items():
            for host in _names(str(pattern)):
                group.hosts.setdefault(host, {}).update(variables or {})
        group.variables.update((data or {}).get("vars") or {})
        for child, inner in ((data or {}).get("children") or {}).items():
            group.children[str(child)] = None
            add(str(child), inner)

    for name, data in _load_yaml(text).items():
        add(str(name), data)
    return groups


def _from_json(data: Mapping[str, Any]) -> _AnsibleGroups:
    groups = _AnsibleGroups(_AnsibleGroup)
    variables = data.get("_meta", {}).get("hostvars", {})
    for name, group in data.items():
        if name != "_meta":
            groups[name].hosts = {host: variables.get(host, {}) for host in group.get("hosts", [])}
            groups[name].children = dict.fromkeys(group.get("children", []))
            groups[name].variables = group.get("vars", {})
    return groups


def _variable_files(path: Path, trusted: bool) -> Iterator[tuple[tuple[str, str], Any]]:
    """(group_vars or host_vars, name) -> the variables of its files beside the inventory."""
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for kind in ("group_vars", "host_vars"):
        for file in sorted((path.parent / kind).rglob("*")):
            if not file.is_file() or file.suffix not in ("", *_YAML, *_JSON):
                continue
            refuse_strangers(file, trusted)
            text = read_regular(file).decode("utf-8", "replace")
            name = file.relative_to(path.parent / kind).parts[0]
            encrypted = {"ansible_vault": f"{kind}/{name} is encrypted"}
            data = encrypted if text.startswith("$ANSIBLE_VAULT") else _load_yaml(text)
            key = kind, name if file.parent.name == name else Path(name).stem
            merged.setdefault(key, {}).update(data or {})
    yield from merged.items()


# --- What the groups mean.


def _resolved(
    groups: _AnsibleGroups, files: Mapping[tuple[str, str], Any]
) -> tuple[dict[str, Group], str]:
    depths = {"all": 0}

    def descend(name: str, depth: int) -> None:
        if depth > len(groups) + 1:
            raise InventoryError(f"the group {name} is its own child")
        depths[name] = max(depths.get(name, 0), depth)
        for child in groups[name].children:
            descend(child, depth + 1)

    for name in [*groups]:
        descend(name, 0 if name == "all" else 1)
    hosts: dict[str, dict[str, Any]] = {}
    members: dict[str, dict[str, None]] = {name: {} for name in groups}
    # The children first, so that a parent has their hosts.
    for name in sorted(groups, key=lambda name: -depths[name]):
        members[name].update(dict.fromkeys(groups[name].hosts))
        for child in groups[name].children:
            members[name].update(members[child])
    every = list(dict.fromkeys(host for group in groups.values() for host in group.hosts))
    members["all"] = dict.fromkeys(every)
    order = sorted(members, key=lambda name: (depths.get(name, 0), name))
    unused: dict[str, None] = {}
    for host in every:
        own_groups = [name for name in order if host in members[name]]
        layers = [groups[name].variables for name in own_groups]
        layers += [files.get(("group_vars", name), {}) for name in own_groups]
        layers += [group.hosts[host] for group in groups.values() if host in group.hosts]
        layers.append(files.get(("host_vars", host), {}))
        variables = {key: value for layer in layers for key, value in layer.items()}
        if variables.get("ansible_connection", "ssh") in _SSH:
            hosts[host] = _login(host, variables, unused)
        else:
            words = sanitise(str(variables["ansible_connection"]), 40)
            unused[f"{host} (ansible_connection={words}: name @local, or ssh)"] = None
    named = (name for name in order if name not in ("all", "ungrouped"))
    groups_of = {name: [host for host in members[name] if host in hosts] for name in named}
    result: dict[str, Group] = {name: (hosts_of, {}) for name, hosts_of in groups_of.items()}
    result["all"] = (list(hosts.items()), {})
    shown = sanitise(", ".join(unused), 300)
    return result, f"not used of Ansible's inventory: {shown}" if shown else ""


def _login(host: str, variables: Mapping[str, Any], unused: dict[str, None]) -> dict[str, Any]:
    """The data of pyinfra's connector; what is not used is added to `unused`."""
    data: dict[str, Any] = {}
    for name, value in variables.items():
        key = _KEYS.get(name)
        if key is None:
            if name.startswith("ansible_") and name not in _IGNORED:
                unused[value if name == "ansible_vault" else name] = None
            continue
        if isinstance(value, _Secret) or "{{" in str(value):
            raise InventoryError(f"{host}: {name} is a template or encrypted; {_WHOLE}")
        data[key] = text = str(value)
        if key == "_sudo":
            data[key] = text.lower() in ("true", "yes", "1", "on")
        elif key == "ssh_port" and text.isdecimal():
            data[key] = int(text)
    return data
