"""Processes that no signal ends (state D), and zombies.

A process passes through state D with every read of a disk. So the states are read twice, a second
apart: a process is stuck that is in D both times and has used no CPU time in between. The time of
waiting follows from ``se.exec_start`` of /proc/PID/sched, the time at which the process last ran,
and from the same value of a process that runs now; the kernel keeps no other record. Each CPU has
a clock of its own for it, which stands still while the CPU serves interrupts or the hypervisor
takes it (rq_clock_task of kernel/sched/sched.h): clocks may differ by hours. So the other process
runs on the CPU on which the first ran last. Without that file or taskset(1) the duration is not
known.

Only the first thread of a process is read: thousands of threads would cost more than the whole
probe. Kernel threads normally wait in D and are left out. A process that a cgroup (v1) has frozen
is in D too: Slurm's suspended jobs are.

Any user can start thousands of processes in these states. So the node counts zombies and sends
none, and reads a limited number of processes of each user. Of a process of another user it reads
no file that waits for a lock of the process (cmdline, environ, stack).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Marks nodeready's own probe of a mount (nodeready.subjects.host.mounts) in /proc/PID/cmdline.
MARK = "nr_fs="
#: Maximum processes in state D that are read twice, and maximum of one user; those of the system's
#: users come first.
MOST, MOST_OF_USER = 256, 32
#: The first user who is a person (UID_MIN of login.defs(5)).
FIRST_USER = 1000
# One awk reads all these files: a process for each kind of file would cost more than the reading.
# A file of a process that has ended meanwhile is passed over. Of /proc/PID/stat it prints pid
# (name) state ppid pgrp session tty tpgid flags minflt cminflt majflt cmajflt utime stime
# (proc_pid_stat(5)); the 37th is the CPU. A name cannot end a line (the kernel escapes it there),
# nor look like the fields behind it.
_FUNCTIONS = r"""
function fields(pid,  line, n) {
    line = text = ""
    getline line < ("/proc/" pid "/stat")
    close("/proc/" pid "/stat")
    if (line !~ /\) [DZ] /) return 0
    text = line
    sub(/^.*\) /, "", line)
    text = substr(text, 1, length(text) - length(line))
    if (split(line, word, " ") < 37 || word[1] !~ /^[DZ]$/) return 0
    for (n = 1; n <= 13; n++) text = text (n == 1 ? "" : " ") word[n]
    return 1
}
function first(file, pattern,  line) {
    while ((getline line < file) > 0 && line !~ pattern) line = ""
    close(file)
    return line
}
"""
# The zombies by their parents, and the processes in state D. 2097152 is PF_KTHREAD of
# linux/sched.h. The user is the real uid (Uid: REAL EFFECTIVE ... of /proc/PID/status), because a
# user also starts a setuid program.
_SORT = rf"""
{_FUNCTIONS}
function keep(pid) {{
    few++
    print "uid_" pid "=" uid[pid]
    print "cpu_" pid "=" cpu[pid]
    print stat[pid]
}}
BEGIN {{
    for (n = 1; n < ARGC; n++) {{
        pid = ARGV[n]
        gsub(/[^0-9]/, "", pid)
        if (!fields(pid)) continue
        if (word[1] == "Z") {{ zombies++; of[word[2]]++; continue }}
        if (int(word[7] / 2097152) % 2 == 1) continue
        last = word[37]
        if (waiting++ >= 16384) {{ unseen++; continue }}
        if (split(first("/proc/" pid "/status", "^Uid:"), word, /[ \t]+/) < 3) continue
        seen++
        if (each[word[2]]++ >= {MOST_OF_USER}) continue
        uid[pid] = word[2]
        cpu[pid] = last
        stat[pid] = text
        if (word[2] >= {FIRST_USER}) later[++many] = pid
        else if (few < {MOST}) keep(pid)
    }}
    for (n = 1; n <= many && few < {MOST}; n++) keep(later[n])
    if (seen > few) print "more=" seen - few
    print "zombies=" zombies + 0
    print "unseen=" unseen + 0
    for (n = 0; n < 5; n++) {{
        worst = ""
        for (parent in of) if (worst == "" || of[parent] > of[worst]) worst = parent
        if (worst == "") break
        print "reaps_" worst "=" of[worst]
        delete of[worst]
        name = first("/proc/" worst "/comm", "")
        if (name != "") print "parent_" worst "=" name
    }}
}}
"""
# The same processes once more. ARGV: their users, in one word, and their pids.
_AGAIN = rf"""
{_FUNCTIONS}
BEGIN {{
    for (n = 2; n < ARGC; n++) if (fields(ARGV[n])) print text
    while ((getline line < "/etc/passwd") > 0) {{
        split(line, word, ":")
        if (index(ARGV[1], " " word[3] " ")) print "user_" word[3] "=" word[1]
    }}
    for (n = 2; n < ARGC; n++) {{
        print "/proc/" ARGV[n] "/wchan:" first("/proc/" ARGV[n] "/wchan", "")
        print "/proc/" ARGV[n] "/sched:" first("/proc/" ARGV[n] "/sched", "^se.exec_start *:")
    }}
}}
"""

# mawk fails when a process ends between the opening and the reading of its file (ESRCH). Then awk
# starts again, and a probe that never succeeds reports it.
#
# The script sets nr_hung: the mounts at which an earlier probe hangs, a line each.
SCRIPT = rf"""
nr_hung=
nr_failed=
nr_pids=
nr_ours=
nr_uids=' '
nr_cpus=' '
nr_status Uid
nr_me=$nr_field
nr_sort() {{ nr_sorted=$(awk '{_SORT}' /proc/[0-9]*/stat 2>/dev/null); }}
nr_sort || nr_sort || nr_sort || nr_failed=1
printf 'processes=1\n%s\n' "$nr_sorted"
while IFS='_=' read -r nr_key nr_pid nr_id; do
    case $nr_key in
    uid)
        nr_pids="$nr_pids $nr_pid"
        nr_uids="$nr_uids$nr_id "
        if [ "$nr_id" = "$nr_me" ]; then nr_ours="$nr_ours $nr_pid"; fi
        ;;
    cpu) case $nr_cpus in *" $nr_id "*) ;; *) nr_cpus="$nr_cpus$nr_id " ;; esac ;;
    esac
done <<EOF
$nr_sorted
EOF
if [ -n "$nr_pids" ]; then
    sleep 1
    printf 'processes=2\n'
    nr_again() {{ nr_found=$(awk '{_AGAIN}' "$nr_uids" $nr_pids 2>/dev/null); }}
    nr_again || nr_again || nr_again || nr_failed=1
    printf '%s\n' "$nr_found"
    for nr_cpu in $nr_cpus; do
        taskset -c "$nr_cpu" sed -n "s/^se\.exec_start *:/clock_$nr_cpu:/p" /proc/self/sched
    done 2>/dev/null
    # Another user may give a process any name and any arguments, also one that is setuid root,
    # whose directory in /proc is root's. So only the real uid counts.
    for nr_pid in $nr_ours; do
        nr_line=
        {{ read -r nr_line <"/proc/$nr_pid/comm"; }} 2>/dev/null
        if [ "$nr_line" = stat ]; then
            nr_line=$(tr '\0' ' ' <"/proc/$nr_pid/cmdline" 2>/dev/null)
            case $nr_line in
            *'{MARK}'*' %n '*)
                nr_line=${{nr_line##*' %n '}}
                nr_hung="$nr_hung${{nr_line% }}
"
                printf 'ours=%s\n' "$nr_pid"
                ;;
            esac
        fi
    done
fi
# Without awk, or with more arguments than the kernel takes, nothing was read.
if [ -z "$nr_failed" ]; then printf 'processes=end\n'; fi
"""

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
    # since the process last ran; None: this kernel does not tell, a second at least
    seconds: int | None
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


def parse(text: str) -> HostProcesses:
    """The processes in the output of `SCRIPT`; never raises."""
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
