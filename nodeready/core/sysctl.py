"""The sysctl files of a node, and which of their lines wins at boot.

Rules, from sysctl.d(5), systemd's src/sysctl/sysctl.c and procps' sysctl(8): files of all
directories sort by base name and the last assignment wins; a file masks the files of its name in
later directories of the list (a link to /dev/null masks all of them). An explicit key precedes a
glob wherever it stands, and ``-KEY`` without a value excludes the key from globs. systemd-sysctl
does not read /etc/sysctl.conf itself (Debian 12 links it as 99-sysctl.conf); ``sysctl --system``
reads it last of all.

Other programs write sysctls at boot, too. The kernel takes ``sysctl.KEY=VALUE`` of its command
line before all files (kernel-parameters.txt). tuned sets the [sysctl] section of its profile, and
then what /etc/sysctl.d, /run/sysctl.d and /etc/sysctl.conf say, unless reapply_sysctl is off
(tuned-main.conf). An enabled ufw sets /etc/ufw/sysctl.conf (ufw-framework(8)). An executable
rc.local runs after all of them (systemd-rc-local-generator(8)).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar, NamedTuple

from nodeready.core import base
from nodeready.core.own_files import beatable
from nodeready.core.policy import Policy
from nodeready.core.result import Check, Result

#: Highest priority first (sysctl.d(5); procps adds /usr/local/lib).
DIRECTORIES = (
    "/etc/sysctl.d", "/run/sysctl.d", "/usr/local/lib/sysctl.d", "/usr/lib/sysctl.d",
    "/lib/sysctl.d",
)  # fmt: skip
SYSCTL_CONF = "/etc/sysctl.conf"
UFW = "/etc/ufw/sysctl.conf"
_UFW_CONF = "/etc/ufw/ufw.conf"
_RC_LOCAL = ("/etc/rc.local", "/etc/rc.d/rc.local")
#: The commands of a script that set a key: its name, or its path below /proc/sys, and the value.
_SYSCTL_COMMAND = re.compile(
    r"\s*(?:\S*/)?sysctl(?:\s+-\S+)*\s+[\"']?(?P<path>[^\s=#-][^\s=]*)=[\"']?(?P<value>[^\s\"';]+)"
)
_ECHO_COMMAND = re.compile(
    r"\s*echo\s+[\"']?(?P<value>[^\s\"']+)[\"']?\s*>\s*/proc/sys/(?P<path>\S+)"
)
_TUNED_CONF = "/etc/tuned/tuned-main.conf"
#: Directories whose sysctl files tuned applies again, after its own values.
_REAPPLIED = ("/etc/", "/run/")
CMDLINE = "/proc/cmdline"
_UNIT = "systemd-sysctl.service"
#: Characters of a key or a pattern of keys; it is a path below /proc/sys.
_MAX_KEY = 4096


def _script(policy: Policy) -> str:
    globs = " ".join(f"{directory}/*.conf" for directory in DIRECTORIES)
    return rf"""
    nr_there file {globs} {SYSCTL_CONF}
    for nr_file in /lib/systemd/systemd-sysctl /usr/lib/systemd/systemd-sysctl; do
        if [ -x "$nr_file" ]; then printf 'reader=systemd\n'; fi
    done
    for nr_file in /etc/systemd/system/{_UNIT} /run/systemd/system/{_UNIT}; do
        if [ "$nr_file" -ef /dev/null ]; then printf 'masked=%s\n' "$nr_file"; fi
    done
    nr_line=
    {{ read -r nr_line <{CMDLINE}; }} 2>/dev/null
    case $nr_line in *sysctl*) printf 'cmdline=%s\n' "$nr_line" ;; esac
    # The profiles that tuned applies at boot, the last first: each one, and then what it includes.
    set --
    nr_names=
    if [ -L /etc/systemd/system/multi-user.target.wants/tuned.service ]; then
        {{ read -r nr_names </etc/tuned/active_profile; }} 2>/dev/null
        set -- {_TUNED_CONF}
    fi
    for nr_file in {" ".join(_RC_LOCAL)}; do
        if [ -x "$nr_file" ]; then set -- "$@" "$nr_file"; fi
    done
    while [ -n "$nr_names" ] && [ $# -lt 18 ]; do
        nr_name=${{nr_names##*[ ,]}}
        nr_names=${{nr_names%"$nr_name"}}
        nr_names=${{nr_names%[ ,]}}
        case $nr_name in '' | *[!A-Za-z0-9._-]* | .*) continue ;; esac
        for nr_file in /etc/tuned/profiles/$nr_name /etc/tuned/$nr_name \
            /usr/lib/tuned/profiles/$nr_name /usr/lib/tuned/$nr_name; do
            nr_file=$nr_file/tuned.conf
            if [ ! -f "$nr_file" ]; then continue; fi
            printf 'tuned=%s\n' "$nr_file"
            set -- "$@" "$nr_file"
            while read -r nr_line; do
                case $nr_line in
                include=* | include[[:space:]]*=*) nr_names="$nr_names ${{nr_line#*=}}" ;;
                esac
            done 2>/dev/null <"$nr_file"
            break
        done
    done
    nr_lines set {globs} {SYSCTL_CONF} {UFW} {_UFW_CONF} "$@"
    """


SECTION = base.Section("sysctl", _script)


@dataclass(frozen=True)
class Setting:
    """An assignment."""

    JSON_KEYS: ClassVar = {"source": "where"}
    value: str  # as written
    source: str  # its line, ``/path:number``

    @property
    def shown(self) -> str:
        """The value in words."""
        return self.value or "empty"


@dataclass(frozen=True)
class BootSetting:
    """What sets one key at the next boot."""

    winner: Setting | None  # the line of a file or the kernel's that sets it; None: none does
    conflict: Setting | None = None  # the line of sysctl.conf that `sysctl --system` would take
    # base name of the last foreign file that sets or excludes this key, and whose name sorts
    # before a possible name of nodeready's file; "" for none
    last_name: str = ""
    remedy: str = ""  # what a person must do before nodeready's file can win; "": nothing

    @property
    def beatable(self) -> bool:
        """Whether nodeready's file in /etc/sysctl.d can override the winner."""
        return not self.remedy

    @property
    def source(self) -> str:
        """The line that sets it; "": nothing does."""
        return self.winner.source if self.winner else ""

    def text(self, live: object) -> str:
        """The live value and that of the next boot: ``1, next boot unset``."""
        return f"{live}, next boot {self.winner.shown if self.winner else 'unset'}"


class SysctlOption(NamedTuple):
    """What the files say of one key or glob: its value (None: excluded), and the line."""

    value: str | None
    line: base.Line


@dataclass(frozen=True)
class SysctlFiles:
    """The sysctl files of a node."""

    order: tuple[str, ...]  # the files in the order in which the boot applies them
    lines: Mapping[str, tuple[base.Line, ...]]  # file -> its lines
    options: Mapping[str, SysctlOption]  # path below /proc/sys -> what the boot makes of all files
    manual: Mapping[str, SysctlOption]  # the same for `sysctl --system`: /etc/sysctl.conf last
    keys: Mapping[str, tuple[str, ...]]  # path below /proc/sys -> the files that set or exclude it
    systemd: bool  # systemd-sysctl is installed
    masked: str = ""  # the unit file that masks systemd-sysctl; "": not masked
    # path below /proc/sys -> what tuned's profile sets
    tuned: Mapping[str, SysctlOption] = field(default_factory=dict)
    reapply: bool = True  # tuned applies the files of /etc and /run after its own values
    # path below /proc/sys -> what an enabled ufw and rc.local set after all these files
    late: Mapping[str, SysctlOption] = field(default_factory=dict)
    # path below /proc/sys -> what the kernel's command line sets
    cmdline: Mapping[str, str] = field(default_factory=dict)


_SWAPPED = str.maketrans("./", "/.")


def _relative_path(key: str) -> str:
    """The path below /proc/sys of a key as written (systemd's sysctl_normalize).

    The first separator of a key decides: behind a dot, dots and slashes are interchanged.
    """
    separator = re.search(r"[./]", key)
    path = key.translate(_SWAPPED) if separator and separator[0] == "." else key
    return "/".join(part for part in path.split("/") if part not in ("", "."))


def _matches(path: str, pattern: str) -> bool:
    """Whether a glob(7) pattern names this path: no star goes beyond a slash."""
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _options(lines: Iterable[base.Line]) -> dict[str, SysctlOption]:
    """What systemd-sysctl makes of these lines, in its order (parse_line of its sysctl.c).

    A key that is set again moves to the end, unless it gets the value that it has.
    """
    options: dict[str, SysctlOption] = {}
    for line in lines:
        name, equals, value = line.text.strip().partition("=")
        if not name or name[0] in "#;" or not (equals or name[0] == "-"):
            continue
        path = _relative_path(name[name[0] == "-" :].strip())
        if not path or len(path) > _MAX_KEY:
            continue
        assigned = value.strip() if equals else None
        if path in options and options[path].value != assigned:
            del options[path]
        options[path] = SysctlOption(assigned, line)
    return options


def _commands(lines: Iterable[base.Line]) -> dict[str, SysctlOption]:
    options = {}
    for line in lines:
        if match := _SYSCTL_COMMAND.match(line.text) or _ECHO_COMMAND.match(line.text):
            options[_relative_path(match["path"])] = SysctlOption(match["value"], line)
    return options


def _setting(options: Mapping[str, SysctlOption], path: str) -> Setting | None:
    """What sets this path: its own line, else the last glob that names it."""
    if (setting := options.get(path)) is None:
        for pattern, option in options.items():
            is_glob = option.value is not None and not {*"*?["}.isdisjoint(pattern)
            if is_glob and _matches(path, pattern):
                setting = option
    if setting is None or setting.value is None:
        return None
    return Setting(setting.value, setting.line.source)


def section(lines: Iterable[base.Line], name: str) -> list[base.Line]:
    """The lines of one section of an ini file."""
    section_lines, inside = [], ""
    for line in lines:
        text = line.text.strip()
        if text.startswith("["):
            inside = text
        elif inside == f"[{name}]":
            section_lines.append(line)
    return section_lines


def _is_on(lines: Iterable[base.Line], name: str, default: bool) -> bool:
    """Whether a ``NAME = yes`` of these lines switches something on."""
    for line in lines:
        key, _, value = line.text.partition("=")
        if key.strip() == name:
            default = value.strip().strip("\"'").lower() in ("1", "yes", "true", "on")
    return default


@lru_cache(maxsize=64)
def parse(output: base.Output) -> SysctlFiles:
    """The sysctl files of a node from the section's output. Raises ProbeError.

    One object for all subjects, and for all nodes whose files are alike: a fleet's are.
    """
    text = output.require()
    paths = output.all("file")
    values = output.values()
    lines = {path: tuple(rows) for path, rows in base.by_path(base.file_lines(text)).items()}
    systemd = "reader=systemd" in text.splitlines()
    profiles = [path for path in output.all("tuned") if path in lines]
    reapply = _is_on(lines.get(_TUNED_CONF, ()), "reapply_sysctl", True)
    # The script prints the profiles in the opposite order. tuned removes quotes around a value.
    rows = (row for path in reversed(profiles) for row in section(lines[path], "sysctl"))
    unquoted = (replace(row, text=re.sub(r'=\s*"(.*)"\s*$', r"=\1", row.text)) for row in rows)
    tuned = _options(unquoted)
    # Unmasked files, in the order in which they are applied.
    order = list(base.files_by_name(DIRECTORIES, paths).values())
    manual = [*order, SYSCTL_CONF] if SYSCTL_CONF in paths else order
    # tuned reads /etc/sysctl.conf last of all, as procps does.
    boot_order = order if systemd and not (tuned and reapply) else manual
    keys: dict[str, list[str]] = {}
    for path in boot_order:
        for key in _options(lines.get(path, ())):
            keys.setdefault(key, []).append(path)
    ufw = _is_on(lines.get(_UFW_CONF, ()), "ENABLED", False)
    return SysctlFiles(
        tuple(boot_order),
        lines,
        _options(line for path in boot_order for line in lines.get(path, ())),
        _options(line for path in manual for line in lines.get(path, ())),
        {key: tuple(setters) for key, setters in keys.items()},
        systemd,
        values.get("masked", "") if systemd else "",
        tuned,
        reapply,
        (_options(lines.get(UFW, ())) if ufw else {})
        | _commands(line for path in _RC_LOCAL for line in lines.get(path, ())),
        # Each dot is a slash (fs/proc/proc_sysctl.c).
        {
            match[1].replace(".", "/"): match[2].strip('"')
            for token in base.kernel_arguments(values.get("cmdline", ""))
            if (match := re.fullmatch(r"sysctl[./]([^=]*)=(.*)", token.strip('"'), re.S))
        },
    )


def _removal(source: str) -> str:
    """The remedy for a line that stands in the way."""
    return f"remove the line {source}"


def _remedy(files: SysctlFiles, path: str) -> str:
    """What a person must do before nodeready's file in /etc/sysctl.d can set this path, or ""."""
    if files.masked:
        return f"systemctl unmask {_UNIT}"
    if written := files.options.get(path):
        file = written.line.path
        if file == SYSCTL_CONF or not beatable(file.rpartition("/")[2]):
            return _removal(written.line.source)
    for later in (files.late, {} if files.reapply else files.tuned):
        if (setting := _setting(later, path)) is not None:
            return _removal(setting.source)
    return ""


def boot_value(files: SysctlFiles, key: str) -> BootSetting:
    """What sets ``key`` at the next boot, and what `sysctl --system` would set instead."""
    path = _relative_path(key)
    winner = None if files.masked else _setting(files.options, path)
    tuned = _setting(files.tuned, path)
    is_reapplied = winner is not None and winner.source.startswith(_REAPPLIED)
    if tuned is not None and not (files.reapply and is_reapplied):
        winner = tuned
    winner = _setting(files.late, path) or winner
    if winner is None and path in files.cmdline:
        winner = Setting(files.cmdline[path], CMDLINE)
    names = [file.rpartition("/")[2] for file in files.keys.get(path, ()) if file != SYSCTL_CONF]
    names = [name for name in names if "nodeready" not in name and beatable(name)]
    manual = _setting(files.manual, path)
    conflict = manual if manual and manual.source.startswith(f"{SYSCTL_CONF}:") else None
    conflict, last_name = conflict if conflict != winner else None, names[-1] if names else ""
    return BootSetting(winner, conflict, last_name, _remedy(files, path))


def kernel_number(text: str) -> int | None:
    """The number that the kernel takes of a text for a key of numbers; None: it refuses the text.

    The first word counts, in C's spelling (kernel/sysctl.c, proc_get_long).
    """
    match = re.match(r"\s*(-?)(0[xX][0-9a-fA-F]{1,16}|\d{1,20})(?=\s|$)", text)
    if match is None:
        return None
    digits = match[2].lower()
    base = 16 if digits.startswith("0x") else 8 if digits.startswith("0") else 10
    try:
        return int(f"{match[1]}{digits}", base)
    except ValueError:
        return None


def sets(text: str, expected: str) -> bool:
    """Whether this text gives the key the expected value in the kernel: ``0 # off`` is 0."""
    return text == expected or (expected.isdigit() and kernel_number(text) == int(expected))


def contradicted(check: Check, key: str, boot: BootSetting, expected_value: str) -> Result:
    """Judge whether /etc/sysctl.conf gives ``key`` another value than ``expected_value``."""
    conflict, expected = boot.conflict, "no conflicting line"
    if conflict is None or sets(conflict.value, expected_value):
        return check.ok(expected=expected)
    actual = f"{key} = {conflict.shown} wins under sysctl --system"
    return check.warn(actual, conflict.source, _removal(conflict.source), expected=expected)
