"""The program on the node: hear the control machine's orders, and answer each of them.

Started by root, it opens a session for the job's user (``su -``, through PAM as every login) and
runs there once more. Root's part hands the orders in, and lets answers out: one to each order, of
its kind and within the bounds. What is inside is the user's, who can print what he likes there; he
reaches the row of his own node alone.

Inside, or as whoever logs in, it listens on the job's ports, finds the engines, says hello, and
works the orders one after the other. The end of the standard input, a signal and the alarm end
everything at once, in the middle of a test, too: both parts, and all that they started.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import queue
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NoReturn, Union

from nodeready.node import payload
from nodeready.node.payload import Program
from nodeready.node.proofs import session
from nodeready.node.proofs.mesh import addresses_here
from nodeready.node.runtime import Ended, ProcessSupervisor, hold_streams, mistake
from nodeready.node.smoke import engines, orders, ring
from nodeready.node.smoke.orders import Collective, Config, End, Hello, Pair, Paired, Ran
from nodeready.subjects import wire

# payload.program starts this module's main with this module's Config.
__all__ = ["Config", "main"]

#: Seconds for a login to come as far as our program.
_LOGIN_S = 20
#: Seconds for the engines to be found, more than they take by their own limits; and of the whole
#: time, what that may be.
_FIND_S, _FIND_SHARE = 120, 0.75
#: Seconds after a test's limit in which a thread must have answered; another one answers for it.
_LATE_S = 0.9
#: The kernel's word, and PyTorch's, for a port that another process has (EADDRINUSE).
_IN_USE = re.compile(r"(?i)address already in use|EADDRINUSE|errno: 98\b")
#: Seconds for a port that a rank had to be free again.
_TAKE_S = 0.3
#: Seconds for the session to end by itself, with its logout by PAM, before it is killed.
_LEAVE_S = 1.0
#: Seconds that a session's program ends before the one that started it.
_SOONER_S = 2
#: No test takes longer.
_MOST_S = 24 * 3600
#: Characters of an answer: the ranks of a node, each with an error.
_LONGEST = 128 << 10

_Work = Union[Collective, Pair]

#: The name of an answer -> its type; and the name of the answer to an order.
_ANSWERS: dict[str, type[Any]] = {"hello": Hello, "ran": Ran, "paired": Paired}
_ANSWER = {Collective: "ran", Pair: "paired"}

_printing = threading.Lock()


def _say(config: Config, name: str, seen: Any) -> None:
    text = wire.line(config.nonce, name, seen)
    with _printing:
        print(text, flush=True)


def _no_hello(user: str, why: str, busy: tuple[orders.Busy, ...] = ()) -> Hello:
    host = os.uname().nodename
    return Hello(host, user, "", (), busy, addresses_here(), 0, (), why)


def main(config: Config, *, inside: bool = False) -> None:
    """inside: this is the session that root opened for the user."""
    hold_streams()
    os.chdir("/")
    supervisor = ProcessSupervisor(config.tag, config.limit_s)
    root = os.geteuid() == 0 and config.user not in ("", "root") and not inside
    part = _Session(supervisor, config) if root else _Node(supervisor, config)

    def leave(number: int, frame: object) -> None:
        part.leave(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, leave)
    signal.setitimer(signal.ITIMER_REAL, config.limit_s)
    if inside:
        # To root's part alone: the login has come this far.
        print(f"{config.nonce} begun {{}}", flush=True)
    try:
        part.begin()
        for text in _typed():
            part.take(_order(text))
    except Exception as problem:  # noqa: BLE001 - it must not keep the program from its end
        print(problem if isinstance(problem, ValueError) else mistake(problem), file=sys.stderr)
        part.leave(1)
    part.leave(0)


def _typed() -> Iterator[str]:
    """The lines of the standard input as they come. One that is cut off is none."""
    # A profile may have closed it: then Python has no sys.stdin.
    with open(0, "rb", closefd=False) as file:
        for row in file:
            if row.endswith(b"\n"):
                yield row.decode("utf-8", "replace")


def _order(text: str) -> _Work | End:
    """The order of a line. Raises ValueError for what is none."""
    try:
        order = orders.read(text)
        whole = type(order.number) is int
        if not whole or (not isinstance(order, End) and not 0 < order.limit_s <= _MOST_S):
            raise ValueError("its numbers make no sense")
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as problem:
        raise ValueError(f"no order: {type(problem).__name__}: {problem}"[:200]) from None
    return order


class _Part:
    """What both parts have: everything can end at any moment."""

    def __init__(self, supervisor: ProcessSupervisor, config: Config) -> None:
        self.supervisor, self.config = supervisor, config
        self.leaving = False

    def last(self) -> None:
        """What is done before everything is killed; it is done twice when a signal comes then."""

    def leave(self, status: int) -> NoReturn:
        """End everything that was started, and this process, whatever it is doing."""
        self.leaving = True
        # From here on nothing is printed. A thread may hang over its line.
        _printing.acquire(blocking=False)
        self.last()
        self.supervisor.end()
        os._exit(status)

    def refuse(self, user: str, why: str) -> NoReturn:
        """Nothing can be tested on this node: say so, and leave."""
        _say(self.config, "hello", _no_hello(user, why))
        self.leave(0)


# --- Root's part.


class _Session(_Part):
    """The session of the job's user, from outside."""

    def __init__(self, supervisor: ProcessSupervisor, config: Config) -> None:
        super().__init__(supervisor, config)
        self._orders: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        #: The number of an order without an answer -> the name of its answer, and rank 0's port.
        self._asked: dict[int, str] = {}
        self._heads: dict[int, int] = {}
        self._begun = self._greeted = self._refused = False
        # Of the lines from inside. Nobody there knows the one by which the control machine reads.
        self._inner = replace(config, nonce=f"inside-{os.urandom(8).hex()}")
        self._thread = threading.Thread(target=self._run, daemon=True)

    def begin(self) -> None:
        """Start, without waiting for anything."""
        user = self.config.user
        try:
            pwd.getpwnam(user)
        except KeyError:
            self.refuse(user, f"no such user: {user}")
        self._thread.start()

    def take(self, order: _Work | End) -> None:
        """Hand an order in."""
        if not isinstance(order, End):
            self._asked[order.number] = _ANSWER[type(order)]
        if isinstance(order, Collective):
            self._heads[order.number] = order.head.port
        self._orders.put(f"{orders.line(order)}\n")

    def last(self) -> None:
        # The end of its input lets the session end as every login does.
        self._orders.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_LEAVE_S)

    def _run(self) -> None:
        """Have the session, to its end. Without it, this program has no reason to be there."""
        config, supervisor = self.config, self.supervisor
        inner = replace(self._inner, limit_s=max(1, int(supervisor.left_s) - _SOONER_S))

        def made(descriptor: int) -> Program:
            how = {"stdin": True, "first": sys.executable, "descriptor": descriptor}
            return payload.program(__name__, inner, inside=True, **how)  # type: ignore[arg-type]

        try:
            ended = session.run(
                supervisor,
                config.user,
                made,
                self._hear,
                more=iter(self._orders.get, None),
                begun=(_LOGIN_S, lambda: self._begun),
            )
        except Exception as problem:  # noqa: BLE001 - its files were closed when we left, say
            ended = Ended(127, "", mistake(problem), 0.0)
        if self.leaving:
            return
        if ended.rc == 128 + signal.SIGALRM:
            # The alarm of the program inside.
            ended = replace(ended, rc=None)
        if not self._greeted:
            self.refuse(config.user, session.no_session(ended, config.user))
        if not self._refused:
            rows = [row.strip() for row in ended.err.splitlines() if row.strip()]
            how = "timed out" if ended.rc is None else f"exit status {ended.rc}"
            said = f": {rows[-1][:200]}" if rows else ""
            print(f"the session of {config.user} ended ({how}){said}", file=sys.stderr, flush=True)
        self.leave(0 if self._refused else 1)

    def _hear(self, text: str) -> None:
        """Let a line from inside out when it is what was asked for.

        A profile's noise may stand in front of it; whatever else is printed there is passed over.
        """
        try:
            ((name, data),) = wire.lines(text, self._inner.nonce)
            if name == "begun":
                self._begun = True
                return
            seen = wire.decode(_ANSWERS[name], data)
        except (wire.DecodeError, KeyError, ValueError):
            return
        if isinstance(seen, Hello):
            if self._greeted:
                return
            # What root knows itself, nobody inside has to say.
            known = _no_hello(self.config.user, "")
            ports = tuple(one for one in self.config.ports if one in seen.ports)
            known = replace(known, token=seen.token, ports=ports, busy=seen.busy)
            seen = replace(known, gpus=seen.gpus, engines=seen.engines, why=seen.why)
        elif self._asked.get(seen.number) != name:
            return
        elif isinstance(seen, Ran) and seen.taken:
            # Root sees whose program it is, too.
            seen = replace(seen, taken=_taken(self._heads[seen.number]) or seen.taken)
        if len(wire.line(self.config.nonce, name, seen)) > _LONGEST:
            return
        if isinstance(seen, Hello):
            self._greeted, self._refused = True, bool(seen.why)
        else:
            del self._asked[seen.number]
        _say(self.config, name, seen)


# --- The node's part: as the job's user, or as whoever logs in.


class _Job:
    """An order on its way. stop: set when its test has to end"""

    def __init__(self, order: _Work) -> None:
        self.order, self.stop, self.answered = order, threading.Event(), False


class _Node(_Part):
    """The orders of this node, worked one after the other in a thread that may hang."""

    def __init__(self, supervisor: ProcessSupervisor, config: Config) -> None:
        super().__init__(supervisor, config)
        self._lock = threading.Lock()
        self._todo: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        #: Without an answer, by number.
        self._jobs: dict[int, _Job] = {}
        self._greeted = False
        self._own: tuple[str, ...] = ()
        #: Ports that ranks have, or had, in place of our listeners.
        self._lent: set[int] = set()

    def begin(self) -> None:
        """Start, without waiting for anything."""
        here, user = session.name_of(os.geteuid()), self.config.user
        if user not in ("", here):
            try:
                uid = pwd.getpwnam(user).pw_uid
            except KeyError:
                self.refuse(here, f"no such user: {user}")
            # A number may have more than one name.
            if uid != os.geteuid():
                self.refuse(here, session.cannot_become(here, user))
        # Of 1 byte no core is written, not even through a pipe (fs/coredump.c).
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (1 if hard else 0, hard))
        limit_s = min(_FIND_S, self.supervisor.left_s * _FIND_SHARE)
        why = f"the engines were not found in {limit_s:.0f} s"
        _later(limit_s, partial(self._greet, _no_hello(here, why)))
        self._thread(self._first)

    def take(self, order: _Work | End) -> None:
        """Have an order worked. Raises ValueError for one that is being worked."""
        if isinstance(order, End):
            if order.number in (jobs := dict(self._jobs)):
                jobs[order.number].stop.set()
            return
        with self._lock:
            if order.number in self._jobs:
                raise ValueError(f"no order: there is a test {order.number}")
            job = self._jobs[order.number] = _Job(order)
        self._todo.put(job)

    def _thread(self, work: Callable[[], None]) -> None:
        def one() -> None:
            try:
                work()
            except Exception as problem:  # noqa: BLE001 - the end tells the other side
                print(mistake(problem), file=sys.stderr, flush=True)
                self.leave(1)

        threading.Thread(target=one, daemon=True).start()

    # --- Hello.

    def _first(self) -> None:
        here = session.name_of(os.geteuid())
        try:
            hello = self._look(here)
        except Exception as problem:  # noqa: BLE001 - said by the node that it is about
            hello = _no_hello(here, mistake(problem))
        self._greet(hello)
        self._work()

    def _look(self, here: str) -> Hello:
        """The listeners and the engines of this node."""
        self._own = addresses_here()
        self._listeners = listeners = ring.Listeners(self.config.ports)
        if not listeners.ports:
            return _no_hello(here, _no_port(self.config.ports, listeners.busy), listeners.busy)
        threading.Thread(target=listeners.serve, daemon=True).start()
        self._engines = found = engines.find(self.supervisor, self.config, listeners.descriptors)
        self.supervisor.at_end(found.close)
        return Hello(
            host=os.uname().nodename,
            user=here,
            token=listeners.token,
            ports=tuple(sorted(listeners.ports)),
            busy=tuple(listeners.busy),
            addresses=self._own,
            gpus=found.gpus,
            engines=found.engines,
            why="",
        )

    def _greet(self, hello: Hello) -> None:
        with self._lock:
            if self._greeted:
                return
            self._greeted = True
        _say(self.config, "hello", hello)
        if hello.why:
            self.leave(0)

    # --- Orders.

    def _work(self) -> None:
        while True:
            job = self._todo.get()
            self._take_back()
            limit_s = job.order.limit_s
            timer = _later(limit_s + _LATE_S, partial(self._give_up, job))
            try:
                seen = self._worked(job)
            except Exception as problem:  # noqa: BLE001 - it costs this test alone
                seen = _nothing(job.order, mistake(problem), broken=True)
            timer.cancel()
            if not self._claim(job):
                # Another thread works the orders by now.
                return
            _say(self.config, _ANSWER[type(job.order)], seen)

    def _worked(self, job: _Job) -> Ran | Paired:
        order = job.order
        if isinstance(order, Pair):
            return ring.run_pair(order, self._own, self._listeners, job.stop)
        if order.engine == orders.RING:
            return Ran(order.number, "", (ring.run_ring(order, self._listeners, job.stop),))
        port, released = order.head.port, False
        if order.first == 0 and port in self._listeners.ports:
            # Rank 0 is here, and listens there itself.
            self._lent.add(port)
            released = not self._engines.takes(order)
            (self._listeners.release if released else self._listeners.lend)(port)
        try:
            ranks = self._engines.run(order, order.head.addresses, job.stop)
            in_use = released and any(_IN_USE.search(rank.said) for rank in ranks)
            return Ran(order.number, "", ranks, _taken(port) if in_use else "")
        finally:
            if not job.answered:
                self._take_back(_TAKE_S)

    def _take_back(self, limit_s: float = 0.0) -> None:
        """Listen again on the ports that ranks had: others' pairs are answered there."""
        until = time.monotonic() + limit_s
        for port in sorted(self._lent):
            while not (taken := self._listeners.take(port)) and time.monotonic() < until:
                time.sleep(0.02)
            if taken:
                self._lent.discard(port)

    def _claim(self, job: _Job) -> bool:
        """Whether the caller is the one who answers; from then on nobody else is."""
        with self._lock:
            if job.answered:
                return False
            job.answered = True
            del self._jobs[job.order.number]
            return True

    def _give_up(self, job: _Job) -> None:
        """Answer for a thread that did not, and let another one work the orders."""
        if not self._claim(job):
            return
        order = job.order
        job.stop.set()
        ranks = isinstance(order, Collective) and order.engine != orders.RING
        if ranks:
            self.supervisor.kill()
        why = f"did not end in {order.limit_s:g} s"
        _say(self.config, _ANSWER[type(order)], _nothing(order, why))
        if ranks:
            # What it had running for the next test, too, was killed.
            self._engines.close()
        self._thread(self._work)


#: Processes that are searched for a port's holder.
_MOST_HOLDERS = 4096


def _holder(port: int) -> tuple[int, str] | None:
    """Who listens on a port of this node: the uid, and in words the user and, where we may see it,
    the program (proc(5), /proc/net/tcp). None: nobody."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{table}", encoding="ascii") as file:
            for row in islice(file, 1, None):
                words = row.split()
                if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                    uid, program = int(words[7]), _program(int(words[7]), words[9])
                    name = session.name_of(uid)
                    user = name if name == str(uid) else f"{name} (uid {uid})"
                    return uid, f"{user}: {program}" if program else user
    return None


def _program(uid: int, inode: str) -> str:
    """The process of this user that has a socket; "": it is not seen."""
    for pid in islice(filter(str.isdigit, os.listdir("/proc")), _MOST_HOLDERS):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid != uid:
                continue
            for number in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{number}") == f"socket:[{inode}]":
                    with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
                        return f"{file.read().strip()}, pid {pid}"
    return ""


def _taken(port: int) -> str:
    """Which other user's process has a port that our ranks should have; "": none that is seen."""
    found = _holder(port)
    return f"port {port} is taken by {found[1]}" if found and found[0] != os.geteuid() else ""


def _later(limit_s: float, act: Callable[[], None]) -> threading.Timer:
    """Do that after so many seconds, unless what comes back is cancelled."""
    timer = threading.Timer(limit_s, act)
    timer.daemon = True
    timer.start()
    return timer


def _nothing(order: _Work, why: str, *, broken: bool = False) -> Ran | Paired:
    """The answer to an order of which nothing is known.

    broken: it is our own mistake
    """
    if isinstance(order, Pair):
        return Paired(order.number, order.target.name, (), why, "", (), "", 0.0, 0.0, -1, 0)
    gpus = (*order.gpus, *[-1] * order.ranks)
    seconds = 0.0 if broken else order.limit_s
    ranks = (
        orders.Rank(order.first + at, gpus[at], "start", "", why, -1, 0.0, 0.0, -1, seconds)
        for at in range(order.ranks)
    )
    return Ran(order.number, why if broken else "", tuple(ranks))


def _no_port(ports: tuple[int, ...], busy: Iterable[orders.Busy]) -> str:
    """Why there is no listener, in one line: each error once, with its first port."""
    if not ports:
        return "no port to listen on"
    whole = [*ports] == [*range(ports[0], ports[-1] + 1)]
    of = f"{ports[0]}-{ports[-1]}" if whole and ports[1:] else ", ".join(map(str, ports[:8]))
    first: dict[str, int] = {}
    for one in busy:
        first.setdefault(one.error, one.port)
    rows = [_taken(port) or f"{port}: {error}" for error, port in first.items()]
    more = ["…"] if len(ports) > len(rows) else []
    return f"no port of {of} is free ({'; '.join(rows + more)})"
