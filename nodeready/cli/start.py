"""From the command line's words to a Session: inventory, selection, policies, connection data."""

from __future__ import annotations

import contextlib
import getpass
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nodeready.cli.exits import Refused
from nodeready.files import write_atomically
from nodeready.policy import Policy
from nodeready.policy.load import PolicyError
from nodeready.transports.answer import PROBE_TIMEOUT_S, SUDO

if TYPE_CHECKING:
    from pyinfra.api import Host

    from nodeready import inventory
    from nodeready.cli.screen import Screen
    from nodeready.session import NodeRun, Session

#: What stands for the nodes that failed in the last run.
LAST_FAILED = "@last-failed"


@dataclass(frozen=True)
class Common:
    """The values of the options that every command shares."""

    limit: str | None = None
    sudo: bool = False
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
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, [f"{name}\n" for name in names])


def _selected(loaded: inventory.NodeInventory, words: str) -> list[Host]:
    """The hosts that ``--limit`` selects."""
    from nodeready import inventory

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
    from nodeready import fleet, inventory

    data: dict[str, Any] = {}
    if common.ssh_user:
        data["ssh_user"] = common.ssh_user
    if common.ssh_key:
        data["ssh_key"] = common.ssh_key
    try:
        loaded = inventory.load(words, data=data)
        hosts = list(loaded) if common.limit is None else _selected(loaded, common.limit)
        wanted = fleet.policies(loaded, hosts)
    except inventory.InventoryError as error:
        raise Refused(str(error)) from None
    except PolicyError as error:
        raise Refused("\n".join(error.problems)) from None
    if given:
        changed = {policy: replace(policy, **given) for policy in {*wanted.values()}}
        wanted = {name: changed[policy] for name, policy in wanted.items()}
    return loaded, hosts, wanted


def open_session(
    words: str,
    common: Common,
    subjects: Iterable[str] | None = None,
    limit_s: int = PROBE_TIMEOUT_S,
    given: Mapping[str, Any] = MappingProxyType({}),
) -> Session:
    """A Session for an INVENTORY. Every mistake of the user's ends here, before any node.

    subjects: what it looks at; None: all
    limit_s:  seconds for the look at one node
    given:    settings of the policy that the command line sets for every node
    """
    # pyinfra takes longer to load than anybody waits for --help.
    from pyinfra.api import Config

    from nodeready.cli.interrupt import hear
    from nodeready.session import Session

    hear()
    loaded, hosts, wanted = declared(words, common, given)
    config = Config()
    if common.sudo:
        config.SUDO = True
    return Session(loaded, hosts, wanted, config, subjects=subjects, limit_s=limit_s)


def visit(session: Session, screen: Screen, what: str, work: Callable[[NodeRun], None]) -> None:
    """Do ``work``, which connects, on all nodes, with progress; ask for sudo's password once.

    what: the word for it beside the progress
    """

    def each(runs: list[NodeRun]) -> None:
        with screen.progress(what, [node.name for node in runs]) as done:
            session.each(work, runs, done)

    each(session.nodes)
    asking = [node for node in session.nodes if node.kind == SUDO]
    if asking and sys.stdin.isatty():
        session.ask_password(getpass.getpass(f"sudo password ({len(asking)} nodes): "))
        each(asking)


def gather(session: Session, screen: Screen) -> None:
    """Look at all nodes; what all of them showed completes each one's policy."""
    visit(session, screen, "looking", session.look)
    session.complete()
