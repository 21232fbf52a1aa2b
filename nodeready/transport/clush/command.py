"""A command on nodes: its line, the nodes' output, and ClusterShell's worker that runs it."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from ClusterShell.Event import EventHandler
from ClusterShell.NodeSet import NodeSet
from ClusterShell.Worker.Exec import ExecClient, ExecWorker
from ClusterShell.Worker.Tree import TreeWorker
from ClusterShell.Worker.Worker import FANOUT_UNLIMITED

from nodeready import shell
from nodeready.shell import KILL_AFTER_S, quote
from nodeready.transport.base import (
    CONNECT_TIMEOUT_S,
    ERROR_BYTES,
    FAILED,
    HUNG,
    LOST,
    OUTPUT,
    REFUSED,
    SUDO,
    UNREACHABLE,
    Answer,
    Failure,
    Reply,
    Request,
    append_up_to,
)
from nodeready.transport.clush.engine import ClushEngine
from nodeready.transport.clush.gateway_program import (
    BOUNDS,
    FLOOD,
    GATEWAY_GONE,
    NOISE_BYTES,
    bounded_read,
)
from nodeready.transport.clush.ssh_targets import LOGIN_S, SSH_SAYS, SshTarget
from nodeready.transport.sudo import as_root, judge_reply

#: Characters of base64 in one line.
_WIDTH = 32 << 10
#: Seconds until an ssh is ended whose line is being read now.
_SOON_S = 0.02


# --- The command line, and the output.


def framed(line: str, nonce: str, max_bytes: int) -> str:
    """Wrap ``line``: its output is separate from a login's, bounded on the node, and in few lines.

    ClusterShell passes output on line by line, through a gateway as one message each.

    Standard output goes as base64 between two lines that begin with the nonce: that the line runs,
    and its exit status, with a word before it when a signal ended it. Standard error goes as it
    is.
    """
    inner = (
        f"exec 4>&1 5>&2; echo; echo {nonce} b; "
        # A shell writes a line to its standard error when a signal ended a command.
        f"nr=$({{ {{ (exec {line} 2>&5 3>&- 4>&- 5>&-); echo $? >&3; }} 2>&3 | "
        f"head -c {max_bytes + 1} 3>&- 4>&- | "
        # An older busybox has no -w, and says so before it reads.
        f"{{ base64 -w {_WIDTH} 2>/dev/null || base64; }} 3>&- >&4; }} 3>&1); "
        f"echo {nonce} z $nr"
    )
    return f"sh -c {quote(inner)}"


def request_line(request: Request, tag: str, target: SshTarget) -> tuple[str, bytes]:
    """The line that runs a request on a node, without frames, and its input.

    The tag is in no process's command line but those on the node: not in that of an ssh, which
    runs on a machine that may be a node, too.
    """
    command = shell.command(request.script, request.limit_s, tag, request.payload)
    line, stdin = as_root(command, target.password) if target.sudo else command
    hidden = line.removesuffix(tag) + tag.replace(":", '":"')
    return hidden, stdin.encode("utf-8", "surrogateescape")


@dataclass
class NodeOutput:
    """A node's output for one request, line by line.

    max_bytes: of the answer; base64 makes them a third more
    began: time.monotonic() at the start of the line; 0: not yet
    is_flood: it printed more than the limits
    """

    nonce: bytes
    max_bytes: int
    began: float = 0.0
    is_flood: bool = False
    status: int | None = None
    is_whole: bool = False
    _text: bytearray = field(default_factory=bytearray)
    _noise: bytearray = field(default_factory=bytearray)
    _errors: bytearray = field(default_factory=bytearray)

    def out(self, row: bytes) -> None:
        """A line of standard output."""
        if row == FLOOD or len(self._text) > 2 * self.max_bytes + NOISE_BYTES:
            self.is_flood = True
        elif row.startswith(self.nonce):
            words = row[len(self.nonce) :].split()
            if words[:1] == [b"b"]:
                self.began = time.monotonic()
            elif words[:1] == [b"z"]:
                self.is_whole = True
                self.status = int(words[1]) if len(words) == 2 and words[1].isdigit() else None
        elif self.began and not self.is_whole:
            self._text += row
        else:
            append_up_to(self._noise, row + b"\n", ERROR_BYTES)

    def error(self, row: bytes) -> None:
        """A line of standard error."""
        if row == FLOOD:
            self.is_flood = True
        elif row or self._errors:
            append_up_to(self._errors, row + b"\n", ERROR_BYTES)

    @property
    def stderr(self) -> str:
        return self._errors.decode("utf-8", "surrogateescape")

    @property
    def noise(self) -> str:
        return self._noise.decode("utf-8", "surrogateescape")

    def stdout(self) -> bytes:
        """Raises ValueError when something else was written in between."""
        return base64.b64decode(self._text, validate=True)

    def answer(
        self,
        request: Request,
        target: SshTarget,
        status: int | None,
        seconds: float,
        gateway: str = "",
    ) -> Answer:
        """The node's answer, when its ssh has ended.

        status:  ssh's
        seconds: since the question
        gateway: "": asked directly
        """
        if self.is_flood:
            return self._too_much(bytes(self._noise.strip() or self._errors), seconds)
        if not self.began:
            if status == 255:
                return Failure(
                    "", "", seconds, UNREACHABLE, target.failure_text(self.stderr, gateway)
                )
            # A login that runs nothing: its own words are the answer.
            return Reply(self.noise.lstrip("\n"), self.stderr, seconds, status)
        if not self.is_whole:
            return Failure("", self.stderr, seconds, LOST, "connection lost")
        try:
            data = self.stdout()
        except ValueError:
            error = "the answer cannot be read: something else was written into it"
            return Failure("", self.stderr, seconds, FAILED, error)
        if len(data) > request.max_bytes:
            return self._too_much(data, seconds)
        text = data.decode("utf-8", "surrogateescape")
        reply = Reply(text, self.stderr, seconds, self.status)
        answer = judge_reply(reply, request.limit_s, target.sudo)
        if isinstance(answer, Failure) and answer.kind == SUDO and gateway:
            error = (
                f"sudo wants a password, which goes through no gateway ({gateway}): "
                "allow NOPASSWD, or ask with --via ssh"
            )
            return replace(answer, kind=REFUSED, error=error)
        return answer

    def _too_much(self, data: bytes, seconds: float) -> Failure:
        first = data.lstrip(b"\n")[:40].decode("utf-8", "replace")
        error = f"too much output, beginning with {first!r}"
        return Failure("", self.stderr, seconds, OUTPUT, error)


# --- ClusterShell's workers, and their event handlers.


class SshWorker(ExecWorker):  # type: ignore[misc]
    """ssh to some nodes, each with its own options."""

    class SHELL_CLASS(ExecClient):  # type: ignore[misc]
        _read = bounded_read(*BOUNDS)

        def _build_cmd(self) -> tuple[list[str], None]:
            target = self.worker.targets[self.key]
            return ["ssh", *target.options, "--", target.destination, self.command], None

    def __init__(
        self,
        targets: Mapping[str, SshTarget],
        handler: EventHandler,
        timeout: float | None,
        line: str,
        *,
        is_unlimited: bool = False,
    ) -> None:
        """is_unlimited: it does not count in the fanout; ClusterShell has no argument for that"""
        self.targets = targets
        # ClusterShell folds a set of nodes, which takes long for names of many numbers.
        super().__init__(NodeSet(), handler, timeout, command=line, stderr=True)
        if is_unlimited:
            self._fanout = FANOUT_UNLIMITED

    def _create_clients(self, timeout: float | None = None, **how: Any) -> None:
        for name in self.targets:
            self._add_client(name, rank=None, timeout=timeout, stderr=True)

    def _on_node_timeout(self, node: str) -> None:
        super()._on_node_timeout(node)
        self.eh.timed_out(node)

    def end(self, nodes: Iterable[str]) -> None:
        """End the ssh of these nodes."""
        chosen = set(nodes)
        for client in list(self._clients):
            if client.key in chosen:
                client.abort()


class GatewayTree(TreeWorker):  # type: ignore[misc]
    """Nodes behind gateways.

    through: gateway -> its nodes
    """

    def __init__(
        self,
        through: Mapping[str, list[str]],
        handler: EventHandler,
        timeout: float | None,
        line: str,
        invoke: str,
    ) -> None:
        self._through = through
        super().__init__(NodeSet(), handler, timeout, command=line, stderr=True)
        self.invoke_gateway = invoke

    def _distribute(self, fanout: int, nodes: Any) -> tuple[tuple[NodeSet, NodeSet], ...]:
        return tuple(
            (NodeSet(gateway), NodeSet.fromlist(names)) for gateway, names in self._through.items()
        )

    def _on_remote_node_timeout(self, node: str, gateway: str) -> None:
        super()._on_remote_node_timeout(node, gateway)
        self.eh.timed_out(node)

    def end(self, nodes: Iterable[str]) -> None:
        """End the ssh of these nodes, which run on the gateways."""
        chosen = set(nodes)
        for gateway, targets in list(self.gwtargets.items()):
            names = sorted(targets & chosen)
            if names and gateway in self.task.gateways:
                self.task.gateways[gateway][0].eh.end(names, self)
            for name in names:
                self._on_remote_node_close(name, GATEWAY_GONE, gateway)


@dataclass(eq=False)
class Question:
    """One question to one node, and its state.

    put:     gets the answer, once
    gateway: "": asked directly
    until:   the deadline of its connection, of time.monotonic()
    """

    request: Request
    target: SshTarget
    tag: str
    put: Callable[[Answer], None]
    call: int = -1
    started: float = field(default_factory=time.monotonic)
    gateway: str = ""
    has_begun: bool = False
    until: float = 0.0
    is_over: bool = False
    batch: Any = None

    def answer(self, answer: Answer) -> None:
        if not self.is_over:
            self.is_over = True
            self.put(answer)


class Batch(EventHandler):  # type: ignore[misc]
    """One worker of ClusterShell's: one line and one input for all its nodes."""

    def __init__(self, engine: ClushEngine, questions: list[Question]) -> None:
        self._engine = engine
        self.questions = {question.target.name: question for question in questions}
        first = questions[0]
        self.user = first.target.user
        nonce = f"nodeready-{secrets.token_hex(8)}"
        self.outputs = {
            name: NodeOutput(nonce.encode(), first.request.max_bytes) for name in self.questions
        }
        line, self.stdin = request_line(first.request, first.tag, first.target)
        self.line = framed(line, nonce, first.request.max_bytes)
        self.worker: Any = None
        for question in questions:
            question.batch = self

    def start(self, is_unlimited: bool) -> None:
        """Give the command to ClusterShell. is_unlimited: it does not count in the fanout"""
        questions = list(self.questions.values())
        limit_s = CONNECT_TIMEOUT_S + LOGIN_S + questions[0].request.limit_s + 2 * KILL_AFTER_S
        if questions[0].gateway:
            through: dict[str, list[str]] = {}
            for question in questions:
                through.setdefault(question.gateway, []).append(question.target.name)
                self._engine.reached.add(question.target.name)
            for gateway, names in through.items():
                gate = self._engine.gateways[gateway]
                gate.asked_count += len(names)
                turns = -(-gate.asked_count // self._engine.gateway_fanout())
                for name in names:
                    self.questions[name].until = time.monotonic() + (limit_s + LOGIN_S) * turns
            self.worker = GatewayTree(through, self, limit_s, self.line, self._engine.invoke)
        else:
            targets = {name: question.target for name, question in self.questions.items()}
            self.worker = SshWorker(targets, self, limit_s, self.line, is_unlimited=is_unlimited)
        self._engine.task.schedule(self.worker)
        self.worker.write(self.stdin)
        self.worker.set_write_eof()

    def ev_pickup(self, worker: Any, node: str) -> None:
        self._engine.reached.add(node)

    def ev_read(self, worker: Any, node: str, sname: str, msg: bytes) -> None:
        output = self.outputs.get(node)
        if output is None:
            return
        if sname == worker.SNAME_STDERR:
            output.error(msg)
        else:
            output.out(msg)
        if output.is_flood:
            self._over(node, self._answer(node, None))
            self._engine.later(_SOON_S, lambda: self.worker.end([node]))
        elif output.began and not self.questions[node].has_begun:
            self.questions[node].has_begun = True

    def ev_hup(self, worker: Any, node: str, rc: int) -> None:
        question, output = self.questions[node], self.outputs.get(node)
        if output is None:
            return
        seconds = time.monotonic() - question.started
        if question.gateway and rc == GATEWAY_GONE and not output.is_whole:
            gate = self._engine.gateways.get(question.gateway)
            reason = (
                gate.unfit_reason if gate is not None and gate.unfit_reason else "connection lost"
            )
            error = f"gateway {question.gateway}: {reason}"
            self._over(node, Failure("", output.stderr, seconds, LOST, error))
        else:
            self._over(node, self._answer(node, rc))

    def _answer(self, node: str, rc: int | None) -> Answer:
        question, output = self.questions[node], self.outputs[node]
        seconds = time.monotonic() - question.started
        return output.answer(question.request, question.target, rc, seconds, question.gateway)

    def timed_out(self, node: str) -> None:
        """ClusterShell's own limit has ended an ssh."""
        if node in self.outputs:
            self._over(node, self._hung(node))

    def _hung(self, node: str) -> Failure:
        question, output = self.questions[node], self.outputs[node]
        seconds = time.monotonic() - question.started
        if output.began:
            error = f"no answer in {question.request.limit_s} s"
            return Failure("", output.stderr, seconds, HUNG, error)
        return Failure(
            "",
            "",
            seconds,
            UNREACHABLE,
            question.target.failure_text("timed out", question.gateway),
        )

    def _over(self, node: str, answer: Answer) -> None:
        question = self.questions[node]
        del self.outputs[node]
        if question.gateway:
            gate = self._engine.gateways.get(question.gateway)
            if gate is not None:
                gate.asked_count -= 1
        question.answer(answer)

    def ev_close(self, worker: Any, timedout: bool) -> None:
        for name in list(self.outputs):
            self._over(name, self._hung(name))
        for gate in self._engine.gateways.values():
            gate.forget(worker)
        self._engine.batches.discard(self)

    def end_late(self, now_s: float) -> None:
        """End what has no time left."""
        late = []
        for name, output in self.outputs.items():
            question = self.questions[name]
            if output.began and now_s > output.began + question.request.limit_s + 2 * KILL_AFTER_S:
                late.append((name, self._hung(name)))
            elif question.gateway and not output.began and now_s > question.until:
                waited_s = question.until - question.started
                error = f"gateway {question.gateway}: no answer in {waited_s:.0f} s"
                late.append((name, Failure(kind=LOST, error=error)))
        for name, answer in late:
            self._over(name, answer)
        if late:
            self.worker.end([name for name, _ in late])

    def end(self, questions: Iterable[Question], failure: Callable[[Question], Failure]) -> None:
        """Stop waiting for these."""
        names = [
            name
            for name, question in self.questions.items()
            if question in questions and name in self.outputs
        ]
        for name in names:
            self._over(name, failure(self.questions[name]))
        self.worker.end(names)


class OpenSession(EventHandler):  # type: ignore[misc]
    """An interactive command: its lines go to the parent."""

    def __init__(
        self, engine: ClushEngine, number: int, request: Request, target: SshTarget
    ) -> None:
        self._engine, self._number, self.target = engine, number, target
        self.request, self.user, self.gateway = request, target.user, ""
        self._last_output, self._worker, self._early_input = (
            bytearray(),
            cast("Any", None),
            list[bytes](),
        )
        self._bytes = 0
        self._closed = self._over = False
        line, _ = request_line(request, engine.tag, target)
        begins = f"nodeready-{secrets.token_hex(8)} b"
        self._line = f"sh -c {quote(f'exec 2>&1; echo; echo {begins}; exec {line}')}"

    def start(self, gateway: str) -> None:
        name, self.gateway = self.target.name, gateway
        if gateway:
            self._engine.gateways[gateway].asked_count += 1
            self._worker = GatewayTree(
                {gateway: [name]}, self, None, self._line, self._engine.invoke
            )
        else:
            self._worker = SshWorker(
                {name: self.target}, self, None, self._line, is_unlimited=True
            )
        self._engine.reached.add(name)
        self._engine.task.schedule(self._worker)
        for data in self._early_input:
            self._worker.write(data)
        if self._closed:
            self._worker.set_write_eof()

    def write(self, data: bytes) -> None:
        if self._worker is None:
            self._early_input.append(data)
        elif not self._closed and not self._over:
            self._worker.write(data)

    def close(self) -> None:
        """End the command's input, and then an ssh that still runs."""
        if self._worker is None:
            self.end("ended")
        elif not self._closed and not self._over:
            self._worker.set_write_eof()
            self._engine.later(2, lambda: self._over or self._worker.end([self.target.name]))
        self._closed = True

    def ev_read(self, worker: Any, node: str, sname: str, msg: bytes) -> None:
        # ssh's own errors come last, on standard error.
        room = ERROR_BYTES if sname == worker.SNAME_STDERR else ERROR_BYTES // 2
        append_up_to(self._last_output, msg + b"\n", room)
        self._bytes += len(msg) + 1
        if self._bytes > self.request.max_bytes:
            self.end("too much output")
            self._engine.later(_SOON_S, lambda: worker.end([node]))
        elif not self._over:
            self._engine.say("data", self._number, msg + b"\n")

    def ev_hup(self, worker: Any, node: str, rc: int) -> None:
        text = self._last_output.decode("utf-8", "replace")
        if self.gateway and rc == GATEWAY_GONE:
            gate = self._engine.gateways.get(self.gateway)
            self.end(
                f"gateway {self.gateway}: {(gate and gate.unfit_reason) or 'connection lost'}"
            )
        elif rc == 255:
            is_sshs = any(pattern.search(text) for pattern, _ in SSH_SAYS)
            self.end(
                self.target.failure_text(text, self.gateway) if is_sshs else "connection lost"
            )
        else:
            self.end("")

    def timed_out(self, node: str) -> None:
        self.end("no answer in time")

    def ev_close(self, worker: Any, timedout: bool) -> None:
        self.end("ended")
        for gate in self._engine.gateways.values():
            gate.forget(worker)

    def end(self, reason: str) -> None:
        """Tell the parent that the command is over, and why."""
        if self._over:
            return
        self._over = True
        if self.gateway and self.gateway in self._engine.gateways:
            self._engine.gateways[self.gateway].asked_count -= 1
        self._engine.sessions.pop(self._number, None)
        self._engine.say("over", self._number, reason)
