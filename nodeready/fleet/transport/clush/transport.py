"""The transport over ClusterShell's tree of gateways (topology.conf), by the ssh program.

A child process has every ssh: if this process is killed, it ends what runs on the nodes.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from shutil import which
from typing import TYPE_CHECKING, Any

import gevent
from ClusterShell.Defaults import DEFAULTS
from gevent.lock import BoundedSemaphore
from gevent.pool import Pool

from nodeready.agent import asking
from nodeready.agent.local import LineChannel, as_root, judge_reply
from nodeready.core import shell
from nodeready.core.outcome import HUNG, LOST, OUTPUT, REFUSED, SUDO, UNREACHABLE, Gap
from nodeready.core.shell import KILL_AFTER_S, quote
from nodeready.core.text import sanitise
from nodeready.fleet.transport import Note, connectors, ignore
from nodeready.fleet.transport.clush.gateway import (
    COMMON,
    LOGIN_S,
    SSH_ERRORS,
    Gateway,
    SshTarget,
    absolute,
    gateway_command,
    gateways_by_node,
    ssh_target,
    topology_file,
    without_own_keys,
)
from nodeready.fleet.transport.processes import Child, WorkerTransport, fork_transport
from nodeready.fleet.transport.ssh import Holders, ParallelTransport, SlotStream

if TYPE_CHECKING:
    from pyinfra.api import Config, Host

#: Seconds without an answer of the child, after which it is considered hung.
_SILENT_S = 30.0
GATEWAY_FANOUT = 64  # commands at once on one gateway, unless the user says how many


class ClushError(asking.TransportUnavailable):
    """ClusterShell's tree cannot be used here, or with this topology.conf; one line."""


# --- The command line, and the output.


def request_line(request: asking.Request, tag: str, target: SshTarget) -> tuple[str, str]:
    """The line that runs a request on a node, before `framed`, and its input.

    Only processes on the node have the tag in their command line. The ssh has not: it runs on a
    machine that may be a node, too.
    """
    command = shell.command(request.script, request.limit_s, tag, request.payload)
    line, stdin = as_root(command, target.password) if target.sudo else command
    return line.removesuffix(tag) + tag.replace(":", '":"'), stdin


def framed(line: str, nonce: str) -> str:
    """Wrap ``line``: its output is between two lines with the nonce. The last one has the exit
    status, after a word if a signal ended the command.
    """
    inner = (
        f"exec 4>&1 5>&2; echo; echo {nonce} b; "
        # A shell writes a line to its standard error when a signal ended a command.
        f"nr=$(exec 2>&1; (exec {line} >&4 2>&5 4>&- 5>&-); echo $?); "
        f"echo; echo {nonce} z $nr"
    )
    return f"sh -c {quote(inner)}"


class FramedOutput(connectors.AnswerBuffer):
    """A node's output for one request, with the lines of `framed`.

    on_begin: called when the first of them was read
    """

    def __init__(
        self, nonce: str, request: asking.Request, on_begin: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(f"\n{nonce} b\n".encode(), request.max_bytes + connectors.NOISE_BYTES)
        self.has_begun = False
        self._last, self._request, self._on_begin = f"\n{nonce} z ".encode(), request, on_begin

    def add(self, data: bytes) -> None:
        super().add(data)
        if not self.has_begun and self.mark in self.data:
            self.has_begun = True
            self._on_begin()

    def answer(self, reply: asking.Answer, target: SshTarget, gateway: str = "") -> asking.Answer:
        """The node's answer, when its ssh has ended.

        reply:   of ssh
        gateway: its name; "": asked directly
        """
        stderr, seconds = reply.stderr, reply.seconds
        noise, _, framed_text = bytes(self.data).partition(self.mark)
        if not self.has_begun:
            if reply.rc == connectors.SSH_FAILED:
                error = target.failure_text(stderr, gateway)
                return asking.Answer(seconds=seconds, gap=Gap(UNREACHABLE, error))
            # A login that runs no command: its output is the answer.
            text = noise.lstrip(b"\n").decode("utf-8", "surrogateescape")
            return replace(reply, stdout=text)
        body, last, status = framed_text.rpartition(self._last)
        if not last:
            return asking.Answer("", stderr, seconds, gap=Gap(LOST, "connection lost"))
        if len(body) > self._request.max_bytes:
            return asking.Answer("", stderr, seconds, gap=self.flood_gap(body))
        words = status.split(b"\n")[0].split()
        rc = int(words[0]) if len(words) == 1 and words[0].isdigit() else None
        text = body.decode("utf-8", "surrogateescape")
        answer = asking.Answer(text, stderr, seconds, rc)
        answer = judge_reply(answer, self._request.limit_s, target.sudo)
        if answer.has_gap(SUDO) and gateway:
            reason = f"sudo wants a password, which goes through no gateway ({gateway})"
            error = f"{reason}: allow NOPASSWD, or ask with --via ssh"
            return replace(answer, gap=Gap(REFUSED, error))
        return answer

    def flood_gap(self, data: bytes) -> Gap:
        first = (data.partition(self.mark)[2] or data).lstrip(b"\n")[:40]
        shown = first.decode("utf-8", "replace")
        return Gap(OUTPUT, f"too much output, beginning with {shown!r}")


class _Session:
    """An interactive command as a Stream. Raises ValueError with why the command ended."""

    def __init__(self, command: Any, target: SshTarget, gateway: str, max_bytes: int) -> None:
        self._command, self._target, self._gateway = command, target, gateway
        self._room, self._last_output = max_bytes, b""
        self.write, self.close = command.write, command.close

    def read(self, limit_s: float) -> bytes:
        try:
            data: bytes = self._command.read(limit_s)
        except (connectors.OutputTooLarge, EOFError) as problem:
            raise ValueError(str(problem)) from None
        self._room -= len(data)
        if self._room < 0:
            raise ValueError("too much output")
        self._last_output = (self._last_output + data)[-asking.ERROR_BYTES :]
        if not data and self._command.status("") == connectors.SSH_FAILED:
            text = self._last_output.decode("utf-8", "replace")
            is_known = any(pattern.search(text) for pattern, _ in SSH_ERRORS)
            error = self._target.failure_text(text, self._gateway)
            raise ValueError(error if is_known else "connection lost")
        return data


# --- The child's transport.


class ClushHosts(ParallelTransport):
    """Nodes that the ssh programs of this process and of gateways ask.

    gateways: the targets of all hosts of the inventory: any of them may be a gateway
    topology: the file; "": none
    fanout:   ssh programs at once; 0: as ClusterShell's configuration has it
    note:     shows the user a line
    """

    def __init__(
        self,
        targets: Iterable[SshTarget],
        gateways: Iterable[SshTarget],
        topology: str,
        *,
        fanout: int,
        run: str,
        note: Note,
    ) -> None:
        self._targets = {target.name: target for target in targets}
        super().__init__(self._targets, run)
        self._gateway_targets = {target.name: target for target in gateways}
        self._note, self._fanout = note, fanout
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        # An ssh has three pipes.
        self._max_clients = max(1, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 64) // 4)
        fanout = min(fanout or int(DEFAULTS.fanout), self._max_clients)
        self._slots = BoundedSemaphore(max(1, fanout))
        self._sessions = BoundedSemaphore(max(1, self._max_clients // 2))
        self._gateways: dict[str, Gateway] = {}
        self._gateway_jobs: list[Any] = []
        self._is_over = False
        self._reached: set[str] = set()
        self._begun: Counter[str] = Counter()
        #: Node -> the names of the gateways before it; such names -> the nodes that use them.
        self._gateways_of: dict[str, tuple[str, ...]] = {}
        self._users: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
        if topology:
            try:
                self._gateways_of = gateways_by_node(topology)
            except Exception as problem:  # noqa: BLE001 - ClusterShell's parser raises many kinds
                reason = sanitise(" ".join(str(problem).split())) or type(problem).__name__
                note(f"{topology}: {reason}: asking every node directly")

    def __exit__(self, *problem: object) -> None:
        self._is_over = True
        gevent.killall(self._gateway_jobs)

    def use_password(self, password: str, nodes: Iterable[str]) -> None:
        for name in nodes:
            self._targets[name] = replace(self._targets[name], password=password)

    # --- Gateways.

    def _gateway_target(self, name: str) -> SshTarget:
        """The ssh target of a gateway; one outside of the inventory has the usual user and key."""
        if name in self._gateway_targets:
            return self._gateway_targets[name]
        usual = Counter((target.user, target.key) for target in self._targets.values())
        user, key = usual.most_common(1)[0][0]
        options = [*COMMON, "-oStrictHostKeyChecking=accept-new"]
        options += [f"-oUser={user}"] if user else []
        options += [f"-oIdentityFile={key}"] if key else []
        return SshTarget(name, name, tuple(options), user, key)

    def _gateway_for(self, target: SshTarget) -> Gateway | None:
        """The gateway for a node, which counts in its asked_count; None: none."""
        names = self._gateways_of.get(target.name)
        if names is None or target.direct_reason or (target.sudo and target.password):
            return None
        self._users[names].add(target.name)
        while True:
            gateways = [self._gateways[name] for name in names if name in self._gateways]
            usable = [gateway for gateway in gateways if not gateway.is_over]
            for name in names:
                # No more gateways than nodes.
                if len(usable) < len(self._users[names]) and name not in self._gateways:
                    usable.append(self._open_gateway(name))
            unjudged = [gateway for gateway in usable if not gateway.judged.is_set()]
            if not unjudged:
                break
            unjudged[0].judged.wait()
        if not usable:
            return None
        gateway = min(usable, key=lambda gateway: gateway.asked_count)
        gateway.asked_count += 1
        return gateway

    def _open_gateway(self, name: str) -> Gateway:
        target = self._gateway_target(name)
        gateway = Gateway(target, self._fanout or GATEWAY_FANOUT, self._warn)
        self._gateways[name] = gateway
        line = gateway_command(os.environ, gateway.hello)
        self._gateway_jobs.append(
            gevent.spawn(
                gateway.serve,
                lambda: self._start(target, self._gateway_for(target), line, None, 1 << 62),
            )
        )
        return gateway

    def _warn(self, gateway: Gateway, was_fit: bool) -> None:
        todo = "" if was_fit else f"; {gateway.remedy()}"
        if not self._is_over:
            reason = f"gateway {gateway.name} is not used: {gateway.unfit_reason}{todo}"
            self._note(f"{reason}; nodes behind it are asked in another way")

    # --- Questions.

    def _start(
        self,
        target: SshTarget,
        gateway: Gateway | None,
        line: str,
        stdin: bytes | None,
        max_bytes: int,
        *,
        has_errors_apart: bool = True,
    ) -> Any:
        """Start an ssh to the node that runs this line, here or on the gateway."""
        if gateway is None:
            argv = ["ssh", *target.options, "--", target.destination, line]
            return connectors.PipedProgram(argv, separate_errors=has_errors_apart)
        user = [f"-oUser={target.user}"] if target.user else []
        argv = ["ssh", *COMMON, *user, "--", target.name, line]
        return gateway.start(argv, stdin, max_bytes, has_errors_apart)

    def holders(self, exchanges: Mapping[asking.Key, asking.Exchange[Any]]) -> Holders:
        for key, exchange in exchanges.items():
            yield key, partial(self._hold, asking.node_of(key), exchange)

    def is_reached(self, key: asking.Key) -> bool:
        return bool(self._begun[asking.node_of(key)])

    def _hold(self, name: str, exchange: asking.Exchange[asking.ResultT]) -> None:
        exchange.start()
        while not exchange.is_over:
            assert exchange.request is not None
            exchange.answer(self._ask(exchange.request))

    def _ask(self, request: asking.Request) -> asking.Answer:
        """Ask a node when it has its turn, here or on its gateway."""
        target = self._targets[request.node]
        if target.refused:
            return asking.Answer(gap=Gap(REFUSED, target.refused))
        while True:
            gateway = self._gateway_for(target)
            try:
                with gateway.slots if gateway else self._slots:
                    if gateway is None or gateway.is_fit:
                        return self._ask_now(target, gateway, request, self.tag)
            finally:
                if gateway is not None:
                    gateway.asked_count -= 1

    def _ask_now(
        self, target: SshTarget, gateway: Gateway | None, request: asking.Request, tag: str
    ) -> asking.Answer:
        """Ask a node. Never raises for a node's fault."""
        nonce, started = asking.new_nonce(), time.monotonic()
        run_s = request.limit_s + 2 * KILL_AFTER_S
        timer = gevent.Timeout.start_new(asking.CONNECT_TIMEOUT_S + LOGIN_S + run_s)

        def begin() -> None:
            nonlocal timer
            self._begun[target.name] += 1
            timer.close()
            timer = gevent.Timeout.start_new(run_s)

        output = FramedOutput(nonce, request, begin)
        gateway_name = gateway.name if gateway else ""
        command, reply, gap = None, asking.Answer(), None
        try:
            line, text = request_line(request, tag, target)
            stdin = text.encode("utf-8", "surrogateescape")
            max_bytes = connectors.max_received_bytes(request.max_bytes)
            self._reached.add(target.name)
            command = self._start(target, gateway, framed(line, nonce), stdin, max_bytes)
            reply = connectors.reply_of(command, stdin, output)
        except gevent.Timeout as timeout:
            if timeout is not timer:
                raise
            if output.has_begun:
                gap = Gap(HUNG, f"no answer in {request.limit_s} s")
            elif gateway_name:
                waited_s = time.monotonic() - started
                gap = Gap(LOST, f"gateway {gateway_name}: no answer in {waited_s:.0f} s")
            else:
                gap = Gap(UNREACHABLE, target.failure_text("timed out"))
        except connectors.OutputTooLarge as problem:
            gap = output.flood_gap(problem.data)
        except (OSError, EOFError) as problem:
            gap = Gap(LOST, str(problem))
        finally:
            timer.close()
            self._begun[target.name] -= output.has_begun
            if command is not None:
                command.close()
        seconds = time.monotonic() - started
        if gap is not None:
            return asking.Answer(seconds=seconds, gap=gap)
        return output.answer(replace(reply, seconds=seconds), target, gateway_name)

    def open(self, request: asking.Request) -> LineChannel:
        target = self._targets[request.node]
        line, stdin = request_line(request, self.tag, target)
        start = partial(self._session, target, request, line)
        return LineChannel(start, stdin, request.mark, sudo=target.sudo)

    def _session(self, target: SshTarget, request: asking.Request, line: str) -> SlotStream:
        """An interactive command. Raises ValueError."""
        if target.refused:
            raise ValueError(target.refused)
        if not self._sessions.acquire(blocking=False):
            maximum = self._max_clients // 2
            raise ValueError(
                f"more than {maximum} nodes spoken with at once: raise ulimit -n here"
            )
        gateway = self._gateway_for(target)
        self._reached.add(target.name)
        line = f"sh -c {quote(f'exec 2>&1; exec {line}')}"
        max_bytes = request.max_bytes + connectors.NOISE_BYTES
        command = self._start(target, gateway, line, None, max_bytes, has_errors_apart=False)

        def on_close() -> None:
            self._sessions.release()
            if gateway is not None:
                gateway.asked_count -= 1

        gateway_name = gateway.name if gateway else ""
        session = _Session(command, target, gateway_name, request.max_bytes)
        return SlotStream(session, on_close)

    def end(self, limit_s: float = 5) -> None:
        script = asking.end_script(self.run)

        def end(name: str) -> None:
            target = self._targets[name]
            gateway = self._gateway_for(target)
            try:
                self._ask_now(target, gateway, asking.Request(name, script, 3), "nodeready:end")
            finally:
                if gateway is not None:
                    gateway.asked_count -= 1

        closing = Pool(self._max_clients // 2)
        for name in sorted(self._reached):
            closing.spawn(end, name)
        closing.join(timeout=limit_s)


# --- The transport.


class Clush(WorkerTransport):
    """The nodes of an inventory, asked over ClusterShell's tree.

    hosts:    the selected hosts of pyinfra's inventory
    config:   pyinfra's configuration, for its SUDO; None: only the data of the hosts
    further_hosts: of the inventory; some may be gateways
    topology: topology.conf; None: where ClusterShell looks for it; "": no tree
    fanout:   number of nodes that this machine asks at once, and each gateway; 0: the fanout in
              ClusterShell's defaults.conf (64 without it), and 64 on a gateway
    notify:   shows the user a line about each gateway that is not used

    Only ssh sees the host keys: `ssh_peers` is empty.
    Raises ClushError without an ssh program, and for a ``topology`` that cannot be read.
    """

    child_name = "ClusterShell's process"
    one_text = True

    def __init__(
        self,
        hosts: Iterable[Host],
        config: Config | None = None,
        *,
        further_hosts: Iterable[Host] = (),
        topology: str | None = None,
        fanout: int = 0,
        notify: Note = ignore,
    ) -> None:
        sudo = bool(config is not None and config.SUDO)
        targets = without_own_keys(ssh_target(host, sudo) for host in hosts)
        super().__init__(target.name for target in targets)
        if not which("ssh"):
            raise ClushError("ssh is not installed here: --via clush is ClusterShell's own ssh")
        topology_path = topology_file() if topology is None else topology
        if topology:
            try:
                with open(topology, "rb"):
                    pass
            except OSError as problem:
                raise ClushError(f"{topology}: {problem.strerror}") from None
        gateways = (*targets, *(ssh_target(host) for host in further_hosts))
        path = absolute(topology_path) if topology_path else ""
        make_transport = partial(ClushHosts, targets, gateways, path, fanout=fanout)
        self._make_transport = partial(make_transport, run=self.run)
        self._notify = notify
        self._watching: Any = None

    def note(self, text: str) -> None:
        self._notify(text)

    def start(self) -> list[Child]:
        return [fork_transport(self.nodes, lambda note: self._make_transport(note=note))]

    def __enter__(self) -> Clush:
        super().__enter__()
        self._watching = gevent.spawn(self._watch)
        return self

    def __exit__(self, *problem: object) -> None:
        self._watching.kill()
        super().__exit__(*problem)

    def _watch(self) -> None:
        """Kill a silent child, so that all questions to it fail."""
        (child,) = self._pool.children
        while not child.gone_reason:
            gevent.sleep(_SILENT_S / 3)
            if not self.ask_children([child], "ssh_peers", limit_s=_SILENT_S):
                child.kill(f"gave no sign for {_SILENT_S:.0f} s, and was ended")
