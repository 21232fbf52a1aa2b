"""The place of a crash's core: the kernel's pattern, the directory, retention, the handlers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from nodeready.core import shell, sysctl
from nodeready.core.base import Line, Output, Probe, ProbeError, Section, files_by_name
from nodeready.core.policy import Policy

KEY = "kernel.core_pattern"
#: Services that rewrite core_pattern after the sysctl files: Ubuntu's apport, RHEL 7's abrt.
REWRITERS = ("apport.service", "abrt-ccpp.service")
_TMPFILES = ("/etc/tmpfiles.d", "/run/tmpfiles.d", "/usr/lib/tmpfiles.d")
# Highest priority first (coredump.conf(5)).
_COREDUMP_DIRECTORIES = (
    "/etc/systemd", "/run/systemd", "/usr/local/lib/systemd", "/usr/lib/systemd",
)  # fmt: skip
_COREDUMP = tuple(
    f"{directory}/{name}"
    for directory in _COREDUMP_DIRECTORIES
    for name in ("coredump.conf", "coredump.conf.d/*.conf")
)


def core_directory(policy: Policy) -> str:
    return policy.core_pattern.rpartition("/")[0]


def _script(policy: Policy) -> str:
    return shell.script(
        "core_dumps", DIRECTORY=shell.quote(core_directory(policy)),
        REWRITERS=" ".join(REWRITERS),
        COREDUMP=" ".join(_COREDUMP), TMPFILES=" ".join(f"'{parent}/*'" for parent in _TMPFILES),
    )  # fmt: skip


def _seeks(policy: Policy) -> str:
    """The lines of tmpfiles.d about the directory."""
    pattern = shell.quote(re.sub(r"([][\\.*^$+?(){}|])", r"\\\1", core_directory(policy)))
    return f"nr_seek {pattern} {' '.join(f'{parent}/*.conf' for parent in _TMPFILES)}"


@dataclass(frozen=True)
class CoreDumps:
    """The place of the core of a job's process."""

    live: str  # the pattern in force, a path or ``|program``
    boot: sysctl.BootSetting  # the pattern in the sysctl files, for the next boot
    directory_mode: int | None  # permission bits of the core directory; None: no such directory
    retention: Line | None  # the tmpfiles.d line for that directory that applies, or None
    rewriters: tuple[str, ...]  # installed services that overwrite the pattern and are not masked
    systemd: bool  # systemd runs as the init
    coredump_binary: str  # systemd-coredump's path; "" when it is not installed
    coredump: Mapping[str, sysctl.Setting]  # the settings of coredump.conf and its drop-ins
    packaged: sysctl.Setting | None  # the pattern of systemd-coredump's own sysctl file, or None
    directory_owner: int = 0  # its owner's uid
    # (path, kind, uid) of an obstacle for a deploy: "link" (owned by this uid, not by root),
    # "nowhere" (a link without a target), "nodir" (a file in its place), "fixed" (a read-only
    # mount, an immutable directory, or NFS that trusts no root); ("", "", 0): none
    blocked: tuple[str, str, int] = ("", "", 0)
    closed: tuple[str, ...] = ()  # directories on the way that other users cannot enter
    in_place: tuple[str, ...] = ()  # the files in the places of the links of `systemctl mask`


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


def _coredump_conf(lines: tuple[Line, ...], paths: list[str]) -> dict[str, sysctl.Setting]:
    """The settings: main file first, then drop-ins by base name; a key's last value counts.

    A file masks those of its name in later directories (coredump.conf(5)).
    """
    main = files_by_name(_COREDUMP_DIRECTORIES, paths)
    dropins = files_by_name((f"{root}/coredump.conf.d" for root in _COREDUMP_DIRECTORIES), paths)
    settings: dict[str, sysctl.Setting] = {}
    for path in (*main.values(), *dropins.values()):
        file_lines = (line for line in lines if line.path == path)
        for line in sysctl.section(file_lines, "Coredump"):
            if match := re.match(r"([A-Za-z]+)\s*=(.*)", line.text.strip()):
                settings[match[1]] = sysctl.Setting(match[2].strip(), line.source)
    return settings


def parse(outputs: Mapping[str, Output], policy: Policy) -> CoreDumps:
    """The observation. Raises ProbeError when the live pattern cannot be read."""
    output = outputs["core_dumps"]
    values = output.values()
    if "live" not in values:
        raise ProbeError("/proc/sys/kernel/core_pattern cannot be read")
    modes: dict[str, tuple[int, int]] = {}
    for text in output.all("way"):
        if (match := re.fullmatch(r"([0-7]{1,5}) (\d{1,10}) (/.*)", text)) is None:
            raise ProbeError("the core directory's mode is no mode", text)
        modes[match[3]] = int(match[1], 8), int(match[2])
    directory = core_directory(policy)
    mode, owner = modes.pop(directory, (None, 0))
    kinds = ("nowhere", "nodir", "fixed")
    blocked = [(values[kind], kind, 0) for kind in kinds if kind in values]
    if link := re.fullmatch(r"(\d{1,10}) (/.*)", values.get("link", "")):
        blocked.insert(0, (link[2], "link", int(link[1])))
    files = sysctl.parse(outputs["sysctl"])
    lines = tuple(output.lines())
    packaged = [
        sysctl.Setting(line.text.partition("=")[2].strip(), line.source)
        for path in files.order
        for line in files.lines.get(path, ())
        if "core_pattern" in line.text and "|" in line.text and "systemd-coredump" in line.text
    ]
    masked = output.all("masked")
    installed = output.all("unit")
    return CoreDumps(
        live=values["live"],
        boot=sysctl.boot_value(files, KEY),
        directory_mode=mode,
        directory_owner=owner,
        blocked=blocked[0] if blocked and "root" in values else ("", "", 0),
        closed=tuple(sorted(path for path, (bits, _) in modes.items() if not bits & 0o1)),
        retention=_retention(lines, directory),
        rewriters=tuple(unit for unit in REWRITERS if unit in installed and unit not in masked),
        in_place=tuple(output.all("inplace")),
        systemd="systemd" in values,
        coredump_binary=values.get("coredump", ""),
        coredump=_coredump_conf(lines, output.all("file")),
        packaged=packaged[-1] if packaged else None,
    )


PROBE = Probe("core_dumps", (Section("core_dumps", _script, seeks=_seeks), sysctl.SECTION), parse)
