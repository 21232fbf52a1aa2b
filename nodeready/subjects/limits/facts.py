"""The resource limits of jobs on a node: at login, from services, and of running processes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from nodeready.core import base, shell, sysctl
from nodeready.core.policy import Policy
from nodeready.core.settings import Names
from nodeready.subjects.limits import limit_files
from nodeready.subjects.limits.limit_files import PamLimits, PamStack, Unit, UnitLimit

NR_OPEN = "fs.nr_open"
# nr_lines reads this file at once: dash would read byte by byte, which /proc/sys does not support.
_NR_OPEN_FILE = "/proc/sys/fs/nr_open"
_PROC_NAMES = {
    "Max core file size": "core", "Max locked memory": "memlock", "Max open files": "nofile",
}  # fmt: skip

_CGROUPS = ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified")
# Whether $nr_pid is an ordinary user's process (UID_MIN is 1000). Such a process may have the name
# of a service and lower limits.
_IS_USERS_PROCESS = 'nr_status Uid "/proc/$nr_pid"; [ "${nr_field:-0}" -ge 1000 ]'


def _service_script(service: str) -> str:
    files = " ".join(
        shell.quote(f"{directory}/{name}")
        for name in limit_files.file_names(service)
        for directory in limit_files.UNIT_DIRECTORIES
    )
    dropins = " ".join(
        f"{shell.quote(directory)}/*.conf" for directory in limit_files.dropin_directories(service)
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
                nr_there there {dropins}
            fi
            break
        fi
    done
    nr_first= nr_main= nr_persons=
    for nr_file in {procs}; do
        if [ ! -r "$nr_file" ]; then continue; fi
        while read -r nr_pid; do
            nr_comm=
            {{ read -r nr_comm <"/proc/$nr_pid/comm"; }} 2>/dev/null || continue
            # Without cgroups for jobs, the processes of jobs are in slurmd's cgroup.
            if {_IS_USERS_PROCESS}; then
                if [ -n "$nr_first" ] && [ -z "$nr_persons" ]; then continue; fi
                nr_persons=1
            fi
            nr_first=${{nr_first:-$nr_pid}}
            if [ "$nr_comm" = {shell.quote(service[:15])} ]; then nr_main="$nr_main $nr_pid"; fi
        done <"$nr_file"
    done
    for nr_pid in ${{nr_main:-$nr_first}}; do
        printf 'process=%s %s\n' {name} "$nr_pid"
        set -- "$@" "/proc/$nr_pid/limits"
    done
    """


# Without CAP_SYS_RESOURCE (in a container) root may not raise a hard limit above sshd's own. A
# strict pam_limits then refuses the login, so the probe reads the limits that root can set. The
# capability is bit 24, in the tenth digit of CapBnd.
_NO_RESOURCE = "?????????[02468ace]??????"
_CEILING = rf"""
    nr_self
    case $nr_self_bound in
    {_NO_RESOURCE})
        nr_pid=1
        {{ read -r nr_pid </run/sshd.pid; }} 2>/dev/null
        printf 'ceiling=%s\n' "$nr_pid"
        set -- "$@" "/proc/$nr_pid/limits"
        nr_find limits '/etc/pam.d/*' '/usr/lib/pam.d/*'
        printf '%s' "$nr_found"
        ;;
    esac
"""

_STRICT = re.compile(r"-?session[ \t\v\f\r]+requi.*pam_limits")


def _script(policy: Policy) -> str:
    services = policy.limit_services
    # With ``conf=``, pam_limits reads another file, usually in the same directory.
    limits = " ".join(
        f"{directory}/*.conf {directory}/limits.d/*.conf" for directory in limit_files.DIRECTORIES
    )
    manager = " ".join(
        f"{directory}/system.conf {directory}/system.conf.d/*.conf"
        for directory in limit_files.MANAGER_DIRECTORIES
    )
    pam = " ".join(
        f"{directory}/{name}"
        for directory in base.PAM_DIRECTORIES
        for name in (*limit_files.SERVICES, *limit_files.PAM_INCLUDED)
    )
    sshd = " ".join((*limit_files.SSHD_CONFIG, *limit_files.SSHD_INCLUDED))
    names = "|".join(shell.quote(service[:15]) for service in services)
    scan = rf"""
    nr_find limits '/proc/*/comm:*'
    for nr_row in $nr_found; do
        nr_pid=${{nr_row%%/comm:*}}
        nr_pid=${{nr_pid#/proc/}}
        nr_comm=${{nr_row#*:1:}}
        case $nr_comm in {names}) ;; *) continue ;; esac
        {_IS_USERS_PROCESS} && continue
        printf 'process=%s %s\n' "$nr_comm" "$nr_pid"
        set -- "$@" "/proc/$nr_pid/limits"
    done
    """
    return rf"""
    if [ -d /run/systemd/system ]; then printf 'systemd=1\n'; fi
    nr_there there {limits} {manager}
    set --
    {"".join(_service_script(service) for service in services)}
    {scan if services else ""}
    {_CEILING}
    nr_lines set {limits} {manager} {pam} {sshd} "$@" {_NR_OPEN_FILE}
    """


def _seeks(policy: Policy) -> str:
    """The strict lines of PAM; without systemd, which has cgroups of services, the processes."""
    names = "|".join(re.escape(service[:15]) for service in policy.limit_services)
    pattern = shell.quote(f"^({names})$")
    scan = rf"""
    if [ ! -d /run/systemd/system ]; then nr_seek {pattern} /proc/[0-9]*/comm; fi
    """
    return rf"""
    nr_seek '^-?session[[:space:]]+requi.*pam_limits' /etc/pam.d/* /usr/lib/pam.d/*
    {scan if names else ""}
    """


@dataclass(frozen=True)
class Running:
    """A process of a service with its limits."""

    service: str  # name of its program
    pid: int  # of the process
    limits: Mapping[str, tuple[int, int]]  # item -> (soft, hard) in kernel units


@dataclass(frozen=True)
class Limits:
    """The limits of jobs on a node."""

    pam: PamLimits  # the limits that the files give to new logins
    units: Mapping[str, Unit]  # service -> its unit; without the services that are not installed
    running: tuple[Running, ...]  # the processes of the policy's services
    # item -> the maximum hard limit of logins, where root cannot raise hard limits and pam_limits
    # is strict; empty on every usual node
    ceiling: Mapping[str, int]
    nr_open: int | None  # fs.nr_open in force: maximum open files of a process; None: unreadable
    nr_open_boot: sysctl.BootSetting  # fs.nr_open in the sysctl files, for the next boot
    systemd: bool  # systemd runs as the init
    defaults: Mapping[str, UnitLimit] = field(default_factory=dict)  # item -> systemd's default
    # service of SERVICES -> its PAM stack; without stacks that were not read
    stacks: Mapping[str, PamStack] = field(default_factory=dict)
    # file -> the limits that pam_limits gives by its option ``conf=``
    confs: Mapping[str, PamLimits] = field(default_factory=dict)
    no_pam: base.Line | str | None = None  # sshd's line that leaves PAM off, or a file without one


def _proc_limits(lines: Iterable[base.Line]) -> dict[str, tuple[int, int]]:
    """Item -> (soft, hard) of a /proc/PID/limits; {} when the process ended meanwhile."""
    limits: dict[str, tuple[int, int]] = {}
    for line in lines:
        match = re.match(r"(Max(?: [a-z]+)+)\s{2,}(\w+)\s+(\w+)", line.text)
        if match and match[1] in _PROC_NAMES:
            soft, hard = (
                limit_files.UNLIMITED if text == "unlimited" else base.number(text, match[1])
                for text in (match[2], match[3])
            )
            limits[_PROC_NAMES[match[1]]] = (soft, hard)
    return limits


def parse(outputs: Mapping[str, base.Output], policy: Policy) -> Limits:
    """The observation. Raises ProbeError when a value of the kernel is no number."""
    return _parse(outputs["limits"], outputs["sysctl"], policy.limit_services)


@lru_cache(maxsize=64)
def _parse(output: base.Output, kernel: base.Output, services: Names) -> Limits:
    values = output.values()
    # In a container, the output has PAM's files twice.
    files = base.by_path(dict.fromkeys(output.lines()))
    lines = [line for file_lines in files.values() for line in file_lines]
    existing = output.all("there")
    units: dict[str, Unit] = {}
    for text in output.all("unit"):
        service, _, path = text.partition(" ")
        if service not in services or not path.startswith("/"):
            raise base.ProbeError("a unit that was not requested", text)
        units[service] = limit_files.parse_unit_limits(service, path, lines, existing)
    by_name = {service[:15]: service for service in services}
    running = []
    for text in dict.fromkeys(output.all("process")):
        name, _, pid = text.partition(" ")
        if limits := _proc_limits(files.get(f"/proc/{pid}/limits", ())):
            if name[:15] not in by_name:
                raise base.ProbeError("a process that was not requested", text)
            running.append(Running(by_name[name[:15]], base.number(pid, "a process id"), limits))
    ceiling = _proc_limits(files.get(f"/proc/{values.get('ceiling')}/limits", ()))
    is_strict = any("/pam.d/" in line.path and _STRICT.match(line.text) for line in lines)
    stacks = {
        name: stack
        for name in limit_files.SERVICES
        if (stack := limit_files.parse_stack(name, files))
    }
    confs = {stack.conf for stack in stacks.values()} & {*files, *existing}
    nr_open = files.get(_NR_OPEN_FILE, ())
    observed: Limits = base.frozen(
        Limits(
            pam=limit_files.parse_pam_limits(lines, existing),
            units=units,
            running=tuple(running),
            ceiling={item: hard for item, (_, hard) in ceiling.items()} if is_strict else {},
            nr_open=base.number(nr_open[0].text, NR_OPEN) if nr_open else None,
            nr_open_boot=sysctl.boot_value(sysctl.parse(kernel), NR_OPEN),
            systemd="systemd" in values,
            defaults=limit_files.parse_defaults(lines, existing),
            stacks=stacks,
            confs={
                path: limit_files.parse_pam_limits(files.get(path, ()), conf=path)
                for path in confs
            },
            no_pam=limit_files.find_disabled_pam(files),
        )
    )
    return observed


PROBE = base.Probe(
    "limits", (base.Section("limits", _script, seeks=_seeks), sysctl.SECTION), parse
)
