"""A command on nodes: its line, the nodes' output, and ClusterShell's worker that runs it."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ClusterShell.Event import EventHandler
from ClusterShell.NodeSet import NodeSet
from ClusterShell.Worker.Exec import ExecClient, ExecWorker
from ClusterShell.Worker.Tree import TreeWorker
from ClusterShell.Worker.Worker import FANOUT_UNLIMITED

from nodeready.agent.asking import (
    CONNECT_TIMEOUT_S,
    ERROR_BYTES,
    Answer,
    Request,
    append_up_to,
    new_nonce,
)
from nodeready.agent.sudo import as_root, judge_reply
from nodeready.core import shell
from nodeready.core.outcome import FAILED, HUNG, LOST, OUTPUT, REFUSED, SUDO, UNREACHABLE, Gap
from nodeready.core.shell import KILL_AFTER_S, quote
from nodeready.fleet.transport.clush.gateway_program import (
    BOUNDS,
    FLOOD,
    GATEWAY_GONE,
    NOISE_BYTES,
    bounded_read,
)
from nodeready.fleet.transport.clush.ssh_targets import LOGIN_S, SSH_ERRORS, SshTarget

if TYPE_CHECKING:
    from nodeready.fleet.transport.clush.child import ClushProcess

#: Characters of base64 in one line.
_WIDTH = 32 << 10
#: Seconds until an ssh is ended, after the event that is being handled.
_SOON_S = 0.02


# --- The command line, and the output.


def framed(line: str, nonce: str, max_bytes: int) -> str:
    """Wrap ``line``: its output is separate from a login's, bounded on the node, and in few lines.

    ClusterShell passes output on line by line, and a gateway sends a message for each. So standard
    output becomes base64 between two lines with the nonce: a first line, and a last line with the
    exit status, after a word if a signal ended the command. Standard error is unchanged.
    """
    inner = (
        f"exec 4>&1 5>&2; echo; echo {nonce} b; "
        # A shell writes a line to its standard error when a signal ended a command.
        f"nr=$({{ {{ (exec {line} 2>&5 3>&- 4>&- 5>&-); echo $? >&3; }} 2>&3 | "
        f"head -c {max_bytes + 1} 3>&- 4>&- | "
        # An older busybox has no -w, and fails before it reads.
        f"{{ base64 -w {_WIDTH} 2>/dev/null || base64; }} 3>&- >&4; }} 3>&1); "
        f"echo {nonce} z $nr"
    )
    return f"sh -c {quote(inner)}"


def request_line(request: Request, tag: str, target: SshTarget) -> tuple[str, bytes]:
    """The line that runs a request on a node, before `framed`, and its input.

    Only processes on the node have the tag in their command line. The ssh has not: it runs on a
    machine that may be a node, too.
    """
    command = shell.command(request.script, request.limit_s, tag, request.payload)
    line, stdin = as_root(command, target.password) if target.sudo else command
    hidden = line.removesuffix(tag) + tag.replace(":", '":"')
    return hidden, stdin.encode("utf-8", "surrogateescape")


@dataclass
class NodeOutput:
    """A node's output for one request, line by line."""

    nonce: bytes
    max_bytes: int  # of the answer, before base64
    began: float = 0.0  # time.monotonic() at the start of the command; 0: not yet
    is_flood: bool = False  # the node printed more than the limits
    status: int | None = None
    is_whole: bool = False
    _text: bytearray = field(default_factory=bytearray)
    _noise: bytearray = field(default_factory=bytearray)
    _errors: bytearray = field(default_factory=bytearray)

    def add_line(self, row: bytes) -> None:
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

    def add_error_line(self, row: bytes) -> None:
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
        """The decoded answer. Raises ValueError if other output is mixed in."""
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

        status:  ssh's exit status
        gateway: its name; "": asked directly
        """
        if self.is_flood:
            return self._too_much(bytes(self._noise.strip() or self._errors), seconds)
        if not self.began:
            if status == 255:
                error = target.failure_text(self.stderr, gateway)
                return Answer(seconds=seconds, gap=Gap(UNREACHABLE, error))
            # A login that runs no command: its output is the answer.
            return Answer(self.noise.lstrip("\n"), self.stderr, seconds, status)
        if not self.is_whole:
            return self._without_end(seconds, LOST, "connection lost")
        try:
            data = self.stdout()
        except ValueError:
            error = "the answer cannot be read: something else was written into it"
            return self._without_end(seconds, FAILED, error)
        if len(data) > request.max_bytes:
            return self._too_much(data, seconds)
        text = data.decode("utf-8", "surrogateescape")
        reply = Answer(text, self.stderr, seconds, self.status)
        answer = judge_reply(reply, request.limit_s, target.sudo)
        if answer.has_gap(SUDO) and gateway:
            error = (
                f"sudo wants a password, which goes through no gateway ({gateway}): "
                "allow NOPASSWD, or ask with --via ssh"
            )
            return replace(answer, gap=Gap(REFUSED, error))
        return answer

    def _without_end(self, seconds: float, kind: str, reason: str) -> Answer:
        return Answer("", self.stderr, seconds, gap=Gap(kind, reason))

    def _too_much(self, data: bytes, seconds: float) -> Answer:
        first = data.lstrip(b"\n")[:40].decode("utf-8", "replace")
        error = f"too much output, beginning with {first!r}"
        return self._without_end(seconds, OUTPUT, error)


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
        """is_unlimited: it does not count in the fanout"""
        self.targets = targets
        # An empty set: ClusterShell folds a set of nodes, which takes long for names with many
        # numbers.
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

    names_by_gateway: gateway -> its nodes
    gateway_line:     runs the gateway's program
    """

    def __init__(
        self,
        names_by_gateway: Mapping[str, list[str]],
        handler: EventHandler,
        timeout: float | None,
        line: str,
        gateway_line: str,
    ) -> None:
        self._names_by_gateway = names_by_gateway
        super().__init__(NodeSet(), handler, timeout, command=line, stderr=True)
        self.invoke_gateway = gateway_line

    def _distribute(self, fanout: int, nodes: Any) -> tuple[tuple[NodeSet, NodeSet], ...]:
        return tuple(
            (NodeSet(gateway), NodeSet.fromlist(names))
            for gateway, names in self._names_by_gateway.items()
        )

    def _on_remote_node_timeout(self, node: str, gateway: str) -> None:
        super()._on_remote_node_timeout(node, gateway)
        self.eh.timed_out(node)

    def end(self, nodes: Iterable[str]) -> None:
        """End the ssh of these nodes on the gateways."""
        chosen = set(nodes)
        for gateway, targets in list(self.gwtargets.items()):
            names = sorted(targets & chosen)
            if names and gateway in self.task.gateways:
                self.task.gateways[gateway][0].eh.end(names, self)
            for name in names:
                self._on_remote_node_close(name, GATEWAY_GONE, gateway)


@dataclass(eq=False)
class Question:
    """One question to one node, and its state."""

    request: Request
    target: SshTarget
    tag: str
    on_answer: Callable[[Answer], None]  # gets the answer, once
    started: float = field(default_factory=time.monotonic)
    gateway_name: str = ""  # "": asked directly
    has_begun: bool = False
    until: float = 0.0  # the deadline of the connection, of time.monotonic()
    is_over: bool = False
    batch: Any = None

    def answer(self, answer: Answer) -> None:
        if not self.is_over:
            self.is_over = True
            self.on_answer(answer)


def gateway_error(process: ClushProcess, name: str) -> str:
    """The error of a node whose gateway has gone."""
    gateway = process.gateways.get(name)
    return f"gateway {name}: {(gateway and gateway.unfit_reason) or 'connection lost'}"


class Batch(EventHandler):  # type: ignore[misc]
    """The questions of one worker of ClusterShell's, with one command and one input."""

    def __init__(self, process: ClushProcess, questions: list[Question]) -> None:
        self._process = process
        self.questions = {question.target.name: question for question in questions}
        first = questions[0]
        self.user = first.target.user
        nonce = new_nonce()
        self.outputs = {
            name: NodeOutput(nonce.encode(), first.request.max_bytes) for name in self.questions
        }
        line, self.stdin = request_line(first.request, first.tag, first.target)
        self.line = framed(line, nonce, first.request.max_bytes)
        self.worker: Any = None
        for question in questions:
            question.batch = self

    def start(self, *, is_unlimited: bool) -> None:
        """Start the command. is_unlimited: it does not count in the fanout"""
        questions = list(self.questions.values())
        limit_s = CONNECT_TIMEOUT_S + LOGIN_S + questions[0].request.limit_s + 2 * KILL_AFTER_S
        if questions[0].gateway_name:
            names_by_gateway: dict[str, list[str]] = {}
            for question in questions:
                names_by_gateway.setdefault(question.gateway_name, []).append(question.target.name)
                self._process.reached.add(question.target.name)
            for gateway_name, names in names_by_gateway.items():
                gateway = self._process.gateways[gateway_name]
                gateway.asked_count += len(names)
                turns = -(-gateway.asked_count // self._process.gateway_fanout())
                for name in names:
                    self.questions[name].until = time.monotonic() + (limit_s + LOGIN_S) * turns
            self.worker = GatewayTree(
                names_by_gateway, self, limit_s, self.line, self._process.gateway_line
            )
        else:
            targets = {name: question.target for name, question in self.questions.items()}
            self.worker = SshWorker(targets, self, limit_s, self.line, is_unlimited=is_unlimited)
        self._process.task.schedule(self.worker)
        self.worker.write(self.stdin)
        self.worker.set_write_eof()

    def ev_pickup(self, worker: Any, node: str) -> None:
        self._process.reached.add(node)

    def ev_read(self, worker: Any, node: str, sname: str, msg: bytes) -> None:
        output = self.outputs.get(node)
        if output is None:
            return
        if sname == worker.SNAME_STDERR:
            output.add_error_line(msg)
        else:
            output.add_line(msg)
        if output.is_flood:
            self._finish(node, self._answer(node, None))
            self._process.call_later(_SOON_S, lambda: self.worker.end([node]))
        elif output.began:
            self.questions[node].has_begun = True

    def ev_hup(self, worker: Any, node: str, rc: int) -> None:
        question, output = self.questions[node], self.outputs.get(node)
        if output is None:
            return
        seconds = time.monotonic() - question.started
        if question.gateway_name and rc == GATEWAY_GONE and not output.is_whole:
            error = gateway_error(self._process, question.gateway_name)
            self._finish(node, Answer("", output.stderr, seconds, gap=Gap(LOST, error)))
        else:
            self._finish(node, self._answer(node, rc))

    def _answer(self, node: str, rc: int | None) -> Answer:
        question, output = self.questions[node], self.outputs[node]
        seconds = time.monotonic() - question.started
        return output.answer(question.request, question.target, rc, seconds, question.gateway_name)

    def timed_out(self, node: str) -> None:
        """ClusterShell's own limit has ended an ssh."""
        if node in self.outputs:
            self._finish(node, self._hung(node))

    def _hung(self, node: str) -> Answer:
        question, output = self.questions[node], self.outputs[node]
        seconds = time.monotonic() - question.started
        if output.began:
            error = f"no answer in {question.request.limit_s} s"
            return Answer("", output.stderr, seconds, gap=Gap(HUNG, error))
        error = question.target.failure_text("timed out", question.gateway_name)
        return Answer(seconds=seconds, gap=Gap(UNREACHABLE, error))

    def _finish(self, node: str, answer: Answer) -> None:
        question = self.questions[node]
        del self.outputs[node]
        if question.gateway_name:
            gateway = self._process.gateways.get(question.gateway_name)
            if gateway is not None:
                gateway.asked_count -= 1
        question.answer(answer)

    def ev_close(self, worker: Any, timedout: bool) -> None:
        for name in list(self.outputs):
            self._finish(name, self._hung(name))
        for gateway in self._process.gateways.values():
            gateway.forget(worker)
        self._process.batches.discard(self)

    def end_late(self, now_s: float) -> None:
        """Give up the questions whose time is over."""
        late = []
        for name, output in self.outputs.items():
            question = self.questions[name]
            if output.began and now_s > output.began + question.request.limit_s + 2 * KILL_AFTER_S:
                late.append((name, self._hung(name)))
            elif question.gateway_name and not output.began and now_s > question.until:
                waited_s = question.until - question.started
                error = f"gateway {question.gateway_name}: no answer in {waited_s:.0f} s"
                late.append((name, Answer(gap=Gap(LOST, error))))
        for name, answer in late:
            self._finish(name, answer)
        if late:
            self.worker.end([name for name, _ in late])

    def end(self, questions: Iterable[Question], failure: Callable[[Question], Answer]) -> None:
        """Give up these questions."""
        names = [
            name
            for name, question in self.questions.items()
            if question in questions and name in self.outputs
        ]
        for name in names:
            self._finish(name, failure(self.questions[name]))
        self.worker.end(names)


class OpenSession(EventHandler):  # type: ignore[misc]
    """An interactive command: the parent gets its lines."""

    def __init__(
        self, process: ClushProcess, number: int, request: Request, target: SshTarget
    ) -> None:
        self._process, self._number, self.target = process, number, target
        self.request, self.user, self.gateway_name = request, target.user, ""
        self._worker: Any = None
        self._last_output, self._early_input = bytearray(), list[bytes]()
        self._bytes = 0
        self._closed = self._over = False
        line, _ = request_line(request, process.tag, target)
        begins = f"{new_nonce()} b"
        self._line = f"sh -c {quote(f'exec 2>&1; echo; echo {begins}; exec {line}')}"

    def start(self, gateway_name: str) -> None:
        name, self.gateway_name = self.target.name, gateway_name
        if gateway_name:
            self._process.gateways[gateway_name].asked_count += 1
            self._worker = GatewayTree(
                {gateway_name: [name]}, self, None, self._line, self._process.gateway_line
            )
        else:
            self._worker = SshWorker(
                {name: self.target}, self, None, self._line, is_unlimited=True
            )
        self._process.reached.add(name)
        self._process.task.schedule(self._worker)
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
        """End the command's input, and 2 s later the ssh."""
        if self._worker is None:
            self.end("ended")
        elif not self._closed and not self._over:
            self._worker.set_write_eof()
            self._process.call_later(2, lambda: self._over or self._worker.end([self.target.name]))
        self._closed = True

    def ev_read(self, worker: Any, node: str, sname: str, msg: bytes) -> None:
        # ssh's own errors come last, on standard error.
        room = ERROR_BYTES if sname == worker.SNAME_STDERR else ERROR_BYTES // 2
        append_up_to(self._last_output, msg + b"\n", room)
        self._bytes += len(msg) + 1
        if self._bytes > self.request.max_bytes:
            self.end("too much output")
            self._process.call_later(_SOON_S, lambda: worker.end([node]))
        elif not self._over:
            self._process.send("data", self._number, msg + b"\n")

    def ev_hup(self, worker: Any, node: str, rc: int) -> None:
        text = self._last_output.decode("utf-8", "replace")
        if self.gateway_name and rc == GATEWAY_GONE:
            self.end(gateway_error(self._process, self.gateway_name))
        elif rc == 255:
            error = "connection lost"
            if any(pattern.search(text) for pattern, _ in SSH_ERRORS):
                error = self.target.failure_text(text, self.gateway_name)
            self.end(error)
        else:
            self.end("")

    def timed_out(self, node: str) -> None:
        self.end("no answer in time")

    def ev_close(self, worker: Any, timedout: bool) -> None:
        self.end("ended")
        for gateway in self._process.gateways.values():
            gateway.forget(worker)

    def end(self, reason: str) -> None:
        """Report the end of the command to the parent, and why."""
        if self._over:
            return
        self._over = True
        if self.gateway_name and self.gateway_name in self._process.gateways:
            self._process.gateways[self.gateway_name].asked_count -= 1
        self._process.sessions.pop(self._number, None)
        self._process.send("over", self._number, reason)
