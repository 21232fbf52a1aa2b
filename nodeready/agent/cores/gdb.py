"""gdb on a core, with the rights of the user who can write the core, and within limits.

gdb never runs as root: a core of root's is read as uid 65534, who may read every file for it, in
namespaces without devices, network and writable files.

A core is hostile input: its notes and its memory name the files that gdb opens. So gdb takes
scripts only from its own directories, reads no start-up file, downloads nothing and gets none of
our environment. If it takes too much memory or time, only its core is not read.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from nodeready.agent.runtime import ProcessSupervisor
from nodeready.agent.users_file import NOBODY, Rights, confine, rights_of_process

# --- Root's debuggers, which start with the rights of their target's user.
#
# A debugger opens the files that its target names: the user's files, links, FIFOs and devices. So
# root's debugger runs as that user, with one capability (capabilities(7)) for what the user may
# not read (`memory_reader_command`). The user can end such a tool, but can neither trace it nor
# take its descriptors: ptrace(2) requires all capabilities of its target.

#: The capabilities to read every file (CAP_DAC_READ_SEARCH) and every process's memory
#: (CAP_SYS_PTRACE).
READ_FILES, READ_MEMORY = 2, 19

# A separate program, because code between fork and exec must not use threads, locks or ctypes. Its
# arguments: uid, groups (the main group first), capabilities, bytes of memory, the process whose
# mapped files the tool opens (0: none); then the tool's words. A capability that cannot be kept
# (Linux before 4.3, a Python without ctypes) is missing. Its numbers of Linux: 0x00020000 is
# CLONE_NEWNS, 0x48000000 CLONE_NEWNET and CLONE_NEWIPC, 0x44000 MS_PRIVATE and MS_REC, 442
# mount_setattr, 0x8000 AT_RECURSIVE.
_LAUNCHER = r"""
import os, resource, struct, sys
uid, memory, pid = int(sys.argv[1]), int(sys.argv[4]), int(sys.argv[5])
groups = [int(word) for word in sys.argv[2].split(",")]
kept = [int(word) for word in sys.argv[3].split(",") if word]
for number, limit in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, memory)):
    hard = resource.getrlimit(number)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(number, (limit, limit))
try:
    # If memory runs out, the kernel kills this before any job.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
except OSError:
    pass
try:
    import ctypes
    libc = ctypes.CDLL(None)
except (ImportError, OSError):
    libc = None
def show_root(process, top):
    # py-spy opens the mapped files below /proc/PID/root. Their names begin at the root of the
    # process's mount namespace. For a process in a chroot(2), show that root in its place.
    names = os.listdir(f"/proc/{pid}")
    if libc.mount(b"none", b"/proc/%d" % pid, b"tmpfs", 0, b"size=64k,mode=755") == 0:
        for name in names:
            leads = top if name == "root" else f"{process}/{name}"
            os.symlink(f"/proc/self/fd/{leads}", f"/proc/{pid}/{name}")
        os.set_inheritable(process, True)
        os.set_inheritable(top, True)
def top_of(pid):
    # A descriptor of the root of a process's mount namespace (setns(2)); -1: it is the process's
    # own root.
    if not pid or os.readlink(f"/proc/{pid}/root") == "/":
        return -1
    flags = os.O_PATH | os.O_DIRECTORY
    here, own = os.open("/", flags), os.open("/proc/self/ns/mnt", os.O_RDONLY)
    if libc.setns(os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY), 0x00020000):
        return -1
    top = os.open("/", flags)
    if libc.setns(own, 0x00020000):
        sys.exit("setns: no way back")
    os.fchdir(here)
    os.chroot(".")
    return top
if libc:
    hides_devices = uid == 0 or 2 in kept
    try:
        top = top_of(pid)
    except OSError:
        top = -1
    if (hides_devices or top >= 0) and libc.unshare(0x00020000) == 0:
        private = libc.mount(b"none", b"/", None, 0x44000, 0) == 0
        if private and top >= 0:
            show_root(os.open(f"/proc/{pid}", os.O_PATH | os.O_DIRECTORY), top)
        # Hide devices, and make all files read-only: mount_namespaces(7), mount_setattr(2) with
        # RDONLY, NOSUID and NODEV.
        if private and hides_devices:
            libc.mount(b"none", b"/dev", b"tmpfs", 0, b"size=4k")
            libc.syscall(442, -100, b"/", 0x8000, struct.pack("=QQQQ", 7, 0, 0, 0), 32)
    if uid and 2 in kept:
        # A process that may read every file gets no network and no IPC: network_namespaces(7),
        # ipc_namespaces(7).
        libc.unshare(0x48000000)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    for capability in range(64):
        if capability not in kept:
            libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
    libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS
os.setgroups(groups)
os.setresgid(groups[0], groups[0], groups[0])
os.setresuid(uid, uid, uid)
if libc:
    mask = sum(1 << capability for capability in kept)
    head = struct.pack("=II", 0x20080522, 0)
    libc.capset(head, struct.pack("=IIIIII", *(mask,) * 3, 0, 0, 0))
    for capability in kept:
        libc.prctl(47, 2, capability, 0, 0)  # PR_CAP_AMBIENT_RAISE
os.execv(sys.argv[6], sys.argv[6:])
"""


def tool_command(
    rights: Rights,
    capabilities: Sequence[int],
    memory_bytes: int,
    tool: Sequence[str],
    maps_of: int = 0,
) -> list[str]:
    """The words with which root starts ``tool`` (its path first) with these rights.

    capabilities: additional ones, of READ_FILES and READ_MEMORY
    memory_bytes: of its address space
    maps_of:      the process whose mapped files the tool opens below /proc/PID/root; 0: none
    """
    groups = dict.fromkeys((rights.gid, *rights.groups))
    words = [",".join(map(str, numbers)) for numbers in (groups, capabilities)]
    options = [str(rights.uid), *words, str(memory_bytes), str(maps_of)]
    return [sys.executable, "-I", "-S", "-B", "-c", _LAUNCHER, *options, *tool]


def memory_reader_command(
    pid: int, memory_bytes: int, tool: Sequence[str], *, by_maps: bool = False
) -> list[str]:
    """The words that start a tool which reads this process's memory.

    A process of root is read by root, without devices and without other capabilities. If we are
    not root, the words are the tool's own. Raises OSError if the process has ended.

    by_maps: the tool opens the process's mapped files
    """
    if os.geteuid() != 0:
        return list(tool)
    rights = rights_of_process(pid)
    capabilities = (READ_MEMORY,) if rights.uid else (READ_FILES, READ_MEMORY)
    return tool_command(rights, capabilities, memory_bytes, tool, pid if by_maps else 0)


# --- gdb on a core.

LIMIT_S = 60  # seconds for one core
FRAMES, THREADS = 200, 500  # maximum frames of a thread, and threads, in a backtrace
TEXT = 1 << 20  # maximum bytes of gdb's output that are kept
#: The headings in gdb's output, by which `nodeready.runs.cores` reads it.
CRASHED, EVERY, PYTHON = "== the thread of the signal", "== every thread", "== Python"

_WRITTEN_BYTES = 1 << 20  # that gdb may write: nothing, but the site's wrapper may keep a log
_MIN_MEMORY, _MAX_MEMORY = 2 << 30, 16 << 30

# A frame whose function is known.
_NAMED = re.compile(r"^#[0-9]+ +(?:0x[0-9a-f]+ in |(?!0x))[^?\s]", re.M)

# Messages of gdb about most cores, which do not explain an error.
_NOISE = ("Undefined command", "warning: Unexpected size of section")

#: Settings before all others: they limit the files that bring code into gdb (gdb(1),
#: "Auto-loading").
GUARDS = (
    "set auto-load safe-path $debugdir:$datadir/auto-load", "set auto-load libthread-db off",
    "set width 0", "set height 0",
)  # fmt: skip


def find_gdb() -> str:
    """gdb's path; "": it is not installed."""
    return shutil.which("gdb") or ""


def environment() -> dict[str, str]:
    """The environment of a gdb that reads a core, with English messages. Only our PATH is taken
    over, because the user whose rights gdb has can read it.
    """
    path = os.environ.get("PATH", os.defpath)
    return {"PATH": path, "LC_ALL": "C", "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/"}


def words(
    gdb: str, core: str, program: str, commands: tuple[str, ...], guards: tuple[str, ...] = GUARDS
) -> list[str]:
    """The words for gdb in batch mode, without start-up files. program: its path; "": unknown"""
    argv = [gdb, "-batch", "-nx"]
    for line in guards:
        argv += ["-iex", line]
    for line in commands:
        argv += ["-ex", line]
    argv.append(f"--core={core}")
    return [*argv, *([f"--exec={program}", f"--symbols={program}"] if program else ())]


def _memory_bytes() -> int:
    """The address space that gdb gets: a quarter of the machine's memory, 2 to 16 GiB."""
    installed_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(_MIN_MEMORY, min(installed_bytes // 4, _MAX_MEMORY))


@lru_cache(maxsize=1)
def _libc() -> Any:
    """The C library; None: this Python has no ctypes."""
    with contextlib.suppress(ImportError, OSError):
        import ctypes

        return ctypes.CDLL(None)
    return None


def _limit_gdb() -> None:
    """Set gdb's limits, in the child before gdb starts."""
    with contextlib.suppress(Exception):
        confine(_memory_bytes(), LIMIT_S, _WRITTEN_BYTES, executes=True)
    with contextlib.suppress(Exception):
        _libc().prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS


def _last_message(error_text: str) -> str:
    """gdb's last message that explains an error, or ""."""
    rows = [row.strip() for row in error_text.splitlines() if row.strip()]
    messages = [row for row in rows if not row.startswith(_NOISE)]
    return messages[-1][:200] if messages else ""


# --- The native stack of a live process.

#: Seconds in which gdb reads the symbols of all libraries while the process waits.
LIVE_LIMIT_S = 25
_LIVE_FRAMES = 100
_LIVE_MEMORY = 16 << 30
_CALL = re.compile(
    r"#(\d{1,6}) +(?:0x[0-9a-f]+ in )?(.+?) \([^()]*\)"
    r"(?: at (?P<file>\S+):(?P<line>\d{1,9})| from (?P<library>\S+))?"
)
_MAX_ROW = 3000


def calls(text: str) -> list[tuple[str, str, int]]:
    """The calls of gdb's ``bt``, root to leaf: function, name of the file or library, line. A
    function without a name is ``?``.
    """
    frames: dict[int, tuple[str, str, int]] = {}
    for row in text.splitlines():
        if call := _CALL.fullmatch(row.strip()[:_MAX_ROW]):
            place = os.path.basename(call["file"] or call["library"] or "")
            name = "?" if call[2] == "??" else call[2]
            frames[int(call[1])] = (name[:300], place[:300], int(call["line"] or 0))
    return [frames[number] for number in sorted(frames, reverse=True)]


def live_stack(
    supervisor: ProcessSupervisor, pid: int, limit_s: float
) -> tuple[list[tuple[str, str, int]], str, bool]:
    """The native stack of a live process's main thread, the error, and whether gdb was ended.

    If gdb was ended, the process may have a pending signal to stop. The process must not be in
    state D, T or t: gdb would leave it stopped forever. gdb has the rights of the process's user
    (`memory_reader_command`), and runs no code of the files that the process names.
    """
    gdb = find_gdb()
    if not gdb:
        return [], "gdb is not installed (nodeready deploy installs it)", False
    argv = [gdb, "-batch", "-nx"]
    # The files in the process's own view, such as a container's.
    files = (f"set sysroot /proc/{pid}/root", "set debuginfod enabled off")
    for line in ("set auto-load off", *GUARDS[1:], *files):
        argv += ["-iex", line]
    argv += ["-p", str(pid), "-ex", f"bt -frame-arguments none {_LIVE_FRAMES}", "-ex", "detach"]
    try:
        confined = memory_reader_command(pid, _LIVE_MEMORY, argv)
        ended = supervisor.run(confined, min(limit_s, LIVE_LIMIT_S), env=environment())
    except (OSError, subprocess.SubprocessError, KeyError, ValueError, IndexError) as problem:
        return [], f"gdb: {getattr(problem, 'strerror', '') or problem}", False
    if frames := calls(ended.out):
        return frames, "", ended.rc is None
    if ended.rc is None:
        return [], "gdb did not finish in time", True
    message = _last_message(ended.err)
    return [], f"gdb: {message}" if message else "gdb shows no call", False


def start_options(core: int) -> dict[str, object]:
    """The options to start gdb on an open core, whose file no user can exchange."""
    return {"pass_fds": (core,), "env": environment(), "cwd": "/"}


def _limited_options(core: int, rights: Rights | None) -> dict[str, object]:
    """The options to start gdb on a hostile core. Our process must have no threads."""
    _libc()
    options = {**start_options(core), "preexec_fn": _limit_gdb}
    if rights is None:
        return options
    groups = list(rights.groups)
    return {**options, "user": rights.uid, "group": rights.gid, "extra_groups": groups}


def _limit_launcher() -> None:
    """Set limits, in the child before it gives up root's rights and starts gdb."""
    with contextlib.suppress(Exception):
        confine(_memory_bytes(), LIMIT_S, 0, executes=True)


def backtrace(
    supervisor: ProcessSupervisor,
    gdb: str,
    core: int,
    *,
    program: str,
    threads: int,
    rights: Rights | None,
) -> tuple[str, str, str, bool]:
    """gdb's output, the error, a doubt about the output, and whether the output is cut.

    core:    its descriptor
    program: its path; "": gdb reads only the core
    rights:  of the user who can write the core; None: our own, for root only the right to read
    """
    commands = (
        f"set backtrace limit {FRAMES}", "set print elements 100", "set print repeats 10",
        f"echo \\n{CRASHED}\\n", "bt",
        f"echo \\n{EVERY}\\n", f"thread apply 1-{max(1, min(threads, THREADS))} bt",
        f"echo \\n{PYTHON}\\n", "py-bt",
    )  # fmt: skip
    sealed = rights is None and os.geteuid() == 0
    # gdb must print no line of a file that debug information names (gdb 12 and later).
    guards = (*GUARDS, "set source open off") if sealed else GUARDS
    argv = words(gdb, f"/proc/self/fd/{core}", program, commands, guards)
    ionice = shutil.which("ionice")
    argv = [ionice, "-c", "3", "-t", *argv] if ionice else argv
    options = _limited_options(core, rights)
    if sealed:
        # Uid 65534 reads the core, which is root's.
        argv = tool_command(Rights(NOBODY, NOBODY, ()), (READ_FILES,), _memory_bytes(), argv)
        options = {**start_options(core), "preexec_fn": _limit_launcher}
    output = bytearray()

    def keep(process: object, stream: int, data: bytes) -> None:
        # One byte more than is kept tells that the output is cut.
        output.extend(data[: max(0, TEXT + 1 - len(output))] if stream == 1 else b"")

    limit_s = min(LIMIT_S, supervisor.left_s)
    try:
        ended = supervisor.run(argv, limit_s, keep, **options)
    except (OSError, subprocess.SubprocessError) as problem:
        return "", f"{gdb}: {getattr(problem, 'strerror', '') or problem}", "", False
    text = bytes(output[:TEXT]).decode("utf-8", "replace")
    was_ended = ended.rc is None
    if _NAMED.search(text):
        doubt = f"gdb was ended after {limit_s:.0f} s: not every thread is there"
        return text, "", doubt if was_ended else "", was_ended or len(output) > TEXT
    if was_ended:
        return "", f"gdb had no backtrace after {limit_s:.0f} s and was ended", "", False
    message = _last_message(ended.err)
    return "", "gdb finds no function in it" + (f": {message}" if message else ""), "", False
