"""Session: one command's connections to its nodes, from the first look to the last word.

A node that is unreachable, dies or hangs costs that node; the others go on.
"""

from __future__ import annotations

import secrets
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import gevent
from gevent.pool import Pool
from pyinfra.api import Config, Host, Inventory, State
from pyinfra.context import ctx_host, ctx_state

from nodeready import fleet, known_hosts, shell
from nodeready.policy import Policy
from nodeready.results import Result
from nodeready.snapshot import Snapshot, judge
from nodeready.transports.answer import (
    FAILED,
    HUNG,
    LOST,
    OVER,
    PROBE_TIMEOUT_S,
    SUDO,
    UNREACHED,
    Answer,
)
from nodeready.transports.connection import connect, set_timeouts
from nodeready.transports.connector import Become, become, carry
from nodeready.transports.live import observe

#: Nodes worked on at once. Each costs one socket and little memory; beyond this the controller's
#: own CPU is the limit.
MAX_PARALLEL = 256

Progress = Callable[[str], None]


@dataclass
class NodeRun:
    """What one command knows about one node.

    error:   one line when the node could not be looked at; kind says whose fault it is
    results: of all checks, from the latest look
    seconds: wall time of the first look, connection included
    """

    host: Host
    policy: Policy
    snapshot: Snapshot | None = None
    results: list[Result] = field(default_factory=list)
    error: str = ""
    kind: str = ""
    seconds: float = 0.0
    rights: Become | None = None

    @property
    def name(self) -> str:
        return str(self.host.name)

    @property
    def reached(self) -> bool:
        return self.snapshot is not None

    @property
    def unreachable(self) -> bool:
        """Whether it was not reached, or got lost on the way."""
        return self.kind in UNREACHED

    def fail(self, answer: Answer) -> None:
        self.error, self.kind = answer.error, answer.kind


class Session:
    """The nodes of one command. Use as a context manager; leaving it disconnects.

    inventory: pyinfra's, not yet used by a State
    hosts:     the selected ones
    wanted:    their declared policies, by name
    subjects:  what it looks at; None: all
    limit_s:   seconds for the look at one node
    """

    def __init__(
        self,
        inventory: Inventory,
        hosts: Iterable[Host],
        wanted: dict[str, Policy],
        config: Config | None = None,
        *,
        subjects: Iterable[str] | None = None,
        limit_s: int = PROBE_TIMEOUT_S,
    ) -> None:
        set_timeouts(inventory)
        config = config or Config()
        chosen = list(hosts)
        config.PARALLEL = max(1, min(len(chosen), MAX_PARALLEL))
        self.state = State(inventory, config, check_for_changes=False)
        self.run = secrets.token_hex(6)
        self.declared = wanted
        self.subjects = None if subjects is None else tuple(subjects)
        self.limit_s = limit_s
        self.nodes = [NodeRun(host, wanted[host.name]) for host in chosen]
        self._pool = Pool(config.PARALLEL)
        self.interrupted = False
        #: What else to begin on a node as soon as it is connected, without waiting for it.
        self.beside: Callable[[NodeRun], None] | None = None

    @property
    def tag(self) -> str:
        """The word that marks this run's processes on the nodes."""
        return f"nodeready:{self.run}"

    def __enter__(self) -> Session:
        self._context = ctx_state.use(self.state)
        self._context.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        self._pool.kill(timeout=2)
        closing = Pool(64)
        for node in self.nodes:
            if node.host.connected:
                closing.spawn(_disconnect, node.host)
        closing.join(timeout=5)
        self._context.__exit__(None, None, None)

    def each(
        self, work: Callable[[NodeRun], None], nodes: Iterable[NodeRun], done: Progress
    ) -> None:
        """Run ``work`` on these nodes in parallel, at most MAX_PARALLEL at once.

        An interrupt ends the waiting: nodes that are not done stay as they are.
        """

        def one(node: NodeRun) -> None:
            if self.interrupted:
                return
            try:
                with ctx_host.use(node.host):
                    work(node)
            except Exception as error:  # noqa: BLE001 - a mistake of ours costs this node alone
                node.error, node.kind = _mistake(error), FAILED
            done(node.name)

        jobs = [self._pool.spawn(one, node) for node in nodes]
        try:
            gevent.joinall(jobs, raise_error=True)
        except BaseException:
            gevent.killall(jobs, block=False)
            raise

    def connect(self, node: NodeRun) -> bool:
        """Connect if needed; False and the node's error when that fails."""
        node.error = node.kind = ""
        if not node.host.connected:
            answer = connect(node.host)
            if not answer.ok:
                node.fail(answer)
                return False
        if node.rights is None:
            node.rights = become(node.host)
        return True

    def look(self, node: NodeRun, subjects: Iterable[str] | None = None) -> None:
        """Connect if needed and observe the node: one round trip.

        subjects: what to look at; None: what this session is about
        """
        subjects = self.subjects if subjects is None else subjects
        started = time.monotonic()
        if not self.connect(node):
            return
        if self.beside is not None:
            self.beside(node)
        seen, error, kind = observe(
            node.host, node.policy, self.tag, subjects, node.rights, limit_s=self.limit_s
        )
        if error and kind in OVER - {HUNG}:
            node.error = f"{error} while looking" if kind == LOST else error
            node.kind = kind
            return
        node.snapshot = node.snapshot.merged(seen) if node.snapshot else seen
        node.seconds = node.seconds or time.monotonic() - started

    def gather(self, done: Progress) -> None:
        """Look at every node; what all of them showed completes each one's policy."""
        self.each(self.look, self.nodes, done)
        self.complete()

    def complete(self) -> None:
        """Complete the policies by what all nodes' answers say together."""
        snapshots = {node.name: node.snapshot for node in self.nodes if node.snapshot}
        wanted = fleet.expectations(self.declared, snapshots, self.state.inventory, self._block)
        for node in self.nodes:
            node.policy = wanted[node.name]

    def judge(self) -> None:
        """Judge every node that was looked at."""
        for node in self.nodes:
            if node.snapshot is not None:
                node.results = judge(node.snapshot, node.policy)

    def _block(self, name: str) -> str:
        """A node's known_hosts block that was too large for the snapshot."""
        node = next(node for node in self.nodes if node.name == name)
        with ctx_host.use(node.host):
            line = shell.command(known_hosts.READ_BLOCK, 30, self.tag)
            return self.carry(node, line, 30).stdout

    def ask_password(self, password: str) -> None:
        """Use this password for sudo on the nodes that want one."""
        for node in self.nodes:
            if node.kind == SUDO and node.rights is not None:
                node.rights = Become(True, password, node.rights.others)

    def carry(self, node: NodeRun, command: str, timeout_s: int, stdin: str = "") -> Answer:
        """One command on a node that was looked at."""
        return carry(node.host, command, timeout_s, stdin=stdin, rights=node.rights)

    def end_remote(self, limit_s: int = 5) -> None:
        """End what this run still has running on the nodes, by its tag; at most a few seconds."""
        # In brackets, so that it does not find the search itself.
        script = f"{shell.library('end')}nr_end {shell.quote(f'[n]odeready:{self.run}')}"
        line = shell.command(script, 3, "nodeready:end")

        def end(node: NodeRun) -> None:
            with ctx_host.use(node.host):
                carry(node.host, line, 3, rights=node.rights)

        closing = Pool(64)
        for node in self.nodes:
            if node.host.connected:
                closing.spawn(end, node)
        closing.join(timeout=limit_s)


def _mistake(error: Exception) -> str:
    """An exception that nobody expected, in one line, with the place in our code."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{place.filename.rpartition('/')[2]}:{place.lineno}"
    return f"internal error at {where}: {type(error).__name__}: {error}"


def _disconnect(host: Host) -> None:
    client = getattr(host.connector, "client", None)
    try:
        host.connector.disconnect()
        if client is not None:
            client.close()
    except Exception:  # noqa: BLE001 - the connection goes away either way
        return
