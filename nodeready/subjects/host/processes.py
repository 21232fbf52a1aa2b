"""Processes that no signal ends (state D), and zombies.

A process passes through state D with every read of a disk. So two looks a second apart count: a
process is stuck that is in D both times and has used no CPU time in between. How long it has been
waiting is told by ``se.exec_start`` of /proc/PID/sched, the time at which the process last ran,
beside the same value of a process that runs now; the kernel keeps no other record. Without that
file the duration is not known.

Only the first thread of a process is looked at: thousands of threads would cost more than the
whole look. Kernel threads wait in D by trade and are left out. A process that a cgroup (v1) has
frozen is in D too: Slurm's suspended jobs are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

#: Marks our own look at a mount (nodeready.subjects.host.mounts) in /proc/PID/cmdline.
MARK = "nr_fs="
#: At most so many processes in state D are looked at twice.
MOST = 64
# pid (name) state ppid pgrp session tty tpgid flags minflt cminflt majflt cmajflt utime stime:
# the first fields of /proc/PID/stat (proc_pid_stat(5)).
_FIELDS = r"^[0-9]* (.*) [DZ]\( [0-9-]*\)\{12\}"

# The script leaves in nr_hung, a line each, the mounts at which an earlier look of ours hangs.
SCRIPT = rf"""
nr_hung=
nr_pids=
nr_files=
nr_scheds=
nr_parents=' '
nr_count=0
nr_found=$(grep -aosh '{_FIELDS}' /proc/[0-9]*/stat)
if [ -n "$nr_found" ]; then
    while IFS= read -r nr_line; do
        nr_pid=${{nr_line%% *}}
        set -- ${{nr_line##*) }}
        case $1 in
        Z)
            case $nr_parents in
            *" $2 "*) ;;
            *) nr_parents="$nr_parents$2 " ;;
            esac
            ;;
        D)
            # PF_KTHREAD of linux/sched.h
            if [ $(($7 / 2097152 % 2)) = 0 ] && [ $nr_count -lt {MOST} ]; then
                nr_pids="$nr_pids $nr_pid"
                nr_files="$nr_files /proc/$nr_pid/stat"
                nr_scheds="$nr_scheds /proc/$nr_pid/sched"
                nr_count=$((nr_count + 1))
            fi
            ;;
        esac
    done <<EOF
$nr_found
EOF
fi
printf 'processes=1\n%s\n' "$nr_found"
for nr_pid in $nr_parents; do nr_value "parent_$nr_pid" "/proc/$nr_pid/comm"; done
if [ -n "$nr_pids" ]; then
    sleep 1
    printf 'processes=2\n'
    grep -aosh '{_FIELDS}' $nr_files
    for nr_pid in $nr_pids; do
        nr_value "wchan_$nr_pid" "/proc/$nr_pid/wchan"
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
    grep -asH '^se.exec_start' /proc/self/sched $nr_scheds
fi
printf 'processes=end\n'
"""

_STAT = re.compile(r"(\d{1,10}) \((.*)\) ([DZ])((?: -?\d{1,20}){12})$")
_SCHED = re.compile(r"^/proc/(\w+)/sched:se\.exec_start\s*:\s*(\d{1,18})(?:\.\d*)?$", re.M)
# Where a frozen process waits (kernel/freezer.c).
_FROZEN = ("__refrigerator", "refrigerator")


@dataclass(frozen=True)
class Stuck:
    """A process that waits inside the kernel and that no signal ends.

    wchan:   the kernel function in which the process waits, "" where it is not shown
    seconds: since the process last ran; None: this kernel does not tell, a second at least
    frozen:  a cgroup has frozen the process on purpose; it can be thawed
    """

    pid: int
    name: str
    wchan: str
    seconds: int | None
    frozen: bool


@dataclass(frozen=True)
class Parent:
    """A process that does not reap its ended children, and how many zombies those are."""

    pid: int
    name: str
    count: int


@dataclass(frozen=True)
class Processes:
    """What is wrong with the processes of a node.

    looked:  whether the look came to its end; if not, the other fields tell nothing
    parents: of the zombies, those with the most first, five at most
    """

    looked: bool
    stuck: tuple[Stuck, ...] = ()
    zombies: int = 0
    parents: tuple[Parent, ...] = ()


@dataclass(frozen=True)
class _Stat:
    pid: int
    name: str
    state: str
    parent: int
    cpu: tuple[str, str]


def _stats(text: str) -> Iterator[_Stat]:
    for line in text.split("\n"):
        match = _STAT.match(line)
        if match:
            fields = match[4].split()
            cpu = (fields[10], fields[11])
            yield _Stat(int(match[1]), match[2], match[3], int(fields[0]), cpu)


def parse(text: str) -> Processes:
    """The processes in what SCRIPT printed; never raises."""
    pieces = re.split(r"^processes=(1|2|end)$", text, flags=re.M)
    parts = dict(zip(pieces[1::2], pieces[2::2]))
    first = {stat.pid: stat for stat in _stats(parts.get("1", ""))}
    zombies = Counter(stat.parent for stat in first.values() if stat.state == "Z")
    again = parts.get("2", "")
    values = dict(re.findall(r"^(parent_\d+|wchan_\d+)=(.*)$", text, re.M))
    ours = {int(pid) for pid in re.findall(r"^ours=(\d{1,10})$", again, re.M)}
    ran = {match[1]: int(match[2]) for match in _SCHED.finditer(again)}
    stuck = []
    for stat in _stats(again):
        before = first.get(stat.pid)
        waits = before is not None and before.state == stat.state == "D" and before.cpu == stat.cpu
        if not waits or stat.pid in ours:
            continue
        wchan = values.get(f"wchan_{stat.pid}", "")
        seconds = None
        if "self" in ran and str(stat.pid) in ran:
            seconds = max(0, ran["self"] - ran[str(stat.pid)]) // 1000
        shown = "" if wchan == "0" else wchan
        stuck.append(Stuck(stat.pid, stat.name, shown, seconds, wchan in _FROZEN))
    parents = tuple(
        Parent(pid, values.get(f"parent_{pid}", ""), count)
        for pid, count in zombies.most_common(5)
    )
    return Processes("end" in parts, tuple(stuck), sum(zombies.values()), parents)
