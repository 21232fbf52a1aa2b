"""From the command line's words to the nodes: inventory, selection, policies, connection data."""

from __future__ import annotations

import contextlib
import getpass
import os
import pwd
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from nodeready.transport.look import (
    PROBE_TIMEOUT_S,
    Look,
    Read,
    SnapshotQuestion,
    look_at,
)

if TYPE_CHECKING:
    from pyinfra.api import Host

    from nodeready.cli.screen import Screen
    from nodeready.inventory import load as inventory
    from nodeready.inventory.load import NodeInventory
    from nodeready.transport.allocation import Job

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
    via: str = "ssh"
    salloc: str | None = None
    topology: str | None = None
    ssh_processes: int | None = None

    def screen(self) -> Screen:
        from nodeready.cli.screen import Screen

        return Screen(self.color, self.quiet, self.verbose)


def _last_failed() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "nodeready" / "last-failed"


@dataclass(frozen=True)
class _Failed:
    """A node that failed when it was last asked.

    lost:  no command judged it: it could not be asked
    where: the inventory file that it was asked from; "": nodes that the command line listed
    """

    name: str
    lost: bool = False
    where: str = ""

    @classmethod
    def of(cls, row: str) -> _Failed:
        name, lost, where = (*row.split("\t", 2), "", "")[:3]
        return cls(name, bool(lost), where)

    def __str__(self) -> str:
        return "\t".join((self.name, "lost" * self.lost, self.where)).rstrip("\t")


def _remembered() -> list[_Failed]:
    try:
        rows = _last_failed().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    return [_Failed.of(row) for row in rows if row]


def remember_failed(
    nodes: Nodes,
    failed: Iterable[str],
    *,
    lost: bool = False,
    asked: Iterable[str] | None = None,
) -> None:
    """Keep the nodes that failed, for ``--limit @last-failed``. A full home is no error.

    What was kept of other nodes stays, whichever inventory they are from: a run with --limit, or
    one that was interrupted, forgets no node that it has not looked at. A run over a whole
    inventory forgets what it kept of nodes that have left the inventory since.

    lost:  the command only asks: it adds nodes that could not be asked, and forgets those that
           could not be asked before; what another command has judged stays
    asked: the nodes that it got to; None: all that were chosen
    """
    if nodes.inventory is None and not nodes.job:
        # This machine alone.
        return
    where = "" if nodes.inventory is None else nodes.inventory.file
    seen = set(nodes.policies if asked is None else asked)
    whole = nodes.inventory is not None and len(seen) == len(nodes.inventory)
    kept = [
        one
        for one in _remembered()
        if (lost and not one.lost) or not (one.name in seen or (whole and one.where == where))
    ]
    known = {one.name for one in kept}
    kept += [_Failed(name, lost, where) for name in dict.fromkeys(failed) if name not in known]
    path = _last_failed()
    with contextlib.suppress(OSError):
        make_directory(path.parent, 0o700)
        write_atomically(path, [f"{one}\n" for one in kept], 0o600)


def _selected(
    loaded: inventory.NodeInventory, words: str, tell: Callable[[str], None]
) -> list[Host]:
    """The hosts that ``--limit`` selects. Tells which failed nodes are not there any more."""
    from nodeready.inventory.limit import select_hosts
    from nodeready.inventory.nodeset import folded, split

    parts = split(words)
    if LAST_FAILED not in parts:
        return select_hosts(loaded, words)
    kept = _remembered()
    alone = set(parts) == {LAST_FAILED}
    if not kept and alone:
        raise Refused(f"--limit {LAST_FAILED}: no node failed in the last run")
    found = [one.name for one in kept if one.name in loaded.hosts]
    # Nodes of another inventory's file are not missing here.
    gone = [
        one.name for one in kept
        if one.name not in loaded.hosts and one.where in ("", loaded.file)
    ]  # fmt: skip
    if not found and alone:
        left = folded([one.name for one in kept], 200)
        raise Refused(f"--limit {LAST_FAILED}: not in the inventory: {left}")
    if gone:
        tell(f"--limit {LAST_FAILED}: not in the inventory: {folded(gone, 200)}")
    return select_hosts(loaded, words, {LAST_FAILED: found})


def declared(
    words: str, common: Common, given: Mapping[str, Any] = MappingProxyType({})
) -> tuple[inventory.NodeInventory, list[Host], dict[str, Policy]]:
    """An INVENTORY, its selected hosts, and their policies by name; no node is contacted.

    given: settings of the policy that the command line sets for every node
    Every mistake of the user's ends here. Raises Refused.
    """
    from pyinfra.api.exceptions import InventoryError

    from nodeready.inventory import load as inventory
    from nodeready.inventory.node_policies import policies

    def tell(text: str) -> None:
        if not common.quiet:
            click.echo(f"nodeready: {text}", err=True)

    data: dict[str, Any] = {}
    if common.ssh_user:
        data["ssh_user"] = common.ssh_user
    if common.ssh_key:
        data["ssh_key"] = common.ssh_key
    try:
        loaded = inventory.load(words, data=data, trusted=common.trust_inventory)
        hosts = list(loaded) if common.limit is None else _selected(loaded, common.limit, tell)
        wanted = policies(loaded, hosts)
    except InventoryError as error:
        raise Refused(str(error)) from None
    except PolicyError as error:
        raise Refused("\n".join(error.problems)) from None
    if loaded.note:
        tell(loaded.note)
    if given:
        changed = {policy: replace(policy, **given) for policy in {*wanted.values()}}
        wanted = {name: changed[policy] for name, policy in wanted.items()}
    return loaded, hosts, wanted


@dataclass(frozen=True)
class Nodes:
    """The nodes of one command, and the way to them. Leave it by ``carrier``, a context manager.

    policies:  declared, by name
    inventory: that they are from; None: this machine, without one
    job:       Slurm's number of the job whose steps ask; "": none, or one of our own
    """

    carrier: Carrier
    policies: Mapping[str, Policy]
    inventory: NodeInventory | None = None
    job: str = ""

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


#: Nodes for one process that speaks ssh, before a second one is worth its start. A login costs
#: some 6 ms of a core (docs/benchmarks.md): this many are a second and a half.
_SHARE = 256
#: Nodes from which on ``--via auto`` takes ClusterShell's tree, where it has gateways for them: so
#: many neighbours the kernel's table holds (net.ipv4.neigh.default.gc_thresh3, ip-sysctl), and so
#: many files a process may usually have open. Below, ssh is faster and costs this machine less
#: (docs/benchmarks.md, The ways).
_TREE_FROM = 1024


def over_ssh(words: str, common: Common, given: Mapping[str, Any] = MappingProxyType({})) -> Nodes:
    """The nodes of an INVENTORY, by one process. Every mistake of the user's ends here, before any
    node.

    given: settings of the policy that the command line sets for every node
    """
    from nodeready.transport.ssh import Fleet

    interrupt_on_signals()
    loaded, hosts, wanted = declared(words, common, given)
    _refuse_nameless(hosts)
    return Nodes(Fleet(loaded, hosts, _config(common)), wanted, loaded)


def _refuse_nameless(hosts: Iterable[Host]) -> None:
    """Raises Refused for a user id without a name (a container's ``-u``): ssh does the same, and
    reads of the name's entry in passwd where the keys are."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        if any(not host.name.startswith("@") for host in hosts):
            raise Refused(
                f"no user has the id {os.getuid()}: ssh needs a name for it in /etc/passwd"
            ) from None


def _config(common: Common) -> Any:
    # pyinfra takes longer to load than anybody waits for --help.
    from pyinfra.api import Config

    config = Config()
    if common.sudo:
        config.SUDO = True
    return config


def nodes_of(
    words: str | None,
    common: Common,
    given: Mapping[str, Any] = MappingProxyType({}),
    *,
    job: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
    works: bool = False,
) -> Nodes:
    """The nodes that a command asks, by the way that ``--via`` says. Raises Refused.

    words: INVENTORY; None: all nodes of the job, by the default policy
    job:   the running job of Slurm's whose steps ask, by srun
    tell:  gets a line about the way
    works: what is spoken with has the job's GPUs (`transport.srun.Srun`)
    """
    interrupt_on_signals()
    _check_way(words, common, job)
    if words is None:
        return _of_job(job, common, given, tell, works)
    loaded, hosts, wanted = declared(words, common, given)
    _refuse_nameless(hosts)
    inside = _own_job(hosts) if job is None and common.via in ("srun", "auto") else ""
    via = _way(common, hosts, inside)
    carrier: Carrier
    if via == "srun":
        carrier, number = _by_steps(list(wanted), common, job or inside, tell, works)
        return Nodes(carrier, {name: wanted[name] for name in carrier.nodes}, loaded, number)
    if via == "clush":
        from nodeready.transport.clush.carrier import Clush

        chosen = {host.name for host in hosts}
        others = [host for host in loaded if host.name not in chosen]
        carrier = Clush(hosts, _config(common), others=others, topology=common.topology, tell=tell)
    else:
        from nodeready.transport.ssh import Fleet, Sharded

        cores = len(os.sched_getaffinity(0))
        count = common.ssh_processes or max(1, min(cores, len(hosts) // _SHARE))
        carrier = (
            Fleet(loaded, hosts, _config(common))
            if count == 1
            else Sharded(loaded, hosts, _config(common), min(count, len(hosts)))
        )
    return Nodes(carrier, wanted, loaded)


def _check_way(words: str | None, common: Common, job: str | None) -> None:
    """Refuse options of a way that is not taken."""
    if job is not None and common.via in ("ssh", "clush"):
        raise Refused("--job: is for --via srun")
    if words is None and common.via in ("ssh", "clush"):
        raise Refused(f"--via {common.via}: of which INVENTORY?")
    if words is None and common.limit is not None:
        raise Refused("--limit: selects from an INVENTORY, and there is none")
    for name, value, ways in (
        ("--salloc", common.salloc, ("srun", "auto")),
        ("--topology", common.topology, ("clush", "auto")),
        ("--ssh-processes", common.ssh_processes, ("ssh", "auto")),
    ):
        if value is not None and common.via not in ways:
            raise Refused(f"{name}: is for --via {ways[0]}")


def _way(common: Common, hosts: list[Host], inside: str) -> str:
    """The way for these nodes. auto: steps of the job in which we run, when it has them all; the
    tree of ClusterShell for many nodes, where it has gateways; else ssh."""
    if common.via != "auto":
        return common.via
    if common.salloc is not None or inside:
        return "srun"
    if len(hosts) >= _TREE_FROM or common.topology is not None:
        from nodeready.transport.clush.ways import has_gateways

        if has_gateways([host.name for host in hosts], common.topology):
            return "clush"
    return "ssh"


def _own_job(hosts: Iterable[Host]) -> str:
    """The job of Slurm's in which this process runs, when it has all of these nodes; else ""."""
    from pyinfra.api.exceptions import InventoryError

    from nodeready.inventory import slurm

    number, text = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_JOB_NODELIST", "")
    if not number or not text:
        return ""
    try:
        path = os.environ.get("PATH", os.defpath)
        own = {*slurm.job_nodes(text, path, slurm.TIMEOUT_S)}
    except InventoryError:
        return ""
    return number if {host.name for host in hosts} <= own else ""


def running_job(words: str) -> Job:
    """The running job of ``--job``. Raises Refused."""
    from nodeready.transport.allocation import SrunError, running

    try:
        return running(words)
    except SrunError as problem:
        raise Refused(str(problem)) from None


def _of_job(
    job: str | None,
    common: Common,
    given: Mapping[str, Any],
    tell: Callable[[str], None],
    works: bool,
) -> Nodes:
    """All nodes of a running job, by the default policy."""
    from nodeready.transport.srun import Srun

    if job is None:
        raise Refused("--via srun: of which job? Name it with --job ID, or name an INVENTORY")
    if common.salloc is not None:
        raise Refused("--salloc: --job has its nodes already")
    found = running_job(job)
    carrier = Srun(found, tell, works=works, sudo=common.sudo)
    policy = replace(Policy(), **given)
    return Nodes(carrier, dict.fromkeys(carrier.nodes, policy), job=found.number)


def _by_steps(
    names: Sequence[str], common: Common, job: str, tell: Callable[[str], None], works: bool
) -> tuple[Carrier, str]:
    """The way to these nodes by steps of this job, as far as it has them, and its number; of one
    of our own for "", which has no number yet."""
    from nodeready.transport.srun import OwnJob, Srun

    if not job:
        return OwnJob(names, common.salloc or "", tell, works=works, sudo=common.sudo), ""
    if common.salloc is not None:
        raise Refused("--salloc: the job has its nodes already")
    found = running_job(job)
    has = {*found.nodes}
    here = [name for name in names if name in has]
    if not here:
        raise Refused(f"--job {job}: has none of the nodes of INVENTORY")
    left = len(names) - len(here)
    if left:
        tell(f"job {found.number} has {len(here)} of these nodes; {left} are not asked")
    return Srun(found.of(here), tell, works=works, sudo=common.sudo), found.number


def this_machine(policy: Policy, *, sudo: bool = False) -> Nodes:
    """This machine, without any connection. sudo: what is asked runs as root"""
    interrupt_on_signals()
    carrier = Local(sudo=sudo)
    return Nodes(carrier, dict.fromkeys(carrier.nodes, policy))


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

            def on_found(key: Key, value: Found | Failure) -> None:
                nonlocal told
                if carrier.interrupted and stopping and not told:
                    told = True
                    screen.say(stopping)
                done(node_of(key), isinstance(value, Failure) or bool(getattr(value, "error", "")))

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
    *,
    read: Read = SnapshotQuestion.read,
) -> list[Look]:
    """The look at every node.

    subjects: what to look at; None: all
    limit_s:  seconds for the look at one node
    stopping: as for `converse`
    read:     makes the snapshot of an answer
    """
    chosen = None if subjects is None else tuple(subjects)
    found = converse(
        nodes.carrier,
        screen,
        "looking",
        lambda name: look_at(
            name, nodes.policies[name], chosen, limit_s, read, nonce=nodes.carrier.nonce
        ),
        stopping=stopping,
    )
    return [Look.of(name, value) for name, value in found.items()]
