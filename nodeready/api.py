"""The commands as functions: `nodeready.audit("prod.py")` returns the document of the command.

A document is what the JSON of ``--format json`` is made of, as a frozen dataclass. The command
itself runs in a child process, and sends its document back: the caller's process forks nothing, is
not patched by gevent, and prints nothing. Lines that the command would print to standard error go
to the logger ``nodeready``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict, Unpack

from nodeready.core.exit_codes import FAILED

if TYPE_CHECKING:
    from nodeready.agent.audit_document import Audit, Ready
    from nodeready.runs.deploy.document import Deploy
    from nodeready.runs.stacks.document import Stacks

__all__ = [
    "ConnectionOptions",
    "Error",
    "Path",
    "Span",
    "Words",
    "audit",
    "deploy",
    "ready",
    "stacks",
]

#: One word with commas, or several words.
Words = str | Iterable[str]
Path = str | os.PathLike[str]
#: Seconds, or a text such as "20s", "5m", "2h".
Span = float | str
#: Seconds for an interrupted command to end what it runs on the nodes.
_END_S = 20.0

_logger = logging.getLogger("nodeready")


class Error(Exception):
    """A command that made no document.

    exit_code: of the command: 2 for a wrong argument, inventory or policy, else 1
    """

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.exit_code)


class ConnectionOptions(TypedDict, total=False):
    """Options of all functions: the nodes and how they are reached (docs/options.md)."""

    limit: Words  # only these nodes: ``gpu[001-004]``, a group, a glob, ``@last-failed``
    sudo: bool  # become root with sudo on the nodes
    trust_inventory: bool  # run inventories and group_data that other users can write
    ssh_user: str  # log in as this user
    ssh_key: Path  # log in with this key


class TransportOptions(ConnectionOptions, total=False):
    """Options of the functions that only read from nodes."""

    via: str  # ``ssh`` (the default), ``srun``, ``clush`` or ``auto``
    salloc: str  # with srun: further options for salloc
    topology: Path  # with clush: path of topology.conf
    ssh_processes: int  # with ssh: number of processes that share the connections


def audit(
    inventory: Path,
    *,
    only: Words | None = None,
    skip: Words | None = None,
    timeout: Span | None = None,
    recorded: str | None = None,
    job: str | None = None,
    **transport: Unpack[TransportOptions],
) -> Audit:
    """What differs from the policy on every node, as `nodeready audit`. Never writes to a node.

    only, skip: check ids, subjects, globs
    timeout:    maximum time per node, after it is connected
    recorded:   directory with the nodes' last gate verdicts; no node is contacted
    job:        with via="srun": run inside this Slurm job
    Raises Error.
    """
    document: Audit = _document("audit", **locals())
    return document


def ready(
    inventory: Path | None = None,
    *,
    local: bool = False,
    budget: Span | None = None,
    user: str | None = None,
    ports: str | None = None,
    gpus: int | None = None,
    nodes_needed: int | None = None,
    full_mesh: bool = False,
    only: Words | None = None,
    skip: Words | None = None,
    job: str | None = None,
    **transport: Unpack[TransportOptions],
) -> Ready:
    """Which nodes may get a job, with proofs, as `nodeready ready`.

    local:        this machine, without any connection, in place of an inventory
    budget:       maximum time in all
    user:         run the proofs as this user, who will run the job
    ports:        port range of the job: ``29500-29510``
    gpus:         GPUs that every node must have
    nodes_needed: how many nodes are enough; None: all
    full_mesh:    connect every pair of nodes, not a sample of them
    only, skip:   check ids, subjects, globs
    job:          with via="srun": run inside this Slurm job
    Raises Error.
    """
    document: Ready = _document("ready", **locals())
    return document


def deploy(
    inventory: Path,
    *,
    check: bool = False,
    only: Words | None = None,
    **connection: Unpack[ConnectionOptions],
) -> Deploy:
    """Configure every node by the policy, as `nodeready deploy --yes`.

    check: only plan; nothing is written
    only:  subjects
    Raises Error.
    """
    document: Deploy = _document("deploy", yes=True, **locals())
    return document


def stacks(
    inventory: Path | None = None,
    *,
    local: bool = False,
    source: Path | None = None,
    job: str | None = None,
    user: str | None = None,
    pids: Sequence[int] = (),
    match: str | None = None,
    native: bool = False,
    locals_: bool = False,
    dump: bool = False,
    ras: bool = False,
    all_threads: bool = False,
    samples: int | None = None,
    interval: Span | None = None,
    timeout: Span | None = None,
    output: Path | None = None,
    **transport: Unpack[TransportOptions],
) -> Stacks:
    """Which rank holds up a job, and where every rank stands, as `nodeready stacks`.

    local:       this machine, without any connection, in place of an inventory
    source:      directory of an earlier capture, in place of an inventory (``--from``)
    job:         of Slurm, torchrun, or ADDRESS:PORT
    user, pids, match: only ranks of this user, these processes, this command line
    native:      also C and C++ frames of some ranks; pauses each for seconds
    locals_:     also variables of the innermost calls, without secrets
    dump:        have the ranks write PyTorch's flight recorder now
    ras:         ask NCCL's RAS port even in versions in which that crashed jobs
    all_threads: group by the stacks of all threads
    samples, interval: samples per rank, and the time between them
    timeout:     maximum time per node, after it is connected
    output:      directory that keeps the traces and every form of the result
    Raises Error.
    """
    document: Stacks = _document("stacks", **locals())
    return document


# --- The child process.

#: Unlike `python -m`, it imports nothing from the current directory.
_CHILD = """\
import sys
sys.path[:] = [*filter(None, sys.path), sys.argv.pop(1)]
from nodeready.cli.as_document import main
main()
"""
#: The directory from which the caller has imported the package.
_PLACE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
#: Parameters whose option has another name.
_OPTION_NAMES = {"source": "from", "pids": "pid", "locals_": "locals"}


def _words(command: str, **values: Any) -> list[str]:
    """The command line of a call: parameters of the function -> their values."""
    inventory = values.pop("inventory", None)
    values |= values.pop("transport", values.pop("connection", {}))
    words = [command, "--format=json"]
    for key, value in values.items():
        option = f"--{_OPTION_NAMES.get(key, key).replace('_', '-')}"
        if value is True:
            words.append(option)
        elif key == "pids":
            words += [f"{option}={pid}" for pid in value]
        elif value is not None and value is not False:
            is_one = isinstance(value, str | int | float | os.PathLike)
            text = os.fspath(value) if isinstance(value, os.PathLike) else value
            words.append(f"{option}={text if is_one else ','.join(value)}")
    return words if inventory is None else [*words, "--", os.fspath(inventory)]


def _document(command: str, **values: Any) -> Any:
    """The document of a command, from a child process. Raises Error."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as complaints, open(reading, "rb") as answers:
        try:
            child = subprocess.Popen(
                [
                    *(sys.executable, "-c", _CHILD, _PLACE, str(writing)),
                    *_words(command, **values),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
                pass_fds=[writing],
                # Ctrl-C at a terminal interrupts this process alone, which then tells the child.
                start_new_session=True,
            )
        finally:
            os.close(writing)
        try:
            content = answers.read()
            child.wait()
        except BaseException:
            _end(child)
            raise
        complaints.seek(0)
        text = complaints.read().decode("utf-8", "replace")
    lines = [line.removeprefix("nodeready: ") for line in text.splitlines()]
    if not content:
        exit_code = child.returncode if child.returncode > 0 else FAILED
        raise Error("\n".join(lines) or f"the command ended with {child.returncode}", exit_code)
    for line in lines:
        _logger.info("%s", line)
    return pickle.loads(content)  # of our own process: nodes have no part in its form


def _end(child: subprocess.Popen[bytes]) -> None:
    """Interrupt the command, so that it ends what it runs on the nodes; then kill it."""
    child.send_signal(signal.SIGINT)
    try:
        child.wait(_END_S)
    except BaseException:
        child.kill()
        with contextlib.suppress(BaseException):
            child.wait()
        raise
