"""The nodes as targets of ssh, and the gateways of topology.conf."""

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

from nodeready.agent.asking import CONNECT_TIMEOUT_S, DEAD_AFTER_S, KEEPALIVE_S
from nodeready.core.text import sanitise
from nodeready.fleet.transport.connection import connect_error

if TYPE_CHECKING:
    from pyinfra.api import Host

#: Seconds for the rest of a login, after ConnectTimeout: TCP, banner and key exchange.
LOGIN_S = 10


# --- The inventory's settings as options of ssh.


@dataclass(frozen=True)
class SshTarget:
    """The target of ssh for a node, from the inventory."""

    name: str
    destination: str  # the argument of ssh: an address, or the name
    options: tuple[str, ...] = ()
    user: str = ""  # also for the ssh of a gateway; "": ssh's configuration has it
    key: str = ""  # the private key; "": ssh's configuration has it
    direct_reason: str = ""  # why no gateway is used; "": gateways may be used
    sudo: bool = False  # run scripts as root
    password: str = ""  # sudo's; "": none
    refused: str = ""  # why ClusterShell cannot ask the node; "": it can
    display_address: str = ""  # for error messages
    known_hosts: str = "~/.ssh/known_hosts"  # likewise

    def failure_text(self, errors: str, gateway: str = "") -> str:
        """Why ssh failed on this machine, or on the gateway of this name."""
        place = f" of gateway {gateway}" if gateway else ""
        return connect_error(
            connect_error_words(errors),
            self.name if gateway else self.display_address or self.destination,
            user=self.user or ("its own" if gateway else getpass.getuser()),
            key=f"any key{place}" if gateway else self.key or "any key of the agent or ~/.ssh",
            known_hosts=f"~/.ssh/known_hosts{place}" if gateway else self.known_hosts,
            limit_s=CONNECT_TIMEOUT_S,
        )


#: OpenSSH's errors, and paramiko's words for them, which `connection.connect_error` knows. The
#: first match counts.
SSH_ERRORS = tuple(
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


def connect_error_words(errors: str) -> str:
    """ssh's standard error in the words that `connect_error` knows."""
    for pattern, words in SSH_ERRORS:
        if pattern.search(errors):
            return words
    rows = [row.strip() for row in errors.splitlines() if row.strip()]
    return sanitise(rows[-1][:200]) if rows else "timed out"


#: pyinfra's arguments that change a command, which only pyinfra supports.
_PYINFRA_ARGUMENTS = (
    "_su_user", "_doas", "_dzdo", "_sudo_user", "_env", "_chdir", "_use_su_login",
    "_use_sudo_login", "_preserve_sudo_env",
)  # fmt: skip


def ssh_target(host: Host, sudo: bool = False) -> SshTarget:
    """How to reach a host of an inventory. sudo: the default from pyinfra's configuration"""
    data: Any = host.data
    name = str(host.name)

    def text_of(key: str) -> str:
        value = data.get(key)
        return "" if value is None else str(value)

    user, key, port = text_of("ssh_user"), text_of("ssh_key"), text_of("ssh_port")
    destination = text_of("ssh_hostname") or name
    has_own_port = port not in ("", "22")
    known_hosts = text_of("ssh_known_hosts_file")
    # Never accept a changed key, and never ask.
    is_strict = text_of("ssh_strict_host_key_checking") in ("yes", "ask")
    options = [*COMMON, f"-oStrictHostKeyChecking={'yes' if is_strict else 'accept-new'}"]
    if file := text_of("ssh_config_file"):
        options = [f"-F{absolute(file)}", *options]
    if known_hosts:
        options.append(f"-oUserKnownHostsFile={absolute(known_hosts)}")
    if key:
        options += [f"-oIdentityFile={absolute(key)}", "-oIdentitiesOnly=yes"]
    if port:
        options.append(f"-oPort={port}")
    if user:
        options.append(f"-oUser={user}")
    sudo_value = data.get("_sudo")
    refused = ""
    if name.startswith("@"):
        refused = f"{name} is a connector of pyinfra's: ask with --via ssh"
    elif keys := [key for key in ("ssh_password", "ssh_key_password") if text_of(key)]:
        refused = f"{keys[0]} is for pyinfra's own ssh: ask with --via ssh"
    elif keys := [key for key in _PYINFRA_ARGUMENTS if data.get(key)]:
        refused = f"{keys[0]} is pyinfra's: ask with --via ssh"
    return SshTarget(
        name=name,
        destination=destination,
        options=tuple(options),
        user=user,
        key=absolute(key) if key else "",
        direct_reason="a port of its own" if has_own_port else "",
        sudo=bool(sudo if sudo_value is None else sudo_value),
        password=text_of("_sudo_password"),
        refused=refused,
        display_address=f"[{destination}]:{port}" if has_own_port else destination,
        known_hosts=known_hosts or "~/.ssh/known_hosts",
    )


#: Options of every ssh here.
COMMON = (
    "-oBatchMode=yes", "-oLogLevel=ERROR", "-oControlMaster=no", "-oForwardAgent=no",
    "-oForwardX11=no", "-oClearAllForwardings=yes", "-oRequestTTY=no",
    f"-oConnectTimeout={CONNECT_TIMEOUT_S}", f"-oServerAliveInterval={KEEPALIVE_S}",
    f"-oServerAliveCountMax={DEAD_AFTER_S // KEEPALIVE_S}",
)  # fmt: skip


def absolute(path: str) -> str:
    """The path from the home or the current directory."""
    return os.path.join(os.getcwd(), os.path.expanduser(path))


def without_own_keys(targets: Iterable[SshTarget]) -> list[SshTarget]:
    """The targets; one with another key than most uses no gateway, which lacks that key."""
    targets = list(targets)
    usual_keys = Counter(target.key for target in targets).most_common(1)
    return [
        target
        if target.direct_reason or target.key == usual_keys[0][0]
        else replace(target, direct_reason="a key of its own")
        for target in targets
    ]


# --- The gateways in topology.conf.


def topology_file() -> str:
    """The topology.conf that ClusterShell finds; "": none."""
    paths = [path for path in config_paths("topology.conf") if os.path.exists(path)]
    return str(paths[-1]) if paths else ""


def tree_of(path: str) -> Any:
    """ClusterShell's tree, seen from this machine. Raises what ClusterShell's parser raises."""
    with open(path, encoding="utf-8"):
        pass  # The parser skips a file that cannot be opened.
    return Topology.TopologyParser(path).tree(socket.gethostname().split(".")[0])


def gateways_by_node(tree: Any) -> dict[str, tuple[str, ...]]:
    """Node behind gateways -> the gateways before it, a row of the tree. A gateway may itself be
    behind gateways.
    """
    gateways_of: dict[str, tuple[str, ...]] = {}
    groups = list(tree.root.children())
    while groups:
        row = groups.pop()
        for group in row.children():
            gateways_of.update(dict.fromkeys(group.nodeset, tuple(row.nodeset)))
            groups.append(group)
    return gateways_of


def has_gateways(names: Iterable[str], topology: str | None = None) -> bool:
    """Whether the tree has gateways between this machine and most of these nodes.

    topology: as for `Clush`, which reports a file that cannot be read; here it has none
    """
    path, selected = topology or topology_file(), {*names}
    if not path:
        return False
    try:
        behind_gateways = selected & gateways_by_node(tree_of(path)).keys()
    except Exception:  # noqa: BLE001 - ClusterShell's parser raises many kinds
        return False
    return 2 * len(behind_gateways) > len(selected)
