"""ClusterShell's program of a gateway, within bounds.

`bounded_read` limits what an ssh may print, here and on a gateway. `run_gateway` reports why a
machine is unfit before it gets any node, and can end a node's command. The source of both is sent
to the gateways, and runs there under Python 3.6 and newer.
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

from nodeready.agent.asking import ANSWER_BYTES, ERROR_BYTES
from nodeready.core.shell import quote

#: Bytes that an ssh may print: the largest answer in base64, and the output of a login.
MOST_BYTES = (ANSWER_BYTES * 4 // 3) + (2 << 20)
#: Bytes that an ssh may print before its command, and in one line, which ClusterShell buffers.
NOISE_BYTES = 1 << 20
#: The last line of an ssh that printed more than MOST_BYTES.
FLOOD = b"nodeready: too much output"
#: ClusterShell's exit status for the nodes of a gateway that is gone (sysexits.h).
GATEWAY_GONE = os.EX_PROTOCOL
#: The variable that names the Python of the gateways.
PROGRAM = "CLUSTERSHELL_GW_PYTHON_EXECUTABLE"


def bounded_read(maximum: int, noise: int, errors: int, flood: bytes, mark: bytes) -> Any:
    """The method ``_read`` of an ssh client, which limits what the ssh may print: ClusterShell
    buffers and passes on any amount, and has no other hook for this.

    maximum: bytes of standard output after which the ssh is ended, with ``flood`` as its last line
    noise:   the same, before a line with ``mark``, and for one line
    errors:  bytes of standard error, and of noise, that are passed on
    """
    from ClusterShell.Communication import Channel
    from ClusterShell.Worker.EngineClient import EngineClient, EngineClientEOF

    begins = re.compile(mark)

    def read(self: Any, sname: str, size: int = 65536) -> bytes:
        data: bytes = EngineClient._read(self, sname, size)
        stream = self.streams[sname]
        is_gateway = isinstance(self.worker.eh, Channel)
        # `gateway.Gateway` limits the messages of a gateway.
        if is_gateway and len(stream.rbuf) <= 2 * noise:
            return data
        # tail: the last bytes, which may have a part of the mark; None: the mark was read
        total, tail = self.__dict__.setdefault("nr_read", {}).get(sname, (0, b""))
        total += len(data)
        if tail is not None and sname == self.worker.SNAME_STDOUT:
            if begins.search(tail + data):
                # The dropped beginning of the line with the mark comes back.
                data, tail = (tail + data if total > errors + len(data) else data), None
            else:
                tail = data[-64:]
        self.nr_read[sname] = total, tail
        is_answer = tail is None or sname != self.worker.SNAME_STDOUT
        limit_bytes = maximum if is_answer else noise
        if is_gateway or total > limit_bytes or len(stream.rbuf) > noise:
            stream.rbuf = b""
            self._on_nodeset_msgline(self.key, flood, sname)
            with contextlib.suppress(OSError):
                self.popen.kill()
            raise EngineClientEOF()
        if tail is not None and total > errors + len(data):
            stream.rbuf = b""
            return b"\n"
        return data

    return read


def run_gateway(version: str, bounds: tuple[Any, ...]) -> None:
    """ClusterShell's program of a gateway, which first reports why this machine cannot be one.

    Several commands share one connection here, and ClusterShell gives all input to the last one.
    So commands are kept by number. The order to end one node's command is new. When a command
    starts again through a second row of gateways, it gets its input again.
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
        # Its log would be a file in /tmp, which any user can replace with a link.
        os.environ["CLUSTERSHELL_GW_LOG_DIR"] = os.devnull
        logging.disable(logging.CRITICAL)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # ClusterShell itself chooses the class of the gateway's ssh.
    from ClusterShell.Worker.Exec import ExecClient

    ExecClient._read = bounded_read(*bounds)
    invoked: Any = []

    class GatewayProgramTree(TreeWorker):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            TreeWorker.__init__(self, *args, **kwargs)
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

    OneCommandChannel: Any = Gateway.GatewayChannel

    class CommandsChannel(OneCommandChannel):  # type: ignore[misc]
        propagation: Any

        def __init__(self, task: Any) -> None:
            OneCommandChannel.__init__(self, task)
            self.nr_trees: Any = {}

        def recv_ctl(self, msg: Any) -> None:
            action = getattr(msg, "action", "")
            if action == "shell":
                invoked.append(msg.data_decode()["invoke_gateway"])
                OneCommandChannel.recv_ctl(self, msg)
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
                OneCommandChannel.recv_ctl(self, msg)

    # ClusterShell's program has no arguments for these classes.
    Gateway.TreeWorker, Gateway.GatewayChannel = GatewayProgramTree, CommandsChannel
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
