"""The nodes of a smoke test: their snapshots, the program on them, and which nodes take part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import gevent

from nodeready.agent.asking import Conversation, Key, Transport, collect, node_of, request
from nodeready.agent.smoke.orders import ENGINES, PAIRS, Hello, SmokeConfig
from nodeready.agent.snapshots import take_snapshot
from nodeready.core.outcome import SUDO, Outcome
from nodeready.core.policy import Policy
from nodeready.fleet.inventory.nodeset import folded
from nodeready.fleet.transport.channels import Channels
from nodeready.runs.ready import mesh
from nodeready.runs.smoke.engine_choice import (
    EngineChoice,
    Kind,
    Numbers,
    choose,
    engine_name,
    idle_gpus,
)
from nodeready.subjects.environment_rules import EnvironmentFinding, RankEnvironment, judge
from nodeready.subjects.gpus.gpu import Gpus
from nodeready.subjects.snapshot import Snapshot

#: The subjects that show idle GPUs and error counters; probed before and after the tests.
_SUBJECTS = ("gpus", "rdma", "nics", "host")
#: Seconds to probe a node, each time. A driver that hangs must not cost the whole budget.
_PROBE_S = 20
#: The nodes are probed again only if these seconds remain.
_MIN_LEFT_S = 3.0

_MAIN = "nodeready.agent.smoke.program"
#: Seconds until the program's first line: a login, and PyTorch from a disk that may be cold.
_START_S = 85.0
#: When most nodes have started, the remaining nodes get this multiple of the slowest start, and at
#: least these seconds.
_START_TIMES, _MIN_START_S = 4, 20.0
#: Seconds between two checks for nodes that have started.
_TICK_S = 0.2
#: Seconds after the deadline at which listeners and ranks end, even if the connection does not.
_LONGER_S = 5

Progress = Callable[[str, Iterable[str]], AbstractContextManager[Callable[[str], object]]]


@dataclass(frozen=True)
class SmokeTask:
    """The request for a smoke test."""

    transport: Transport
    policies: Mapping[str, Policy]  # node -> its policy, in the inventory's order
    deadline: float  # the moment of time.monotonic() at which everything has ended
    budget_s: int  # the user's budget, for messages
    # ``torch``, ``torch:gloo``, ``nccl-tests``, ``pairs``; "": the best available
    engine: str = ""
    # the GPUs' numbers, or their count on each node; None: all
    gpus: tuple[int, ...] | int | None = None
    ranks: int = 2  # the number of ranks on a node without GPUs
    busy: bool = False  # use GPUs that other processes use
    full: bool = False  # test every pair, not only ring and skips
    python: str = ""  # the job's, see `orders.SmokeConfig`; empty: the policy's
    prefix: tuple[str, ...] = ()  # likewise
    environment: tuple[str, ...] = ()  # likewise
    # address -> its node by the inventory
    inventory_addresses: Mapping[str, str] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines to search for: the requested engine and pairs."""
        name = self.engine.partition(":")[0]
        return tuple(engine for engine in ENGINES if not name or engine in (name, PAIRS))


class Participants:
    """The nodes, from the first snapshot to the last.

    excluded:  node -> why it takes no part
    names:     the nodes that take part, in the inventory's order
    gpus:      node -> the numbers of its tested GPUs; {} without GPUs
    ports:     node -> the ports on which it listens
    addresses: node -> the addresses that only this node has
    findings:  about the variables of the ranks
    """

    def __init__(self, task: SmokeTask, tell: Callable[[str], object], progress: Progress) -> None:
        self.task, self.tell, self.progress = task, tell, progress
        self.channels = Channels(task.transport, task.deadline)
        self.before: dict[str, Outcome[Snapshot]] = {}
        self.after: dict[str, Outcome[Snapshot]] = {}
        self.hellos: dict[str, Hello] = {}
        self.excluded: dict[str, str] = {}
        self.names: tuple[str, ...] = ()
        self.choice = EngineChoice()
        self.gpus: dict[str, Numbers] = {}
        self.ports: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, tuple[str, ...]] = {}
        self.owners = mesh.Owners({}, {})
        self.findings: tuple[EnvironmentFinding, ...] = ()
        self._starting: dict[str, tuple[float, Any]] = {}
        self._reported: set[str] = set()

    def probe(self, password: Callable[[list[str]], bool]) -> None:
        """Probe every node, and start the program on each node that is reached."""

        def start(name: str) -> None:
            # It starts while other nodes are still probed.
            job = gevent.spawn(self.channels.for_each, self._start, [name])
            self._starting[name] = time.monotonic(), job

        self._probe(self.task.policies, self.before, start)
        refused = [
            name for name, probed in self.before.items() if probed.gap and probed.gap.kind == SUDO
        ]
        if refused and password(refused):
            self._probe(refused, self.before, start)

    def probe_again(self) -> None:
        """Probe the tested nodes once more, when there is time."""
        names = [name for name in self.names if name not in self.channels.lost]
        if names and self.task.left_s > _MIN_LEFT_S:
            self._probe(names, self.after, lambda name: None)

    def _probe(
        self,
        nodes: Iterable[str],
        results: dict[str, Outcome[Snapshot]],
        reached: Callable[[str], None],
    ) -> None:
        task, names = self.task, list(nodes)
        limit_s = max(1, int(min(_PROBE_S, task.left_s / 2)))
        probes: dict[Key, Conversation[Snapshot]] = {
            name: take_snapshot(
                name, task.policies[name], _SUBJECTS, limit_s, nonce=task.transport.nonce
            )
            for name in names
        }
        with self.progress("looking", names) as done:

            def receive(key: Key, outcome: Outcome[Snapshot]) -> None:
                name = node_of(key)
                results[name] = outcome
                done(name)
                if outcome.value:
                    reached(name)

            collect(task.transport, probes, receive, task.deadline)
        if task.transport.interrupted:
            raise KeyboardInterrupt

    def _start(self, name: str) -> None:
        task, policy = self.task, self.task.policies[name]
        config = SmokeConfig(
            nonce=self.channels.nonce,
            tag=task.transport.tag,
            user=policy.job_user,
            limit_s=max(1, int(task.left_s)) + _LONGER_S,
            ports=mesh.chosen_ports(*policy.port_range),
            engines=task.engines,
            python=task.python or policy.smoke_python,
            prefix=task.prefix or policy.smoke_prefix,
            environment=task.environment or policy.smoke_environment,
        )
        self.channels.start(request(name, _MAIN, config, mark=config.nonce, stdin=True))
        hello = self.channels.read(name, "hello", Hello, _START_S)
        if hello is not None:
            self.hellos[name] = hello

    def _wait_for_hellos(self) -> None:
        """Wait for the first line of each node; kill stragglers after most nodes have started."""
        limit_s, total = min(_START_S, self.task.left_s / 2), len(self._starting)
        durations: list[float] = []
        with self.progress("starting", [*self._starting]) as done:
            while self._starting:
                if 2 * len(durations) > total:
                    straggler_s = max(_MIN_START_S, _START_TIMES * max(durations))
                    limit_s = min(limit_s, straggler_s)
                for name, (began, job) in [*self._starting.items()]:
                    age_s = time.monotonic() - began
                    if job.dead and name in self.hellos:
                        durations.append(age_s)
                    elif not job.dead and age_s > limit_s:
                        job.kill(block=False)
                        self.channels.lose(name, f"did not start in {age_s:.0f} s")
                    if job.dead or name in self.channels.lost:
                        done(name)
                        del self._starting[name]
                gevent.wait([job for _, job in self._starting.values()], _TICK_S, count=1)

    def join(self) -> None:
        """Decide which nodes take part, with which engine and which GPUs."""
        self._wait_for_hellos()
        task, lost = self.task, self.channels.lost
        hellos = {name: self.hellos[name] for name in task.policies if name in self.hellos}
        for name, probed in self.before.items():
            if not probed.value:
                self.excluded[name] = probed.reason
            elif name not in hellos:
                loss = lost.get(name)
                self.excluded[name] = loss.reason if loss else "did not start in time"
        self._assign_addresses(hellos)
        present = {name: self.before[name] for name in hellos if name not in self.excluded}
        counts = {name: task.policies[name].gpu_count for name in present}
        self.gpus, without_gpus = idle_gpus(present, task.gpus, task.busy, counts)
        self.excluded |= without_gpus
        able = {name: hellos[name] for name in present if name not in without_gpus}
        if able:
            self.choice = choose(able, task.engine, any(self.gpus.values()))
            self.excluded |= self.choice.excluded
        self.names = tuple(name for name in able if name not in self.excluded)
        if not self.choice.uses_nccl:
            self.gpus = {}
        self.report_excluded()
        self._judge_environment()

    def _judge_environment(self) -> None:
        """Report the variables of the ranks that keep them apart, before any rank starts."""
        hellos = {name: self.hellos[name] for name in self.names}
        ranks = [RankEnvironment(name, dict(hello.variables)) for name, hello in hellos.items()]
        libraries = (engine.library for hello in hellos.values() for engine in hello.engines)
        versions = (text[5:] for text in libraries if text.startswith("NCCL "))
        uses_nccl = self.choice.uses_nccl
        nccl = next(versions, "") if uses_nccl else None
        # A GPU that PyTorch uses proves its driver.
        proved: dict[str, Any] = {"driver": ""} if uses_nccl else {"nccl": "", "nccl_by": ""}
        facts = {name: replace(hello.facts, **proved) for name, hello in hellos.items()}
        self.findings = judge(ranks, facts, nccl=nccl)
        for finding in self.findings:
            self.tell(f"{folded(finding.nodes)}: {finding.text}: {finding.advice}")

    def _assign_addresses(self, hellos: Mapping[str, Hello]) -> None:
        claimed = {name: hello.addresses for name, hello in hellos.items()}
        peers = self.task.transport.ssh_peers()
        known_owners = mesh.known_owners(self.task.inventory_addresses, peers)
        self.owners = mesh.Owners(claimed, known_owners)
        for name, hello in hellos.items():
            ordered = mesh.chosen_ports(*self.task.policies[name].port_range)
            self.ports[name] = tuple(port for port in ordered if port in {*hello.ports})
            self.addresses[name] = self.owners.addresses_of(name)
            if hello.reason:
                self.excluded[name] = hello.reason
            elif not self.ports[name]:
                self.excluded[name] = "it listens on none of its ports"
            elif not self.addresses[name] and len(hellos) > 1:
                self.excluded[name] = "it has no address of its own"
                for text in self.owners.claimed[name][:1]:
                    self.excluded[name] += f" ({text}: {self.owners.claimers(text)})"

    def close(self) -> None:
        """End the programs on the nodes, and the jobs that wait for them."""
        gevent.killall([job for _, job in self._starting.values()], block=False)
        self._starting.clear()
        self.channels.close()

    def report_excluded(self) -> None:
        """Report the nodes that newly take no part: a line for each reason."""
        lost = {name: loss.reason for name, loss in self.channels.lost.items()}
        by_reason: dict[str, list[str]] = {}
        for name, reason in {**lost, **self.excluded}.items():
            if name not in self._reported:
                by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            self._reported.update(names)
            self.tell(f"{folded(names)}: {reason}")

    def engine(self, name: str, kind: Kind) -> str:
        """The node's engine of this kind in words; "": it has none."""
        engines = self.hellos[name].engines if name in self.hellos else ()
        return next((engine_name(e) for e in engines if (e.name, e.backend) == kind), "")

    def slots(self, name: str) -> int:
        """The number of GPUs in a node's first snapshot."""
        first = [snapshot.subjects.get("gpus") for snapshot in self.snapshots(name)[:1]]
        return sum(len(observed.gpus) for observed in first if isinstance(observed, Gpus))

    def snapshots(self, name: str) -> list[Snapshot]:
        """The snapshots of a node, the earlier one first."""
        outcomes = (self.before.get(name), self.after.get(name))
        return [outcome.value for outcome in outcomes if outcome and outcome.value]
