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
from functools import partial
from typing import Any

from ClusterShell import Communication
from ClusterShell.Defaults import DEFAULTS
from ClusterShell.Event import EventHandler
from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, set_std_group_resolver
from ClusterShell.Task import task_self

from nodeready.agent.asking import (
    CONNECT_TIMEOUT_S,
    Answer,
    Key,
    Request,
    bug_text,
    end_script,
    late,
    node_of,
)
from nodeready.core.outcome import REFUSED, Gap
from nodeready.core.text import sanitise
from nodeready.fleet.transport.clush.command import Batch, OpenSession, Question, SshWorker
from nodeready.fleet.transport.clush.gateway import Gateway, KeepOpen, decoded, remedy
from nodeready.fleet.transport.clush.gateway_program import gateway_command
from nodeready.fleet.transport.clush.ssh_targets import (
    COMMON,
    LOGIN_S,
    ClushPlan,
    SshTarget,
    gateways_by_node,
    tree_of,
)
from nodeready.fleet.transport.processes import Frames

#: ssh programs at once on one gateway, unless the user says how many.
GATEWAY_FANOUT = 64
#: Seconds to wait for more questions, which then share a command with the first.
_GATHER_S = 0.02


class _Inbox(EventHandler):  # type: ignore[misc]
    """Runs a function for a message of another thread, or for a timer."""

    def __init__(self, action: Callable[[Any], object]) -> None:
        self._action = action

    def ev_msg(self, port: Any, msg: Any) -> None:
        self._action(msg)

    def ev_timer(self, timer: Any) -> None:
        self._action(None)


class ClushProcess:
    """ClusterShell's process.

    gateway_line: the line that runs a gateway's program
    max_clients:  ssh programs for which this process has file descriptors
    reached:      nodes on which processes of this run may run
    """

    def __init__(self, frames: Frames, plan: ClushPlan) -> None:
        self._frames = frames
        self._targets = {target.name: target for target in plan.targets}
        self._gateway_targets = {target.name: target for target in plan.gateways}
        self.tag, self._fanout = plan.tag, plan.fanout
        self.gateway_line = gateway_command(os.environ)
        self.batches: set[Batch] = set()
        self.sessions: dict[int, OpenSession] = {}
        self.gateways: dict[str, Gateway] = {}
        self.reached: set[str] = set()
        #: Node -> the names of its gateways; such names -> the number of nodes that wait for them.
        self._gateways_of: dict[str, tuple[str, ...]] = {}
        self._wanted: Counter[tuple[str, ...]] = Counter()
        self._calls: dict[int, tuple[float | None, dict[Key, Question]]] = {}
        self._waiting: list[Question | OpenSession] = []
        self._gathering = False
        #: Gateways that the user was warned about.
        self._warned: set[str] = set()
        #: Gateway -> the number of nodes that `_ask_waiting` has just given to it.
        self._planned: Counter[str] = Counter()
        self.task = task_self()
        self._prepare(plan)

    def _prepare(self, plan: ClushPlan) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # An ssh has three pipes.
        self.max_clients = max(1, (soft - 64) // 4)
        fanout = self._fanout or int(DEFAULTS.fanout)
        self.task.set_info("fanout", max(1, min(fanout, self.max_clients)))
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
        """Read the gateways. If the file cannot be read, warn the user, and use no gateway."""
        try:
            tree = tree_of(path)
            self._gateways_of.update(gateways_by_node(tree))
            self.task.topology = tree
        except Exception as problem:  # noqa: BLE001 - ClusterShell's parser raises many kinds
            reason = sanitise(" ".join(str(problem).split())) or type(problem).__name__
            self.send("note", -1, f"{path}: {reason}: asking every node directly")

    def gateway_fanout(self) -> int:
        """ssh programs at once on one gateway, where interactive ones do not count."""
        interactive = sum(1 for session in self.sessions.values() if session.gateway_name)
        return (self._fanout or GATEWAY_FANOUT) + interactive

    def gateway_target(self, name: str) -> SshTarget:
        """The ssh target of a gateway; one outside of the inventory has the usual user and key."""
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

    # --- The parent.

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
        self.call_later(1.0, self._tick, 1.0)
        self.task.resume()

    def send(self, *frame: Any) -> None:
        with contextlib.suppress(OSError):
            self._frames.send(*frame)

    def call_later(
        self, seconds: float, action: Callable[[], object], interval: float = -1.0
    ) -> None:
        self.task.timer(seconds, _Inbox(lambda _: action()), interval=interval)

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
            self._end_on_nodes(5, lambda: self._leave(1))
        elif frame[0] == "quit":
            self._leave(0)
        else:
            handlers[frame[0]](*frame[1:])

    def _leave(self, status: int) -> None:
        """End every ssh here; a gateway ends its own with the connection."""
        self._warned.update(self.gateways)
        # The public `Task.abort` raises an exception through this handler.
        with contextlib.suppress(Exception):
            self.task._engine.clear()
        os._exit(status)

    def _ssh_peers(self, number: int) -> None:
        self.send("ssh_peers", number, {})

    def _password(self, password: str, names: Iterable[str]) -> None:
        for name in names:
            self._targets[name] = replace(self._targets[name], password=password)

    # --- Questions.

    def _converse(
        self, call: int, deadline: float | None, pairs: Iterable[tuple[Key, Request]]
    ) -> None:
        self._calls[call] = (deadline, {})
        for key, request in pairs:
            self._ask(call, key, request)
        self._ask_waiting()

    def _next(self, call: int, key: Key, request: Request | None) -> None:
        if call not in self._calls:
            return
        _, questions = self._calls[call]
        questions.pop(key, None)
        if request is not None:
            self._ask(call, key, request)
            if not self._gathering:
                self._gathering = True
                self.call_later(_GATHER_S, self._ask_waiting)

    def _ask(self, call: int, key: Key, request: Request) -> None:
        deadline, questions = self._calls[call]

        def on_answer(answer: Answer) -> None:
            self.send("answer", call, key, answer)

        target = self._targets[node_of(key)]
        question = questions[key] = Question(request, target, self.tag, on_answer)
        if target.refused:
            question.answer(Answer(gap=Gap(REFUSED, target.refused)))
        elif deadline is not None and time.monotonic() > deadline:
            question.answer(late())
        else:
            self._waiting.append(question)

    def _stop(self, call: int) -> None:
        """Drop the questions of this call, without answers."""
        _, questions = self._calls.pop(call, (None, {}))
        for question in questions.values():
            question.on_answer = lambda answer: None
        self._give_up(questions.values(), lambda question: late())

    def _give_up(
        self, questions: Iterable[Question], failure: Callable[[Question], Answer]
    ) -> None:
        by_batch: dict[Batch | None, list[Question]] = defaultdict(list)
        for question in questions:
            if not question.is_over:
                by_batch[question.batch].append(question)
        for batch, unanswered in by_batch.items():
            if batch is not None:
                batch.end(unanswered, failure)
            for question in unanswered:
                question.answer(failure(question))
        self._waiting = [
            waiting
            for waiting in self._waiting
            if isinstance(waiting, OpenSession) or not waiting.is_over
        ]

    def _tick(self) -> None:
        now_s = time.monotonic()
        for batch in list(self.batches):
            batch.end_late(now_s)
        for gateway in list(self.gateways.values()):
            if gateway.state == "asked" and now_s > gateway.since + CONNECT_TIMEOUT_S + LOGIN_S:
                gateway.unfit_reason = f"no answer in {CONNECT_TIMEOUT_S + LOGIN_S} s"
                gateway._close(abort=True)
        for call, (deadline, questions) in list(self._calls.items()):
            unanswered = [question for question in questions.values() if not question.is_over]
            if deadline is not None and now_s > deadline and unanswered:
                self._give_up(unanswered, lambda question: late(question.has_begun))
                self._end_on_nodes(2, lambda: None)
            elif not questions:
                del self._calls[call]

    def gateway_judged(self) -> None:
        """Ask the nodes that waited for a gateway: it is known to be fit or unfit."""
        if self._waiting:
            self._ask_waiting()

    def gateway_closed(self, gateway: Gateway, fit: bool) -> None:
        """Warn about a gateway once, in one line."""
        if gateway.name not in self._warned:
            self._warned.add(gateway.name)
            consequence = "nodes behind it are asked in another way"
            todo = "" if fit else f"; {remedy(gateway.unfit_reason)}"
            text = (
                f"gateway {gateway.name} is not used: {gateway.unfit_reason}{todo}; {consequence}"
            )
            self.send("note", -1, text)
        self.gateway_judged()

    def _ask_waiting(self) -> None:
        """Ask the nodes whose gateway is known; open the gateways that the rest need."""
        self._gathering = False
        waiting, self._waiting = self._waiting, []
        names = {question.target.name for question in waiting}
        self._wanted = Counter(
            self._gateways_of[name] for name in names if name in self._gateways_of
        )
        ready: defaultdict[Any, list[Question]] = defaultdict(list)
        for question in waiting:
            gateway_name = self._gateway_for(question)
            if gateway_name is None:
                self._waiting.append(question)
            elif isinstance(question, OpenSession):
                question.start(gateway_name)
            else:
                question.gateway_name = gateway_name
                if gateway_name:
                    self._planned[gateway_name] += 1
                request, target = question.request, question.target
                # Questions with equal values share a command.
                command = (
                    request.script, request.payload, request.limit_s, request.max_bytes,
                    question.tag, target.sudo, target.password, bool(gateway_name),
                    target.user if gateway_name else "",
                )  # fmt: skip
                ready[command].append(question)
        self._planned.clear()
        for questions in ready.values():
            self._start(questions)

    def _start(self, questions: list[Question]) -> None:
        # Two equal questions to a node are two commands.
        first = {question.target.name: question for question in reversed(questions)}
        batch = Batch(self, list(reversed(first.values())))
        self.batches.add(batch)
        # The commands that end a run need not wait for a place in the fanout.
        ends_run = questions[0].tag != self.tag
        batch.start(is_unlimited=ends_run and len(questions) < self.max_clients // 2)
        repeated = [
            question for question in questions if first[question.target.name] is not question
        ]
        if repeated:
            self._start(repeated)

    def _gateway_for(self, question: Question | OpenSession) -> str | None:
        """The name of the gateway for a node; "": none; None: not known yet."""
        target = question.target
        names = self._gateways_of.get(target.name)
        if names is None or target.direct_reason or (target.sudo and target.password):
            return ""
        opened = [self.gateways[name] for name in names if name in self.gateways]
        gateways = [gateway for gateway in opened if gateway.state]
        # No more gateways than nodes.
        for name in names:
            if len(gateways) < self._wanted[names] and name not in self.gateways:
                gateways.append(self._open_gateway(name))
        if any(gateway.state == "asked" for gateway in gateways):
            return None
        fit = [gateway for gateway in gateways if gateway.state == "fit"]
        if not fit:
            return ""
        return min(fit, key=lambda gateway: gateway.asked_count + self._planned[gateway.name]).name

    def _open_gateway(self, name: str) -> Gateway:
        gateway = self.gateways[name] = Gateway(self, name)
        worker = SshWorker(
            {name: self.gateway_target(name)}, gateway, None, self.gateway_line, is_unlimited=True
        )
        worker.nodes = NodeSet(name)
        worker.SNAME_STDIN, worker.SNAME_STDOUT = gateway.SNAME_WRITER, gateway.SNAME_READER
        worker.SNAME_STDERR = gateway.SNAME_ERROR
        self.task.gateways[name] = (worker, {KeepOpen()})
        self.task.schedule(worker)
        return gateway

    # --- Interactive commands.

    def _open(self, number: int, request: Request) -> None:
        target = self._targets[request.node]
        session = self.sessions[number] = OpenSession(self, number, request, target)
        if target.refused:
            session.end(target.refused)
            return
        if len(self.sessions) > self.max_clients // 2:
            maximum = self.max_clients // 2
            session.end(f"more than {maximum} nodes spoken with at once: raise ulimit -n here")
            return
        self._waiting.append(session)
        self._ask_waiting()

    def _line(self, number: int, data: bytes) -> None:
        if session := self.sessions.get(number):
            session.write(data)

    def _close(self, number: int) -> None:
        if session := self.sessions.get(number):
            self._waiting = [waiting for waiting in self._waiting if waiting is not session]
            session.close()

    # --- The end.

    def _end(self, number: int, limit_s: float) -> None:
        self._end_on_nodes(limit_s, lambda: self.send("ended", number, True))

    def _end_on_nodes(self, limit_s: float, done: Callable[[], object]) -> None:
        """End this run's processes on the nodes that it reached; then call ``done``."""
        script = end_script(self.tag.removeprefix("nodeready:"))
        unanswered = set(self.reached)
        is_done = False

        def on_answer(name: str, _: Answer) -> None:
            unanswered.discard(name)
            if not unanswered:
                finish()

        def finish() -> None:
            nonlocal is_done
            if not is_done:
                is_done = True
                done()

        if not unanswered:
            finish()
            return
        for name in sorted(unanswered):
            request, target = Request(name, script, 3), self._targets[name]
            self._waiting.append(
                Question(request, target, "nodeready:end", partial(on_answer, name))
            )
        self._ask_waiting()
        self.call_later(limit_s, finish)


def main(number: int) -> None:
    """The child's program. number: the descriptor of its end of the socket"""
    logging.disable(logging.CRITICAL)
    null = os.open(os.devnull, os.O_RDWR)
    for standard_stream in (0, 1, 2):
        os.dup2(null, standard_stream)
    os.set_inheritable(number, False)
    sock = socket.socket(fileno=number)
    # gevent has made it non-blocking.
    sock.setblocking(True)
    frames = Frames(sock, threading.Lock())
    begin = frames.receive()
    if begin is None:
        return
    try:
        ClushProcess(frames, begin[1]).run()
    except Exception as problem:  # noqa: BLE001 - the parent reports it for every node
        with contextlib.suppress(OSError):
            frames.send("bug", -1, bug_text(problem))
        os._exit(1)
