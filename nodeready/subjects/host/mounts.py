"""What hangs a node: processes in state D, and mounts that do not answer or are missing.

A network mount whose server is down hangs every process that accesses it, often forever. So a
separate process (``stat -f``, statfs(2)) asks each network mount under a timeout, and a process
that does not end is left behind. The local mounts share one process. The kernel's table of mounts,
/proc/self/mounts, is read without touching a mount. What a person has mounted by FUSE is left out:
that person may let it hang, and no job of others uses it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Optional

from nodeready.core import shell
from nodeready.core.base import Line
from nodeready.core.policy import Policy

# --- Processes that no signal ends (state D), and zombies: how they are read says sh/processes.sh.

#: Marks nodeready's own probe of a mount (nodeready.subjects.host.mounts) in /proc/PID/cmdline.
MARK = "nr_fs="
#: Maximum processes in state D that are read twice, and of one user; the system's come first.
MOST_PROCESSES, MOST_OF_USER = 256, 32
#: The first user who is a person (UID_MIN of login.defs(5)).
FIRST_USER = 1000


def _states() -> str:
    return shell.script(
        "states", MOST_PROCESSES=MOST_PROCESSES, MOST_OF_USER=MOST_OF_USER, FIRST_USER=FIRST_USER
    )


def processes_script() -> str:
    """The shell text that prints the processes, and sets nr_hung."""
    return _states() + shell.script("processes", MARK=MARK)


_STAT = re.compile(r"(\d{1,10}) \((.*)\) ([DZ])((?: -?\d{1,20}){12})$")
_SCHED = re.compile(r"^/proc/(\d+)/sched:se\.exec_start\s*:\s*(\d{1,18})(?:\.\d*)?$", re.M)
_CLOCK = re.compile(r"^clock_(\d+):\s*(\d{1,18})(?:\.\d*)?$", re.M)
_WCHAN = re.compile(r"^/proc/(\d+)/wchan:([A-Za-z_][\w.]{0,127})$", re.M)
# Where a frozen process waits (kernel/freezer.c).
_FROZEN = ("__refrigerator", "refrigerator")
# The waits that any user's process can cause at will on a healthy node. SIGKILL ends the first
# three (TASK_KILLABLE of linux/sched.h), which /proc/PID/stat shows as D, too; the writing of a
# core ends (Linux: kernel/fork.c, fs/userfaultfd.c, fs/fuse/dev.c, fs/coredump.c, kernel/exit.c).
_AT_WILL = (
    (r"kernel_clone|_?do_fork|wait_for_vfork_done|\w*sys_vfork", "for its own child (vfork)"),
    (r"handle_userfault|userfaultfd_\w+", "for its own page faults (userfaultfd)"),
    (r"request_wait_answer|_*fuse_\w+", "for a program that serves files (FUSE)"),
    (r"coredump_wait|do_coredump|coredump_task_exit|exit_mm", "for its core to be written"),
)
# Kernel functions in which processes of any user wait for a resource of the node: network storage,
# GPUs, RDMA, disks. In other functions a process may wait for another process of the same user: a
# FUSE server of the user can hold any kernel lock on its files.
_NODES = re.compile(
    r"_*(rpc|nfs4?|nlm|xprt|smb2?|cifs|ceph|rbd|ldlm|ptlrpc|osc|obd|cl|ll|lov|mdc|v9fs|p9|afs"
    r"|gpfs|mmfs|cxi\w*|beegfs|weka|nv|os|uvm|nvidia|rm|amdgpu|kfd|kgd|ttm|drm|dma_fence|ib|mlx[45]"
    r"|rdma|uverbs|iw|blk|bio|submit_bio|io|jbd2|ext4|xfs|xlog|btrfs|zfs|zil|txg|scsi|sg|nvme|md"
    r"|raid\w*|dm)_\w+|_nv\d+rm|io_schedule\w*|SendReceive\w*|cv_wait_common"
)


@dataclass(frozen=True)
class StuckProcess:
    """A process that waits inside the kernel and that no signal ends."""

    pid: int  # of the process
    name: str  # likewise
    wchan: str  # the kernel function in which the process waits, "" where it is not shown
    seconds: int | None  # since it last ran; None: this kernel does not tell, a second at least
    frozen: bool  # a cgroup has frozen the process on purpose; it can be thawed
    uid: int | None = None  # who started it; None: unknown
    user: str = ""  # the name in /etc/passwd of who started it; "": none there

    @property
    def at_will(self) -> str:
        """What it waits for, if its user can cause the wait on a healthy node; "" if not.

        A person's process counts as waiting at will unless the kernel names a resource of the
        node: no user may decide the verdict about a node.
        """
        for pattern, words in _AT_WILL:
            if re.fullmatch(pattern, self.wchan):
                return words
        if self.uid is None or self.uid < FIRST_USER or _NODES.fullmatch(self.wchan):
            return ""
        return "for what may be its user's own"


@dataclass(frozen=True)
class Parent:
    """A process that does not reap its ended children."""

    pid: int  # of the process
    name: str  # likewise
    count: int  # of its zombies


@dataclass(frozen=True)
class HostProcesses:
    """What is wrong with the processes of a node."""

    is_complete: bool  # the probe was completed; if not, the fields below mean nothing
    stuck: tuple[StuckProcess, ...] = ()
    unseen: int = 0  # processes in state D that were too many to be read twice
    zombies: int = 0
    parents: tuple[Parent, ...] = ()  # of the zombies, those with the most first, five at most


def _stats(text: str) -> dict[int, tuple[str, str, list[str]]]:
    """Pid -> name, state and the CPU time of each process."""
    matches = filter(None, map(_STAT.match, text.split("\n")))
    return {int(match[1]): (match[2], match[3], match[4].split()[10:12]) for match in matches}


def parse_processes(text: str) -> HostProcesses:
    """The processes in the output of `processes_script`; never raises."""
    sections = re.split(r"^processes=(1|2|end)$", text, flags=re.M)
    parts = dict(zip(sections[1::2], sections[2::2]))
    first_text, second = parts.get("1", ""), parts.get("2", "")
    first = _stats(first_text)
    names = dict(re.findall(r"^parent_(\d{1,10})=(.*)$", first_text, re.M))
    counts = {name: int(n) for name, n in re.findall(r"^(\w+)=(\d{1,10})$", first_text, re.M)}
    owners, cpus = (
        {int(name[4:]): n for name, n in counts.items() if re.match(rf"{key}_\d+$", name)}
        for key in ("uid", "cpu")
    )
    reapers = [name[6:] for name in counts if re.match(r"reaps_\d+$", name)][:5]
    users = dict(re.findall(r"^user_(\d{1,10})=([^\n]{1,64})$", second, re.M))
    own_pids = {int(pid) for pid in re.findall(r"^ours=(\d{1,10})$", second, re.M)}
    ran = {int(match[1]): int(match[2]) for match in _SCHED.finditer(second)}
    clocks = {int(match[1]): int(match[2]) for match in _CLOCK.finditer(second)}
    places = {int(match[1]): match[2] for match in _WCHAN.finditer(second)}
    stuck = []
    for pid, (name, state, cpu_time) in _stats(second).items():
        if first.get(pid, ())[1:] != ("D", cpu_time) or state != "D" or pid in own_pids:
            continue
        wchan, uid = places.get(pid, ""), owners.get(pid)
        clock, seconds = clocks.get(cpus.get(pid, -1)), None
        if clock is not None and pid in ran:
            seconds = max(0, clock - ran[pid]) // 1000
        user = users.get(str(uid), "")
        stuck.append(StuckProcess(pid, name, wchan, seconds, wchan in _FROZEN, uid, user))
    counted = set(re.findall(r"^(zombies|unseen|more)=", first_text, re.M))
    return HostProcesses(
        is_complete="end" in parts and counted <= counts.keys(),
        stuck=tuple(stuck),
        unseen=counts.get("unseen", 0) + counts.get("more", 0),
        zombies=counts.get("zombies", 0),
        parents=tuple(Parent(int(p), names.get(p, ""), counts[f"reaps_{p}"]) for p in reapers),
    )


# --- Which mounts are asked, and what they answer.

TABLE = "/proc/self/mounts"

#: Seconds that a mount has to answer.
ANSWER_S = 3
#: Maximum network mounts that are asked: of more, an automounter made most.
MOST_MOUNTS = 256

LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "bcachefs", "fuseblk")
#: File systems that another machine or a program serves.
NETWORK = (
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "fhgfs", "ceph", "cifs", "smb3", "smbfs", "9p",
    "virtiofs", "wekafs", "panfs", "orangefs", "pvfs2", "glusterfs", "afs", "dvs", "gfs2", "ocfs2",
    "cvfs", "ncpfs", "coda", "fuse", "fuse.*",
)  # fmt: skip
# Of a session or a container, not of the node.
_NOT_OURS = (
    "fuse.lxcfs", "fuse.gvfsd-fuse", "fuse.portal", "fuse.snapfuse", "fuse.squashfuse",
    "fuse.squashfuse_ll", "fuse.fuse-overlayfs",
)  # fmt: skip
#: MiB, free per cent, free inodes per cent.
Size = tuple[Optional[int], Optional[float], Optional[float]]


def escaped(path: str) -> str:
    """A path as the kernel's table spells it (proc_pid_mounts(5))."""
    return re.sub(r"[ \t\n\\]", lambda match: f"\\{ord(match[0]):03o}", path)


def unescaped(text: str) -> str:
    """The path that a word of the kernel's table stands for."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8) & 0xFF), text)


# A program of a person serves what that person has mounted (fusermount). It may stop answering at
# will, so the mount is no part of the node, unless the policy names it. UID_MIN is 1000. A
# thousand such mounts, each with a path of 4 KB, would fill the probe's output, so they are left
# out before the table is read line by line. An overlay's options name all layers: they are cut.
_ROWS = r"""
$3 ~ /^fuse(\.|$)/ && ("," $4) ~ /,user_id=[1-9][0-9][0-9][0-9]/ &&
    !index(ENVIRON["NR_WANTED"], " " $2 " ") { next }
{ print FILENAME ":" FNR ":" substr($1, 1, 1024), $2, $3, substr($4, 1, 256) }
"""


def _policy_paths(policy: Policy) -> str:
    return shell.quote(f" {' '.join(map(escaped, policy.mounts))} ")


def table_script(policy: Policy) -> str:
    """The shell text that prints the kernel's table, and sets nr_sorted and nr_table."""
    return _states() + shell.script(
        "mount_table", ROWS=_ROWS, TABLE=TABLE, WANTED=_policy_paths(policy)
    )


def script(policy: Policy) -> str:
    """The shell text about the mounts. It follows `processes_script`, which sets nr_hung."""
    kinds = {"NOT_OURS": _NOT_OURS, "NETWORK": NETWORK, "LOCAL": LOCAL}
    return shell.script(
        "mounts", ROWS=_ROWS, TABLE=TABLE, WANTED=_policy_paths(policy), MARK=MARK,
        PATTERN="|".join(shell.quote(escaped(path)) for path in policy.mounts) or "''",
        MOST_MOUNTS=MOST_MOUNTS, ANSWER_S=ANSWER_S, CAT_S=ANSWER_S + 2,
        **{name: "|".join(patterns) for name, patterns in kinds.items()},
    )  # fmt: skip


@dataclass(frozen=True)
class Mount:
    """A mounted file system that matters to jobs, or that the policy names."""

    path: str  # the directory where it is mounted
    device: str  # first word in the kernel's table of mounts: ``/dev/sda1``, ``server:/home``
    fstype: str  # ``ext4``, ``nfs4`` and so on
    options: str  # as the kernel shows them
    network: bool  # another machine or a program serves it
    read_only: bool  # as mounted now
    # ok; hung: no answer in time, every process that looks into it waits; stale: the server no
    # longer knows the mount, or the program that serves it has ended; failed; not asked
    state: str = "not asked"
    detail: str = ""  # the error's text, or why the mount was not asked
    size_mb: int | None = None  # MiB; None where the file system tells no size
    free_percent: float | None = None  # of what users may fill, as df counts it
    inodes_free_percent: float | None = None  # None where the file system counts no inodes (btrfs)


@dataclass(frozen=True)
class Answers:
    """The answers of the mounts. The first three fields have paths in the table's spelling."""

    asked_together: frozenset[str] = frozenset()  # the mounts that one process asked, all at once
    asked_separately: frozenset[str] = frozenset()  # the mounts that each had a separate process
    not_asked: frozenset[str] = frozenset()  # the mounts that were too many to ask
    sizes: Mapping[str, Size] = field(default_factory=dict)  # path -> its size
    errors: Mapping[str, str] = field(default_factory=dict)  # path -> the error's text
    ended: str = ""  # the last stage of the probe: "" (before the mounts), begin, local, end


def _share(part: int, total: int) -> float | None:
    return round(100 * part / total, 1) if total > 0 else None


_SIZE = re.compile(rf"{MARK}((?:\d{{1,20}} ){{6}})(/.*)$")
_ERROR = re.compile(r"stat: [^/]{0,80}'(/.*)': ([^':]{1,100})$")


def answers(text: str) -> Answers:
    """The answers in the script's output; never raises."""
    sizes: dict[str, Size] = {}
    errors: dict[str, str] = {}
    asked_by_phase: dict[str, set[str]] = {"": set(), "begin": set(), "local": set(), "end": set()}
    over: set[str] = set()
    ended = ""
    for line in text.split("\n"):
        name, _, value = line.partition("=")
        if name == "mounts" and value in asked_by_phase:
            ended = value
        elif ended and name == "asked":
            asked_by_phase[ended].add(value)
        elif ended and name == "over":
            over.add(value)
        elif ended:
            size, error = _SIZE.match(line), _ERROR.match(line)
            if size:
                sizes[size[2]] = _size(size[1])
            elif error:
                errors[error[1]] = error[2]
    together, separate = frozenset(asked_by_phase["begin"]), frozenset(asked_by_phase["local"])
    return Answers(together, separate, frozenset(over), sizes, errors, ended)


def _size(numbers: str) -> Size:
    block, blocks, free, available, inodes, inodes_free = map(int, numbers.split())
    # df's arithmetic: blocks that are kept for root count as neither used nor free.
    usable = blocks - free + available
    size_mb = block * blocks // 2**20 if blocks else None
    return size_mb, _share(available, usable), _share(inodes_free, inodes)


def _state(raw: str, path: str, answers_read: Answers) -> tuple[str, str]:
    error = answers_read.errors.get(path)
    if path in answers_read.sizes:
        return "ok", ""
    if error is not None:
        stale = ("Stale", "Transport endpoint is not connected", "Host is down")
        return ("stale" if error.startswith(stale) else "failed"), error
    if raw in answers_read.not_asked:
        return "not asked", f"more than {MOST_MOUNTS} network mounts"
    if raw in answers_read.asked_separately:
        if answers_read.ended == "end":
            return "hung", f"no answer in {ANSWER_S} s"
        return "not asked", "the look was cut off"
    if raw in answers_read.asked_together:
        if answers_read.ended == "begin":
            return "hung", "this one or another local file system does not answer"
        return "failed", "no answer"
    return "not asked", ""


def fold(lines: Iterable[Line], answers_read: Answers, policy: Policy) -> tuple[Mount, ...]:
    """The mounts that were to be asked, the policy's and /dev/shm, in the order of the table.

    A mount that another one above it hides, so that no path leads there, is left out.
    """
    chosen = (
        answers_read.asked_together
        | answers_read.asked_separately
        | answers_read.not_asked
        | {"/dev/shm", *map(escaped, policy.mounts)}
    )
    mounts: dict[str, Mount] = {}
    for line in lines:
        words = line.text.split(" ")
        if len(words) < 4:
            continue
        prefix = f"{unescaped(words[1]).rstrip('/')}/"
        if prefix != "/":
            # The root itself may have been mounted after the mounts in it (switch_root(8)).
            for path in [path for path in mounts if path.startswith(prefix)]:
                if mounts[path].detail == "No such file or directory":
                    del mounts[path]
        if words[1] not in chosen:
            continue
        path, device, fstype, options = unescaped(words[1]), words[0], words[2], words[3]
        state, detail = _state(words[1], path, answers_read)
        if fstype == "autofs":
            state, detail = "not asked", "mounted on first access"
        size: Size = (None, None, None)
        if state == "ok":
            size = answers_read.sizes.get(path, size)
        read_only = "ro" in options.split(",")
        # A later mount over the same path hides the earlier one.
        mounts[path] = Mount(
            path, unescaped(device), fstype, options, is_network(fstype), read_only,
            state, detail, *size,
        )  # fmt: skip
    return tuple(mounts.values())


def is_network(fstype: str) -> bool:
    """Whether another machine or a program serves a file system of this type."""
    return fstype in NETWORK or (fstype.startswith("fuse.") and fstype not in _NOT_OURS)


# --- What /etc/fstab mounts at boot (fstab(5)), and whether that is mounted.

FSTAB = "/etc/fstab"
#: Options by which systemd mounts at the first access to the directory (systemd.mount(5)).
_AUTOMOUNT = ("x-systemd.automount", "comment=systemd.automount")
#: File systems that are always read-only: no error of a disk made them so. A boot image (ostree
#: with composefs) is mounted in place of fstab's file system.
_IMAGES = ("squashfs", "erofs", "iso9660", "cramfs", "romfs", "udf")
_IMAGE_DEVICES = ("composefs", "overlayroot")


@dataclass(frozen=True)
class FstabEntry:
    """A line that mounts something at a directory."""

    JSON_KEYS: ClassVar = {"source": "where"}
    path: str  # the directory where it mounts
    device: str  # as written in the line
    fstype: str  # likewise
    options: tuple[str, ...]  # likewise
    source: str  # the line, ``/path:number``
    mounted: bool  # something is mounted at the directory now
    read_only: bool = False  # that mount is read-only

    @property
    def at_boot(self) -> bool:
        """Whether the boot mounts it.

        A local disk with ``nofail`` may be missing (a cloud's temporary disk). A network mount
        with ``nofail`` may not: its server may have been down at boot alone.
        """
        late = {"noauto", *_AUTOMOUNT} | (set() if is_network(self.fstype) else {"nofail"})
        return not late & set(self.options)


def parse_fstab(lines: Iterable[Line], table: Iterable[Line]) -> tuple[FstabEntry, ...]:
    """The entries of fstab, each compared with the kernel's table of mounts."""
    mounted = {
        unescaped(words[1]): (words[0], words[2], words[3].split(","))
        for words in (line.text.split(" ") for line in table)
        if len(words) > 3
    }
    entries = []
    for line in lines:
        words = line.text.split()
        if len(words) < 3 or words[0].startswith("#") or not words[1].startswith("/"):
            continue
        path = unescaped(words[1]).rstrip("/") or "/"
        options = tuple(words[3].split(",")) if len(words) > 3 else ()
        device = unescaped(words[0])
        mounted_device, mounted_fstype, mount_options = mounted.get(path, ("", "", []))
        image = mounted_fstype in _IMAGES or mounted_device in _IMAGE_DEVICES
        read_only = "ro" in mount_options and not image
        entries.append(
            FstabEntry(path, device, words[2], options, line.source, path in mounted, read_only)
        )
    return tuple(entries)
