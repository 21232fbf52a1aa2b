"""ClusterShell's program of a gateway, within bounds.

`bounded_read` bounds what an ssh may print, on both ends. `run_gateway` tells why a machine is
unfit before any node is given to it, and takes the end of a command. The source of both travels to
the gateways, and runs there under Python 3.6 and newer.
"""

from __future__ import annotations

import base64
import contextlib
import inspect
import logging
import os
import re
import resource
import sys
import zlib
from collections.abc import Mapping
from typing import Any

import ClusterShell

from nodeready.shell import quote
from nodeready.transport.base import ANSWER_BYTES, ERROR_BYTES

#: Bytes that an ssh may print: the largest answer, as text of base64, and what a login prints.
MOST_BYTES = (ANSWER_BYTES * 4 // 3) + (2 << 20)
#: Bytes before its command begins, and of one line, which ClusterShell keeps until its end.
NOISE_BYTES = 1 << 20
#: The last line of an ssh that printed more than MOST_BYTES.
FLOOD = b"nodeready: too much output"
#: The exit status that ClusterShell gives to the nodes of a gateway that is gone (sysexits.h).
GATEWAY_GONE = os.EX_PROTOCOL
#: The variable that names the Python of the gateways.
PROGRAM = "CLUSTERSHELL_GW_PYTHON_EXECUTABLE"


def bounded_read(maximum: int, noise: int, errors: int, flood: bytes, mark: bytes) -> Any:
    """The method ``_read`` of an ssh client that bounds what the ssh may print: ClusterShell keeps
    and passes on any amount, and has no hook in front of its buffers.

    maximum: bytes of standard output after which the ssh is ended, with ``flood`` as its last line
    noise:  the same, until there was a line with ``mark``, and of one line
    errors: bytes of standard error, and of noise, that are handed on
    """
    from ClusterShell.Communication import Channel
    from ClusterShell.Worker.EngineClient import EngineClient, EngineClientEOF

    begins = re.compile(mark)

    def read(self: Any, sname: str, size: int = 65536) -> bytes:
        data: bytes = EngineClient._read(self, sname, size)
        stream = self.streams[sname]
        is_gateway = isinstance(self.worker.eh, Channel)
        # The messages of a gateway are bounded where they are read.
        if is_gateway and len(stream.rbuf) <= 2 * noise:
            return data
        total, last = self.__dict__.setdefault("nr_read", {}).get(sname, (0, b""))
        total += len(data)
        if last is not None and sname == self.worker.SNAME_STDOUT:
            if begins.search(last + data):
                # What was dropped of the line with the mark comes back.
                data, last = (last + data if total > errors + len(data) else data), None
            else:
                last = data[-64:]
        self.nr_read[sname] = total, last
        is_answer = last is None or sname != self.worker.SNAME_STDOUT
        limit_bytes = maximum if is_answer else noise
        if is_gateway or total > limit_bytes or len(stream.rbuf) > noise:
            stream.rbuf = b""
            self._on_nodeset_msgline(self.key, flood, sname)
            with contextlib.suppress(OSError):
                self.popen.kill()
            raise EngineClientEOF()
        if last is not None and total > errors + len(data):
            stream.rbuf = b""
            return b"\n"
        return data

    return read


def run_gateway(version: str, bounds: tuple[Any, ...]) -> None:
    """ClusterShell's program of a gateway, which first says why this machine cannot be one.

    Several commands share one connection here: ClusterShell gives a command's input to the last
    of them, so that each is kept with its number. And the end of one node's command comes through
    the connection as well. A second row of gateways gets a command's input again when
    the command is started anew.
    """
    try:
        import ClusterShell
        from ClusterShell import Gateway
        from ClusterShell.Propagation import RouteResolvingError
        from ClusterShell.Worker.Tree import TreeWorker
    except ImportError as problem:
        sys.stderr.write(f"nodeready: no ClusterShell for its {sys.executable} ({problem})\n")
        sys.exit(3)
    installed = ClusterShell.__version__
    if installed.split(".")[:2] != version.split(".")[:2]:
        sys.stderr.write(f"nodeready: ClusterShell {installed} there, {version} here\n")
        sys.exit(3)
    if "CLUSTERSHELL_GW_LOG_DIR" not in os.environ:
        # Its log would be a file in /tmp, whose name any user can turn into a link.
        os.environ["CLUSTERSHELL_GW_LOG_DIR"] = os.devnull
        logging.disable(logging.CRITICAL)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # ClusterShell chooses the class of the gateway's ssh: there is no other place for the bounds.
    from ClusterShell.Worker.Exec import ExecClient

    ExecClient._read = bounded_read(*bounds)
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
                    channel = self.task._pchannel(other, self)
                    for buf in self.nr_sent:
                        if buf is None:
                            channel.set_write_eof(nodes=nodes & targets, worker=self)
                        else:
                            channel.write(nodes=nodes & targets, buf=buf, worker=self)

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

    # ClusterShell's program takes no classes as arguments.
    Gateway.TreeWorker, Gateway.GatewayChannel = GatewayChannelTree, Several
    Gateway.gateway_main()


#: The first line of each of our commands.
_BEGINS = rb"nodeready-[0-9a-f]{16} b\r?\n"
BOUNDS = (MOST_BYTES, NOISE_BYTES, ERROR_BYTES, FLOOD, _BEGINS)


def gateway_command(environ: Mapping[str, str]) -> str:
    """The line that runs `run_gateway` on a gateway, with ClusterShell's own variables."""
    source = "".join(
        [
            "import contextlib, logging, os, re, resource, sys\nAny = None\n",
            inspect.getsource(bounded_read),
            inspect.getsource(run_gateway),
            f"run_gateway({ClusterShell.__version__!r}, {BOUNDS!r})\n",
        ]
    )
    packed = base64.b64encode(zlib.compress(source.encode(), 9)).decode("ascii")
    assignments = [
        f"{name}={quote(environ[name])}"
        for name in (
            "PYTHONPATH", PROGRAM, "CLUSTERSHELL_GW_LOG_DIR", "CLUSTERSHELL_GW_LOG_LEVEL",
            "CLUSTERSHELL_GW_B64_LINE_LENGTH",
        )
        if environ.get(name)
    ]  # fmt: skip
    code = f'import base64,zlib;exec(zlib.decompress(base64.b64decode("{packed}")))'
    program = environ.get(PROGRAM) or "python3"
    return " ".join([*(["env", *assignments] if assignments else []), program, "-c", quote(code)])
