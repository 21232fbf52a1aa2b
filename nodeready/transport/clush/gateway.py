"""A gateway of ClusterShell's tree: its program there, and our end of the connection to it.

Behind a gateway, a node is asked by the gateway's own ssh, with the gateway's configuration, keys
and known hosts. A gateway runs ClusterShell's own program, which `_gateway` keeps within bounds:
it has a word for why it is unfit before any node is given to it, and takes the end of a command.
"""

from __future__ import annotations

import base64
import contextlib
import inspect
import logging
import os
import pickle
import re
import resource
import sys
import time
import zlib
from collections.abc import Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any

import ClusterShell
from ClusterShell import Communication, Propagation
from ClusterShell.NodeSet import NodeSet

from nodeready.inventory.nodeset import expand
from nodeready.shell import quote
from nodeready.text import sanitise
from nodeready.transport.base import ANSWER_BYTES, ERROR_BYTES
from nodeready.transport.clush.ways import COMMON, CONNECT_S

if TYPE_CHECKING:
    from nodeready.transport.clush.child import ClushProcess

#: Bytes that one ssh may print: the largest answer, as text of base64, and what a login prints.
MOST_BYTES = (ANSWER_BYTES * 4 // 3) + (2 << 20)
#: And before its command begins; also of one line, of which ClusterShell keeps all until its end.
NOISE_BYTES = 1 << 20
#: What a node's ssh is said to have printed, instead of what came after MOST_BYTES.
FLOOD = b"nodeready: too much output"
#: The exit status that ClusterShell gives to the nodes of a gateway that is gone (sysexits.h).
GATEWAY_GONE = os.EX_PROTOCOL
_PROGRAM = "CLUSTERSHELL_GW_PYTHON_EXECUTABLE"


# --- What both ends of the tree run: ClusterShell within bounds. The source of these two functions
# travels to the gateways, and runs there under Python 3.6 and newer.


def bound(most: int, noise: int, errors: int, flood: bytes, mark: bytes) -> None:
    """Bound what each ssh may print: ClusterShell keeps and hands on whatever comes.

    most:   bytes of standard output after which the ssh is ended, with ``flood`` as its last line
    noise:  the same, until there was a line with ``mark``, and of one line
    errors: bytes of standard error, and of noise, that are handed on
    """
    from ClusterShell.Communication import Channel
    from ClusterShell.Worker.EngineClient import EngineClient, EngineClientEOF
    from ClusterShell.Worker.Exec import ExecClient

    begins = re.compile(mark)

    def read(self: Any, sname: str, size: int = 65536) -> bytes:
        data: bytes = EngineClient._read(self, sname, size)
        if isinstance(self.worker.eh, Channel):
            return data
        stream = self.streams[sname]
        total, last = self.__dict__.setdefault("nr_read", {}).get(sname, (0, b""))
        total += len(data)
        if last is not None and sname == self.worker.SNAME_STDOUT:
            if begins.search(last + data):
                # What was dropped of the line with the mark comes back.
                data, last = (last + data if total > errors + len(data) else data), None
            else:
                last = data[-64:]
        self.nr_read[sname] = total, last
        known = last is None or sname != self.worker.SNAME_STDOUT
        if total > (most if known else noise) or len(stream.rbuf) > noise:
            stream.rbuf = b""
            self._on_nodeset_msgline(self.key, flood, sname)
            with contextlib.suppress(OSError):
                self.popen.kill()
            raise EngineClientEOF()
        if last is not None and total > errors + len(data):
            stream.rbuf = b""
            return b"\n"
        return data

    ExecClient._read = read


def _gateway(version: str, bounds: tuple[Any, ...]) -> None:
    """ClusterShell's program of a gateway, which first says why this machine cannot be one.

    Several commands share one connection here: ClusterShell gives a command's input to the last
    of them, so that each is kept with its number. And the end of one node's command comes through
    the connection as well. What a second row of gateways missed of a command's input when it had
    to be asked in another way is told again.
    """
    try:
        import ClusterShell
        from ClusterShell import Gateway
        from ClusterShell.Propagation import RouteResolvingError
        from ClusterShell.Worker.Tree import TreeWorker
    except ImportError as problem:
        sys.stderr.write(f"nodeready: no ClusterShell for its {sys.executable} ({problem})\n")
        sys.exit(3)
    here = ClusterShell.__version__
    if here.split(".")[:2] != version.split(".")[:2]:
        sys.stderr.write(f"nodeready: ClusterShell {here} there, {version} here\n")
        sys.exit(3)
    if "CLUSTERSHELL_GW_LOG_DIR" not in os.environ:
        # Its log would be a file in /tmp, under a name that everybody can have made a link.
        os.environ["CLUSTERSHELL_GW_LOG_DIR"] = os.devnull
        logging.disable(logging.CRITICAL)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    bound(*bounds)
    invoked: Any = []

    class GatewayChannelTree(TreeWorker):  # type: ignore[misc]
        def __init__(self, *words: Any, **named: Any) -> None:
            TreeWorker.__init__(self, *words, **named)
            self.invoke_gateway = invoked[-1]
            self.nr_sent: Any = []

        def _distribute(self, fanout: int, nodes: Any) -> Any:
            try:
                return TreeWorker._distribute(self, fanout, nodes.copy())
            except RouteResolvingError:
                return ((nodes, nodes),)

        def write(self, buf: bytes) -> None:
            self.nr_sent.append(buf)
            TreeWorker.write(self, buf)

        def set_write_eof(self) -> None:
            self.nr_sent.append(None)
            TreeWorker.set_write_eof(self)

        def _relaunch(self, gateway: str) -> None:
            before, targets = list(self.workers), set(self.gwtargets[gateway])
            TreeWorker._relaunch(self, gateway)
            for worker in self.workers:
                if worker not in before:
                    for buf in self.nr_sent:
                        worker.set_write_eof() if buf is None else worker.write(buf)
            for other, nodes in self.gwtargets.items():
                if nodes & targets:
                    way = self.task._pchannel(other, self)
                    for buf in self.nr_sent:
                        if buf is None:
                            way.set_write_eof(nodes=nodes & targets, worker=self)
                        else:
                            way.write(nodes=nodes & targets, buf=buf, worker=self)

    Alone: Any = Gateway.GatewayChannel

    class Several(Alone):  # type: ignore[misc]
        propagation: Any

        def __init__(self, task: Any) -> None:
            Alone.__init__(self, task)
            self.nr_trees: Any = {}

        def recv_ctl(self, msg: Any) -> None:
            action = getattr(msg, "action", "")
            if action == "shell":
                invoked.append(msg.data_decode()["invoke_gateway"])
                Alone.recv_ctl(self, msg)
                self.nr_trees[msg.srcid] = self.propagation
                return
            self.propagation = self.nr_trees.get(msg.srcid)
            if self.propagation is None:
                self._ack(msg)
            elif action == "nr_end":
                ended = msg.data_decode()["nodes"]
                for worker in self.propagation.workers:
                    for client in list(worker._engine_clients()):
                        if client.key in ended:
                            client.abort()
                self._ack(msg)
            else:
                Alone.recv_ctl(self, msg)

    Gateway.TreeWorker, Gateway.GatewayChannel = GatewayChannelTree, Several
    Gateway.gateway_main()


#: The line with which every command of ours begins.
_BEGINS = rb"nodeready-[0-9a-f]{16} b\r?\n"
BOUNDS = (MOST_BYTES, NOISE_BYTES, ERROR_BYTES, FLOOD, _BEGINS)


def gateway_command(environ: Mapping[str, str]) -> str:
    """The line that runs `_gateway` on a gateway, with ClusterShell's own variables."""
    source = "".join(
        [
            "import contextlib, logging, os, re, resource, sys\nAny = None\n",
            inspect.getsource(bound),
            inspect.getsource(_gateway),
            f"_gateway({ClusterShell.__version__!r}, {BOUNDS!r})\n",
        ]
    )
    packed = base64.b64encode(zlib.compress(source.encode(), 9)).decode("ascii")
    given = [
        f"{name}={quote(environ[name])}"
        for name in (
            "PYTHONPATH", _PROGRAM, "CLUSTERSHELL_GW_LOG_DIR", "CLUSTERSHELL_GW_LOG_LEVEL",
            "CLUSTERSHELL_GW_B64_LINE_LENGTH",
        )
        if environ.get(name)
    ]  # fmt: skip
    code = f'import base64,zlib;exec(zlib.decompress(base64.b64decode("{packed}")))'
    program = environ.get(_PROGRAM) or "python3"
    return " ".join([*(["env", *given] if given else []), program, "-c", quote(code)])


# --- This end of the connection to a gateway.


class Hold:
    """What keeps a gateway's connection open between two requests."""

    def _gateway_abort(self, gateway: str) -> None:
        return


class Gateway(Propagation.PropagationChannel):  # type: ignore[misc]
    """The connection to one gateway, and what is known of it.

    state: "asked", "fit", or "" when it is not used (any more), and then ``why``
    """

    def __init__(self, child: ClushProcess, name: str) -> None:
        super().__init__(child.task, NodeSet(name))
        self.name, self.state, self.why = name, "asked", ""
        self.since = time.monotonic()
        self._child = child
        self.errors = bytearray()
        #: Nodes that are asked through it just now.
        self.load = 0

    def shell(self, **given: Any) -> None:
        """As ClusterShell's, with a fanout and a user for this gateway and this command."""
        worker = given["worker"]
        self.workers[id(worker)] = worker
        message = Communication.ControlMessage(id(worker))
        message.action, message.target = "shell", given["nodes"]
        info = {
            "debug": False, "grooming_delay": 0.0, "command_timeout": 0,
            "connect_timeout": CONNECT_S, "fanout": self._child.gateway_fanout(),
            "ssh_options": _HOP, "ssh_user": worker.eh.user or None,
        }  # fmt: skip
        told = {key: given[key] for key in ("stderr", "timeout", "remote")}
        told.update(cmd=given["command"], invoke_gateway=given["gw_invoke_cmd"], taskinfo=info)
        message.data_encode(told)
        self.send_queued(message)

    def end(self, nodes: list[str], worker: Any) -> None:
        """End the ssh of these nodes on the gateway."""
        message = Communication.ControlMessage(id(worker))
        message.action, message.target = "nr_end", NodeSet.fromlist(nodes)
        message.data_encode({"nodes": nodes})
        self.send_queued(message)

    def ev_read(self, worker: Any, node: str, sname: str, msg: bytes) -> None:
        """A line of the gateway's. What makes no sense ends the connection."""
        if sname == self.SNAME_ERROR:
            self.errors += (msg + b"\n")[: ERROR_BYTES - len(self.errors)]
            return
        if not self.opened and not msg.startswith(b"<"):
            return  # what its login prints
        try:
            super().ev_read(worker, node, sname, msg)
        except Exception as problem:  # noqa: BLE001 - a gateway may send anything
            self.errors += f"nodeready: {type(problem).__name__} in its answer".encode()
            self._close(abort=True)

    def recv_cfg(self, msg: Any) -> None:
        super().recv_cfg(msg)
        if self.setup:
            self.state = "fit"
            self._child.judged()

    def recv_ctl(self, msg: Any) -> None:
        """An answer from a node behind it: of no other node than those that it was given."""
        kind = msg.type
        if kind == Communication.ErrorMessage.ident:
            self.errors += sanitise(str(msg.reason)).encode("utf-8", "replace")
            self._close(abort=True)
            return
        worker = self.workers.get(getattr(msg, "srcid", None))
        if kind == "ACK" or worker is None:
            if kind == "ACK":
                super().recv_ctl(msg)
            return
        if kind == Communication.RoutingMessage.ident:
            return
        given = worker.gwtargets.get(self.name, ())
        for name in [one for one in expand(msg.nodes) if one in given]:
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
        """It is gone: nobody is asked through it any more, and who was asked is told."""
        fit, self.state = self.state == "fit", ""
        self.opened = self.setup = False
        self.why = self.why or self._words(fit)
        self.task._pchannel_close(self.name, worker)
        self._child.gate_closed(self, fit)

    def _words(self, fit: bool) -> str:
        said = self.errors.decode("utf-8", "replace")
        ours = re.findall(r"^nodeready: (.+)$", said, re.MULTILINE)
        if ours:
            return sanitise(ours[-1])
        if fit:
            return "connection lost"
        if self._rc == 255:
            return self._child.gateway_way(self.name).words(said)
        rows = [row.strip() for row in said.splitlines() if row.strip()]
        return sanitise(rows[-1][:200]) if rows else f"its program ended ({self._rc})"


#: Of the ssh of a gateway; the rest is its own configuration.
_HOP = " ".join(
    one for one in COMMON if not one.startswith(("-oBatchMode", "-oConnectTimeout", "-oForward"))
)


class _Plain(pickle.Unpickler):
    """Plain values alone: what a gateway sends must not run anything here."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


def decoded(message: Any) -> Any:
    """A gateway's message, instead of ClusterShell's `Message.data_decode`. Raises
    MessageProcessingError."""
    try:
        found = _Plain(BytesIO(base64.b64decode(message.data))).load()
    except Exception as problem:  # noqa: BLE001 - a gateway may send anything
        raise Communication.MessageProcessingError(f"no payload: {problem}") from None
    if not isinstance(found, bytes):
        raise Communication.MessageProcessingError("no payload: no bytes")
    return found


def remedy(why: str) -> str:
    """What to do about a gateway that is unfit."""
    if "ClusterShell" in why or "not found" in why:
        return f"install the same ClusterShell there, or set {_PROGRAM}"
    return "repair it, or take it out of topology.conf"
