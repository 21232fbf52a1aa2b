"""Child processes that ask a share of the nodes each: the parent's end, and the child's.

A login costs some milliseconds of a core, so thousands of nodes are shared between one process per
core. ClusterShell's event loop runs in a child, too. Conversations stay in the parent; requests go
to the child, and answers come back, as frames over a socket: a length and a pickle. Only the two
processes write pickles; the output of nodes is text in them.

When the parent's end of the socket closes, a child ends its processes on the nodes, and then
itself.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import socket
import struct
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast
from weakref import WeakSet

import gevent
import gevent.os
import gevent.socket
from gevent.lock import BoundedSemaphore
from gevent.queue import Empty, Queue

from nodeready.agent.asking import (
    Answer,
    Conversation,
    Exchange,
    Key,
    NodeChannel,
    Outcomes,
    Request,
    ResultT,
    SshPeer,
    Transport,
    bug_text,
    end_all,
    exchanges_of,
    interrupted,
    late,
    node_of,
)
from nodeready.core.exit_codes import handle_signals
from nodeready.core.outcome import FAILED, INTERRUPTED, LATE, Gap

_LENGTH = struct.Struct("!I")
#: Bytes of one frame. An answer is at most `base.ANSWER_BYTES` and its standard error; the first
#: questions to all nodes of a child are one frame, 100 KB for each node that is asked its own.
_MAX_FRAME_BYTES = 1 << 30
#: Seconds beyond its own limit for a child to say that it is done.
_GRACE_S = 3.0


class Frames:
    """Whole frames over a socket.

    lock: keeps the frames of several senders apart; None: gevent's
    """

    def __init__(self, sock: socket.socket, lock: Any = None) -> None:
        self._sock, self._sending = sock, lock or BoundedSemaphore()

    def send(self, *frame: Any) -> None:
        """Raises OSError when the peer is gone."""
        data = pickle.dumps(frame, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            self._sock.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> tuple[Any, ...] | None:
        """The next frame; None: the peer is gone."""
        head = self._read(_LENGTH.size)
        if head is None:
            return None
        (size,) = _LENGTH.unpack(head)
        data = self._read(size) if size <= _MAX_FRAME_BYTES else None
        return None if data is None else cast("tuple[Any, ...]", pickle.loads(data))

    def _read(self, count: int) -> bytes | None:
        data = bytearray(count)
        view, count_read = memoryview(data), 0
        while count_read < count:
            try:
                received = self._sock.recv_into(view[count_read:])
            except OSError:
                received = 0
            if not received:
                return None
            count_read += received
        return bytes(data)

    def close(self) -> None:
        """End every wait at this socket, here and at the peer."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self.forget()

    def forget(self) -> None:
        """Close the socket in this process only; another process may still use it."""
        self._sock.close()


# --- The parent's end.

#: The sockets to this process's children. A fork closes them, because a child notices the end of
#: its parent only when no other process holds the parent's socket.
_TO_CHILDREN: WeakSet[Frames] = WeakSet()


def frames_to_child(sock: socket.socket) -> Frames:
    """The frames over a socket to a child of this process."""
    frames = Frames(sock)
    _TO_CHILDREN.add(frames)
    return frames


def close_inherited() -> None:
    """In a fork: close its parent's sockets to children."""
    for frames in list(_TO_CHILDREN):
        frames.forget()
    _TO_CHILDREN.clear()


class WorkerProcess:
    """A child process, and the socket to it.

    gone_reason: why the child answers no more; "": it answers
    kill_reason: why this process killed the child; "": it did not
    """

    def __init__(self, nodes: Iterable[str], sock: socket.socket, pid: int) -> None:
        self.nodes, self.pid, self.frames = tuple(nodes), pid, frames_to_child(sock)
        self.gone_reason = self.kill_reason = ""

    def send(self, *frame: Any) -> None:
        """Send a frame, unless the child is gone: its waiters get the frame "gone"."""
        with contextlib.suppress(OSError):
            self.frames.send(*frame)

    def end_reason(self) -> str:
        """How the child ended, once its end of the socket is closed.

        gevent may have taken its status: it waits for every child when it runs subprocesses.
        """
        if self.kill_reason:
            return self.kill_reason
        for _ in range(50):
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if not pid:
                    gevent.sleep(0.02)
                    continue
                if os.WIFSIGNALED(status):
                    return f"was ended by signal {os.WTERMSIG(status)}"
                return f"ended with exit status {os.WEXITSTATUS(status)}"
            break
        return "ended"


class WorkerTransport(Transport):
    """Nodes that child processes ask. child_name: the child's name in a failure"""

    child_name = "the process that asked it"

    def __init__(self, nodes: Iterable[str]) -> None:
        super().__init__(nodes)
        self._workers: list[WorkerProcess] = []
        self.worker_of: dict[str, WorkerProcess] = {}
        self._numbers = itertools.count()
        # Number of a call, channel or question -> the frames for it.
        self._queues: dict[int, Queue[Any]] = {}
        self._readers: list[Any] = []

    @abstractmethod
    def start(self) -> list[WorkerProcess]:
        """Start the children; each node belongs to one."""

    def __enter__(self) -> WorkerTransport:
        self._workers = self.start()
        self.worker_of = {name: worker for worker in self._workers for name in worker.nodes}
        self._readers = [gevent.spawn(self._read, worker) for worker in self._workers]
        return self

    def __exit__(self, *problem: object) -> None:
        for worker in self._workers:
            worker.send("quit")
        until = time.monotonic() + _GRACE_S
        gevent.joinall(self._readers, timeout=_GRACE_S)
        for worker in self._workers:
            worker.frames.close()
            _reap(worker.pid, until)

    def note(self, text: str) -> None:
        """Show a line of a child to the user."""

    def _read(self, worker: WorkerProcess) -> None:
        """Dispatch the child's frames, until it ends."""
        reason = ""
        while (frame := worker.frames.receive()) is not None:
            queue = self._queues.get(frame[1])
            if frame[0] == "bug":
                reason = frame[2]
            elif frame[0] == "note":
                self.note(frame[2])
            elif queue is not None:
                queue.put((worker, *frame))
        worker.gone_reason = reason or f"{self.child_name} {worker.end_reason()}"
        for queue in list(self._queues.values()):
            queue.put((worker, "gone"))

    @contextlib.contextmanager
    def numbered_queue(self) -> Iterator[tuple[int, Queue[Any]]]:
        """A number, and the queue of the frames with this number."""
        number = next(self._numbers)
        self._queues[number] = Queue()
        try:
            yield number, self._queues[number]
        finally:
            del self._queues[number]

    def converse(
        self, conversations: Mapping[Key, Conversation[ResultT]], deadline: float | None = None
    ) -> Outcomes[ResultT]:
        exchanges = exchanges_of(conversations)
        stopped = False
        with self.numbered_queue() as (call, frames):
            try:
                yield from self._begin(call, exchanges, deadline)
                while exchanges:
                    remaining_s = None
                    if deadline is not None:
                        remaining_s = max(0, deadline + _GRACE_S - time.monotonic())
                    worker, kind, *details = frames.get(timeout=remaining_s)
                    if kind == "gone":
                        yield from self._gone(worker, exchanges)
                        continue
                    _, key, answer = details
                    exchange = exchanges.get(key)
                    if exchange is None:
                        continue
                    exchange.answer(answer)
                    worker.send("next", call, key, None if exchange.is_over else exchange.request)
                    if exchange.is_over:
                        yield key, exchanges.pop(key).outcome
            except Empty:
                # The children have the same deadline: they do not answer any more.
                yield from end_all(exchanges, lambda key: late())
            except KeyboardInterrupt:
                self.interrupted = stopped = True
                self._stop(call)
                yield from end_all(exchanges, lambda key: interrupted())
            finally:
                if exchanges and not stopped:
                    stopped = True
                    self._stop(call)
                if stopped:
                    self.end()

    def _stop(self, call: int) -> None:
        for worker in self._workers:
            worker.send("stop", call)

    def _begin(
        self, call: int, exchanges: dict[Key, Exchange[ResultT]], deadline: float | None
    ) -> Outcomes[ResultT]:
        """Send every conversation's first question; yields the conversations without one."""
        first_requests: dict[WorkerProcess, list[tuple[Key, Request]]] = {}
        for key, exchange in list(exchanges.items()):
            exchange.start()
            if exchange.is_over:
                yield key, exchanges.pop(key).outcome
                continue
            worker = self.worker_of[node_of(key)]
            first_requests.setdefault(worker, []).append((key, cast("Request", exchange.request)))
        for worker, pairs in first_requests.items():
            worker.send("converse", call, deadline, pairs)
        for worker in self._workers:
            if worker.gone_reason:
                yield from self._gone(worker, exchanges)

    @staticmethod
    def _gone(worker: WorkerProcess, exchanges: dict[Key, Exchange[ResultT]]) -> Outcomes[ResultT]:
        """End every conversation of a child that is gone, with the reason."""
        nodes = set(worker.nodes)
        ended = {key: exchanges.pop(key) for key in list(exchanges) if node_of(key) in nodes}
        yield from end_all(ended, lambda key: Answer(gap=Gap(FAILED, worker.gone_reason)))

    def open(self, request: Request) -> NodeChannel:
        return _RemoteChannel(self, request)

    def ask_worker(self, worker: WorkerProcess, *words: Any, limit_s: float) -> Any:
        """The child's answer; None: none in this time."""
        with self.numbered_queue() as (number, frames):
            worker.send(words[0], number, *words[1:])
            until = time.monotonic() + limit_s
            while not worker.gone_reason:
                try:
                    sender, *frame = frames.get(timeout=max(0.0, until - time.monotonic()))
                except Empty:
                    break
                if sender is worker:
                    return None if frame[0] == "gone" else frame[2]
        return None

    def _ask_all(self, *words: Any, limit_s: float) -> list[Any]:
        """The answers of all children, asked at once."""
        jobs = [
            gevent.spawn(self.ask_worker, worker, *words, limit_s=limit_s)
            for worker in self._workers
        ]
        gevent.joinall(jobs, timeout=limit_s)
        return [job.value for job in jobs if job.value is not None]

    def end(self, limit_s: float = 5) -> None:
        self._ask_all("end", limit_s, limit_s=limit_s + _GRACE_S)

    def ssh_peers(self) -> Mapping[str, SshPeer]:
        peers: dict[str, SshPeer] = {}
        for peers_seen in self._ask_all("ssh_peers", limit_s=_GRACE_S):
            peers.update(peers_seen)
        return peers

    def use_password(self, password: str, nodes: Iterable[str]) -> None:
        names_by_worker: dict[WorkerProcess, list[str]] = {}
        for name in nodes:
            names_by_worker.setdefault(self.worker_of[name], []).append(name)
        for worker, names in names_by_worker.items():
            worker.send("password", password, names)


class _RemoteChannel(NodeChannel):
    def __init__(self, transport: WorkerTransport, request: Request) -> None:
        self.error = ""
        self._transport, self._worker = transport, transport.worker_of[request.node]
        self._name = os.urandom(8).hex()
        self._worker.send("open", self._name, request)

    def send_line(self, line: str) -> None:
        self._worker.send("line", self._name, line)

    def read_line(self, limit_s: float) -> str | None:
        if self.error:
            return None
        # The child waits for limit_s, and may still have to connect.
        reply = self._transport.ask_worker(
            self._worker, "read", self._name, limit_s, limit_s=limit_s + 60
        )
        if reply is None:
            self.error = self._worker.gone_reason or "no answer from the process that asks it"
            return None
        line, self.error = reply
        return cast("str | None", line)

    def close(self) -> None:
        self._worker.send("close", self._name)


def _reap(pid: int, until: float) -> None:
    """Wait until the child has ended; end it after ``until``."""
    for number in (0, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError):
            if number:
                os.kill(pid, number)
            while True:
                if os.waitpid(pid, os.WNOHANG)[0]:
                    return
                if time.monotonic() > until:
                    break
                gevent.sleep(0.01)
        until = time.monotonic() + 1


# --- The child's end, for a transport that works under gevent.


def fork_worker(nodes: Sequence[str], make_transport: Callable[[], Transport]) -> WorkerProcess:
    """Fork a child in a new session that asks these nodes.

    make_transport: makes the child's transport, in the child
    """
    parent_end, child_end = gevent.socket.socketpair()
    pid = gevent.os.fork_gevent()
    if pid:
        child_end.close()
        return WorkerProcess(nodes, parent_end, pid)
    status, frames = 1, Frames(child_end)
    try:
        # Ctrl-C is for the parent, which stops the child.
        os.setsid()
        handle_signals(signal.SIG_IGN)
        parent_end.close()
        close_inherited()
        with make_transport() as transport:
            _WorkerServer(transport, frames).serve()
        status = 0
    except Exception as error:  # noqa: BLE001 - the parent reports it for every node
        with contextlib.suppress(OSError):
            frames.send("bug", -1, bug_text(error))
    finally:
        os._exit(status)


class _WorkerServer:
    """Serves the parent with the transport of a child."""

    def __init__(self, transport: Transport, frames: Frames) -> None:
        self._transport, self._frames = transport, frames
        self._calls: dict[int, Any] = {}
        self._stopped: set[int] = set()
        # The parent's next request for each conversation.
        self._questions: dict[tuple[int, Key], Queue[Request | None]] = {}
        self._channels: dict[str, _HeldChannel] = {}

    def serve(self) -> None:
        """Handle the parent's frames, until "quit" or the parent's end."""
        handlers: dict[str, Callable[..., None]] = {
            "converse": self._converse, "next": self._next, "stop": self._stop,
            "open": self._open, "line": self._line, "read": self._read, "close": self._close,
            "password": self._transport.use_password, "end": self._end,
            "ssh_peers": self._ssh_peers,
        }  # fmt: skip
        while (frame := self._frames.receive()) is not None:
            if frame[0] == "quit":
                return
            handlers[frame[0]](*frame[1:])
        for call in list(self._calls):
            self._stop(call)
        self._transport.end()

    def _send(self, *frame: Any) -> None:
        with contextlib.suppress(OSError):
            self._frames.send(*frame)

    def _converse(
        self, call: int, deadline: float | None, pairs: Sequence[tuple[Key, Request]]
    ) -> None:
        conversations = {key: self._relay(call, key, request) for key, request in pairs}
        self._questions.update({(call, key): Queue() for key in conversations})

        def run() -> None:
            # The interrupt comes once; the transport then ends its processes on the nodes.
            with contextlib.suppress(KeyboardInterrupt):
                for _ in self._transport.converse(conversations, deadline):
                    pass

        def forget(_: object) -> None:
            del self._calls[call]
            for key in conversations:
                del self._questions[call, key]

        self._calls[call] = gevent.spawn(run)
        self._calls[call].link(forget)

    def _relay(self, call: int, key: Key, first: Request) -> Conversation[None]:
        """A conversation that passes the parent's questions on, and the answers back."""
        request: Request | None = first
        while request is not None:
            answer: Answer = yield request
            self._send("answer", call, key, answer)
            if answer.has_gap(LATE, INTERRUPTED):
                return
            request = self._questions[call, key].get()

    def _next(self, call: int, key: Key, request: Request | None) -> None:
        if questions := self._questions.get((call, key)):
            questions.put(request)

    def _stop(self, call: int) -> None:
        if call not in self._stopped and (greenlet := self._calls.get(call)):
            self._stopped.add(call)
            greenlet.kill(KeyboardInterrupt, block=False)

    def _open(self, name: str, request: Request) -> None:
        self._channels[name] = _HeldChannel(self._transport, request)

    def _line(self, name: str, line: str) -> None:
        self._channels[name].lines.put(line)

    def _read(self, number: int, name: str, limit_s: float) -> None:
        channel = self._channels[name]
        gevent.spawn(lambda: self._send("line", number, channel.read(limit_s)))

    def _close(self, name: str) -> None:
        if channel := self._channels.pop(name, None):
            channel.lines.put(None)

    def _end(self, number: int, limit_s: float) -> None:
        def end() -> None:
            self._transport.end(limit_s)
            self._send("ended", number, True)

        gevent.spawn(end)

    def _ssh_peers(self, number: int) -> None:
        self._send("ssh_peers", number, dict(self._transport.ssh_peers()))


class _HeldChannel:
    """A channel that the parent uses. Sending and reading do not wait for each other.

    lines: to send; None: close the channel
    """

    def __init__(self, transport: Transport, request: Request) -> None:
        self.lines: Queue[str | None] = Queue()
        self._opened = gevent.spawn(transport.open, request)
        gevent.spawn(self._send)

    def _send(self) -> None:
        channel = self._opened.get()
        while (line := self.lines.get()) is not None:
            channel.send_line(line)
        channel.close()

    def read(self, limit_s: float) -> tuple[str | None, str]:
        """The next line, and the channel's error."""
        channel = self._opened.get()
        return channel.read_line(limit_s), channel.error
