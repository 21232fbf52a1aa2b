"""Start a tool of root's that reads what a user made, with no more than that user's rights.

A debugger opens what its target names: files of the user's, links, FIFOs, devices. So it is the
target's user, with one capability (capabilities(7)) for what it could not read at all otherwise.
The user can end such a tool, and can neither trace it nor take its descriptors: ptrace(2) asks for
all capabilities that its target has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from nodeready.node.users_file import Rights

#: Capabilities: reading every file, and every process's memory.
READ_FILES, READ_MEMORY = 2, 19

# A program of its own: what runs between fork and exec must not use threads, locks or ctypes.
# uid, groups (the first is the main one), capabilities, bytes of memory; then the tool's words.
# Where a capability cannot be kept (Linux before 4.3, a Python without ctypes), it is lacking.
_LOWER = r"""
import os, resource, struct, sys
uid, memory = int(sys.argv[1]), int(sys.argv[4])
groups = [int(word) for word in sys.argv[2].split(",")]
kept = [int(word) for word in sys.argv[3].split(",") if word]
for number, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, memory)):
    hard = resource.getrlimit(number)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(number, (most, most))
try:
    # Where memory runs out, this is ended before any job.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
except OSError:
    pass
try:
    import ctypes
    libc = ctypes.CDLL(None)
except (ImportError, OSError):
    libc = None
if libc:
    # No device is opened but by who may open it anyway, and no file written: mount_namespaces(7),
    # mount_setattr(2) with RDONLY, NOSUID and NODEV.
    if (uid == 0 or 2 in kept) and libc.unshare(0x00020000) == 0:
        if libc.mount(b"none", b"/", None, 0x44000, 0) == 0:
            libc.mount(b"none", b"/dev", b"tmpfs", 0, b"size=4k")
            libc.syscall(442, -100, b"/", 0x8000, struct.pack("=QQQQ", 7, 0, 0, 0), 32)
    if uid and 2 in kept:
        # What may read every file talks to nobody: network_namespaces(7), ipc_namespaces(7).
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
os.execv(sys.argv[5], sys.argv[5:])
"""


def words(
    rights: Rights, capabilities: Sequence[int], memory_bytes: int, tool: Sequence[str]
) -> list[str]:
    """The words that start ``tool`` (its path first) with these rights; to be started by root.

    capabilities: what it may do beside, of READ_FILES and READ_MEMORY
    memory_bytes: of its address space
    """
    groups = dict.fromkeys((rights.gid, *rights.groups))
    given = [
        str(rights.uid),
        ",".join(map(str, groups)),
        ",".join(map(str, capabilities)),
        str(memory_bytes),
    ]
    return [sys.executable, "-I", "-S", "-B", "-c", _LOWER, *given, *tool]


def rights_of_process(pid: int) -> Rights:
    """The rights that this process has now (proc(5)). Raises OSError when it is gone."""
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        rows = dict(row.split(":", 1) for row in file if ":" in row)
    uid, gid = (int(rows[name].split()[1]) for name in ("Uid", "Gid"))
    return Rights(uid, gid, tuple(map(int, rows["Groups"].split())))


def with_rights_of(pid: int, memory_bytes: int, tool: Sequence[str]) -> list[str]:
    """The words that start a tool which reads this process's memory; as no root, the tool's own.

    Root's own process is read by root, without devices and all other capabilities. Raises OSError
    when the process is gone.
    """
    if os.geteuid() != 0:
        return list(tool)
    rights = rights_of_process(pid)
    capabilities = (READ_MEMORY,) if rights.uid else (READ_FILES, READ_MEMORY)
    return words(rights, capabilities, memory_bytes, tool)
