"""How nodes are reached: the inventory in words of ssh's, and topology.conf's gateways."""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ClusterShell import Topology
from ClusterShell.Defaults import config_paths

from nodeready.text import sanitise
from nodeready.transport.base import UNREACHABLE, Failure

if TYPE_CHECKING:
    from pyinfra.api import Host

#: Seconds for a connection: ssh's own limit on TCP, banner and keys; and beyond that for the rest
#: of a login.
CONNECT_S, LOGIN_S = 15, 10
#: A node that dies in the middle is noticed after ALIVE_S * ALIVE_COUNT (ssh_config(5)).
ALIVE_S, ALIVE_COUNT = 5, 5


# --- What the inventory says, as words of ssh's.


@dataclass(frozen=True)
class SshTarget:
    """How ssh reaches a node, as the inventory has it.

    to:       the destination for ssh here: an address, or the name
    options:  of ssh here
    user:     "": ssh's own configuration tells; travels to a gateway
    key:      the private key; "": ssh's own
    alone:    why it is never asked through a gateway; "": it may be
    sudo:     run what is asked as root
    password: sudo's; "": none
    refused:  why the node cannot be asked at all in this way; "": it can
    shown, known_hosts: for the words of a failure
    """

    name: str
    to: str
    options: tuple[str, ...] = ()
    user: str = ""
    key: str = ""
    alone: str = ""
    sudo: bool = False
    password: str = ""
    refused: str = ""
    shown: str = ""
    known_hosts: str = "~/.ssh/known_hosts"

    def unreachable(self, said: str) -> Failure:
        """The failure of a connection, from what ssh said."""
        return Failure(kind=UNREACHABLE, error=self.words(said))

    def words(self, said: str, by: str = "") -> str:
        """Why there is no connection. by: the gateway whose ssh said so; "": ours"""
        # It loads paramiko and pyinfra, which ClusterShell's process needs for this alone.
        from nodeready.transport.connection import connect_error

        where = f" of gateway {by}" if by else ""
        return connect_error(
            translated(said),
            self.name if by else self.shown or self.to,
            user=self.user or ("its own" if by else getpass.getuser()),
            key=f"any key{where}" if by else self.key or "any key of the agent or ~/.ssh",
            known_hosts=f"~/.ssh/known_hosts{where}" if by else self.known_hosts,
            limit_s=CONNECT_S,
        )


#: What OpenSSH's ssh says, and the words of the other carrier's library for the same: what they
#: mean is said in one place (`connection.connect_error`). The first that is found counts.
SSH_SAYS = tuple(
    (re.compile(pattern, re.IGNORECASE), words)
    for pattern, words in (
        (r"host identification has changed|host key for .* has changed", "host key error"),
        (r"no \S+ host key is known for", "no host key for it in known_hosts"),
        (r"host key verification failed", "no host key for it in known_hosts"),
        (r"could not resolve hostname", "could not resolve"),
        (r"(stdio forwarding failed|connection closed by unknown|proxy)", "proxycommand"),
        (r"too many authentication failures", "too many authentication failures"),
        (r"no matching \S+( \S+)* found|unable to negotiate", "no acceptable algorithm"),
        (r"permission denied \(", "authentication failed"),
        (r"connection refused", "connection refused"),
        (r"no route to host|network is unreachable|host is down", "no route to host"),
        (r"during banner exchange|banner exchange: |invalid format", "banner"),
        (r"exceeded maxstartups", "exceeded maxstartups"),
        (r"not allowed at this time", "not allowed at this time"),
        (r"kex_exchange_identification: .*(closed|reset)", "hung up before its banner"),
        (r"timed? ?out|not responding", "timed out"),
        (r"load key|invalid private key", "private key file"),
        (r"reset by peer|broken pipe", "reset by peer"),
        (r"connection closed by|closed by remote host", "saw eof"),
    )
)


def translated(said: str) -> str:
    """What ssh's standard error means, in the words that `connect_error` reads."""
    for pattern, words in SSH_SAYS:
        if pattern.search(said):
            return words
    rows = [row.strip() for row in said.splitlines() if row.strip()]
    return sanitise(rows[-1][:200]) if rows else "timed out"


#: pyinfra's arguments that put something else around a command, which only pyinfra knows.
_PYINFRAS = (
    "_su_user", "_doas", "_dzdo", "_sudo_user", "_env", "_chdir", "_use_su_login",
    "_use_sudo_login", "_preserve_sudo_env",
)  # fmt: skip


def ssh_target(host: Host, sudo: bool = False) -> SshTarget:
    """How to reach a host of an inventory. sudo: pyinfra's configuration asks for it"""
    data: Any = host.data
    name = str(host.name)

    def told(key: str) -> str:
        value = data.get(key)
        return "" if value in (None, "") else str(value)

    user, key, port = told("ssh_user"), told("ssh_key"), told("ssh_port")
    to = told("ssh_hostname") or name
    known_hosts = told("ssh_known_hosts_file")
    options = [*COMMON, f"-oStrictHostKeyChecking={_strict(told('ssh_strict_host_key_checking'))}"]
    if file := told("ssh_config_file"):
        options = [f"-F{absolute(file)}", *options]
    if known_hosts:
        options.append(f"-oUserKnownHostsFile={absolute(known_hosts)}")
    if key:
        options += [f"-oIdentityFile={absolute(key)}", "-oIdentitiesOnly=yes"]
    if port:
        options.append(f"-oPort={port}")
    if user:
        options.append(f"-oUser={user}")
    asked = data.get("_sudo")
    refused = ""
    if name.startswith("@"):
        refused = f"{name} is a connector of pyinfra's: ask with --via ssh"
    elif only := [one for one in ("ssh_password", "ssh_key_password") if told(one)]:
        refused = f"{only[0]} is for pyinfra's own ssh: ask with --via ssh"
    elif only := [one for one in _PYINFRAS if data.get(one)]:
        refused = f"{only[0]} is pyinfra's: ask with --via ssh"
    return SshTarget(
        name=name,
        to=to,
        options=tuple(options),
        user=user,
        key=absolute(key) if key else "",
        alone="a port of its own" if port not in ("", "22") else "",
        sudo=bool(sudo if asked is None else asked),
        password=told("_sudo_password"),
        refused=refused,
        shown=to if port in ("", "22") else f"[{to}]:{port}",
        known_hosts=known_hosts or "~/.ssh/known_hosts",
    )


#: Of every ssh here.
COMMON = (
    "-oBatchMode=yes", "-oLogLevel=ERROR", "-oControlMaster=no", "-oForwardAgent=no",
    "-oForwardX11=no", "-oClearAllForwardings=yes", "-oRequestTTY=no",
    f"-oConnectTimeout={CONNECT_S}", f"-oServerAliveInterval={ALIVE_S}",
    f"-oServerAliveCountMax={ALIVE_COUNT}",
)  # fmt: skip


def absolute(path: str) -> str:
    """A path as the user meant it: from home, or from where they stand."""
    return os.path.join(os.getcwd(), os.path.expanduser(path))


def _strict(told: str) -> str:
    """pyinfra's word for ssh: a key that has changed is never taken, and nobody can be asked."""
    return "yes" if told in ("yes", "ask") else "accept-new"


def without_own_keys(ways: Iterable[SshTarget]) -> list[SshTarget]:
    """The same, where a node with another key than most is asked directly: no gateway has it."""
    ways = list(ways)
    usual = Counter(one.key for one in ways).most_common(1)
    return [
        one if one.alone or one.key == usual[0][0] else replace(one, alone="a key of its own")
        for one in ways
    ]


@dataclass(frozen=True)
class ClushPlan:
    """What ClusterShell's process is told first.

    gateways: how to reach the hosts of the inventory, of which some may be gateways
    topology: the file; "": none
    fanout:   ssh programs at once; 0: as ClusterShell's configuration has it
    """

    ways: tuple[SshTarget, ...]
    gateways: tuple[SshTarget, ...]
    tag: str
    topology: str
    fanout: int


# --- Gateways, as topology.conf has them.


def topology_file() -> str:
    """The topology.conf that ClusterShell would take; "": there is none."""
    found = [path for path in config_paths("topology.conf") if os.path.exists(path)]
    return str(found[-1]) if found else ""


def tree_of(path: str) -> Any:
    """ClusterShell's tree, seen from this machine. Raises what ClusterShell's parser raises."""
    with open(path, encoding="utf-8"):
        pass
    return Topology.TopologyParser(path).tree(socket.gethostname().split(".")[0])


def rows(tree: Any) -> dict[str, tuple[str, ...]]:
    """Node that stands below gateways of this machine's -> those gateways, a row of the tree."""
    found: dict[str, tuple[str, ...]] = {}
    for group in tree.root.children():
        below = list(group.children())
        while below:
            one = below.pop()
            found.update(dict.fromkeys(one.nodeset, tuple(group.nodeset)))
            below += one.children()
    return found


def has_gateways(names: Iterable[str], topology: str | None = None) -> bool:
    """Whether the tree has gateways between this machine and most of these nodes.

    topology: as for `Clush`. A file that cannot be read has none here: `Clush` says why
    """
    path, wanted = topology or topology_file(), {*names}
    if not path:
        return False
    try:
        below = wanted & rows(tree_of(path)).keys()
    except Exception:  # noqa: BLE001 - its parser raises what it meets
        return False
    return 2 * len(below) > len(wanted)
