"""From the command line's words to the nodes: inventory, selection, policies, connection data."""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from nodeready.cli.options import Refused
from nodeready.exit_codes import SIGNALS, leave
from nodeready.files import make_directory, write_atomically
from nodeready.policy import Policy
from nodeready.policy.policy import PolicyError
from nodeready.text import counted
from nodeready.transport.base import (
    SUDO,
    Answer,
    Asks,
    Carrier,
    Conversation,
    Failure,
    Found,
    Key,
    Request,
    collect,
    node_of,
    once,
)
from nodeready.transport.local import Local
from nodeready.transport.look import PROBE_TIMEOUT_S, Look, look_at

if TYPE_CHECKING:
    from pyinfra.api import Host

    from nodeready.cli.screen import Screen
    from nodeready.inventory import load as inventory
    from nodeready.inventory.load import NodeInventory

#: What stands for the nodes that failed in the last run.
LAST_FAILED = "@last-failed"


@dataclass(frozen=True)
class Common:
    """The values of the options that every command shares."""

    limit: str | None = None
    sudo: bool = False
    trust_inventory: bool = False
    ssh_user: str | None = None
    ssh_key: str | None = None
    color: str = "auto"
    quiet: bool = False
    verbose: int = 0

    def screen(self) -> Screen:
        from nodeready.cli.screen import Screen

        return Screen(self.color, self.quiet, self.verbose)


def _last_failed() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "nodeready" / "last-failed"


def remember_failed(names: Iterable[str]) -> None:
    """Keep the nodes that failed, for ``--limit @last-failed``. A full home is no error."""
    path = _last_failed()
    with contextlib.suppress(OSError):
        make_directory(path.parent, 0o700)
        write_atomically(path, [f"{name}\n" for name in names], 0o600)


def _selected(loaded: inventory.NodeInventory, words: str) -> list[Host]:
    """The hosts that ``--limit`` selects."""
    from nodeready.inventory import load as inventory

    named: dict[str, list[str]] = {}
    if LAST_FAILED in words:
        try:
            named[LAST_FAILED] = _last_failed().read_text(encoding="utf-8").split()
        except OSError:
            named[LAST_FAILED] = []
        if not named[LAST_FAILED]:
            raise Refused(f"--limit {LAST_FAILED}: no node failed in the last run")
    return inventory.limit(loaded, words, named)


def declared(
    words: str, common: Common, given: Mapping[str, Any] = MappingProxyType({})
) -> tuple[inventory.NodeInventory, list[Host], dict[str, Policy]]:
    """An INVENTORY, its selected hosts, and their policies by name; no node is contacted.

    given: settings of the policy that the command line sets for every node
    Every mistake of the user's ends here. Raises Refused.
    """
    from nodeready.inventory import load as inventory
    from nodeready.inventory.load import policies

    data: dict[str, Any] = {}
    if common.ssh_user:
        data["ssh_user"] = common.ssh_user
    if common.ssh_key:
        data["ssh_key"] = common.ssh_key
    try:
        loaded = inventory.load(words, data=data, trusted=common.trust_inventory)
        hosts = list(loaded) if common.limit is None else _selected(loaded, common.limit)
        wanted = policies(loaded, hosts)
    except inventory.InventoryError as error:
        raise Refused(str(error)) from None
    except PolicyError as error:
        raise Refused("\n".join(error.problems)) from None
    if loaded.note and not common.quiet:
        click.echo(f"nodeready: {loaded.note}", err=True)
    if given:
        changed = {policy: replace(policy, **given) for policy in {*wanted.values()}}
        wanted = {name: changed[policy] for name, policy in wanted.items()}
    return loaded, hosts, wanted


@dataclass(frozen=True)
class Nodes:
    """The nodes of one command, and the way to them. Leave it by ``carrier``, a context manager.

    policies:  declared, by name
    inventory: that they are from; None: this machine, without one
    """

    carrier: Carrier
    policies: Mapping[str, Policy]
    inventory: NodeInventory | None = None

    @property
    def all(self) -> NodeInventory:
        """The inventory, of nodes that have one."""
        assert self.inventory is not None
        return self.inventory

    @property
    def slots(self) -> dict[str, int]:
        """The slots that the inventory gives to its nodes, as far as it does."""
        if self.inventory is None:
            return {}
        data = {name: self.inventory.get_host(name).data for name in self.policies}
        return {name: int(one.slots) for name, one in data.items() if one.get("slots")}


# --- Ctrl-C and SIGTERM under gevent: always a KeyboardInterrupt in the command's own greenlet.
#
# Python runs a signal's handler in whatever greenlet runs: in the work on some node, or in the
# loop of gevent, which would print a traceback. Before that, while a command is imported and reads
# what it was given, a signal ends the process at once (exit_codes.leave_on_signals).


def interrupt_on_signals() -> None:
    """From here on, a signal interrupts the calling greenlet; a second one ends the process."""
    import gevent
    from gevent import hub

    command = gevent.getcurrent()
    handled = [name for name in SIGNALS if signal.getsignal(name) is not signal.SIG_IGN]

    def interrupt(signum: int, frame: FrameType | None) -> None:
        for name in handled:
            signal.signal(name, leave)
        if gevent.getcurrent() is command:
            raise KeyboardInterrupt
        hub.get_hub().loop.run_callback(command.throw, KeyboardInterrupt())

    for name in handled:
        signal.signal(name, interrupt)


# --- The nodes that a command asks.


def over_ssh(words: str, common: Common, given: Mapping[str, Any] = MappingProxyType({})) -> Nodes:
    """The nodes of an INVENTORY. Every mistake of the user's ends here, before any node.

    given: settings of the policy that the command line sets for every node
    """
    # pyinfra takes longer to load than anybody waits for --help.
    from pyinfra.api import Config

    from nodeready.transport.ssh import Fleet

    interrupt_on_signals()
    loaded, hosts, wanted = declared(words, common, given)
    config = Config()
    if common.sudo:
        config.SUDO = True
    return Nodes(Fleet(loaded, hosts, config), wanted, loaded)


def this_machine(policy: Policy, *, sudo: bool = False) -> Nodes:
    """This machine, without any connection. sudo: what is asked runs as root"""
    interrupt_on_signals()
    carrier = Local(sudo=sudo)
    return Nodes(carrier, dict.fromkeys(carrier.nodes, policy))


def over_srun(job: str, tell: Callable[[str], None], *, works: bool = False) -> tuple[Nodes, str]:
    """The nodes of a running job of Slurm's, and the number by which its processes know it: a task
    of an array has one of its own. Raises Refused.

    works: what is spoken with has the job's GPUs (`transport.srun.Srun`)
    """
    from nodeready.transport.srun import Srun, SrunError
    from nodeready.transport.srun import job as running_job

    interrupt_on_signals()
    try:
        found = running_job(job)
    except SrunError as problem:
        raise Refused(str(problem)) from None
    carrier = Srun(found, tell, works=works)
    return Nodes(carrier, dict.fromkeys(carrier.nodes, Policy())), found.number


def converse(
    carrier: Carrier,
    screen: Screen,
    what: str,
    conversation: Callable[[str], Conversation[Found]],
    names: Iterable[str] | None = None,
    *,
    stopping: str = "",
) -> dict[str, Found | Failure]:
    """A conversation with each of these nodes (None: all), with progress; ask for sudo's password
    once.

    what:     the word for it beside the progress
    stopping: what to say when an interrupt ends what runs on the nodes
    """
    found: dict[str, Found | Failure] = {}
    told = False

    def each(chosen: list[str]) -> None:
        with screen.progress(what, chosen) as done:

            def on_found(key: Key, _: Found | Failure) -> None:
                nonlocal told
                if carrier.interrupted and stopping and not told:
                    told = True
                    screen.say(stopping)
                done(node_of(key))

            conversations: dict[Key, Conversation[Found]] = {
                name: conversation(name) for name in chosen
            }
            for key, value in collect(carrier, conversations, on_found).items():
                found[node_of(key)] = value

    each(list(carrier.nodes if names is None else names))
    refused = [name for name, value in found.items() if getattr(value, "kind", "") == SUDO]
    if refused and not carrier.interrupted and password(carrier, refused):
        each(refused)
    return found


def password(carrier: Carrier, names: list[str]) -> bool:
    """Ask for sudo's password for these nodes, when somebody is there to answer."""
    if not sys.stdin.isatty():
        return False
    words = f"sudo password ({counted(len(names), 'node')}): "
    carrier.use_password(getpass.getpass(words), names)
    return True


def ask_with_progress(carrier: Carrier, screen: Screen) -> Asks:
    """The function that asks each node one question, with progress and sudo's password."""

    def ask(what: str, asked: Mapping[str, Request]) -> Mapping[str, Answer]:
        return converse(carrier, screen, what, lambda name: once(asked[name]), asked)

    return ask


def look(
    nodes: Nodes,
    screen: Screen,
    subjects: Iterable[str] | None = None,
    limit_s: int = PROBE_TIMEOUT_S,
    stopping: str = "",
) -> list[Look]:
    """The look at every node.

    subjects: what to look at; None: all
    limit_s:  seconds for the look at one node
    stopping: as for `converse`
    """
    chosen = None if subjects is None else tuple(subjects)
    found = converse(
        nodes.carrier,
        screen,
        "looking",
        lambda name: look_at(name, nodes.policies[name], chosen, limit_s),
        stopping=stopping,
    )
    return [Look.of(name, value) for name, value in found.items()]
