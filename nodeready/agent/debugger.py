"""The program on the node for a debugger's session with one rank: copies lines between both.

The rank listens at the socket of `nodeready run --debug-rank`. In another rank, Python 3.14 and
newer starts the debugger by a script (PEP 768), which connects to a socket of this program.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
from dataclasses import dataclass

from nodeready.agent import run
from nodeready.agent.users_file import give_up, rights_of_process
from nodeready.core import wire
from nodeready.core.base import ProbeError

#: Seconds until the rank executes the script; bytes of one read.
_ANSWER_S, _READ_BYTES = 10.0, 16 << 10
#: The script that a rank executes; with the source of nodeready.agent.run, and the socket's path.
_SCRIPT = """
import socket, sys
space, client = {{"__name__": "nodeready_run"}}, socket.socket(socket.AF_UNIX)
client.connect({path!r})
exec({source!r}, space)
space["debug"](space["DebuggerTerminal"](client), sys._getframe(1), None, "interrupted")
"""
_UNPREPARED = "it was not started with --debug-rank, and"


@dataclass(frozen=True)
class DebuggerConfig:
    nonce: str  # as of every program that is sent to a node (`nodeready.agent.payload`)
    tag: str  # likewise
    rank: int
    pid: int
    limit_s: int  # of a session


@dataclass(frozen=True)
class DebuggerOutput:
    """A part of the debugger's output; the last one has the reason why there was no session."""

    text: str
    is_last: bool = False


def main(config: DebuggerConfig) -> None:
    """Copy the user's lines to the rank's debugger, and its output to the user."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    reason = ""
    try:
        give_up(rights_of_process(config.pid) if os.geteuid() == 0 else None)
        _copy(_listening(config) or _injected(config.pid), config.nonce)
    except ProbeError as problem:
        reason = problem.reason
    except OSError as problem:
        reason = f"{problem.strerror or problem}: {problem.filename or 'the rank'}"
    print(wire.line(config.nonce, "debugger", DebuggerOutput(reason, True)), flush=True)


def _listening(config: DebuggerConfig) -> socket.socket | None:
    """A connection to the rank, if it was started to be debugged. Raises OSError, ProbeError."""
    with open(f"/proc/{config.pid}/environ", "rb") as file:
        block = file.read(1 << 20)
    start = f"{run.DEBUG}={config.rank}:".encode()
    directory = next((row for row in block.split(b"\0") if row.startswith(start)), b"")
    if not directory:
        return None
    # The path may be longer than a socket's, and lie in a container.
    os.chdir(os.fsencode(f"/proc/{config.pid}/root") + directory[len(start) :])
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect("socket")
    except (FileNotFoundError, ConnectionRefusedError):
        raise ProbeError("no Python of it reads sitecustomize (python -I, -E, -S)") from None
    return client


def _injected(pid: int) -> socket.socket:
    """A connection from the rank, whose Python runs a script that connects. Raises likewise."""
    python = os.readlink(f"/proc/{pid}/exe")
    if not os.path.basename(python).startswith("python"):
        raise ProbeError(f"its program is no Python: {python}")
    if os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt"):
        raise ProbeError(f"{_UNPREPARED} is in a container")
    directory, lock = run.private_directory("nodeready-debugger-")
    try:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{directory}/socket")
        listener.listen()
        source = globals()["__loader__"].get_source(run.__name__)
        with open(f"{directory}/script.py", "w", encoding="utf-8") as script:
            script.write(_SCRIPT.format(path=f"{directory}/socket", source=source))
        _execute(python, pid, script.name)
        if not select.select([listener], [], [], _ANSWER_S)[0]:
            # The Python would look for the script later.
            _execute(python, pid, os.devnull)
            raise ProbeError("its main thread runs no Python: it is in a call of C")
        return listener.accept()[0]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _execute(python: str, pid: int, script: str) -> None:
    """Have the process's Python execute a script as soon as its main thread runs Python."""
    words = [python, "-I", "-S", "-c", f"import sys; sys.remote_exec({pid}, {script!r})"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"{python} failed"])[-1]
        if "has no attribute 'remote_exec'" in reason:
            reason = "its Python is older than 3.14"
        raise ProbeError(f"{_UNPREPARED} {reason}")


def _copy(client: socket.socket, nonce: str) -> None:
    """Copy until the debugger or its user has ended. Raises OSError."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    number = client.fileno()
    with contextlib.suppress(ConnectionError):  # the rank did not read all lines
        while ready := select.select([number, 0], [], [])[0]:
            data = os.read(number if number in ready else 0, _READ_BYTES)
            if not data:
                return
            if number in ready:
                print(wire.line(nonce, "debugger", DebuggerOutput(decode(data))), flush=True)
            else:
                client.sendall(data)
