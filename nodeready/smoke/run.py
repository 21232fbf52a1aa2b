"""The smoke test of all nodes, until one deadline: the search's rounds, over open channels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import gevent
from gevent.queue import Empty, Queue

from nodeready.inventory.nodeset import folded
from nodeready.node.smoke import orders
from nodeready.node.smoke.orders import (
    ENGINES,
    RING,
    Collective,
    Config,
    End,
    Hello,
    Pair,
    Paired,
    Peer,
    Ran,
)
from nodeready.policy import Policy
from nodeready.ready import mesh
from nodeready.smoke import document, judge
from nodeready.smoke.search import (
    ALONE,
    CONFIRM,
    CONTROL,
    GROUP,
    HALF,
    MERGE,
    NODE,
    SCALE,
    SWEEP,
    Found,
    Known,
    Outcome,
    Suspect,
    Test,
    plan,
    search,
)
from nodeready.subjects.gpus.gpu import Gpus
from nodeready.subjects.snapshot import Snapshot
from nodeready.text import counted, now
from nodeready.transport.base import (
    SUDO,
    Carrier,
    Conversation,
    Failure,
    Key,
    collect,
    mistake,
    node_of,
    request,
)
from nodeready.transport.channels import Channels
from nodeready.transport.look import NOT_LOOKED_AT, Look, look_at

#: What is looked at before and after: what is idle, and what counts errors.
_SUBJECTS = ("gpus", "rdma", "nics", "host")
#: Seconds of the look at a node, each time. A driver that hangs must not cost the whole budget.
_LOOK_S = 20

#: The program on the node, and the seconds until its first line: a login, and PyTorch from a disk
#: that may be cold. The program gives up after 80.
_MAIN = "nodeready.node.smoke.program"
_START_S = 85.0
#: When most nodes are up after so many seconds, the others have so many times as many, and at
#: least so many seconds.
_START_TIMES, _START_LEAST_S = 4, 20.0
#: Listeners and ranks outlive the deadline by this at most, if the connection does not end them.
_LONGER_S = 5

#: Bytes of the collectives whose results are checked, and of the one whose bandwidth counts.
_SMALL = 4 << 10
_LARGE, _LARGE_GPU = 8 << 20, 256 << 20
#: Bytes of a pair's large message: in a sweep all nodes send at once, and full packets are all
#: that a path must show.
_LARGE_PAIR = 1 << 20
#: Seconds of a pair: its name (3 s), time-outs of three ports and a token (7.5 s), and the data;
#: the name and the ports are waited for, however fast other pairs are.
_PAIR_S, _PAIR_LEAST_S = 14.0, 8.0

#: Seconds beyond its limit that a node's answer may take: it ends its ranks, and the way here.
_MARGIN_S = 6.0
#: After a node of a test has failed or is lost, the others hear nothing any more: seconds for them
#: to say so themselves before they are told to end.
_GRACE_S = 3.0
#: When most tests of a round have passed, or others like one before, it has so many times as long,
#: and at least so many seconds; after half of the tests, or before the round, twice as many.
_TIMES, _LEAST_S = 5, 3.0
#: Of the time that is left, at most so much for a look afterwards.
_AFTER_S = 8.0
#: Suspects beside which another engine is tried.
_MOST_CONTROLS = 5
#: Seconds of one round when all is well, for the plan alone: nothing waits by them.
_USUAL_S = {("torch", "nccl"): 8.0, ("nccl-tests", "nccl"): 15.0, ("torch", "gloo"): 2.0}
_USUAL_RING_S = 1.0

#: A round's purpose in words, and what an engine stands for.
_WORDS = {
    ALONE: "alone",
    GROUP: "groups",
    CONFIRM: "confirming",
    MERGE: "together",
    SWEEP: "pairs",
    CONTROL: "control",
}
_LIBRARIES = {"torch": "PyTorch or its library", "nccl-tests": "NCCL", RING: "the ring"}
#: Seconds between two looks at who has started.
_TICK_S = 0.2

_Kind = tuple[str, str]
#: A node and its answer, or why there is none.
_Heard = tuple[str, Ran | Paired | str]
Progress = Callable[[str, Iterable[str]], AbstractContextManager[Callable[[str], object]]]


@dataclass(frozen=True)
class Task:
    """What is asked of the nodes, and until when.

    policies:    the nodes', by name, in the inventory's order
    deadline:    the moment of time.monotonic() at which everything has ended
    budget_s:    what the user allowed, for the words about what it cut off
    engine:      ``torch``, ``torch:gloo``, ``nccl-tests``, ``ring``; "": the best there is
    gpus:        which, or how many of each node; None: all
    ranks:       of a node without GPUs
    busy:        use GPUs that others use
    full:        every pair, not only ring and skips
    python, prefix, environment: of the job, see `orders.Config`; empty: the policy's
    given:       address -> the node to which the inventory gives it
    """

    carrier: Carrier
    policies: Mapping[str, Policy]
    deadline: float
    budget_s: int
    engine: str = ""
    gpus: tuple[int, ...] | int | None = None
    ranks: int = 2
    busy: bool = False
    full: bool = False
    python: str = ""
    prefix: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    given: Mapping[str, str] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    @property
    def engines(self) -> tuple[str, ...]:
        """What is looked for on the nodes: the engine that is wanted, and the ring beside it."""
        name = self.engine.partition(":")[0]
        return tuple(one for one in ENGINES if not name or one in (name, RING))


def smoke(
    task: Task,
    tell: Callable[[str], object],
    progress: Progress,
    password: Callable[[list[str]], bool] = lambda names: False,
) -> document.Smoke:
    """Test all nodes together, and search who spoils it.

    tell:     gets the plan before anything is tested, and what went wrong, a line each
    progress: of each round: gets what it is and its nodes, and then each node that has answered
    password: asks for sudo's, for these nodes; whether there is one now

    Never raises for a node's fault. An interrupt, or the deadline, ends what runs on the nodes,
    and what is known until then is in the document.
    """
    started, nodes = now(), _Nodes(task, tell, progress)
    run = _Run(nodes)
    try:
        nodes.look(password)
        nodes.join()
        run.drive()
        run.control()
        nodes.close()
        nodes.look_again()
    except KeyboardInterrupt:
        run.interrupt()
    finally:
        nodes.close()
    return run.result(started)


# --- Who takes part, and with what.


class _Nodes:
    """The nodes, from the first look to the last.

    out:       node -> why it takes no part
    names:     of those that do, in the inventory's order
    gpus:      node -> the numbers of its GPUs that are tested; without GPUs it is empty
    ports:     node -> on which it listens
    addresses: node -> its own, that no other node has as well
    """

    def __init__(self, task: Task, tell: Callable[[str], object], progress: Progress) -> None:
        self.task, self.tell, self.progress = task, tell, progress
        self.channels = Channels(task.carrier, task.deadline, "the smoke test")
        self.before: dict[str, Look] = {}
        self.after: dict[str, Look] = {}
        self.hellos: dict[str, Hello] = {}
        self.out: dict[str, str] = {}
        self.names: tuple[str, ...] = ()
        self.choice = judge.Choice()
        self.gpus: dict[str, tuple[int, ...]] = {}
        self.ports: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, tuple[str, ...]] = {}
        self.owners = mesh.Owners({}, {})
        self._starting: dict[str, tuple[float, Any]] = {}
        self._told: set[str] = set()

    def look(self, password: Callable[[list[str]], bool]) -> None:
        """Look at every node, and start the program on each that is reached."""

        def start(name: str) -> None:
            # It comes up while other nodes are still looked at.
            job = gevent.spawn(self.channels.for_each, self._start, [name])
            self._starting[name] = time.monotonic(), job

        self._look(self.task.policies, self.before, start)
        asking = [name for name, look in self.before.items() if look.kind == SUDO]
        if asking and password(asking):
            self._look(asking, self.before, start)

    def look_again(self) -> None:
        """Look once more at the nodes that were tested, when there is time."""
        names = [name for name in self.names if name not in self.channels.lost]
        if names and self.task.left_s > _LEAST_S:
            self._look(names, self.after, lambda name: None)

    def _look(
        self, names: Iterable[str], kept: dict[str, Look], reached: Callable[[str], None]
    ) -> None:
        task, names = self.task, list(names)
        limit_s = max(1, int(min(_LOOK_S, task.left_s / 2)))
        looks: dict[Key, Conversation[Look]] = {
            name: look_at(name, task.policies[name], _SUBJECTS, limit_s, nonce=task.carrier.nonce)
            for name in names
        }
        with self.progress("looking", names) as done:

            def heard(key: Key, value: Look | Failure) -> None:
                name = node_of(key)
                kept[name] = Look.of(name, value)
                done(name)
                if kept[name].reached:
                    reached(name)

            collect(task.carrier, looks, heard, task.deadline)
        if task.carrier.interrupted:
            raise KeyboardInterrupt

    def _start(self, name: str) -> None:
        """Start the program on a node, and hear its first line."""
        task, policy = self.task, self.task.policies[name]
        config = Config(
            nonce=self.channels.nonce,
            tag=task.carrier.tag,
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

    def _hear(self) -> None:
        """Wait for the first lines: as long as a start takes, or most have shown how long."""
        limit_s, took, total = min(_START_S, self.task.left_s / 2), [0.0], len(self._starting)
        with self.progress("starting", [*self._starting]) as done:
            while self._starting:
                if 2 * (len(took) - 1) > total:
                    limit_s = min(limit_s, max(_START_LEAST_S, _START_TIMES * max(took)))
                for name, (began, job) in [*self._starting.items()]:
                    age = time.monotonic() - began
                    if job.dead and name in self.hellos:
                        took.append(age)
                    elif not job.dead and age > limit_s:
                        job.kill(block=False)
                        self.channels.lose(name, f"did not start in {age:.0f} s")
                    if job.dead or name in self.channels.lost:
                        done(name)
                        del self._starting[name]
                gevent.wait([job for _, job in self._starting.values()], _TICK_S, count=1)

    def join(self) -> None:
        """Settle who takes part, with which engine and which GPUs."""
        self._hear()
        task, lost = self.task, self.channels.lost
        there = {name: self.hellos[name] for name in task.policies if name in self.hellos}
        for name, look in self.before.items():
            if not look.reached:
                self.out[name] = look.error
            elif name not in there:
                self.out[name] = lost[name].reason if name in lost else "did not start in time"
        self._own(there)
        present = {name: self.before[name] for name in there if name not in self.out}
        counts = {name: task.policies[name].gpu_count for name in present}
        self.gpus, away = judge.idle(present, task.gpus, task.busy, counts)
        asked = {name: there[name] for name in present if name not in away}
        self.out |= away
        if asked:
            self.choice = judge.choose(asked, task.engine, any(self.gpus.values()))
            self.out |= self.choice.out
        self.names = tuple(name for name in asked if name not in self.out)
        if "nccl" not in (self.choice.backend, self.choice.alone[1]):
            self.gpus = {}
        self.say_out()

    def _own(self, there: Mapping[str, Hello]) -> None:
        """The ports and addresses of each node, as far as they can be its own."""
        claimed = mesh.claimed_addresses({name: one.addresses for name, one in there.items()})
        known = mesh.known_owners(self.task.given, self.task.carrier.met())
        self.owners = owners = mesh.Owners(claimed, known)
        for name, hello in there.items():
            asked = mesh.chosen_ports(*self.task.policies[name].port_range)
            self.ports[name] = tuple(port for port in asked if port in {*hello.ports})
            self.addresses[name] = tuple(one for one in claimed[name] if owners.of(one) == name)
            if hello.why:
                self.out[name] = hello.why
            elif not self.ports[name]:
                self.out[name] = "it listens on none of its ports"
            elif not self.addresses[name] and len(there) > 1:
                whose = [f"{one}: {owners.claimers(one)}" for one in claimed[name][:1]]
                self.out[name] = " (".join(["it has no address of its own", *whose]) + ")" * len(
                    whose
                )

    def close(self) -> None:
        """End the programs on the nodes, and whatever waits for them."""
        gevent.killall([job for _, job in self._starting.values()], block=False)
        self._starting.clear()
        self.channels.close()

    def say_out(self) -> None:
        """Name who takes no part and was not named yet: a line for each reason."""
        lost = {name: one.reason for name, one in self.channels.lost.items()}
        why: dict[str, list[str]] = {}
        for name, reason in {**lost, **self.out}.items():
            if name not in self._told:
                why.setdefault(reason, []).append(name)
        for reason, names in why.items():
            self._told.update(names)
            self.tell(f"{folded(names)}: {reason}")

    def engine(self, name: str, kind: _Kind) -> str:
        """An engine of a node in words; "" where it has none."""
        found = self.hellos[name].engines if name in self.hellos else ()
        return next((judge.title(one) for one in found if (one.name, one.backend) == kind), "")

    def slots(self, name: str) -> int:
        """How many GPUs the look saw on a node."""
        seen = [one.subjects.get("gpus") for one in self.snapshots(name)[:1]]
        return sum(len(one.gpus) for one in seen if isinstance(one, Gpus))

    def snapshots(self, name: str) -> list[Snapshot]:
        """What the looks at a node saw, the first one first."""
        looks = (self.before.get(name), self.after.get(name))
        return [one.snapshot for one in looks if one is not None and one.snapshot is not None]


# --- The tests: rounds of them, each with its deadline.


@dataclass(frozen=True)
class _Asked:
    """A test with its orders.

    like:    the engine, and whether there are several nodes: with as many ranks, it takes as long
    limit_s: what it may take; cut: the budget allows no more
    """

    test: Test
    like: tuple[_Kind, bool]
    world: int
    limit_s: float
    cut: bool
    orders: Mapping[str, Collective | Pair]


@dataclass
class _Round:
    """Tests side by side.

    least_s: that every test has, however fast the others are
    took_s:  until half of them had passed
    end_at:  the moment at which those still running are ended
    heard:   the tests' queues: something in them wakes their test
    """

    total: int
    least_s: float
    began: float = field(default_factory=time.monotonic)
    passed: int = 0
    took_s: float = 0.0
    end_at: float = math.inf
    heard: list[Queue[_Heard]] = field(default_factory=list)

    def passes(self) -> None:
        """A test passed: half of them, or most, show how long it takes."""
        self.passed += 1
        if not 2 * self.passed >= self.total > 1:
            return
        self.took_s = self.took_s or time.monotonic() - self.began
        least_s = 2 * self.least_s if 2 * self.passed == self.total else self.least_s
        end_at = self.began + max(least_s, _TIMES * self.took_s)
        if end_at < self.end_at:
            self.end_at = end_at
            for heard in self.heard:
                heard.put(("", ""))


class _Stopped(Exception):
    """There is no time for another round."""


class _Run:
    """The tests of one run.

    known: what the search knows
    turn:  counts the rounds in which all passed, and chooses the ports: one that fails stays while
           the search looks for its node
    """

    def __init__(self, nodes: _Nodes) -> None:
        self.nodes, self.task, self.channels = nodes, nodes.task, nodes.channels
        self.stop_at = self.task.deadline - min(_AFTER_S, self.task.left_s / 6)
        self.known = Known()
        self.rounds = self.turn = self.last = 0
        self.beside: dict[Suspect, str] = {}
        self.everywhere = self.control_name = self.stopped = ""
        # Like tests -> ranks -> the seconds of the slowest that passed.
        self._took: dict[tuple[_Kind, bool], dict[int, float]] = {}

    # --- One test.

    def _asked(self, test: Test, kind: _Kind, room_s: float) -> _Asked:
        if test.purpose == SWEEP:
            source, target = test.nodes
            limit_s = min(_PAIR_S, room_s)
            ports = self.nodes.ports[target]
            pair = Pair(test.number, self._peer(target), ports, _SMALL, _LARGE_PAIR, limit_s)
            return _Asked(test, ((RING, ""), True), 2, limit_s, room_s < _PAIR_S, {source: pair})
        rows, world = self._ranks(test, kind)
        like = kind, len(rows) > 1
        large = _LARGE_GPU if kind[1] == "nccl" else _LARGE
        took = self._took.get(like, {})
        # PyTorch itself is read when the node says hello; what its GPUs need is not.
        wanted = judge.seconds(*kind, world, large, first=not took and kind[1] == "nccl")
        if took:
            # As long as the slowest of those with as many ranks; of more ranks, nobody knows yet.
            most = max(took)
            as_many = [s for ranks, s in took.items() if ranks >= min(world, most)]
            like_s = max(as_many) * max(1.0, world / most)
            wanted = min(wanted, max(2 * _LEAST_S, _TIMES * like_s))
        limit_s, head = min(wanted, room_s), self._peer(test.nodes[0])
        following = [*test.nodes[1:], test.nodes[0]] if len(rows) > 1 else [None]
        found = {}
        for (name, first, ranks, gpus), after in zip(rows, following, strict=True):
            found[name] = Collective(
                number=test.number,
                engine=kind[0],
                backend=kind[1],
                world=world,
                first=first,
                ranks=ranks,
                gpus=gpus,
                head=head,
                next=self._peer(after, 1) if after else None,
                small=_SMALL,
                large=large,
                limit_s=limit_s,
            )
        return _Asked(test, like, world, limit_s, room_s < wanted, found)

    def _again(self, asked: _Asked) -> _Asked:
        """The same test with another port of its first node's."""
        head = self._peer(asked.test.nodes[0])
        orders = {
            name: replace(order, head=head) if isinstance(order, Collective) else order
            for name, order in asked.orders.items()
        }
        return replace(asked, orders=orders)

    def _ranks(
        self, test: Test, kind: _Kind
    ) -> tuple[list[tuple[str, int, int, tuple[int, ...]]], int]:
        """Each node with its first rank, how many it has, and their GPUs; and all ranks."""
        chosen, world, rows = dict(test.gpus), 0, []
        for name in test.nodes:
            gpus = self.nodes.gpus.get(name, ()) if kind[1] == "nccl" else ()
            if gpus:
                gpus = chosen.get(name, gpus)
            ranks = 1 if kind[0] == RING else len(gpus) or self.task.ranks
            rows.append((name, world, ranks, gpus))
            world += ranks
        return rows, world

    def _peer(self, name: str, step: int = 0) -> Peer:
        """step: the ring's port is the one after rank 0's, which is lent to the ranks"""
        ports = self.nodes.ports[name]
        port = ports[(self.turn + step) % len(ports)]
        return Peer(name, self.nodes.addresses[name], port, self.nodes.hellos[name].token)

    def _ask(self, name: str, order: Collective | Pair, heard: Queue[_Heard]) -> None:
        """Order, and pass on the answer, or why there is none."""
        seen: Ran | Paired | None = None
        # The test's own deadline comes first.
        limit_s = order.limit_s + 2 * _MARGIN_S
        try:
            self.channels.open[name].send_line(orders.line(order))
            if isinstance(order, Pair):
                seen = self.channels.read(name, "paired", Paired, limit_s)
            else:
                seen = self.channels.read(name, "ran", Ran, limit_s)
            if seen is not None and seen.number != order.number:
                self.channels.lose(name, "the answer makes no sense (another test)")
                seen = None
        except Exception as problem:  # noqa: BLE001 - a mistake of ours costs this node alone
            self.channels.lose(name, mistake(problem))
        lost = self.channels.lost.get(name)
        heard.put((name, seen or (lost.reason if lost else "no answer in time")))

    def _end(self, names: Iterable[str], number: int) -> None:
        def end(name: str) -> None:
            channel = self.channels.open.get(name)
            if channel is not None:
                channel.send_line(orders.line(End(number)))

        self.channels.for_each(end, names)

    def _answers(
        self, asked: _Asked, together: _Round, done: Callable[[str], object]
    ) -> dict[str, Ran | Paired | str]:
        """Order a test, and wait until all of its nodes have answered, or are lost."""
        heard: Queue[_Heard] = Queue()
        together.heard.append(heard)
        number = asked.test.number
        jobs = [gevent.spawn(self._ask, *one, heard) for one in asked.orders.items()]
        found: dict[str, Ran | Paired | str] = {}
        lost_at, end_at, ended = together.began + asked.limit_s + _MARGIN_S, math.inf, False
        try:
            while len(found) < len(asked.orders):
                left = [name for name in asked.orders if name not in found]
                moment, end_at = time.monotonic(), min(end_at, together.end_at)
                if not ended and moment >= end_at:
                    ended, lost_at = True, min(lost_at, moment + _MARGIN_S)
                    self._end(left, number)
                if moment >= lost_at:
                    why = f"no answer in {moment - together.began:.0f} s, in test {number}"
                    self.channels.lose_all(left, why)
                    found.update(dict.fromkeys(left, why))
                    continue
                until = lost_at if ended else min(end_at, lost_at)
                try:
                    name, answer = heard.get(timeout=max(0.0, until - moment))
                except Empty:
                    continue
                if name:
                    found[name] = answer
                    done(name)
                    if not (isinstance(answer, Ran) and all(rank.ok for rank in answer.ranks)):
                        end_at = min(end_at, time.monotonic() + _GRACE_S)
        finally:
            gevent.killall(jobs, block=False)
        return found

    def _test(
        self, asked: _Asked, together: _Round, done: Callable[[str], object]
    ) -> Outcome | None:
        """One test to its end. None: the budget cut it off, which tells nothing."""
        test, began = asked.test, time.monotonic()
        try:
            answers = self._answers(asked, together, done)
            # Another user's process has rank 0's port: that is no fault of the node's.
            head = test.nodes[0]
            for _ in self.nodes.ports[head][1:]:
                if not judge.taken(answers[head]):
                    break
                self.turn += 1
                asked = self._again(asked)
                answers = self._answers(asked, together, done)
            if why := judge.taken(answers[head]):
                self.nodes.out[head] = why
                self.channels.lose(head, why)
                return Outcome(False, f"{head}: {why}", barred=(head,))
            if test.purpose == SWEEP:
                source, target = test.nodes
                said = cast("Paired | str", answers[source])
                ports = self.nodes.ports[target]
                outcome = judge.paired(test, said, self.nodes.owners, ports)
            else:
                seen = cast("Mapping[str, Ran | str]", answers)
                outcome = judge.ran(test, seen, cast("Mapping[str, Collective]", asked.orders))
        except Exception as problem:  # noqa: BLE001 - a mistake of ours accuses nobody
            self.channels.lose_all(test.nodes, mistake(problem))
            return Outcome(False, mistake(problem), lost=test.nodes)
        seconds = time.monotonic() - began
        if outcome.ok:
            together.passes()
            took = self._took.setdefault(asked.like, {})
            took[asked.world] = max(seconds, took.get(asked.world, 0.0))
        elif asked.cut and seconds >= asked.limit_s:
            return None
        return outcome

    # --- One round.

    def round(self, tests: Sequence[Test], kind: _Kind | None = None) -> dict[int, Outcome]:
        """Make these tests side by side. Raises _Stopped when the time is over.

        kind: the engine and backend; None: that of the search
        """
        choice, gone = self.nodes.choice, {*self.channels.lost}
        room_s = self.stop_at - time.monotonic() - _MARGIN_S
        ready = [
            self._asked(
                test,
                kind
                or (choice.alone if len(test.nodes) == 1 else (choice.engine, choice.backend)),
                max(room_s, 0.1),
            )
            for test in tests
            if not gone & {*test.nodes}
        ]
        took = [s for one in ready for s in self._took.get(one.like, {}).values()]
        if room_s < max(_LEAST_S, 2 * max(took, default=0.0)):
            raise _Stopped
        sweep = tests[0].purpose == SWEEP
        together = _Round(len(ready), _PAIR_LEAST_S if sweep else _LEAST_S)
        found: dict[int, Outcome | None] = {}

        def make(one: _Asked) -> None:
            found[one.test.number] = self._test(one, together, done)

        what = self._words(tests)
        with self.nodes.progress(what, {n for one in ready for n in one.orders}) as done:
            jobs = [gevent.spawn(make, one) for one in ready]
            try:
                gevent.joinall(jobs)
            except BaseException:
                gevent.killall(jobs, block=False)
                raise
        if sweep and not all(one and one.ok for one in found.values()):
            # A target has no order: nobody would notice that it is gone.
            self.channels.drop_dead()
        self.rounds += 1
        self.last = max([self.last, *(test.number for test in tests)])
        self.nodes.say_out()
        kept = {}
        for test in tests:
            gone = self.channels.lost.keys() - self.nodes.out.keys()
            lost = tuple(name for name in test.nodes if name in gone)
            outcome = found.get(test.number, Outcome(False, f"{', '.join(lost)} is lost"))
            if outcome is None:
                raise _Stopped
            # A node that is gone blames nobody.
            kept[test.number] = outcome if outcome.ok or not lost else replace(outcome, lost=lost)
        passed = sum(one.ok for one in kept.values())
        if passed < len(kept):
            self.nodes.tell(f"{what}: {passed} of {len(kept)} passed")
        elif tests[0].purpose not in (HALF, CONFIRM, CONTROL):
            self.turn += 1
        return kept

    def _words(self, tests: Sequence[Test]) -> str:
        """What a round is, for the progress."""
        if tests[0].purpose != HALF:
            return _WORDS.get(tests[0].purpose, tests[0].purpose)
        passed = {n for test, outcome in self._several() if outcome.ok for n in test.nodes}
        names = [*dict.fromkeys(name for test in tests for name in test.nodes)]
        return f"halving {folded([n for n in names if n not in passed] or names, 40)}"

    def _several(self) -> list[tuple[Test, Outcome]]:
        """The search's tests of several nodes, without the sweep."""
        return [
            (test, outcome)
            for test, outcome in self.known.made
            if len(test.nodes) > 1 and test.purpose != SWEEP
        ]

    # --- The search, and the control arm beside what it found.

    def drive(self) -> None:
        """Search, round by round, as long as there is time."""
        names, task = self.nodes.names, self.task
        if not names:
            self.stopped = "no node could take part"
            return
        gpus = {name: self.nodes.gpus.get(name, ()) for name in names}
        self._tell_plan()
        going = search(names, gpus, full=task.full, known=self.known)
        try:
            tests = next(going)
            while True:
                outcomes = self.round(tests)
                tests = going.send(outcomes)
        except StopIteration:
            return
        except _Stopped:
            self.stopped = f"the budget of {task.budget_s} s was over in round {self.rounds + 1}"
            unsure, untested = len(self.known.doubts), len(self.known.found().untested)
            if unsure:
                was = "was" if unsure == 1 else "were"
                self.stopped += f": {counted(unsure, 'suspect')} {was} not confirmed"
            elif untested:
                self.stopped += f": nothing can be said of {counted(untested, 'node')}"
            self.nodes.tell(self.stopped)

    def _tell_plan(self) -> None:
        choice, names = self.nodes.choice, self.nodes.names
        kind = choice.engine, choice.backend
        ranks = sorted({self._ranks(Test(0, ALONE, (name,)), kind)[1] for name in names})
        many = counted(ranks[0], "rank") if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]} ranks"
        best = plan(len(names), full=self.task.full)
        # Alone, in groups, all together; then the pairs.
        usual = best.rounds * _USUAL_S.get(kind, _USUAL_RING_S) + best.sweeps * _USUAL_RING_S
        if choice.instead:
            self.nodes.tell(f"{choice.name}, for there is {choice.instead}")
        together = [f"{counted(best.tests, 'test')} of several"] * bool(best.tests)
        pairs = [counted(best.sweeps, "round") + " of pairs"] * bool(best.sweeps)
        steps = ", ".join(["each alone", *together, *pairs])
        self.nodes.tell(
            f"{counted(len(names), 'node')} with {many} each, {choice.name}: {steps}; "
            f"{max(1, round(usual))} s when all is well, budget {self.task.budget_s} s"
        )

    def control(self) -> None:
        """Tests that failed once more with another engine on the same nodes, which tells a library
        that fails from a path that does."""
        kind, lost = self.nodes.choice.control, {*self.channels.lost}
        if kind is None or self.stopped:
            return
        several, waiting = self._several(), dict[Suspect | None, tuple[str, ...]]()
        if several and not any(outcome.ok for _, outcome in several):
            waiting[None] = tuple(name for name in self.nodes.names if name not in lost)
        else:
            named = [one for one in self.known.found().suspects if one.kind != SCALE]
            for one in named[:_MOST_CONTROLS]:
                waiting[one] = self._failing(one, 2 if kind[0] == RING else 1)
        waiting = {one: names for one, names in waiting.items() if names}
        while waiting:
            side: dict[Suspect | None, Test] = {}
            for suspect, names in waiting.items():
                # A node has one order at a time.
                if not {*names} & {name for test in side.values() for name in test.nodes}:
                    side[suspect] = Test(self.last + len(side) + 1, CONTROL, names)
            try:
                found = self.round([*side.values()], kind)
            except _Stopped:
                return
            for suspect, test in side.items():
                del waiting[suspect]
                said = self._contrast(test, found[test.number], kind)
                if suspect is None:
                    self.everywhere = said
                elif said:
                    self.beside[suspect] = said

    def _failing(self, suspect: Suspect, least: int) -> tuple[str, ...]:
        """The nodes of the smallest test of at least so many that failed with the suspect. Pairs
        of the sweep are none: they have no engine."""
        tests = [
            test.nodes
            for test, outcome in self.known.made
            if not (outcome.ok or outcome.lost or test.purpose == SWEEP)
            and len(test.nodes) >= least
            and {*suspect.nodes} <= {*test.nodes}
            and not self.channels.lost.keys() & {*test.nodes}
        ]
        return min(tests, key=len, default=())

    def _contrast(self, test: Test, outcome: Outcome, kind: _Kind) -> str:
        """What a test with another engine tells, in a sentence; "": nothing."""
        if outcome.lost:
            return ""
        self.control_name = self.nodes.engine(test.nodes[0], kind)
        ring = kind[0] == RING
        other = "the ring" if ring else self.control_name
        where = "on the same nodes" if len(test.nodes) > 1 else "on the same node"
        if not outcome.ok:
            return f"{other} fails {where}, too: the path ({outcome.cause}) [{test.number}]"
        what = _LIBRARIES[self.nodes.choice.engine] if ring else "NCCL or the network that it uses"
        return f"{other} passes {where}: the path is good, {what} is not [{test.number}]"

    # --- The end.

    def interrupt(self) -> None:
        """End what runs on the nodes, and keep what is known."""
        carrier = self.task.carrier
        ended, carrier.interrupted = carrier.interrupted, True
        self.stopped = f"interrupted in round {self.rounds + 1}"
        self.nodes.close()
        if not ended:
            carrier.end()

    def result(self, started: str) -> document.Smoke:
        """All of it as the document."""
        nodes, task, choice = self.nodes, self.task, self.nodes.choice
        found = self.known.found()
        suspects = tuple(
            document.Suspect(
                one.kind,
                one.nodes,
                one.gpus,
                self._evidence(one),
            )
            for one in found.suspects
        )
        blamed = {name for one in suspects if one.kind != SCALE for name in one.nodes}
        floors = {
            name: judge.Floor(policy.smoke_min_gbps, policy.smoke_min_node_gbps)
            for name, policy in task.policies.items()
        }
        slow = judge.below(self.known.made, floors, blamed)
        suspects += tuple(document.Suspect(NODE, (name,), (), why) for name, why in slow.items())
        blamed |= slow.keys()
        rows = []
        for name in task.policies:
            status, why = self._status(name, blamed, found)
            seen = nodes.snapshots(name)
            warnings = judge.worse(*seen) if len(seen) == 2 else ()
            if warnings and status == document.PASSED:
                status = document.WARNED
            kind, there = (choice.engine, choice.backend), name in nodes.names
            rows.append(
                document.Node(
                    name=name,
                    status=status,
                    why=why,
                    ranks=self._ranks(Test(0, ALONE, (name,)), kind)[1] if there else 0,
                    gpus=nodes.gpus.get(name, ()) if there else (),
                    engine=nodes.engine(name, kind),
                    warnings=warnings,
                    slots=nodes.slots(name),
                )
            )
        return document.Smoke(
            started=started,
            finished=now(),
            complete=not task.carrier.interrupted,
            engine=choice.name,
            proves=choice.proves,
            control=self.control_name,
            budget_s=task.budget_s,
            tests=found.tests,
            alone=sum(len(test.nodes) == 1 for test, _ in self.known.made),
            rounds=self.rounds,
            nodes=tuple(rows),
            suspects=suspects,
            links=judge.links(self.known.made, floors),
            stopped=self.stopped,
        )

    def _evidence(self, suspect: Suspect) -> tuple[str, ...]:
        """Why it is suspected: what was lost, what the search says, what another engine does."""
        lost = [self.channels.lost[n].reason for n in suspect.nodes if n in self.channels.lost]
        beside = (self.beside.get(suspect, ""), self.everywhere)
        return (*(f"lost: {why}" for why in lost), *suspect.why, *filter(None, beside))

    def _status(self, name: str, blamed: set[str], found: Found) -> tuple[str, str]:
        """A node's status; and why, of one that was not reached or not tested."""
        look, lost = self.nodes.before.get(name), self.channels.lost.get(name)
        if look is None or not look.reached:
            away = look is not None and look.unreachable
            why = look.error if look and look.error else NOT_LOOKED_AT
            return document.UNREACHABLE if away else document.UNTESTED, why
        if name in blamed:
            return document.SUSPECT, f"lost: {lost.reason}" if lost else ""
        if name in self.nodes.names and name in self.nodes.out:
            return document.UNTESTED, self.nodes.out[name]
        if lost and (name in self.nodes.names or lost.reason.startswith("connection lost")):
            return document.UNREACHABLE, f"lost: {lost.reason}"
        if name in found.passed:
            return document.PASSED, ""
        nobody = "its tests failed, and nothing tells by whom"
        why = self.nodes.out.get(name) or self.everywhere or self.stopped or nobody
        return document.UNTESTED, why
