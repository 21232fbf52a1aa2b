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
    return shell.script(
        "limits_service", FILES=files, DROPINS=dropins, PROCS=procs, NAME=shell.quote(service),
        COMMAND=shell.quote(service[:15]),
    )  # fmt: skip


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
    scan = shell.script("limits_processes", NAMES=names) if services else ""
    return rf"""
    if [ -d /run/systemd/system ]; then printf 'systemd=1\n'; fi
    nr_there there {limits} {manager}
    set --
    {"".join(_service_script(service) for service in services)}
    {scan}
    {shell.library("limits_ceiling")}
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
