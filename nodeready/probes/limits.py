"""Which resource limits jobs get on a node: at login, from services, and in what runs already."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nodeready import shell
from nodeready.policy import Policy
from nodeready.probes import pam_limits, sysctl, unit_limits
from nodeready.probes.base import Line, Output, Probe, ProbeError, Section, file_lines, number
from nodeready.probes.pam_limits import UNLIMITED, PamLimits
from nodeready.probes.unit_limits import Unit

NR_OPEN = "fs.nr_open"
# A number of /proc/sys has to be read at once, and dash reads byte by byte: so grep reads it too.
_NR_OPEN_FILE = "/proc/sys/fs/nr_open"
_PROC_NAMES = {
    "Max core file size": "core",
    "Max locked memory": "memlock",
    "Max open files": "nofile",
}
_CGROUPS = ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified")


def _service_script(service: str) -> str:
    """Find the unit file of one service, its drop-ins and its main processes."""
    files = " ".join(
        shell.quote(f"{directory}/{name}")
        for name in unit_limits.file_names(service)
        for directory in unit_limits.DIRECTORIES
    )
    dropins = " ".join(
        f"{shell.quote(directory)}/*.conf" for directory in unit_limits.dropin_directories(service)
    )
    procs = " ".join(
        shell.quote(f"{root}/system.slice/{service}.service/cgroup.procs") for root in _CGROUPS
    )
    name = shell.quote(service)
    return rf"""
    for nr_file in {files}; do
        if [ -e "$nr_file" ] || [ -L "$nr_file" ]; then
            # A link to /dev/null masks the unit: no regular file.
            if [ -f "$nr_file" ]; then
                printf 'unit=%s %s\n' {name} "$nr_file"
                set -- "$@" "$nr_file" {dropins}
            fi
            break
        fi
    done
    nr_first= nr_main=
    for nr_file in {procs}; do
        if [ ! -r "$nr_file" ]; then continue; fi
        while read -r nr_pid; do
            nr_comm=
            {{ read -r nr_comm <"/proc/$nr_pid/comm"; }} 2>/dev/null || continue
            nr_first=${{nr_first:-$nr_pid}}
            if [ "$nr_comm" = {shell.quote(service[:15])} ]; then nr_main="$nr_main $nr_pid"; fi
        done <"$nr_file"
    done
    for nr_pid in ${{nr_main:-$nr_first}}; do
        printf 'process=%s %s\n' {name} "$nr_pid"
        set -- "$@" "/proc/$nr_pid/limits"
    done
    """


# Without CAP_SYS_RESOURCE (a container) root may not raise a hard limit above what sshd has. A
# strict pam_limits then refuses the login, so what is possible there matters. The capability is
# bit 24, in the tenth digit of CapBnd.
_CEILING = r"""
    while read -r nr_key nr_bits; do
        if [ "$nr_key" = CapBnd: ]; then break; fi
    done </proc/self/status
    case $nr_bits in
    ?????????[02468ace]??????)
        nr_pid=1
        { read -r nr_pid </run/sshd.pid; } 2>/dev/null
        printf 'ceiling=%s\n' "$nr_pid"
        set -- "$@" "/proc/$nr_pid/limits"
        grep -asHE '^-?session[[:space:]]+requi.*pam_limits' /etc/pam.d/* /usr/lib/pam.d/*
        ;;
    esac
"""


def _script(policy: Policy) -> str:
    services = policy.limit_services
    limits = " ".join(
        f"{directory}/limits.conf {directory}/limits.d/*.conf"
        for directory in pam_limits.DIRECTORIES
    )
    names = " ".join(f"-e {shell.quote(service[:15])}" for service in services)
    # Without systemd there are no cgroups to look into: look at the names of all processes.
    scan = rf"""
    if [ ! -d /run/systemd/system ]; then
        for nr_file in $(grep -slxF {names} /proc/[0-9]*/comm); do
            nr_pid=${{nr_file%/comm}}
            nr_comm=
            {{ read -r nr_comm <"$nr_file"; }} 2>/dev/null || continue
            printf 'process=%s %s\n' "$nr_comm" "${{nr_pid#/proc/}}"
            set -- "$@" "$nr_pid/limits"
        done
    fi
    """
    return rf"""
    if [ -d /run/systemd/system ]; then printf 'systemd=1\n'; fi
    set --
    {"".join(_service_script(service) for service in services)}
    {scan if services else ""}
    {_CEILING}
    grep -asHnv -e '^[[:space:]]*[#;]' -e '^[[:space:]]*$' {limits} "$@" {_NR_OPEN_FILE}
    :
    """


@dataclass(frozen=True)
class Running:
    """A process of a service with its limits, item -> (soft, hard) in kernel units."""

    service: str
    pid: int
    limits: Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Limits:
    """The limits of jobs on a node.

    pam:          what the files give to new logins
    units:        service -> what its files set; a service that is not installed is missing
    running:      the processes of the services of the policy
    ceiling:      hard limits that logins cannot exceed, by item: root may not raise any here and
                  pam_limits is strict; empty on every usual node
    nr_open:      fs.nr_open in force: no process may have more open files; None: unreadable
    nr_open_boot: what the sysctl files set it to at the next boot
    systemd:      systemd runs as the init
    """

    pam: PamLimits
    units: Mapping[str, Unit]
    running: tuple[Running, ...]
    ceiling: Mapping[str, int]
    nr_open: int | None
    nr_open_boot: sysctl.Boot
    systemd: bool


def _proc_limits(lines: Iterable[Line]) -> dict[str, tuple[int, int]]:
    """Item -> (soft, hard) of a /proc/PID/limits; nothing when the process ended meanwhile."""
    found: dict[str, tuple[int, int]] = {}
    for line in lines:
        match = re.match(r"(Max [a-z ]+?)\s{2,}(\w+)\s+(\w+)", line.text)
        if match and match[1] in _PROC_NAMES:
            soft, hard = (
                UNLIMITED if text == "unlimited" else number(text, match[1])
                for text in (match[2], match[3])
            )
            found[_PROC_NAMES[match[1]]] = (soft, hard)
    return found


def parse(outputs: Mapping[str, Output], policy: Policy) -> Limits:
    """Raises ProbeError when a value of the kernel is no number."""
    output = outputs["limits"]
    values = output.values()
    by_path: dict[str, list[Line]] = {}
    for line in file_lines(output.require()):
        by_path.setdefault(line.path, []).append(line)
    lines = [line for found in by_path.values() for line in found]
    units: dict[str, Unit] = {}
    for text in output.all("unit"):
        service, _, path = text.partition(" ")
        if service not in policy.limit_services or not path.startswith("/"):
            raise ProbeError("a unit that was not asked for", text)
        units[service] = unit_limits.parse(service, path, lines)
    by_name = {service[:15]: service for service in policy.limit_services}
    running = []
    for text in dict.fromkeys(output.all("process")):
        name, _, pid = text.partition(" ")
        limits = _proc_limits(by_path.get(f"/proc/{pid}/limits", ()))
        if limits:
            service = by_name.get(name[:15], name)
            running.append(Running(service, number(pid, "a process id"), limits))
    own = _proc_limits(by_path.get(f"/proc/{values.get('ceiling')}/limits", ()))
    strict = re.search(r"^/[^:]*/pam\.d/", output.text, re.M)
    nr_open = by_path.get(_NR_OPEN_FILE, ())
    return Limits(
        pam=pam_limits.parse(lines),
        units=units,
        running=tuple(running),
        ceiling={item: hard for item, (_, hard) in own.items()} if strict else {},
        nr_open=number(nr_open[0].text, NR_OPEN) if nr_open else None,
        nr_open_boot=sysctl.boot_value(sysctl.parse(outputs["sysctl"]), NR_OPEN),
        systemd="systemd" in values,
    )


PROBE = Probe("limits", (Section("limits", _script), sysctl.SECTION), parse)
