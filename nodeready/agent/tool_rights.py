"""Start root's debuggers with the rights of their target's user.

A debugger opens the files that its target names: the user's files, links, FIFOs and devices. So
root's debugger runs as that user, with one capability (capabilities(7)) for what the user may not
read (`memory_reader_command`). The user can end such a tool, but can neither trace it nor take its
descriptors: ptrace(2) requires all capabilities of its target.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from nodeready.agent.users_file import Rights, rights_of_process

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
    options = [
        str(rights.uid),
        ",".join(map(str, groups)),
        ",".join(map(str, capabilities)),
        str(memory_bytes),
        str(maps_of),
    ]
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
