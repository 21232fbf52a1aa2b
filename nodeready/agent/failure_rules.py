"""What the words of an error mean: a rank's own failure, a lost peer, a timeout; its kind.

Data, with the programs that write these words as sources. A line is data of a job's user.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from nodeready.agent.witnesses import nccl_errors

#: Roles of an event. The rank failed by itself; it lost a peer; it waited until a timeout; the
#: error says itself that its cause is elsewhere; a signal or the scheduler ended the rank; a
#: launcher or Slurm reports how a rank ended.
FAILED, LOST, WAITED, CONSEQUENCE, ENDED, REPORT = ROLES = (
    "failed", "lost", "waited", "consequence", "ended", "report",
)  # fmt: skip
#: Kinds of a failure.
KINDS = (
    "oom", "exception", "segfault", "gpu", "network", "storage", "timeout", "limit", "signal",
)  # fmt: skip
#: Maximum characters of a line that are searched. The patterns bound what stands between two
#: words, so that a line takes milliseconds at most.
MAX_LINE = 4096
#: Maximum ranks that the launchers' reports in a file name.
MAX_RANKS = 100_000


class TextRule(NamedTuple):
    """A text that matches has this role and kind."""

    role: str
    kind: str
    pattern: re.Pattern[str]


#: Names of clients of services outside of the job: a connection that they lose is no peer.
_OUTSIDE = r"requests\.|urllib3|HTTPS?Connection|botocore|boto3|huggingface|aiohttp|httpx|wandb"
#: Exceptions and messages, the most special first. Sources: PyTorch's ProcessGroupNCCL.cpp,
#: ProcessGroupGloo.cpp, TCPStore.cpp, socket.cpp and CUDAException.cpp, gloo's transport/tcp,
#: NCCL's enqueue.cc and net_ib.cc, Python's errno.
TEXT_RULES = tuple(TextRule(role, kind, re.compile(pattern)) for role, kind, pattern in (
    (FAILED, "signal", r"DataLoader worker .*killed by signal: (?:Killed|Aborted)"),
    (FAILED, "segfault", r"DataLoader worker .*killed by signal: Segmentation fault"),
    (FAILED, "storage", r"DataLoader worker .*killed by signal: Bus error"),
    (ENDED, "signal", r"DataLoader worker .*killed by signal: (?:Terminated|Hangup)"),
    (FAILED, "oom",
     r"(?:CUDA|HIP) out of memory|CUDA error: out of memory|Cuda failure '?out of memory"
     r"|CUBLAS_STATUS_ALLOC_FAILED|DefaultCPUAllocator: (?:can't|not enough)|std::bad_alloc"
     r"|OutOfMemoryError|RESOURCE_EXHAUSTED"
     r"|^MemoryError|Cannot allocate memory|Unable to allocate .* for an arr"),
    (FAILED, "network", rf"(?:{_OUTSIDE}).{{0,400}}?(?i:connect|timed? ?out|resol|reset)"),
    (FAILED, "timeout", r"DataLoader timed out"),
    (FAILED, "storage",
     r"No space left on device|Disk quota exceeded|Stale (?:NFS )?file handle"
     r"|Input/output error|Read-only file system|Transport endpoint is not connected"
     r"|\[Errno (?:5|28|30|116|122)\]|insufficient shared memory|unable to (?:open|mmap) shared"
     r"|[Pp]y[Tt]orchStreamWriter failed|iostream error|unexpected pos \d+ vs"),
    (WAITED, "timeout",
     r"Timed out waiting \d+ms|[Ww]atchdog caught collective operation timeout"
     r"|wait timeout after|Socket Timeout|Timed out after \d+ seconds? waiting for clients"
     r"|RendezvousTimeoutError|monitoredBarrier|client socket has timed out"
     r"|Heartbeat monitor timed out|watchdog hang|Connect timeout|failed to pass monitored"
     r"|Timed out initializing process group|collective timeout|due to timeout"
     r"|DEADLINE_EXCEEDED"),
    (LOST, "network",
     r"(?i)connection (?:closed|reset|refused|aborted|was)|(?:reset|closed) by (?:remote )?peer"
     r"|broken ?pipe|ConnectionResetError|ConnectionRefusedError|ConnectionAbortedError"
     r"|remote process|ncclRemoteError|failed on Socket|flag on TCPStore|remote peer"
     r"|communicator was aborted|NCCL communicator.{0,40}abort|RendezvousClosedError"
     r"|Rendezvous(?:Connection|GracefulExit|State)Error|XlaRuntimeError: UNAVAILABLE"
     r"|heartbeat timeout"
     r"|peer (?:process )?has (?:unexpectedly|exited|disconnected)"
     r"|ailed to recv, got \d+ bytes|client socket has failed to connect|Stop_waiting response"
     r"|MPI_ERR_PROC_FAILED|HorovodInternalError"
     r"|^EOFError$|readv failed|Endpoint is not connected|failed to send a keep-alive"
     r"|Application timeout caused pair closure|socketProgress"),
    (FAILED, "gpu",
     r"CUDA (?:driver )?error|CUBLAS_STATUS_|CUDNN_STATUS|cuDNN error|HIP error|hipError"
     r"|ECC error|no CUDA-capable device|CUDA unknown error|Found no NVIDIA driver"
     r"|invalid device ordinal|NVML|[Cc]uda failure|unhandled cuda error"
     r"|block: \[[\d,]+\], thread: .{0,60}Assertion|Memory access fault by GPU"),
    (FAILED, "network",
     r"[Aa]ddress already in use|EADDRINUSE|No route to host|Network is unreachable"
     r"|Name or service not known|Temporary failure in name resolution|getaddrinfo"
     r"|[Uu]nable to resolve|Connection timed out|No socket interface found"
     r"|[Uu]nable to find (?:address|interface)|Cannot assign requested address"),
    (ENDED, "signal", r"^KeyboardInterrupt|SignalException|got signal: (?:15|2|1)\b|SIGTERM"),
    (FAILED, "segfault", r"(?i)segmentation fault|SIGSEGV"),))  # fmt: skip
#: A first line that says nothing; the lines after it do.
VAGUE = re.compile(r"NCCL [Ee]rror|unhandled system error|internal error|:\s*$")


class Meaning(NamedTuple):
    """The role and the kind of a text; is_known: a rule has it."""

    role: str
    kind: str
    is_known: bool


def meaning(text: str) -> Meaning:
    """The role and the kind of an exception or a message.

    >>> meaning("RuntimeError: Connection closed by peer [10.0.0.2]:4711").role
    'lost'
    >>> meaning("OSError: [Errno 28] No space left on device").kind
    'storage'
    """
    for rule in TEXT_RULES[:_FIRST_RULES]:
        if rule.pattern.search(text[:MAX_LINE]):
            return Meaning(rule.role, rule.kind, True)
    if _COLLECTIVE.search(text):
        # Of several lines, the line that says most.
        errors = [
            error_meaning
            for line in text.split("\n")
            if (error_meaning := nccl_errors.meaning(line))
        ]
        for role in (nccl_errors.CAUSE, nccl_errors.VICTIM, nccl_errors.FOLLOWS):
            for error in errors:
                if error.role == role:
                    return Meaning(*_collective_role(error), True)
    for rule in TEXT_RULES[_FIRST_RULES:]:
        if rule.pattern.search(text[:MAX_LINE]):
            return Meaning(rule.role, rule.kind, True)
    return Meaning(FAILED, "exception", False)


#: The rules that come before those of `nccl_errors`; texts that the latter explain.
_FIRST_RULES = next(at for at, rule in enumerate(TEXT_RULES) if rule.role == WAITED)
_COLLECTIVE = re.compile(r"NCCL|nccl[A-Z]|NET/|gloo|RCCL")


def _collective_role(error: nccl_errors.NcclMeaning) -> tuple[str, str]:
    """The role and the kind of an error of NCCL, RCCL or gloo."""
    if error.role == nccl_errors.CAUSE:
        return FAILED, error.kind
    if error.kind == "timeout":
        return WAITED, error.kind
    is_own = error.role == nccl_errors.FOLLOWS and error.kind != "network"
    return (FAILED if is_own else LOST), error.kind


#: Signal -> kind, and its words in a shell and in srun.
#: A bus error mostly comes from a mapping of a full file system, such as /dev/shm.
_SIGNAL_KINDS = {4: "segfault", 7: "storage", 8: "segfault", 11: "segfault"}
SIGNAL_NAMES = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
    9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM",
    15: "SIGTERM", 24: "SIGXCPU", 25: "SIGXFSZ",
}  # fmt: skip
_SIGNAL_WORDS = {
    "Hangup": 1, "Interrupt": 2, "Quit": 3, "Illegal instruction": 4, "Aborted": 6,
    "Bus error": 7, "Floating point exception": 8, "Killed": 9, "Segmentation fault": 11,
    "User defined signal 1": 10, "User defined signal 2": 12,
    "Broken pipe": 13, "Alarm clock": 14, "Terminated": 15, "Out Of Memory": 9,
}  # fmt: skip
_NUMBERS = {name: number for number, name in SIGNAL_NAMES.items()}
_WORDS = "|".join(_SIGNAL_WORDS)


def kind_of_code(code: int) -> str:
    """The kind of an exit status, or of minus a signal."""
    number = -code if code < 0 else code - 128 if 128 < code < 160 else 0
    return _SIGNAL_KINDS.get(number, "signal") if number else "exception"


def signal_of(code: int) -> int:
    """The signal of an exit status (137) or of minus a signal; 0: none.

    >>> signal_of(137), signal_of(-11), signal_of(1)
    (9, 11, 0)
    """
    return -code if code < 0 else code - 128 if code - 128 in SIGNAL_NAMES else 0


# --- Lines outside of tracebacks.


class LineRule(NamedTuple):
    """A line that matches is an event.
    groups: ``ranks``, ``local``, ``host``, ``pid``, ``code``, ``signal``, ``word``, ``text``
    """

    role: str
    kind: str  # "": by the named group ``word``, ``signal`` or ``code``, else by the text
    source: str
    pattern: re.Pattern[str]


_RANKS = r"(?P<ranks>\d{1,7}(?:[,-]\d{1,7}){0,1000})(?!\d)"
_HOST = r"(?P<host>[\w.-]{1,255})"
#: Sources: Slurm's src/srun/task_state.c, src/srun/libsrun/launch.c, src/slurmd/slurmstepd (req.c,
#: mgr.c); torch's distributed/elastic (agent, multiprocessing/api.py), multiprocessing/spawn.py;
#: Open MPI's help-orterun.txt and PRRTE's help-prterun.txt, MPICH's hydra; DeepSpeed's
#: launcher/launch.py; bash's jobs.c; CPython's faulthandler.c; UCX's debug.c; glibc's malloc.c.
LINE_RULES = tuple(LineRule(*row[:3], re.compile(row[3])) for row in (
    (REPORT, "", "srun",
     rf"srun: error: (?P<host>[\w.,\[\]-]{{1,255}}): tasks? {_RANKS}: "
     rf"(?:(?P<word>{_WORDS})\b|Exited with exit code (?P<code>\d{{1,3}}))"),
    (ENDED, "limit", "slurm",
     rf"\*\*\* (?:JOB|STEP) \S+ ON {_HOST} CANCELLED AT \S+ "
     r"DUE TO (?:TIME LIMIT|PREEMPTION|DEADLINE|JOB REQUEUE)"),
    (ENDED, "limit", "slurm", r"Job \S+ exceeded time limit|DUE TO TIME LIMIT"),
    (FAILED, "network", "slurm",
     rf"(?P<text>CANCELLED AT \S+ DUE TO NODE {_HOST}? ?FAILURE)"),
    (FAILED, "network", "slurm", rf"srun: error: (?P<text>Node failure on {_HOST})"),
    (ENDED, "signal", "slurm-job", rf"\*\*\* JOB \S+ ON {_HOST} CANCELLED AT \S+ \*\*\*"),
    (ENDED, "signal", "slurm", rf"\*\*\* STEP \S+ ON {_HOST} CANCELLED AT \S+ \*\*\*"),
    (FAILED, "oom", "slurm",
     r"slurmstepd(?:-(?P<host>[\w.-]{1,64}))?: error: (?P<text>Detected \d+ oom[_-]kill "
     r"event.*|(?:Step|Job) \S+ exceeded (?:virtual )?memory limit.*|Exceeded \S* ?memory limit"
     r".*)"),
    (REPORT, "", "torchrun",
     r"failed \(exitcode: (?P<code>-?\d{1,5})\) local_rank: (?P<local>\d{1,5}) "
     r"\(pid: (?P<pid>\d{1,10})\)"),
    (ENDED, "signal", "torchrun",
     r"Sending process (?P<pid>\d{1,10}) closing signal (?P<signal>SIG[A-Z]{1,8})"),
    (ENDED, "signal", "agent",
     r"Received (?:Signals\.)?(?P<signal>SIG[A-Z]{1,8}|\d{1,2}) death signal"
     r"|SignalException: Process \d+ got signal: (?P<code>\d{1,2})"),
    (ENDED, "signal", "agent", r"srun: (?:sending Ctrl-C|interrupt \(one more|forcing job)"),
    (REPORT, "", "spawn",
     r"ProcessExitedException: process (?P<ranks>\d{1,7}) terminated with "
     r"(?:exit code (?P<code>\d{1,3})|signal (?P<signal>SIG[A-Z]{1,8}))"),
    (FAILED, "exception", "mpirun",
     r"(?P<text>MPI_ABORT was invoked on rank (?P<ranks>\d{1,7})(?!\d))"),
    (FAILED, "exception", "mpirun",
     r"^(?P<text>Abort\(-?\d+\) on node (?P<ranks>\d{1,7}) .{0,200})"),
    (REPORT, "", "mpirun",
     r"(?:mpi|prte)\w+ noticed that process rank (?P<ranks>\d{1,7}) with PID (?P<pid>\d{1,10}) "
     rf"on node {_HOST} exited on signal (?P<signal>\d{{1,2}})"),
    (REPORT, "", "deepspeed",
     r"sigkill_handler\] .*--local_rank=(?P<local>\d{1,5}).* exits with return code = "
     r"(?P<code>-?\d{1,5})"),
    (FAILED, "", "", r"(?P<text>ERROR: Unexpected .* encountered in worker.*)"),
    (FAILED, "", "", rf"Fatal Python error: (?P<word>{_WORDS})"),
    # faulthandler.dump_traceback_later
    (FAILED, "timeout", "", r"^(?P<text>Timeout \(\d{1,4}:\d\d:\d\d(?:\.\d{1,9})?\)!)$"),
    (FAILED, "exception", "", r"(?P<text>Fatal Python error: .*)"),
    (FAILED, "exception", "", r"(?P<text>^\S+: .{1,300}: Assertion .{1,1000} failed\.?$)"),
    (REPORT, "", "mpirun",
     rf"TERMINATED WITH THE EXIT STRING: (?P<word>{_WORDS}) \(signal \d{{1,2}}\)"),
    (FAILED, "", "",
     rf"\[[\w.-]+:(?P<pid>\d{{1,10}})(?::\d+:\d+)?\] (?:Caught signal \d+ \(|Signal: )"
     rf"(?P<word>{_WORDS})"),
    (FAILED, "segfault", "",
     r"(?P<text>double free or corruption.*|(?:free|malloc|realloc)\(\): .*"
     r"|corrupted (?:size|double).*|\*\*\* stack smashing detected.*)"),
    (REPORT, "", "shell",
     rf"^(?:\S+: line \d+: +)?(?:(?P<pid>\d{{1,10}}) )?(?P<word>{_WORDS})"
     r"(?: \(core dumped\))?(?:  .*)?$"),
    (FAILED, "", "",
     r"^(?P<text>forrtl: (?:severe|error) \(\d{1,4}\): .*|Fortran runtime error: .*"
     r"|panic: .+|thread '.{1,80}' panicked at .+)"),
    (FAILED, "gpu", "", r"(?P<text>Memory access fault by GPU.*)"),
    (FAILED, "gpu", "", r"(?P<text>block: \[[\d,]+\], thread: .{0,60}Assertion .* failed.*)"),
    (FAILED, "", "", r"^F(?:\d{4}){1,2} \d\d:\d\d:\d\d\S* .*?\] (?P<text>.*)"),
    (FAILED, "exception", "",
     r"^(?P<text>\S*python[\d.]*: (?:can't open file|No module named) .*"
     r"|[\w./-]+: error: (?:unrecognized|argument|the following|ambiguous|invalid) .*"
     r"|\S+: error while loading shared libraries: .*"
     r"|(?:\d+: )?(?:\S*(?:bash|sh|slurm_script)|slurmstepd(?:-[\w.-]+)?): "
     r".*(?:command not found|: No such file or directory|Permission denied))$"),
    # Of a process group or NCCL; the text decides.
    ("", "", "", r"(?P<text>terminated with exception: .*)"),
    ("", "", "", r"\] (?P<text>.{0,200}[Ww]atchdog caught collective operation timeout.*)"),
    ("", "", "", r"(?P<text>NCCL WARN .*)"),
    ("", "", "warning", r"^\[?W(?:\d{4}){1,2} .*?\] (?P<text>.*)"),
    ("", "", "", r"^\[?[EF](?:\d{4}){1,2} .*?\] (?P<text>.*)"),))  # fmt: skip
#: Every line of a failure, and every line of the watchdog, has one of these words. A search for
#: words is ten times faster than their pattern.
_NEEDLES = (
    "rror", "xception", "raceback", "ABORT", "ault", "ailed", "ailure", "illed", "illing",
    "bort", "larm clock", "ermina", "CANCEL", "imed out", "imeout", "NCCL WARN", "oom", "emory",
    "ssert", "ignal", " peer", "pipe", "nterrupt", "xit", "noticed", "corrupt", "TIME LIMIT",
    "not found", "No such", "No module", "ermission", "Hangup", "Quit", "atchdog", "nqueued ",
    "Barrier", "onnection ", "on Socket", "on TCPStore", "is running ", "ollective #",
    "lagging ranks", "srun: ", "eartbeat", "at NCCL work", "Root Cause", "panic", "Process name",
    'File "',
)  # fmt: skip


def has_needle(text: str) -> bool:
    return any(map(text.__contains__, _NEEDLES)) or text[:1] == "F" or text.startswith("[F")


def code_of(groups: dict[str, str]) -> int:
    """The exit status, or minus the signal, that a line names; 0: none."""
    if "word" in groups:
        return -_SIGNAL_WORDS[groups["word"]]
    if "signal" in groups:
        name = groups["signal"]
        return -(int(name) if name.isdigit() else _NUMBERS.get(name, 0))
    return int(groups.get("code", 0))


def ranks_in(text: str) -> tuple[int, ...]:
    """The ranks of ``3``, ``0-2,5``; at most MAX_RANKS."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        end = min(int(last or first) + 1, int(first) + MAX_RANKS - len(numbers))
        numbers += range(int(first), end)
    return tuple(numbers)
