"""Where a crash leaves its core: the kernel's pattern, the directory, retention, the handlers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from nodeready import shell
from nodeready.policy import Policy
from nodeready.subjects import sysctl
from nodeready.subjects.base import Line, Output, Probe, ProbeError, Section, file_lines

KEY = "kernel.core_pattern"
#: Services that rewrite core_pattern when they start, after the sysctl files: Ubuntu's apport,
#: RHEL 7's abrt.
REWRITERS = ("apport.service", "abrt-ccpp.service")
_UNIT_DIRECTORIES = ("/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
_TMPFILES = ("/etc/tmpfiles.d", "/run/tmpfiles.d", "/usr/lib/tmpfiles.d")
_COREDUMP = (
    "/etc/systemd/coredump.conf",
    "/usr/lib/systemd/coredump.conf.d/*.conf",
    "/run/systemd/coredump.conf.d/*.conf",
    "/etc/systemd/coredump.conf.d/*.conf",
)


def core_directory(policy: Policy) -> str:
    """The directory of the policy's core_pattern."""
    return policy.core_pattern.rpartition("/")[0]


def _script(policy: Policy) -> str:
    directory = shell.quote(core_directory(policy))
    pattern = shell.quote(re.sub(r"([][\\.*^$])", r"\\\1", core_directory(policy)))
    tmpfiles = " ".join(f"{parent}/*.conf" for parent in _TMPFILES)
    return rf"""
    nr_line=
    {{ IFS= read -r nr_line </proc/sys/kernel/core_pattern; }} 2>/dev/null
    if [ -n "$nr_line" ]; then printf 'live=%s\n' "$nr_line"; fi
    if [ -d {directory} ]; then stat -Lc 'directory=%a' {directory}; fi
    if [ -d /run/systemd/system ]; then printf 'systemd=1\n'; fi
    for nr_dir in {" ".join(_UNIT_DIRECTORIES)}; do
        for nr_unit in {" ".join(REWRITERS)}; do
            if [ -L "$nr_dir/$nr_unit" ] && [ ! "$nr_dir/$nr_unit" -ef /dev/null ]; then
                printf 'unit=%s\n' "$nr_unit"
            elif [ -L "$nr_dir/$nr_unit" ]; then
                printf 'masked=%s\n' "$nr_unit"
            elif [ -f "$nr_dir/$nr_unit" ]; then
                printf 'unit=%s\n' "$nr_unit"
            fi
        done
    done
    for nr_file in /usr/lib/systemd/systemd-coredump /lib/systemd/systemd-coredump; do
        if [ -x "$nr_file" ]; then printf 'coredump=%s\n' "$nr_file"; fi
    done
    grep -asHn -e {pattern} -e '^[[:space:]]*[A-Z]' {tmpfiles} {" ".join(_COREDUMP)} /dev/null
    :
    """


@dataclass(frozen=True)
class CoreDumps:
    """Where a crash of a job's process goes.

    live:            the pattern in force, a path or ``|program``
    boot:            what the sysctl files set at the next boot
    directory_mode:  permission bits of the policy's core directory; None: no such directory
    retention:       the tmpfiles.d line for that directory that applies, or None
    rewriters:       installed services that rewrite the pattern and are not masked
    systemd:         systemd runs as the init
    coredump_binary: systemd-coredump's path; "" when it is not installed
    coredump:        the effective settings of coredump.conf and its drop-ins
    packaged:        the pattern of systemd-coredump's own sysctl file, or None
    """

    live: str
    boot: sysctl.Boot
    directory_mode: int | None
    retention: Line | None
    rewriters: tuple[str, ...]
    systemd: bool
    coredump_binary: str
    coredump: Mapping[str, sysctl.Setting]
    packaged: sysctl.Setting | None


def _retention(lines: tuple[Line, ...], directory: str) -> Line | None:
    """The rule for the directory; of several, that of the first file by name (tmpfiles.d(5))."""
    masked: dict[str, str] = {}
    rules = []
    for parent in _TMPFILES:
        for line in lines:
            folder, _, name = line.path.rpartition("/")
            words = line.text.split()
            if folder != parent or masked.setdefault(name, line.path) != line.path:
                continue
            if len(words) > 1 and words[1] == directory and words[0][0] in "dDevqQ":
                rules.append(line)
    return min(rules, key=lambda line: line.path.rpartition("/")[2]) if rules else None


def _coredump_conf(lines: tuple[Line, ...]) -> dict[str, sysctl.Setting]:
    """The settings: main file first, then drop-ins by base name; a key's last value counts."""

    def order(line: Line) -> tuple[bool, str, int]:
        return ("/coredump.conf.d/" in line.path, line.path.rpartition("/")[2], line.number)

    found: dict[str, sysctl.Setting] = {}
    for line in sorted(lines, key=order):
        match = re.match(r"\s*([A-Za-z]+)\s*=(.*)", line.text)
        if match:
            found[match[1]] = sysctl.Setting(match[2].strip(), line.where)
    return found


def parse(outputs: Mapping[str, Output], policy: Policy) -> CoreDumps:
    """The observation. Raises ProbeError when the live pattern cannot be read."""
    output = outputs["core_dumps"]
    values = output.values()
    if "live" not in values:
        raise ProbeError("/proc/sys/kernel/core_pattern cannot be read")
    mode = values.get("directory")
    if mode is not None and not re.fullmatch(r"[0-7]{1,5}", mode):
        raise ProbeError("the core directory's mode is no mode", mode)
    files = sysctl.parse(outputs["sysctl"])
    lines = tuple(file_lines(output.require()))
    packaged = [
        sysctl.Setting(line.text.partition("=")[2].strip(), line.where)
        for path in files.order
        for line in files.lines.get(path, ())
        if "core_pattern" in line.text and "|" in line.text and "systemd-coredump" in line.text
    ]
    masked = output.all("masked")
    installed = output.all("unit")
    return CoreDumps(
        live=values["live"],
        boot=sysctl.boot_value(files, KEY),
        directory_mode=None if mode is None else int(mode, 8),
        retention=_retention(
            tuple(line for line in lines if "/tmpfiles.d/" in line.path), core_directory(policy)
        ),
        rewriters=tuple(unit for unit in REWRITERS if unit in installed and unit not in masked),
        systemd="systemd" in values,
        coredump_binary=values.get("coredump", ""),
        coredump=_coredump_conf(tuple(line for line in lines if "coredump.conf" in line.path)),
        packaged=packaged[-1] if packaged else None,
    )


PROBE = Probe("core_dumps", (Section("core_dumps", _script), sysctl.SECTION), parse)
