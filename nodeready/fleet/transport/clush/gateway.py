"""Our end of the connection to a gateway of ClusterShell's tree.

A node behind a gateway is asked by the gateway's own ssh, with the gateway's configuration, keys
and known hosts. The gateway runs ClusterShell's program (`gateway_program`).
"""

from __future__ import annotations

import base64
import pickletools
import re
import time
from typing import TYPE_CHECKING, Any

from ClusterShell import Communication, Propagation
from ClusterShell.NodeSet import NodeSet

from nodeready.agent.asking import CONNECT_TIMEOUT_S, ERROR_BYTES, append_up_to
from nodeready.core.text import sanitise
from nodeready.fleet.inventory.nodeset import expand
from nodeready.fleet.transport.clush.gateway_program import FLOOD, NOISE_BYTES, PROGRAM
from nodeready.fleet.transport.clush.ssh_targets import COMMON

if TYPE_CHECKING:
    from nodeready.fleet.transport.clush.child import ClushProcess

#: Maximum bytes of a message: the longest line of a node's login, in base64.
MESSAGE_BYTES = 2 * NOISE_BYTES
#: Maximum names of other nodes in a gateway's answers to one command. Some are usual: an ended ssh
#: may still send lines. Each takes microseconds.
STRAY_NAMES = 100_000


class KeepOpen:
    """Stands in for a worker that uses a gateway, so that its connection stays open."""

    def _gateway_abort(self, gateway: str) -> None:
        return


class Gateway(Propagation.PropagationChannel):  # type: ignore[misc]
    """The connection to one gateway, and its state.

    state:       "asked", "fit", or "" when it is not used (any more): see ``unfit_reason``
    asked_count: number of nodes that are asked through it now
    """

    def __init__(self, process: ClushProcess, name: str) -> None:
        super().__init__(process.task, NodeSet(name))
        self.name, self.state, self.unfit_reason = name, "asked", ""
        self.since = time.monotonic()
        self._process = process
        self.errors = bytearray()
        #: Bytes since the last whole message, and names that count for STRAY_NAMES.
        self._unread = self._strays = 0
        self.asked_count = 0

    def shell(self, **arguments: Any) -> None:
        """As in ClusterShell, with a fanout and a user for this gateway and this command."""
        worker = arguments["worker"]
        self.workers[id(worker)], self._strays = worker, 0
        message = Communication.ControlMessage(id(worker))
        message.action, message.target = "shell", arguments["nodes"]
        info = {
            "debug": False, "grooming_delay": 0.0, "command_timeout": 0,
            "connect_timeout": CONNECT_TIMEOUT_S, "fanout": self._process.gateway_fanout(),
            "ssh_options": _SSH_OPTIONS, "ssh_user": worker.eh.user or None,
        }  # fmt: skip
        content = {key: arguments[key] for key in ("stderr", "timeout", "remote")}
        content.update(
            cmd=arguments["command"], invoke_gateway=arguments["gw_invoke_cmd"], taskinfo=info
        )
        message.data_encode(content)
        self.send_queued(message)

    def end(self, nodes: list[str], worker: Any) -> None:
        """End the ssh of these nodes on the gateway."""
        message = Communication.ControlMessage(id(worker))
        message.action, message.target = "nr_end", NodeSet.fromlist(nodes)
        message.data_encode({"nodes": nodes})
        self.send_queued(message)

    def ev_read(self, worker: Any, node: str, sname: str, msg: bytes) -> None:
        """Handle a line of the gateway; an invalid one ends the connection."""
        if sname == self.SNAME_ERROR or msg == FLOOD:
            append_up_to(self.errors, msg + b"\n", ERROR_BYTES)
            return
        if not self.opened and not msg.startswith(b"<"):
            return  # what its login prints
        self._unread += len(msg) + 1
        try:
            if self._unread > MESSAGE_BYTES:
                raise Communication.MessageProcessingError("a message without an end")
            if b"<!" in msg:
                raise Communication.MessageProcessingError("a declaration")  # of entities
            super().ev_read(worker, node, sname, msg)
        except Communication.MessageProcessingError as problem:
            self._abort(f"its answer makes no sense: {problem}")
        except Exception as problem:  # noqa: BLE001 - a gateway may send anything
            self._abort(f"its answer makes no sense: {type(problem).__name__}")

    def _abort(self, reason: str) -> None:
        self.unfit_reason = self.unfit_reason or sanitise(reason, 200)
        self._close(abort=True)

    def recv(self, msg: Any) -> None:
        """As in ClusterShell, which would give a message without a command to every named node.

        ClusterShell reports an invalid answer as such an ErrorMessage.
        """
        kind = msg.type
        if kind == Communication.StartMessage.ident:
            self.opened = True
            return
        self._unread = 0
        if kind == Communication.EndMessage.ident:
            self._close()
        elif kind == Communication.ErrorMessage.ident:
            self._abort(str(msg.reason))
        elif kind == Communication.StdErrMessage.ident and msg.srcid == 0:
            append_up_to(self.errors, b"nodeready: " + msg.data_decode() + b"\n", ERROR_BYTES)
        elif self.setup:
            self.recv_ctl(msg)
        elif self.opened:
            self.recv_cfg(msg)

    def recv_cfg(self, msg: Any) -> None:
        super().recv_cfg(msg)
        if self.setup:
            self.state = "fit"
            self._process.gateway_judged()

    def recv_ctl(self, msg: Any) -> None:
        """Handle an answer of a node behind the gateway; drop answers for other nodes.

        Raises MessageProcessingError for a gateway that answers for many other nodes.
        """
        kind = msg.type
        worker = self.workers.get(getattr(msg, "srcid", None))
        if kind == "ACK":
            super().recv_ctl(msg)
            return
        if worker is None or kind == Communication.RoutingMessage.ident:
            return
        targets = worker.gwtargets.get(self.name, ())
        names = expand(msg.nodes)
        own_names = [name for name in names if name in targets]
        self._strays += len(names) - len(own_names)
        if self._strays > STRAY_NAMES:
            raise Communication.MessageProcessingError("answers for other nodes")
        for name in own_names:
            if kind in ("OUT", "SER"):
                sname = "stdout" if kind == "OUT" else "stderr"
                for row in (msg.data_decode() + b"\n").splitlines():
                    worker._on_remote_node_msgline(name, row, sname, self.name)
            elif kind == "RET":
                worker._on_remote_node_close(name, msg.retcode, self.name)
            elif kind == "TIM":
                worker._on_remote_node_timeout(name, self.name)

    def forget(self, worker: Any) -> None:
        self.workers.pop(id(worker), None)

    def ev_close(self, worker: Any, timedout: bool) -> None:
        """The connection has ended: its nodes fail, and the gateway is not used any more."""
        fit, self.state = self.state == "fit", ""
        self.opened = self.setup = False
        self.unfit_reason = self.unfit_reason or self._failure_reason(fit)
        self.task._pchannel_close(self.name, worker)
        self._process.gateway_closed(self, fit)

    def _failure_reason(self, fit: bool) -> str:
        text = self.errors.decode("utf-8", "replace")
        own_lines = re.findall(r"^nodeready: (.+)$", text, re.MULTILINE)
        if own_lines:
            return sanitise(own_lines[-1])
        if fit:
            return "connection lost"
        if self._rc == 255:
            return self._process.gateway_target(self.name).failure_text(text)
        rows = [row.strip() for row in text.splitlines() if row.strip()]
        return sanitise(rows[-1][:200]) if rows else f"its program ended ({self._rc})"


#: Options for the ssh of a gateway, beside the gateway's own ssh configuration.
_SSH_OPTIONS = " ".join(
    option
    for option in COMMON
    if not option.startswith(("-oBatchMode", "-oConnectTimeout", "-oForward"))
)


#: The opcodes of a pickled bytes object: around the bytes, and of the bytes.
_FRAMES = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "STOP"}
_BYTES = {"SHORT_BINBYTES", "BINBYTES", "BINBYTES8"}


def decoded(message: Any) -> Any:
    """The bytes that a gateway's message has pickled. Raises MessageProcessingError.

    Nothing is unpickled: a pickle can run any function, and ten bytes of one can use all memory.
    It replaces ClusterShell's `Message.data_decode`, because ClusterShell calls that itself, and
    opens its own class of channel for a gateway that is asked again after it hung up.
    """
    content = b""
    try:
        for opcode, value, _ in pickletools.genops(base64.b64decode(message.data)):
            if opcode.name in _BYTES:
                content = bytes(value or b"")
            elif opcode.name not in _FRAMES:
                raise ValueError(f"no bytes: {opcode.name}")
    except Exception as problem:  # noqa: BLE001 - a gateway may send anything
        raise Communication.MessageProcessingError(f"no payload: {problem}") from None
    return content


def remedy(reason: str) -> str:
    """The remedy for an unfit gateway."""
    if "ClusterShell" in reason or "not found" in reason:
        return f"install the same ClusterShell there, or set {PROGRAM}"
    return "repair it, or take it out of topology.conf"
