"""The program on the node: it reads the control machine's orders, and answers each of them.

Started by root, it opens a session for the job's user (``su -``, through PAM as every login) and
runs there once more. Root's part passes the orders in, and the answers out: one answer to each
order, of its kind and within the bounds. The user can print anything in the session, which affects
only the row of this node.

In the session, or as the user who logs in, the program listens on the job's ports, finds the
engines, says hello, and works one order after another. The end of the standard input, a signal and
the alarm end both parts and all that they started at once, even in the middle of a test.
"""

from __future__ import annotations

import os
import pwd
import queue
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, Union

from nodeready.agent import payload
from nodeready.agent.proc import all_listeners, holder_text, user_name
from nodeready.agent.proofs import session
from nodeready.agent.proofs.mesh import local_addresses
from nodeready.agent.runtime import Ended, ProcessSupervisor, bug_text, hold_streams
from nodeready.agent.smoke import engines, orders
from nodeready.agent.smoke.pair import SmokeListeners, run_pair
from nodeready.agent.stacks import processes
from nodeready.agent.witnesses import environment, software
from nodeready.core import wire
from nodeready.subjects.proof.facts import Busy

_LOGIN_S = 20  # seconds from a login to our program
_ENVIRONMENT_S = 3.0  # seconds for the facts that decide about the job's variables
#: Messages of the kernel and of PyTorch for a port that another process has (EADDRINUSE).
_IN_USE = re.compile(r"(?i)address already in use|EADDRINUSE|errno: 98\b")
_TAKE_S = 0.3  # seconds for a rank's port to become free
_LEAVE_S = 1.0  # seconds for the session to end by itself, with PAM's logout, before a kill
_SOONER_S = 2  # A session's program ends this number of seconds before the program that started it
_MAX_LIMIT_S = 24 * 3600  # the maximum of a test's limit
_LONGEST = 128 << 10  # maximum characters of an answer: the ranks of a node, each with an error

_Work = Union[orders.CollectiveOrder, orders.PairOrder]

#: The name of an answer -> its type. The name is the order's kind.
_ANSWERS: dict[str, type[Any]] = {
    "hello": orders.Hello, "collective": orders.CollectiveAnswer, "pair": orders.PairAnswer,
}  # fmt: skip

_printing = threading.Lock()


def _say(config: orders.SmokeConfig, name: str, answer: Any) -> None:
    text = wire.line(config.nonce, name, answer)
    with _printing:
        print(text, flush=True)


def _no_hello(reason: str) -> orders.Hello:
    return orders.Hello("", (), local_addresses(), (), reason)


def main(config: orders.SmokeConfig, *, inside: bool = False) -> None:
    """Run until the input ends. inside: this is the session that root opened for the user"""
    hold_streams()
    os.chdir("/")
    supervisor = ProcessSupervisor(config.tag, config.limit_s)
    root = os.geteuid() == 0 and config.user not in ("", "root") and not inside
    part = _SessionPart(supervisor, config) if root else _NodePart(supervisor, config)

    def leave(number: int, frame: object) -> None:
        part.leave(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, leave)
    signal.setitimer(signal.ITIMER_REAL, config.limit_s)
    if inside:
        # This line tells root's part that the login was successful.
        print(f"{config.nonce} begun {{}}", flush=True)
    try:
        part.begin()
        # A profile may have closed it: then Python has no sys.stdin.
        with open(0, "rb", closefd=False) as file:
            for row in file:
                if row.endswith(b"\n"):
                    part.take(_order(row.decode("utf-8", "replace")))
    except Exception as problem:  # noqa: BLE001 - it must not keep the program from its end
        print(problem if isinstance(problem, ValueError) else bug_text(problem), file=sys.stderr)
        part.leave(1)
    part.leave(0)


def _order(text: str) -> _Work | orders.EndOrder:
    """The order in a line. Raises ValueError."""
    try:
        order = orders.read(text)
        limit_s = 1 if isinstance(order, orders.EndOrder) else order.limit_s
        if not 0 < limit_s <= _MAX_LIMIT_S:
            raise ValueError("its numbers make no sense")
    except (wire.DecodeError, KeyError, TypeError, ValueError) as problem:
        raise ValueError(f"no order: {type(problem).__name__}: {problem}"[:200]) from None
    return order


class _ProgramPart:
    """Root's part or the node's part; each can end at any moment."""

    def __init__(self, supervisor: ProcessSupervisor, config: orders.SmokeConfig) -> None:
        self.supervisor, self.config = supervisor, config
        self.leaving = False

    def prepare_end(self) -> None:
        """Act before everything is killed. A signal may call it again."""

    def leave(self, status: int) -> NoReturn:
        """End all that was started, and this process."""
        self.leaving = True
        # Nothing is printed from here on. Without waiting: a thread may hang while it prints.
        _printing.acquire(blocking=False)
        self.prepare_end()
        self.supervisor.end()
        os._exit(status)

    def refuse(self, reason: str) -> NoReturn:
        """Say hello with the reason why nothing can be tested on this node, and leave."""
        _say(self.config, "hello", _no_hello(reason))
        self.leave(0)


# --- Root's part.


class _SessionPart(_ProgramPart):
    """The session of the job's user, from outside."""

    def __init__(self, supervisor: ProcessSupervisor, config: orders.SmokeConfig) -> None:
        super().__init__(supervisor, config)
        self._orders: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._pending: dict[int, _Work] = {}  # orders without an answer, by number
        self._has_begun = self._has_greeted = self._has_refused = False
        # The session gets its own nonce, so that the control machine's nonce stays secret.
        self._inner = replace(config, nonce=f"inside-{os.urandom(8).hex()}")
        self._thread = threading.Thread(target=self._run, daemon=True)

    def begin(self) -> None:
        user = self.config.user
        try:
            pwd.getpwnam(user)
        except KeyError:
            self.refuse(f"no such user: {user}")
        self._thread.start()

    def take(self, order: _Work | orders.EndOrder) -> None:
        if not isinstance(order, orders.EndOrder):
            self._pending[order.number] = order
        self._orders.put(f"{orders.line(order)}\n")

    def prepare_end(self) -> None:
        # At the end of its input the session logs out, as every login does.
        self._orders.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_LEAVE_S)

    def _run(self) -> None:
        """Run the session to its end, which is the end of this program."""
        config, supervisor = self.config, self.supervisor
        inner = replace(self._inner, limit_s=max(1, int(supervisor.left_s) - _SOONER_S))
        try:
            make_program = partial(payload.inner_program, __name__, inner)
            ended = session.run(
                supervisor, config.user, make_program, self._relay_answer,
                further_input=iter(self._orders.get, None),
                start=(_LOGIN_S, lambda: self._has_begun),
            )  # fmt: skip
        except Exception as problem:  # noqa: BLE001 - its files were closed when we left, say
            ended = Ended(127, "", bug_text(problem), 0.0)
        if self.leaving:
            return
        if ended.rc == 128 + signal.SIGALRM:
            # The alarm of the program inside.
            ended = replace(ended, rc=None)
        if not self._has_greeted:
            self.refuse(session.no_session(ended, config.user))
        if not self._has_refused:
            rows = [row.strip() for row in ended.err.splitlines() if row.strip()]
            ending = "timed out" if ended.rc is None else f"exit status {ended.rc}"
            message = f"the session of {config.user} ended ({ending})"
            message += f": {rows[-1][:200]}" if rows else ""
            print(message, file=sys.stderr, flush=True)
        self.leave(0 if self._has_refused else 1)

    def _relay_answer(self, text: str) -> None:
        """Pass a line of the session out if it is a hello or answers an order. Other output, such
        as a profile's, is ignored.
        """
        try:
            ((name, data),) = wire.lines(text, self._inner.nonce)
            if name == "begun":
                self._has_begun = True
                return
            answer = wire.decode(_ANSWERS[name], data)
        except (wire.DecodeError, KeyError, ValueError):
            return
        if isinstance(answer, orders.Hello):
            if self._has_greeted:
                return
            # Root's own values replace those that the user can forge.
            ports = tuple(port for port in self.config.ports if port in answer.ports)
            answer = replace(answer, addresses=local_addresses(), ports=ports)
        else:
            order = self._pending.get(answer.number)
            if order is None or order.kind != name:
                return
            if isinstance(order, orders.CollectiveOrder) and answer.port_holder:
                # Root can see which program has the port.
                holder = _foreign_holder(order.head.port) or answer.port_holder
                answer = replace(answer, port_holder=holder)
        if len(wire.line(self.config.nonce, name, answer)) > _LONGEST:
            return
        if isinstance(answer, orders.Hello):
            self._has_greeted, self._has_refused = True, bool(answer.reason)
        else:
            del self._pending[answer.number]
        _say(self.config, name, answer)


# --- The node's part: as the job's user, or as the user who logs in.


class _NodePart(_ProgramPart):
    """This node's part, which works one order after another in a thread."""

    def __init__(self, supervisor: ProcessSupervisor, config: orders.SmokeConfig) -> None:
        super().__init__(supervisor, config)
        self._todo: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._stops: dict[int, threading.Event] = {}  # the events that end the tests, by number
        self._lent: set[int] = set()  # the port that rank 0 has or had, in place of our listener

    def begin(self) -> None:
        login, user = user_name(os.geteuid()), self.config.user
        if user not in ("", login):
            try:
                uid = pwd.getpwnam(user).pw_uid
            except KeyError:
                self.refuse(f"no such user: {user}")
            # A uid may have more than one name.
            if uid != os.geteuid():
                self.refuse(session.cannot_become(login, user))
        # With a limit of 1 byte no core is written, not even through a pipe (fs/coredump.c).
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (1 if hard else 0, hard))
        threading.Thread(target=self._run, daemon=True).start()

    def take(self, order: _Work | orders.EndOrder) -> None:
        """Queue an order, or end the test of an earlier one."""
        if isinstance(order, orders.EndOrder):
            self._stops.get(order.number, threading.Event()).set()
        else:
            self._stops[order.number] = threading.Event()
            self._todo.put(order)

    def _run(self) -> None:
        """Say hello, then answer the orders. A mistake in this program costs one test."""
        try:
            try:
                hello = self._make_hello()
            except Exception as problem:  # noqa: BLE001 - the hello reports it
                hello = _no_hello(bug_text(problem))
            _say(self.config, "hello", hello)
            if hello.reason:
                self.leave(0)
            while True:
                order = self._todo.get()
                self._reclaim_ports()
                try:
                    answer = self._answer(order)
                except Exception as problem:  # noqa: BLE001 - it costs this test alone
                    answer = _empty_answer(order, bug_text(problem))
                del self._stops[order.number]
                _say(self.config, order.kind, answer)
        except Exception as problem:  # noqa: BLE001 - the end tells the other side
            print(bug_text(problem), file=sys.stderr, flush=True)
            self.leave(1)

    def _make_hello(self) -> orders.Hello:
        """Start the listeners, and find the engines of this node."""
        self._addresses = local_addresses()
        variables = environment.variables_of({**os.environ, **self.config.variables})
        # The ports are seen before our own listeners take them.
        values, deadline = dict(variables), time.monotonic() + _ENVIRONMENT_S
        master = values.get("MASTER_ADDR", ""), values.get("MASTER_PORT", "")
        masters = {master: [os.getpid()]} if master[0] else {}
        facts = environment.observe_node(os.getpid(), masters, deadline, values)
        self._listeners = listeners = SmokeListeners(self.config.ports)
        if not listeners.ports:
            return _no_hello(_no_port(self.config.ports, listeners.busy))
        threading.Thread(target=listeners.serve, daemon=True).start()
        self._engines = node_engines = engines.Engines(self.supervisor, self.config)
        self.supervisor.at_end(node_engines.close)
        if node_engines.python_pid is not None:
            libraries = (engine.library for engine in node_engines.engines)
            nccl = next((text[5:] for text in libraries if text.startswith("NCCL ")), "")
            versions = software.observe(node_engines.python_pid, os.geteuid(), nccl)
            driver = processes.contents("/sys/module/nvidia/version").strip()[:40]
            facts = replace(facts, **versions._replace(driver=driver)._asdict())
        return orders.Hello(
            listeners.token, listeners.ports, self._addresses, node_engines.engines, "",
            variables, facts,
        )  # fmt: skip

    def _answer(self, order: _Work) -> orders.CollectiveAnswer | orders.PairAnswer:
        stop = self._stops[order.number]
        if isinstance(order, orders.PairOrder):
            return run_pair(order, self._addresses, stop)
        port = order.head.port
        is_first = (order.engine, order.first) == (orders.TORCH, 0)
        is_lent = is_first and port in self._listeners.ports
        if is_lent:
            # Rank 0 is here, and listens there itself.
            self._lent.add(port)
            self._listeners.lend(port)
        try:
            ranks = self._engines.run(order, stop)
            is_in_use = is_lent and any(_IN_USE.search(rank.error) for rank in ranks)
            port_holder = _foreign_holder(port) if is_in_use else ""
            return orders.CollectiveAnswer(order.number, "", ranks, port_holder)
        finally:
            self._reclaim_ports(_TAKE_S)

    def _reclaim_ports(self, limit_s: float = 0.0) -> None:
        """Listen again on the ports that ranks had, for pairs of other nodes."""
        until = time.monotonic() + limit_s
        for port in sorted(self._lent):
            while not (is_ours := self._listeners.take(port)) and time.monotonic() < until:
                time.sleep(0.02)
            if is_ours:
                self._lent.discard(port)


def _foreign_holder(port: int) -> str:
    """Another user's process that has a port of our ranks; "": none is visible."""
    for listener in all_listeners():
        if listener.port == port:
            return "" if listener.uid == os.geteuid() else holder_text(listener)
    return ""


def _empty_answer(order: _Work, reason: str) -> orders.CollectiveAnswer | orders.PairAnswer:
    """The answer to an order that a mistake in this program leaves without a result."""
    if isinstance(order, orders.PairOrder):
        return orders.PairAnswer(order.number, order.target.name, error=reason)
    ranks = orders.failed_ranks(order, "start", reason)
    return orders.CollectiveAnswer(order.number, reason, ranks)


def _no_port(ports: tuple[int, ...], busy: Iterable[Busy]) -> str:
    """The errors of all ports in one line: each error once, with its first port."""
    if not ports:
        return "no port to listen on"
    range_text = ", ".join(map(str, ports[:8]))
    if ports[1:] and [*ports] == [*range(ports[0], ports[-1] + 1)]:
        range_text = f"{ports[0]}-{ports[-1]}"
    first_ports: dict[str, int] = {}
    for busy_port in busy:
        first_ports.setdefault(busy_port.error, busy_port.port)
    rows = [_foreign_holder(port) or f"{port}: {error}" for error, port in first_ports.items()]
    suffix = ["…"] if len(ports) > len(rows) else []
    return f"no port of {range_text} is free ({'; '.join(rows + suffix)})"
