"""The options of the commands, each declared once, as a field.

`cli.options` makes click's options from the fields, and so the manual and the completion; the
fields of `AuditOptions` and its like are the parameters of the functions of `nodeready.api`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from nodeready.core.shell import join
from nodeready.core.text import parse_span
from nodeready.runs import values

Words = str | Iterable[str]  # one word with commas, or several words
Path = str | os.PathLike[str]
Span = float | str  # seconds, or a text such as "20s", "5m", "2h"
#: What a caller gives, and what a run reads.
GivenT_contra = TypeVar("GivenT_contra", contravariant=True)
ValueT_co = TypeVar("ValueT_co", covariant=True)

_NO_VALUE: Any = object()

if TYPE_CHECKING:

    class Given(Generic[GivenT_contra, ValueT_co]):
        """The type of a field for which a caller may give more than its value."""

        def __get__(self, options: object, kind: type | None = None) -> ValueT_co: ...
        def __set__(self, options: object, value: GivenT_contra) -> None: ...

    GivenWords = Given[Words | None, str | None]
    GivenPath = Given[Path | None, str | None]
    GivenSpan = Given[Span | None, float | None]
    GivenSeconds = Given[Span, int]


@dataclass(frozen=True)
class Opt:
    names: tuple[str, ...]  # ``--name``, ``-n``
    help: str
    metavar: str | None = None
    own_key: str = ""  # see `key`
    default: Any = None  # in the words of the command line
    choices: tuple[str, ...] = ()
    bounds: tuple[int | None, int | None] | None = None  # of a number
    span_s: tuple[float, float] | None = None  # the bounds of a span of time, in seconds
    is_whole: bool = False  # the seconds of a span are an int
    is_file: bool = False  # an existing file
    is_count: bool = False  # the number of times that it is given
    multiple: bool = False  # may be repeated: the value is a tuple
    joined: bool = False  # may be repeated: the values are joined by commas
    required: bool = False
    hidden: bool = False
    show_default: bool | None = None  # None: as the command does
    variable: bool = True  # it has an environment variable of its command
    general: bool = True  # and a variable for all commands
    in_python: bool = True  # it is a parameter of the function of `nodeready.api`
    takes: Callable[[str], bool] | None = None  # whether a value of the general variable counts
    complete: str = ""  # the function of `cli.candidates` that completes its value
    read: Callable[[Any], Any] | None = None  # the value of the words; None: as they are

    @property
    def key(self) -> str:
        """Its name in configuration files."""
        return self.own_key or max(self.names, key=len).lstrip("-").replace("-", "_")


def opt(words: str, help: str, *, key: str = "", value: Any = _NO_VALUE, **how: Any) -> Any:
    """A field of a class of options. how: as for `Opt`

    words: as in --help: ``-n, --lines LINES``
    key:   its name in configuration files, if that is not the option's
    value: of the field, where the default's words are not it
    """
    names, _, metavar = words.replace(", ", ",").partition(" ")
    option = Opt(tuple(names.split(",")), help, metavar or None, key, **how)
    if value is _NO_VALUE:
        value = () if option.multiple else option.default
        if option.span_s and value is not None:
            seconds = parse_span(str(value))
            value = int(seconds) if option.is_whole else seconds
        elif option.read and value is not None:
            value = option.read(value)
    return field(default=value, metadata={"opt": option})


def options_of(kind: type[Any]) -> dict[str, Opt]:
    return {field.name: field.metadata["opt"] for field in fields(kind)}


# --- Options that several commands share.


def flag(words: str, help: str, **how: Any) -> Any:
    return opt(words, help, default=False, **how)


def span(
    words: str, low_s: float, high_s: float, help: str, default: Any = None, **how: Any
) -> Any:
    return opt(f"{words} TIME", help, span_s=(low_s, high_s), default=default, **how)


def timeout(help: str = "Maximum time per node, after it is connected.") -> Any:
    return span("--timeout", 1, 3600, help, "60s", is_whole=True)


def limit(help: str) -> Any:
    return opt("-l, --limit NODES", help, joined=True, complete="nodes")


def only(help: str, metavar: str = "CHECK,...") -> Any:
    return opt(f"--only {metavar}", help, joined=True, complete="checks")


def skip() -> Any:
    help = "Checks or subjects to skip."
    return opt("--skip CHECK,...", help, joined=True, complete="checks")


def local(help: str = "This machine, without any connection.") -> Any:
    return flag("--local", help)


def srun_job() -> Any:
    """``--job`` of a command that is not about a job."""
    return opt("--job ID", "With --via srun: run inside this job.")


def is_directory(path: str) -> bool:
    """Whether NODEREADY_OUTPUT names a directory."""
    return path.endswith("/") or os.path.isdir(path)


def since(noun: str, read: Callable[[str, datetime], float]) -> Any:
    """``--since WHEN``, as a function of `values` reads it, or 0. noun: for what it selects"""
    help = f"Only {noun} since then: 2h, 3d, 08:30, 2026-03-01, 2026-03-01 08:30."
    return opt("--since WHEN", help, value=0.0, read=lambda words: values.past(words, read))


def rank_pattern() -> Any:
    help = "Its group is the rank of a line, if the lines of many ranks are in one file. [learned]"
    read = partial(values.checked_regex, "--rank-pattern")
    return opt("--rank-pattern REGEX", help, value="", read=read)


def max_files(default: int) -> Any:
    help = "Maximum files per node, the most recently written first."
    return opt("--max-files N", help, bounds=(1, 1000), default=default)


def output_directory(help: str, **how: Any) -> Any:
    """``-o DIR``. NODEREADY_OUTPUT counts when it is a directory, or ends with a slash."""
    return opt("-o, --output DIR", help, takes=is_directory, **how)


def trust() -> Any:
    return flag("--trust-inventory", "Run inventories and group_data that other users can write.")


@dataclass(kw_only=True, eq=False, repr=False)
class ConnectionOptions:
    """The nodes of a command, and how they are logged in to."""

    limit: GivenWords = limit("Only these nodes: gpu[001-004], a group, a glob, @last-failed.")
    sudo: bool = flag("--sudo", "Become root with sudo on the nodes.")
    trust_inventory: bool = trust()
    ssh_user: str | None = opt("-u, --ssh-user NAME", "Log in as this user.")
    ssh_key: GivenPath = opt("--ssh-key FILE", "Log in with this key.", is_file=True)

    def words(self, inventory: str | None) -> str:
        """The inventory and the options that reach the same nodes, as words of a shell; without
        one, the word for it.
        """
        if inventory is None:
            return "INVENTORY"
        options = (("--limit", self.limit), ("-u", self.ssh_user), ("--ssh-key", self.ssh_key))
        words = [word for name, value in options if value is not None for word in (name, value)]
        return join([inventory, *words, *(["--sudo"] if self.sudo else [])])


@dataclass(kw_only=True, eq=False, repr=False)
class TargetOptions(ConnectionOptions):
    """The options of a command that only reads from nodes: also the transport."""

    via: str = opt(
        "--via", "Transport: ssh; srun (Slurm steps); clush (ClusterShell); auto.",
        choices=("ssh", "srun", "clush", "auto"), default="ssh",
    )  # fmt: skip
    salloc: str | None = opt(
        "--salloc 'WORDS'",
        "With --via srun: further options for salloc: '--reservation=maint -A ops'.",
    )
    topology: GivenPath = opt(
        "--topology FILE", "With --via clush: path of topology.conf, if not the default."
    )
    ssh_processes: int | None = opt(
        "--ssh-processes N", "With --via ssh: number of processes that share the connections.",
        bounds=(1, 64),
    )  # fmt: skip


# --- The options of each command.


@dataclass(kw_only=True, eq=False, repr=False)
class AuditOptions(TargetOptions):
    only: GivenWords = only("Only these checks or subjects: gpus,nics.mtu.")
    skip: GivenWords = skip()
    fail_on: str = opt(
        "--fail-on", "Lowest status that exits with 3; 'warn' includes warnings and outliers.",
        choices=("fail", "warn"), default="fail", in_python=False,
    )  # fmt: skip
    timeout: GivenSeconds = timeout(
        "Maximum time per node, after it is connected; with --recorded, for DIR."
    )
    recorded: str | None = opt(
        "--recorded DIR",
        "Each node's last gate verdict, from a directory that the nodes share; no connection.",
        general=False,
    )
    every: float | None = span(
        "--watch", 1, 86400, "Repeat after this time until Ctrl-C, and print what changes.",
        key="every", general=False, in_python=False,
    )  # fmt: skip
    job: str | None = srun_job()


@dataclass(kw_only=True, eq=False, repr=False)
class ReadyOptions(TargetOptions):
    local: bool = local()
    budget: GivenSeconds = span("--budget", 1, 3600, "Maximum time in all.", "60s", is_whole=True)
    user: str | None = opt("--user NAME", "Run the proofs as this user, who will run the job.")
    ports: str | None = opt("--ports FIRST-LAST", "Port range of the job.")
    gpus: int | None = opt("--gpus N", "GPUs that every node must have.", bounds=(0, 64))
    nodes_needed: int | None = opt(
        "--nodes-needed N", "Exit 0 when at least N nodes are ready; default: all nodes.",
        bounds=(1, None),
    )  # fmt: skip
    wait_s: int = span(
        "--wait", 0, 7 * 86400, "Repeat until enough nodes are ready, for at most this time.", 0,
        key="wait_s", is_whole=True, show_default=False, in_python=False,
    )  # fmt: skip
    full_mesh: bool = flag("--full-mesh", "Connect every pair of nodes, not a sample of them.")
    active: int | None = opt(
        "--active LEVEL",
        "Also test idle GPUs by nvbandwidth and DCGM at this level; from 2 on also RDMA ports.",
        bounds=(1, 3), variable=False,
    )  # fmt: skip
    only: GivenWords = only("Only these checks or subjects: proof,gpus.present.")
    skip: GivenWords = skip()
    job: str | None = srun_job()


@dataclass(kw_only=True, eq=False, repr=False)
class DeployOptions(ConnectionOptions):
    check: bool = flag("--check", "Only show what would change; write nothing.")
    only: GivenWords = only("Only these subjects, e.g. ptrace,limits.", "SUBJECT,...")
    undo: bool = flag(
        "--undo", "Take back what deploys have changed; packages stay.", variable=False
    )
    batch: Given[str | None, int | float | None] = opt(
        "--batch N|P%",
        "Change one node first, then waves of N nodes, or of this share of the nodes.",
        read=values.read_batch,
    )
    max_fail: int | None = opt(
        "--max-fail N",
        "With --batch: stop after a wave when more than N nodes have failed in all; default: 0.",
        bounds=(0, None),
    )


@dataclass(kw_only=True, eq=False, repr=False)
class StacksOptions(TargetOptions):
    local: bool = local()
    source: GivenPath = opt(
        "--from DIR",
        "Read what -o DIR kept, or texts of py-spy dump (*.txt, *.out, or one file).",
        key="source",
    )
    job: str | None = opt("--job ID", "Only this job: of Slurm, torchrun, or ADDRESS:PORT.")
    user: str | None = opt("--user NAME", "Only ranks of this user.")
    pids: Given[Sequence[int], tuple[int, ...]] = opt(
        "--pid P", "Only this process; may be repeated.", key="pids", bounds=(1, None),
        multiple=True,
    )  # fmt: skip
    match: str | None = opt(
        "--match PATTERN", "Only processes whose command line matches PATTERN."
    )
    native: bool = flag(
        "--native", "Also C and C++ frames of some ranks; pauses each for seconds."
    )
    syscalls: GivenSpan = span(
        "--syscalls", 1, 60, "Also count the suspects' system calls: strace slows them.",
        value=None,
    )  # fmt: skip
    locals_: bool = flag("--locals", "Also variables of the innermost calls, without secrets.")
    dump: bool = flag("--dump", "Have the ranks write PyTorch's flight recorder now.")
    ras: bool = flag("--ras", "Ask NCCL's RAS port even in versions in which that crashed jobs.")
    check: bool = flag(
        "--check", "Check whether this running job can be debugged; exit 3 if not.",
        in_python=False,
    )  # fmt: skip
    attach: int | None = opt(
        "--attach RANK", "Debug this rank with pdb.", bounds=(0, None), in_python=False
    )
    all_threads: bool = flag("--all-threads", "Group by the stacks of all threads.")
    # None: the default, and longer where a longer look tells more
    samples: int | None = opt(
        "--samples N", "Samples per rank.", bounds=(1, 100), default=2, value=None
    )
    interval: GivenSpan = span(
        "--interval", 0.1, 60, "Time between two samples.", "2s", value=None
    )
    slow: GivenSpan = span(
        "--slow", 20, 3600, "Find the rank that a slow job waits for, in this time.", value=None
    )
    timeout: GivenSeconds = timeout()
    output: GivenPath = output_directory(
        "Keep the traces and every form of the result.", general=False
    )


@dataclass(kw_only=True, eq=False, repr=False)
class CoresOptions(TargetOptions):
    local: bool = local()
    since_s: float = since("cores written", values.seconds_ago)
    job: str | None = opt("--job ID", "Only this job: of Slurm, torchrun, or ADDRESS:PORT.")
    pid: int | None = opt(
        "--gcore PID", "Dump this live process first (pauses it).", key="pid", bounds=(2, None)
    )
    output: str | None = output_directory(
        "Write each backtrace to DIR/NODE-PID.txt, and DIR/cores.json."
    )


@dataclass(kw_only=True, eq=False, repr=False)
class TailOptions(TargetOptions):
    local: bool = local("This machine, without any connection; no INVENTORY.")
    lines: int = opt("-n, --lines LINES", "Lines per file.", bounds=(1, 1000), default=10)
    grep: str = opt(
        "--grep REGEX", "Only lines that match REGEX, and their number.", value="",
        read=lambda regex: values.checked_regex("--grep", regex),
    )  # fmt: skip
    ranks: tuple[tuple[int, int, int], ...] = opt(
        "--rank RANKS", "Only lines of these ranks: 3,5-7 or 0-504/8.", value=(),
        read=values.read_ranks,
    )  # fmt: skip
    rank_pattern: str = rank_pattern()
    newer_s: int | None = span(
        "--newer", 1, values.MAX_SPAN_S, "Only files written in the last 90s, 10m, 2h, 3d.",
        key="newer_s", is_whole=True,
    )  # fmt: skip
    since_s: float = since("files written", values.epoch_seconds)
    max_files: int = max_files(64)
    job: str | None = srun_job()


@dataclass(kw_only=True, eq=False, repr=False)
class PostmortemOptions(TargetOptions):
    local: bool = local()
    job: str | None = opt("--job ID", "The Slurm job; its logs are found by scontrol and sacct.")
    patterns: tuple[str, ...] = opt(
        "--logs PATTERN", "The job's logs on the nodes, quoted; may be repeated.", key="patterns",
        multiple=True,
    )  # fmt: skip
    source: str | None = opt(
        "--from DIR", "Read the logs in this directory, or one file; ask no node.", key="source"
    )
    rank_pattern: str = rank_pattern()
    since_s: float = since("logs written", values.epoch_seconds)
    max_files: int = max_files(256)
    timeout: int = timeout()


@dataclass(kw_only=True, eq=False, repr=False)
class HangOptions(TargetOptions):
    """The options of `incident` and `watch`: one job, whose evidence is kept."""

    local: bool = local()
    job: str = opt("--job ID", "The job: of Slurm, torchrun, or ADDRESS:PORT.", required=True)
    user: str | None = opt("--user NAME", "Only ranks of this user.")
    timeout: int = timeout("Maximum time for the stacks of one node, after it is connected.")


@dataclass(kw_only=True, eq=False, repr=False)
class IncidentOptions(HangOptions):
    output: str | None = output_directory(
        "New directory for the evidence; DIR.tar.gz gets the same.", general=False
    )


@dataclass(kw_only=True, eq=False, repr=False)
class WatchOptions(HangOptions):
    interval: float = span(
        "--interval", 1, 3600, "Time between two samples.", "60s", general=False
    )
    # The name of --interval in earlier releases.
    every: float | None = span("--every", 1, 3600, "Time between two samples.", hidden=True)
    confirm: float = span(
        "--confirm", 1, 86400, "Time without progress before an incident is taken.", "3m"
    )
    wait: float | None = span("--wait", 1, 86400, "Time to wait for the first rank of the job.")
    progress: str | None = opt(
        "--progress PATTERN",
        "Only a new line of a log that matches PATTERN is progress: a step's, a checkpoint's.",
    )
    after_incident: str | None = opt(
        "--then COMMAND", "Command to run after an incident, once for each hang."
    )
    once: bool = flag("--once", "End after the first incident, with exit status 3.")
    output: str | None = opt(
        "-o, --output DIR", "Where incidents go: DIR/JOB-TIME.", general=False, takes=is_directory
    )


@dataclass(kw_only=True, eq=False, repr=False)
class JobsOptions(TargetOptions):
    local: bool = local()
    user: str | None = opt("--user NAME", "Only jobs of this user.")
    job: str | None = srun_job()


@dataclass(kw_only=True, eq=False, repr=False)
class SmokeOptions(TargetOptions):
    user: str | None = opt("--user NAME", "Run the tests as this user, who will run the job.")
    gpus: tuple[int, ...] | int | None = opt(
        "--gpus all|N|0,3", "GPUs of each node: all, a number, or indices; 0: none.",
        default="all", general=False, read=values.read_gpus,
    )  # fmt: skip
    ranks: int = opt("--ranks N", "Ranks per node without GPUs.", bounds=(1, 256), default=2)
    budget: int = span(
        "--budget", 10, 86400, "Maximum time in all.", "5m", is_whole=True, general=False
    )
    ports: str | None = opt("--ports FIRST-LAST", "Port range of the ranks.")
    engine: str = opt(
        "--engine", "Backend of the collective; auto: the best that the nodes have.",
        choices=("auto", "torch", "torch:gloo", "torch:nccl", "nccl-tests", "pairs"),
        default="auto",
    )  # fmt: skip
    python: str = opt(
        "--python PATH", "The job's Python on the nodes; its PyTorch is used.",
        takes=lambda path: path.startswith("/"), value="", read=values.read_python,
    )  # fmt: skip
    prefix: tuple[str, ...] = opt(
        "--prefix 'WORDS'", "Command in front of the job's Python: 'apptainer exec --nv job.sif'.",
        general=False, value=(), read=values.read_prefix,
    )  # fmt: skip
    env: tuple[str, ...] = opt(
        "--env NAME=VALUE",
        "Environment variable of the ranks, as the job sets it: NCCL_IB_HCA=mlx5.", multiple=True,
        general=False, read=values.read_environment,
    )  # fmt: skip
    busy: bool = flag("--busy", "Also use GPUs that run other processes.", general=False)
    full: bool = flag("--full", "Also test every pair of nodes.", general=False)
    job: str | None = opt("--job ID", "The nodes of this running job, by srun.", general=False)


@dataclass(kw_only=True, eq=False, repr=False)
class DiffOptions(TargetOptions):
    since: str | None = opt(
        "--since WHEN",
        "Compare with then: yesterday, 3d, a date, the number of a look, or last-good.",
        general=False,
    )
    until: str | None = opt(
        "--until WHEN", "With --since: the later look; ask no node.", general=False
    )
    against: str | None = opt(
        "--against NODE|GROUP|FILE",
        "Compare with a node, with most nodes of a group, or with a file of learn.", general=False,
    )  # fmt: skip
    timeout: int = timeout()
    job: str | None = srun_job()


@dataclass(kw_only=True, eq=False, repr=False)
class EnvOptions(TargetOptions):
    ports: str | None = opt(
        "--ports FIRST-LAST", "Port range for MASTER_PORT; default: the policy's port_range."
    )
    debug: bool = flag("--debug", "Also the variables that make the job debuggable.")
    sync_cuda: bool = flag(
        "--sync-cuda", "Also the variables that make each launch wait for its kernel."
    )
    python: str = opt(
        "--python PATH",
        "With --debug or --sync-cuda: the job's Python on the nodes, for its version of PyTorch.",
        default="python3",
    )
    check: str | None = opt(
        "--check SCRIPT", "Ask no node: check a batch script of Slurm; exit 3 if it is wrong.",
        general=False,
    )  # fmt: skip
    directory: str = opt(
        "--directory DIR", "With --debug: directory for the ranks' flight recorders.", default="",
        show_default=False, read=values.read_directory,
    )  # fmt: skip
    job: str | None = srun_job()


@dataclass(kw_only=True, eq=False, repr=False)
class WaiversOptions(TargetOptions):
    offline: bool = flag("--offline", "Only the list: contact no node.", general=False)
    timeout: int = timeout()
    job: str | None = srun_job()


@dataclass(kw_only=True, eq=False, repr=False)
class UndrainOptions(TargetOptions):
    yes: bool = flag("--yes, -y", "Return the nodes.", general=False)
    end_leftovers: bool = flag(
        "--end-leftovers",
        "End the processes of jobs that Slurm says are over; their evidence stays on the node.",
        general=False,
    )
    budget: int = span("--budget", 1, 3600, "Maximum time for the proofs.", "60s", is_whole=True)
    user: str | None = opt("--user NAME", "Run the proofs as this user, who will run the jobs.")


@dataclass(kw_only=True, eq=False, repr=False)
class LearnOptions(TargetOptions):
    job: str | None = srun_job()


@dataclass(kw_only=True, eq=False, repr=False)
class LemonsOptions:
    limit: str | None = limit("Show these nodes and their GPUs alone: gpu[001-064], a group.")
    since_s: float = since("incidents", values.epoch_seconds)
    trust_inventory: bool = trust()
