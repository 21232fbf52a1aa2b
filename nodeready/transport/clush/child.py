"""ClusterShell's process: one thread, whose event loop handles the parent's frames."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from ClusterShell import Communication
from ClusterShell.Defaults import DEFAULTS
from ClusterShell.Event import EventHandler
from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, set_std_group_resolver
from ClusterShell.Task import task_self

from nodeready import shell
from nodeready.shell import quote
from nodeready.text import sanitise
from nodeready.transport.base import (
    CONNECT_TIMEOUT_S,
    REFUSED,
    Answer,
    Failure,
    Key,
    Request,
    bug_text,
    late,
    node_of,
)
from nodeready.transport.clush.command import Batch, OpenSession, Question, SshWorker
from nodeready.transport.clush.gateway import Gateway, KeepOpen, decoded, remedy
from nodeready.transport.clush.gateway_program import gateway_command
from nodeready.transport.clush.ssh_targets import (
    COMMON,
    LOGIN_S,
    ClushPlan,
    SshTarget,
    rows,
    tree_of,
)
from nodeready.transport.processes import Frames

#: ssh programs at once on one gateway, unless the user says how many.
GATEWAY_FANOUT = 64
#: Seconds in which more questions may come that are put together with the first.
_GATHER_S = 0.02


class _Inbox(EventHandler):  # type: ignore[misc]
    """Runs a function for a message of another thread, or for a timer."""

    def __init__(self, go: Callable[[Any], object]) -> None:
        self._go = go

    def ev_msg(self, port: Any, msg: Any) -> None:
        self._go(msg)

    def ev_timer(self, timer: Any) -> None:
        self._go(None)


class ClushProcess:
    """ClusterShell's process."""

    def __init__(self, frames: Frames, plan: ClushPlan) -> None:
        self._frames = frames
        self._targets = {target.name: target for target in plan.targets}
        self._gateway_targets = {target.name: target for target in plan.gateways}
        self.tag, self._fanout = plan.tag, plan.fanout
        self.invoke = gateway_command(os.environ)
        self.batches: set[Batch] = set()
        self.sessions: dict[int, OpenSession] = {}
        self.gateways: dict[str, Gateway] = {}
        #: The nodes on which something of this run may run.
        self.reached: set[str] = set()
        #: Node -> the gateways to it; a row of gateways -> the number of nodes that need it.
        self._row_of: dict[str, tuple[str, ...]] = {}
        self._wanted: Counter[tuple[str, ...]] = Counter()
        self._calls: dict[int, tuple[float | None, dict[Key, Question]]] = {}
        self._waiting: list[Question | OpenSession] = []
        self._gathering = False
        self._timers: list[Any] = []
        #: Gateways that the user was warned about.
        self._bad: set[str] = set()
        self._planned: Counter[str] = Counter()
        self.task = task_self()
        self._prepare(plan)

    def _prepare(self, plan: ClushPlan) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # An ssh has three pipes.
        self.room = max(1, (soft - 64) // 4)
        fanout = self._fanout or int(DEFAULTS.fanout)
        self.task.set_info("fanout", max(1, min(fanout, self.room)))
        self.task.set_info("debug", False)
        self.task.set_info("grooming_delay", 0.0)
        self.task.set_default("stdout_msgtree", False)
        self.task.set_default("stderr_msgtree", False)
        self.task.set_default("distant_worker", SshWorker)
        if plan.topology:
            self._read_topology(plan.topology)
        set_std_group_resolver(RESOLVER_NOGROUP)
        Communication.Message.data_decode = decoded

    def _read_topology(self, path: str) -> None:
        """Read the gateways. A file that cannot be read gets a line to the user, and no tree."""
        try:
            tree = tree_of(path)
            self._row_of.update(rows(tree))
            self.task.topology = tree
        except Exception as problem:  # noqa: BLE001 - its parser raises what it meets
            reason = sanitise(" ".join(str(problem).split())) or type(problem).__name__
            self.say("note", -1, f"{path}: {reason}: asking every node directly")

    def gateway_fanout(self) -> int:
        """ssh programs at once on one gateway: interactive ones do not count."""
        base = min(self._fanout or GATEWAY_FANOUT, max(GATEWAY_FANOUT, self._fanout))
        return base + sum(1 for session in self.sessions.values() if session.gateway)

    def gateway_target(self, name: str) -> SshTarget:
        """How a gateway is reached: as the inventory says, else as ssh's configuration does."""
        if name in self._gateway_targets:
            return self._gateway_targets[name]
        usual = Counter(
            (target.user, target.key) for target in self._targets.values()
        ).most_common(1)
        user, key = usual[0][0] if usual else ("", "")
        options = [*COMMON, "-oStrictHostKeyChecking=accept-new"]
        options += [f"-oUser={user}"] if user else []
        options += [f"-oIdentityFile={key}"] if key else []
        return SshTarget(name, name, tuple(options), user, key)

    # The parent.

    def run(self) -> None:
        """Handle the parent's frames, until "quit" or the parent's end."""
        port = self.task.port(handler=_Inbox(self._frame), autoclose=False)

        def read() -> None:
            while True:
                frame = self._frames.receive()
                port.msg_send(frame)
                if frame is None or frame[0] == "quit":
                    return

        threading.Thread(target=read, daemon=True).start()
        self.later(1.0, self._tick, 1.0)
        self.task.resume()

    def say(self, *frame: Any) -> None:
        with contextlib.suppress(OSError):
            self._frames.send(*frame)

    def later(self, seconds: float, go: Callable[[], object], interval: float = -1.0) -> None:
        self.task.timer(seconds, _Inbox(lambda _: go()), interval=interval)

    def _frame(self, frame: tuple[Any, ...] | None) -> None:
        handlers: dict[str, Callable[..., None]] = {
            "converse": self._converse, "next": self._next, "stop": self._stop,
            "open": self._open, "line": self._line, "close": self._close,
            "password": self._password, "end": self._end, "ssh_peers": self._ssh_peers,
        }  # fmt: skip
        if frame is None:
            # The parent is gone: end its processes on the nodes.
            for call in list(self._calls):
                self._stop(call)
            self._on_all(5, lambda: self._leave(1))
        elif frame[0] == "quit":
            self._leave(0)
        else:
            handlers[frame[0]](*frame[1:])

    def _leave(self, status: int) -> None:
        """End every ssh here; a gateway ends its own with the connection."""
        self._bad.update(self.gateways)
        # The public `Task.abort` raises through the handler that runs just now.
        with contextlib.suppress(Exception):
            self.task._engine.clear()
        os._exit(status)

    def _ssh_peers(self, number: int) -> None:
        self.say("ssh_peers", number, {})

    def _password(self, password: str, names: Iterable[str]) -> None:
        for name in names:
            self._targets[name] = replace(self._targets[name], password=password)

    # Questions.

    def _converse(
        self, call: int, deadline: float | None, pairs: Iterable[tuple[Key, Request]]
    ) -> None:
        self._calls[call] = (deadline, {})
        for key, request in pairs:
            self._ask(call, key, request)
        self._go()

    def _next(self, call: int, key: Key, request: Request | None) -> None:
        if call not in self._calls:
            return
        _, questions = self._calls[call]
        questions.pop(key, None)
        if request is not None:
            self._ask(call, key, request)
            if not self._gathering:
                self._gathering = True
                self.later(_GATHER_S, self._go)

    def _ask(self, call: int, key: Key, request: Request) -> None:
        deadline, questions = self._calls[call]

        def put(answer: Answer) -> None:
            self.say("answer", call, key, answer)

        question = questions[key] = Question(
            request, self._targets[node_of(key)], self.tag, put, call
        )
        if question.target.refused:
            question.answer(Failure(kind=REFUSED, error=question.target.refused))
        elif deadline is not None and time.monotonic() > deadline:
            question.answer(late())
        else:
            self._waiting.append(question)

    def _stop(self, call: int) -> None:
        """Drop the questions of this call, whose answers are not awaited any more."""
        _, questions = self._calls.pop(call, (None, {}))
        self._give_up(questions.values(), lambda question: late(), False)

    def _give_up(
        self, questions: Iterable[Question], failure: Callable[[Question], Failure], tell: bool
    ) -> None:
        by_batch: dict[Batch | None, list[Question]] = defaultdict(list)
        for question in questions:
            if not question.is_over:
                if not tell:
                    question.put = lambda answer: None
                by_batch[question.batch].append(question)
        for batch, unanswered in by_batch.items():
            if batch is not None:
                batch.end(unanswered, failure)
            for question in unanswered:
                question.answer(failure(question))
        self._waiting = [
            waiting for waiting in self._waiting if not getattr(waiting, "is_over", False)
        ]

    def _tick(self) -> None:
        now_s = time.monotonic()
        for batch in list(self.batches):
            batch.end_late(now_s)
        for gate in list(self.gateways.values()):
            if gate.state == "asked" and now_s > gate.since + CONNECT_TIMEOUT_S + LOGIN_S:
                gate.unfit_reason = f"no answer in {CONNECT_TIMEOUT_S + LOGIN_S} s"
                gate._close(abort=True)
        for call, (deadline, questions) in list(self._calls.items()):
            unanswered = [question for question in questions.values() if not question.is_over]
            if deadline is not None and now_s > deadline and unanswered:
                self._give_up(unanswered, lambda question: late(question.has_begun), True)
                self._on_all(2, lambda: None)
            elif not questions:
                del self._calls[call]

    def gateway_judged(self) -> None:
        """A gateway is known to be fit or unfit: ask the nodes that waited for it."""
        if self._waiting:
            self._go()

    def gateway_closed(self, gate: Gateway, fit: bool) -> None:
        """Warn about a gateway once, in one line."""
        if gate.name not in self._bad:
            self._bad.add(gate.name)
            consequence = "nodes behind it are asked in another way"
            todo = "" if fit else f"; {remedy(gate.unfit_reason)}"
            self.say(
                "note",
                -1,
                f"gateway {gate.name} is not used: {gate.unfit_reason}{todo}; {consequence}",
            )
        self.gateway_judged()

    def _go(self) -> None:
        """Ask the nodes whose route is known; open the gateways of the remaining nodes."""
        self._gathering = False
        waiting, self._waiting = self._waiting, []
        names = {question.target.name for question in waiting}
        self._wanted = Counter(self._row_of[name] for name in names if name in self._row_of)
        ready: defaultdict[Any, list[Question]] = defaultdict(list)
        for question in waiting:
            gateway = self._gateway_for(question)
            if gateway is None:
                self._waiting.append(question)
            elif isinstance(question, OpenSession):
                question.start(gateway)
            else:
                question.gateway = gateway
                if gateway:
                    self._planned[gateway] += 1
                request = question.request
                same = (
                    request.script, request.payload, request.limit_s, request.max_bytes,
                    question.tag, question.target.sudo, question.target.password, bool(gateway),
                    question.target.user if gateway else "",
                )  # fmt: skip
                ready[same].append(question)
        self._planned.clear()
        for questions in ready.values():
            self._start(questions)

    def _start(self, questions: list[Question]) -> None:
        # Two equal questions to a node are two commands.
        first = {question.target.name: question for question in reversed(questions)}
        batch = Batch(self, list(reversed(first.values())))
        self.batches.add(batch)
        batch.start(questions[0].tag != self.tag and len(questions) < self.room // 2)
        repeated = [
            question for question in questions if first[question.target.name] is not question
        ]
        if repeated:
            self._start(repeated)

    def _gateway_for(self, question: Question | OpenSession) -> str | None:
        """The gateway for a node; "": none; None: not known yet."""
        to = question.target
        row = self._row_of.get(to.name)
        if row is None or to.direct_reason or (to.sudo and to.password):
            return ""
        gates = [gate for name in row if (gate := self.gateways.get(name)) and gate.state]
        # One node needs one gateway.
        for name in row:
            if len(gates) < self._wanted[row] and name not in self.gateways:
                gates.append(self._open_gate(name))
        if any(gate.state == "asked" for gate in gates):
            return None
        fit = [gate for gate in gates if gate.state == "fit"]
        if not fit:
            return ""
        return min(fit, key=lambda gate: gate.asked_count + self._planned[gate.name]).name

    def _open_gate(self, name: str) -> Gateway:
        gate = self.gateways[name] = Gateway(self, name)
        to = self.gateway_target(name)
        worker = SshWorker({name: to}, gate, None, self.invoke, is_unlimited=True)
        worker.nodes = NodeSet(name)
        worker.SNAME_STDIN, worker.SNAME_STDOUT = gate.SNAME_WRITER, gate.SNAME_READER
        worker.SNAME_STDERR = gate.SNAME_ERROR
        self.task.gateways[name] = (worker, {KeepOpen()})
        self.task.schedule(worker)
        return gate

    # Interactive commands.

    def _open(self, number: int, request: Request) -> None:
        to = self._targets[request.node]
        session = self.sessions[number] = OpenSession(self, number, request, to)
        if to.refused:
            session.end(to.refused)
            return
        if len(self.sessions) > self.room // 2:
            session.end(
                f"more than {self.room // 2} nodes spoken with at once: raise ulimit -n here"
            )
            return
        self._waiting.append(session)
        self._go()

    def _line(self, number: int, data: bytes) -> None:
        if session := self.sessions.get(number):
            session.write(data)

    def _close(self, number: int) -> None:
        if session := self.sessions.get(number):
            self._waiting = [waiting for waiting in self._waiting if waiting is not session]
            session.close()

    # The end.

    def _end(self, number: int, limit_s: float) -> None:
        self._on_all(limit_s, lambda: self.say("ended", number, True))

    def _on_all(self, limit_s: float, done: Callable[[], object]) -> None:
        """End this run's processes, by its tag, on the nodes that it reached."""
        # In brackets, so that the search does not find its own command line.
        run = self.tag.removeprefix("nodeready:")
        script = f"{shell.library('end')}nr_end {quote(f'[n]odeready:{run}')}"
        unanswered = set(self.reached)
        is_done = False

        def over(name: str) -> Callable[[Answer], None]:
            def put(answer: Answer) -> None:
                unanswered.discard(name)
                if not unanswered:
                    finish()

            return put

        def finish() -> None:
            nonlocal is_done
            if not is_done:
                is_done = True
                done()

        if not unanswered:
            finish()
            return
        for name in sorted(unanswered):
            request = Request(name, script, 3)
            self._waiting.append(
                Question(request, self._targets[name], "nodeready:end", over(name))
            )
        self._go()
        self.later(limit_s, finish)


def main(number: int) -> None:
    """The child. number: its end of the socket."""
    logging.disable(logging.CRITICAL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    os.set_inheritable(number, False)
    sock = socket.socket(fileno=number)
    # gevent has made it one that never waits.
    sock.setblocking(True)
    frames = Frames(sock, threading.Lock())
    begin = frames.receive()
    if begin is None:
        return
    try:
        ClushProcess(frames, begin[1]).run()
    except Exception as problem:  # noqa: BLE001 - a mistake of ours is told with the nodes' names
        with contextlib.suppress(OSError):
            frames.send("bug", -1, bug_text(problem))
        os._exit(1)
