"""Child processes that do orders, as frames over a socket: a length and a pickle.

A login costs some milliseconds of a core, so thousands of nodes are shared between one process per
core. ClusterShell's event loop runs in a child, too, and so do the workers of an audit. Only the
two processes write pickles; the output of nodes is text in them.

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
from gevent import monkey
from gevent.lock import BoundedSemaphore
from gevent.queue import Empty, Queue

from nodeready.agent.asking import (
    INTERRUPT,
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
    end_all,
    exchanges_of,
    late,
    node_of,
)
from nodeready.agent.runtime import bug_text
from nodeready.core.exit_codes import handle_signals
from nodeready.core.outcome import FAILED, INTERRUPTED, LATE, Gap
from nodeready.fleet.transport import Note

_LENGTH = struct.Struct("!I")
#: Bytes of one frame. An answer is at most `base.ANSWER_BYTES` and its standard error; the first
#: questions to all nodes of a child are one frame, 100 KB for each node that is asked its own.
_MAX_FRAME_BYTES = 1 << 30
_GRACE_S = 3.0  # seconds beyond its own limit for a child to say that it is done


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

#: The children of this process. A fork closes the sockets to them, because a child notices the end
#: of its parent only when no other process holds the parent's socket.
_CHILDREN: WeakSet[Child] = WeakSet()


class Child:
    """A child process, and the socket to it.

    nodes:       that it asks
    gone_reason: why it answers no more; "": it answers
    kill_reason: why this process killed it; "": it did not
    signal:      that ended it; 0: none, or unknown
    """

    def __init__(self, pid: int, sock: socket.socket, nodes: Iterable[str] = ()) -> None:
        self.pid, self.frames, self.nodes = pid, Frames(sock), tuple(nodes)
        self.gone_reason = self.kill_reason = ""
        self.signal = 0
        self._is_reaped = False
        _CHILDREN.add(self)

    def send(self, *frame: Any) -> None:
        """Send a frame, unless the child is gone: its pool gets to know that."""
        with contextlib.suppress(OSError):
            self.frames.send(*frame)

    def kill(self, reason: str = "") -> None:
        if not self._is_reaped:
            self.kill_reason = reason
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, limit_s: float = 1.0) -> str:
        """How the child ended; "": not yet.

        gevent may have taken its status: it waits for every child when it runs subprocesses.
        """
        until = time.monotonic() + limit_s
        while not self._is_reaped:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self._is_reaped = True
                break
            if pid:
                self._is_reaped = True
                self.signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
                ended = f"ended with exit status {os.WEXITSTATUS(status)}"
                return f"was ended by signal {self.signal}" if self.signal else ended
            if time.monotonic() > until:
                return ""
            gevent.sleep(0.01)
        return "ended"


def fork(serve: Callable[[socket.socket], None], nodes: Iterable[str] = ()) -> Child:
    """Fork a child in a new session, which runs ``serve`` with its end of a socket.

    The socket is a plain one: a child that does not use gevent leaves the parent's greenlets, of
    which it has copies, alone.
    """
    parent_end, child_end = monkey.get_original("socket", "socketpair")()
    pid = gevent.os.fork_gevent()
    if pid:
        child_end.close()
        return Child(pid, gevent.socket.socket(fileno=parent_end.detach()), nodes)
    status = 1
    try:
        # Ctrl-C is for the parent, which stops the child.
        os.setsid()
        handle_signals(signal.SIG_IGN)
        parent_end.close()
        for child in list(_CHILDREN):
            child.frames.forget()
        serve(child_end)
        status = 0
    except OSError:
        status = 0  # The parent is gone.
    finally:
        # Without the exit handlers of the parent.
        os._exit(status)


class Pool:
    """Child processes, and one reader for each.

    on_frame: gets each frame of a child in its order, and None when the child is gone
    """

    def __init__(
        self, children: Sequence[Child], on_frame: Callable[[Child, tuple[Any, ...] | None], None]
    ) -> None:
        self.children, self._on_frame = children, on_frame
        self._readers = [gevent.spawn(self._read, child) for child in children]

    def _read(self, child: Child) -> None:
        while (frame := child.frames.receive()) is not None:
            self._on_frame(child, frame)
        end = child.wait() or "ended"
        child.gone_reason = child.kill_reason or end
        self._on_frame(child, None)

    def end(self, limit_s: float = 0) -> None:
        """End the children; those that have not ended by themselves in this time are killed."""
        until = time.monotonic() + limit_s
        gevent.joinall(self._readers, timeout=limit_s)
        gevent.killall(self._readers)
        for child in self.children:
            child.frames.close()
            if not child.wait(max(0.0, until - time.monotonic())):
                child.kill()
                child.wait()


class WorkerTransport(Transport):
    """Nodes that child processes ask. child_name: the child's name in a failure"""

    child_name = "the process that asked it"
    _pool: Pool

    def __init__(self, nodes: Iterable[str]) -> None:
        super().__init__(nodes)
        self.child_of: dict[str, Child] = {}
        self._bugs: dict[Child, str] = {}
        self._numbers = itertools.count()
        # Number of a call, channel or question -> the frames for it.
        self._queues: dict[int, Queue[Any]] = {}

    @abstractmethod
    def start(self) -> list[Child]:
        """Start the children; each node belongs to one."""

    def __enter__(self) -> WorkerTransport:
        children = self.start()
        self.child_of = {name: child for child in children for name in child.nodes}
        self._pool = Pool(children, self._dispatch)
        return self

    def __exit__(self, *problem: object) -> None:
        for child in self._pool.children:
            child.send("quit")
        self._pool.end(_GRACE_S)

    def note(self, text: str) -> None:
        """Show a line of a child to the user."""

    def _dispatch(self, child: Child, frame: tuple[Any, ...] | None) -> None:
        if frame is None:
            child.gone_reason = self._bugs.get(child) or f"{self.child_name} {child.gone_reason}"
            for queue in list(self._queues.values()):
                queue.put((child, "gone"))
        elif frame[0] == "bug":
            self._bugs[child] = frame[2]
        elif frame[0] == "note":
            self.note(frame[2])
        elif (answers := self._queues.get(frame[1])) is not None:
            answers.put((child, *frame))

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
                    child, kind, *details = frames.get(timeout=remaining_s)
                    if kind == "gone":
                        yield from self._gone(child, exchanges)
                        continue
                    _, key, answer = details
                    exchange = exchanges.get(key)
                    if exchange is None:
                        continue
                    exchange.answer(answer)
                    child.send("next", call, key, None if exchange.is_over else exchange.request)
                    if exchange.is_over:
                        yield key, exchanges.pop(key).outcome
            except Empty:
                # The children have the same deadline: they do not answer any more.
                yield from end_all(exchanges, lambda key: late())
            except KeyboardInterrupt:
                self.interrupted = stopped = True
                self._stop(call)
                yield from end_all(exchanges, lambda key: INTERRUPT)
            finally:
                if exchanges and not stopped:
                    stopped = True
                    self._stop(call)
                if stopped:
                    self.end()

    def _stop(self, call: int) -> None:
        for child in self._pool.children:
            child.send("stop", call)

    def _begin(
        self, call: int, exchanges: dict[Key, Exchange[ResultT]], deadline: float | None
    ) -> Outcomes[ResultT]:
        """Send every conversation's first question; yields the conversations without one."""
        first_requests: dict[Child, list[tuple[Key, Request]]] = {}
        for key, exchange in list(exchanges.items()):
            exchange.start()
            if exchange.is_over:
                yield key, exchanges.pop(key).outcome
                continue
            child = self.child_of[node_of(key)]
            first_requests.setdefault(child, []).append((key, cast("Request", exchange.request)))
        for child, pairs in first_requests.items():
            child.send("converse", call, deadline, pairs)
        for child in self._pool.children:
            if child.gone_reason:
                yield from self._gone(child, exchanges)

    @staticmethod
    def _gone(child: Child, exchanges: dict[Key, Exchange[ResultT]]) -> Outcomes[ResultT]:
        """End every conversation of a child that is gone, with the reason."""
        nodes = set(child.nodes)
        ended = {key: exchanges.pop(key) for key in list(exchanges) if node_of(key) in nodes}
        yield from end_all(ended, lambda key: Gap(FAILED, child.gone_reason))

    def open(self, request: Request) -> NodeChannel:
        return _RemoteChannel(self, request)

    def ask_children(
        self, children: Iterable[Child], word: str, *arguments: Any, limit_s: float
    ) -> list[Any]:
        """The answers that children give in this time, all asked at once."""
        answers: list[Any] = []
        with self.numbered_queue() as (number, frames):
            unanswered = {child for child in children if not child.gone_reason}
            for child in unanswered:
                child.send(word, number, *arguments)
            until = time.monotonic() + limit_s
            with contextlib.suppress(Empty):
                while unanswered:
                    child, kind, *frame = frames.get(timeout=max(0.0, until - time.monotonic()))
                    unanswered.discard(child)
                    answers += [] if kind == "gone" else [frame[1]]
        return answers

    def end(self, limit_s: float = 5) -> None:
        children = self._pool.children
        self.ask_children(children, "end", limit_s, limit_s=limit_s + _GRACE_S)

    def ssh_peers(self) -> Mapping[str, SshPeer]:
        peers: dict[str, SshPeer] = {}
        for peers_seen in self.ask_children(self._pool.children, "ssh_peers", limit_s=_GRACE_S):
            peers.update(peers_seen)
        return peers

    def use_password(self, password: str, nodes: Iterable[str]) -> None:
        names_by_child: dict[Child, list[str]] = {}
        for name in nodes:
            names_by_child.setdefault(self.child_of[name], []).append(name)
        for child, names in names_by_child.items():
            child.send("password", password, names)


class _RemoteChannel(NodeChannel):
    def __init__(self, transport: WorkerTransport, request: Request) -> None:
        self.error = ""
        self._transport, self._child = transport, transport.child_of[request.node]
        self._name = os.urandom(8).hex()
        self._child.send("open", self._name, request)

    def send_line(self, line: str) -> None:
        self._child.send("line", self._name, line)

    def read_line(self, limit_s: float) -> str | None:
        if self.error:
            return None
        # The child waits for limit_s, and may still have to connect.
        ask, child = self._transport.ask_children, self._child
        replies = ask([child], "read", self._name, limit_s, limit_s=limit_s + 60)
        if not replies:
            self.error = self._child.gone_reason or "no answer from the process that asks it"
            return None
        ((line, self.error),) = replies
        return cast("str | None", line)

    def close(self) -> None:
        self._child.send("close", self._name)


# --- The child's end, for a transport that works under gevent.


def fork_transport(nodes: Sequence[str], make_transport: Callable[[Note], Transport]) -> Child:
    """Fork a child that asks these nodes.

    make_transport: makes its transport in the child, with a function that shows the user a line
    """

    def serve(plain: socket.socket) -> None:
        frames = Frames(gevent.socket.socket(fileno=plain.detach()))
        try:
            with make_transport(lambda text: frames.send("note", -1, text)) as transport:
                _WorkerServer(transport, frames).serve()
        except Exception as error:  # noqa: BLE001 - the parent reports it for every node
            with contextlib.suppress(OSError):
                frames.send("bug", -1, bug_text(error))
            os._exit(1)

    return fork(serve, nodes)


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
        transport, channels = self._transport, self._channels

        def answer(number: int, function: Callable[..., Any], *arguments: Any) -> None:
            gevent.spawn(lambda: self._send("answer", number, function(*arguments)))

        def close(name: str) -> None:
            if channel := channels.pop(name, None):
                channel.lines.put(None)

        handlers: dict[str, Callable[..., Any]] = {
            "converse": self._converse,
            "next": self._next,
            "stop": self._stop,
            "open": lambda name, request: channels.update(
                {name: _HeldChannel(transport, request)}
            ),
            "line": lambda name, line: channels[name].lines.put(line),
            "read": lambda number, name, limit_s: answer(number, channels[name].read, limit_s),
            "close": close,
            "password": transport.use_password,
            "end": lambda number, limit_s: answer(number, transport.end, limit_s),
            "ssh_peers": lambda number: answer(number, lambda: dict(transport.ssh_peers())),
        }
        while (frame := self._frames.receive()) is not None:
            if frame[0] == "quit":
                return
            handlers[frame[0]](*frame[1:])
        for call in list(self._calls):
            self._stop(call)
        transport.end()

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
